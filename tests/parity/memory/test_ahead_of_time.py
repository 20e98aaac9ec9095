"""A small step compiled for four TPUs: what nested blocks and narrow weights must save.

The published measurement in little: periods of three layers and another one, all of it
sharded over the devices and rematerialised. Sliding and full attention with dense
layers stand for the delta rule and experts, which compile several times as long.
"""

import dataclasses
import functools
import importlib.util

import pytest

import shared
from parity.memory.job import Job, compile_step, lower, make_mesh
from parity.programs.topology import topology
from shared import sharding

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason='memory on TPUs needs libtpu: pip install -e ".[tpu]"',
)


def config():
    tiny = shared.preset("gemma-3-tiny")
    wide = {"hidden_size": 128, "head_dim": 128}
    return tiny.replace(
        layers=(*tiny.layers[:3], tiny.layers[5]) * 2,
        attention=dataclasses.replace(tiny.attention, **wide),
        sliding_attention=dataclasses.replace(tiny.sliding_attention, **wide),
        mlp=dataclasses.replace(tiny.mlp, intermediate_size=2048, hidden_size=128),
        hidden_size=128,
        attention_kernel="reference",
        remat_policy="full",
        dtype="bfloat16",
        axis_rules=sharding.AXIS_RULES,
    )


@functools.cache
def memory(block_form, param_dtype):
    changed = config().replace(block_form=block_form, param_dtype=param_dtype)
    mesh = make_mesh({}, topology("v5p:2x2x1"))
    job = Job(changed, mesh, batch=4, length=256)
    return compile_step(lower(job, "linen")).memory


def test_nested_blocks_need_less_than_flat_ones():
    nested, flat = memory("nested", "float32"), memory("flat", "float32")
    assert nested.arguments == flat.arguments
    assert nested.temporary < flat.temporary
    assert nested.code < flat.code


def test_narrow_weights_never_cost_more_than_wide_ones():
    narrow, wide = memory("nested", "bfloat16"), memory("nested", "float32")
    assert narrow.arguments < 0.6 * wide.arguments
    assert narrow.temporary <= wide.temporary
