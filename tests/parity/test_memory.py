"""`parity memory`, with the devices at hand for those that are not there."""

import io
import json

import jax
import pytest
import rich.console

import parity.__main__
import shared
from parity.cli import memory
from shared.trees import flatten

TARGET = ("qwen3-next-tiny", "--topology=here", "--batch=2", "--length=8")


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    status = parity.__main__.main(["memory", *map(str, argv)], console)
    return status, out.getvalue()


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(memory, "topology", lambda name: jax.devices()[:1])


def test_a_step_is_measured_and_judged(here, tmp_path):
    file = tmp_path / "memory.json"
    status, text = main(*TARGET, "--layers=4", "--max-temp=0", f"--json={file}")
    (row,) = json.loads(file.read_text())["steps"]
    assert row["frontends"] == ["linen", "nnx"], "the frontends' programs differ"
    config = shared.preset("qwen3-next-tiny")
    params = shared.abstract_params(config.replace(layers=config.layers[:4]))
    size = sum(leaf.size * leaf.dtype.itemsize for _, leaf in flatten(params))
    # Parameters, two moments, two counts of the optimizer, the step, and the tokens.
    assert row["bytes"]["arguments"] == 3 * size + 3 * 4 + 2 * 8 * 4
    assert row["bound"]["gradients"] == size
    assert row["live"] == pytest.approx(row["bytes"]["temporary"], rel=0.5)
    largest = [buffer["bytes"] for buffer in row["buffers"]]
    assert len(largest) == 8
    assert largest == sorted(largest, reverse=True)
    assert status == 1
    assert "temporary" in text
    assert "is above --max_temp=0" in text


def test_programs_that_differ_are_two_rows_and_no_success():
    rows = [
        {
            "block_form": "flat",
            "param_dtype": "float32",
            "frontends": [name],
            "bytes": {"temporary": 1},
        }
        for name in ("linen", "nnx")
    ]
    out = io.StringIO()
    assert memory.judge(rows, None, rich.console.Console(file=out)) == 1
    expected = "With flat blocks and float32 parameters the frontends' programs differ."
    assert expected in out.getvalue()
    assert memory.judge(rows[:1], 1.0, rich.console.Console(file=out)) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one TARGET"),
        (["qwen3-next-tiny"], "--topology is missing"),
        ([*TARGET, "--layers=99"], "qwen3-next-tiny has"),
        (["gemma-3-tiny", "--topology=here", "--experts=4"], "has no experts"),
        ([*TARGET, "--mesh=fsdp=3"], "does not make up the 1 devices"),
        ([*TARGET, "--remat-policy=everything"], "remat_policy='everything'"),
        ([*TARGET, "--json=/nowhere/x.json"], "no such folder"),
    ],
)
def test_bad_input_is_named(here, argv, said):
    status, text = main(*argv)
    assert status == 2
    assert said in text
