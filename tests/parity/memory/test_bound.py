"""The least memory of a step, against arithmetic done elsewhere."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

import shared
from parity.memory.bound import bound
from parity.memory.job import Job
from shared.sharding import AXIS_RULES

DEVICES = 128


def job(param_dtype, **changes):
    config = shared.preset("qwen3-next-80b-a3b").replace(
        param_dtype=param_dtype, dtype="bfloat16", axis_rules=AXIS_RULES, **changes
    )
    mesh = AbstractMesh((DEVICES,), ("fsdp",))
    return Job(config, mesh, batch=DEVICES, length=2048)


# Gigabytes: 48 streams of 2048 x 2048 in bfloat16; four matrices of 512 experts of 2048
# by 512; 79.67 billion parameters over 128 devices, but for some million (convolutions,
# norms of heads, decays) that each device has whole.
@pytest.mark.parametrize(
    ("param_dtype", "chunks", "expected"),
    [
        ("float32", 1, 0.4027 + 4 * 1.0737 + 2.4898),
        ("float32", 4, 0.4027 + 1.0737 + 2.4898),
        ("bfloat16", 1, 0.4027 + 4 * 1.0737 + 1.2449),
        ("bfloat16", 4, 0.4027 + 1.0737 + 1.2449),
    ],
)
def test_the_largest_model_at_128_devices(param_dtype, chunks, expected):
    found = bound(job(param_dtype, expert_chunks=chunks))
    assert found.total / 1e9 == pytest.approx(expected, abs=6e-3)


def test_experts_that_stay_where_they_are_are_not_gathered():
    spread = dataclasses.replace(
        job("bfloat16"), mesh=AbstractMesh((2, 64), ("fsdp", "expert"))
    )
    assert bound(spread).matrices == bound(job("bfloat16")).matrices // 64


def test_rows_of_a_device_are_what_its_streams_hold():
    twice = dataclasses.replace(job("bfloat16"), batch=2 * DEVICES)
    assert bound(twice).streams == 2 * bound(job("bfloat16")).streams


def test_a_dense_model_gathers_no_experts():
    config = shared.preset("gemma-3-270m").replace(axis_rules=AXIS_RULES)
    dense = Job(config, AbstractMesh((2,), ("fsdp",)), 2, 16)
    assert bound(dense).matrices == 0
