"""The command `parity convert`: what it says, what it refuses, and that it is one."""

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import rich.console
from safetensors.numpy import load_file, save_file

import parity.__main__
import shared
from shared.stores import CheckpointError
from tests.shared.checkpoint.checkpoints import copy_golden
from tests.shared.checkpoint.maxtext_files import config_of

GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"
GOLDEN = GOLDENS / "qwen3_next_6l"
MAXTEXT = GOLDENS.parent / "maxtext"
TINY = pathlib.Path(shared.__file__).parent / "data" / "qwen3_next_tiny"


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["convert", *map(str, argv)], console)
    return status, out.getvalue()


def equal(left, right):
    console = rich.console.Console(file=io.StringIO())
    return parity.__main__.main(["diff", str(left), str(right)], console) == 0


def test_there_and_back(tmp_path):
    status, out = main(GOLDEN, tmp_path / "zoo")
    assert status == 0
    assert f"source: hf: 230 tensors of parameters: {GOLDEN}" in out
    assert f"wrote zoo: 53 leaves, 754,176 bytes: {tmp_path / 'zoo'}" in out
    status, out = main(tmp_path / "zoo", tmp_path / "hf", f"--json={tmp_path / 'j'}")
    assert status == 0 and "wrote hf: 230 leaves" in out
    assert equal(GOLDEN, tmp_path / "hf")
    data = json.loads((tmp_path / "j").read_text())
    assert (data["from"], data["to"], data["bytes"]) == ("zoo", "hf", 754_176)
    assert all(len(leaf["sha256"]) == 64 for leaf in data["leaves"])


def test_a_chain_through_every_format(tmp_path):
    """Each format is read again, and the last is the first."""
    steps = [
        ("--to=zoo", "--noscan_layers"),
        ("--to=maxtext",),
        ("--to=maxtext", "--maxtext_layout=unscanned"),
        ("--to=zoo", "--param_scan_axis=1", "--vocab_padding=3"),
        ("--to=hf", "--experts=fused", "--spelling=published", "--shard_bytes=9999"),
        ("--to=hf", "--experts=separate"),
    ]
    source = GOLDENS / "qwen3_next_8l"
    for i, flags in enumerate(steps):
        status, out = main(source, tmp_path / str(i), *flags)
        assert status == 0, out
        source = tmp_path / str(i)
    assert equal(GOLDENS / "qwen3_next_8l", source)
    assert len(list((tmp_path / "4").glob("*.safetensors"))) > 10


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "mt", "--prompt=5 17 2"],
        ["check", "mt", "--tiers=bits"],
        ["check", "mt", "--tiers=tree"],
        ["compare", "mt"],
    ],
)
def test_a_maxtext_tree_is_not_taken_for_ours(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(GOLDENS / "qwen3_next_8l", "mt", "--to=maxtext")[0] == 0
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    assert parity.__main__.main(command, console) == 2
    said = "mt is in MaxText's layout: parity convert mt NEW --to=zoo"
    assert said in out.getvalue()
    with pytest.raises(CheckpointError, match="mt is in MaxText's layout"):
        shared.checkpoint.load("mt")


def test_hugging_face_tensors_without_their_config_are_recognised(tmp_path):
    golden = copy_golden("qwen3_next_8l/sharded", tmp_path / "hf")
    (golden / "config.json").unlink()
    for flags in ([], ["--from=hf"]):
        flags += ["--config=qwen3-next-8l-tiny"]
        status, out = main(golden, tmp_path / "zoo", *flags)
        assert status == 2
        assert f"{golden} has no config.json" in out
        assert "copy it into their folder" in out
    file = GOLDEN / "model.safetensors"
    status, out = main(file, tmp_path / "zoo", "--config=qwen3-next-8l-tiny")
    assert status == 2 and f"{file} has no config.json" in out


def test_weights_for_vllm_are_recognised(tmp_path):
    assert main(GOLDENS / "qwen3_next_8l", tmp_path / "vllm", "--to=vllm")[0] == 0
    status, out = main(tmp_path / "vllm", tmp_path / "zoo")
    assert status == 2 and len(out.splitlines()) == 1
    assert "fused weights of vLLM" in out and "written, never read" in out
    with pytest.raises(CheckpointError, match="checkpoint that it was made from"):
        shared.checkpoint.load_hf(tmp_path / "vllm")


def test_long_lists_are_cut(tmp_path):
    golden = copy_golden("qwen3_next_8l", tmp_path / "hf")
    tensors = load_file(golden / "model.safetensors")
    renamed = {f"{name}.x": tensor for name, tensor in tensors.items()}
    save_file(renamed, golden / "model.safetensors")
    status, out = main(golden, tmp_path / "zoo")
    assert status == 2 and len(tensors) > 100
    for sort in ("missing", "unexpected"):
        assert f"{len(tensors)} {sort}" in out
        assert out.count(f"  {sort}: ") == 20
    assert f"and {2 * len(tensors) - 40} more" in out


@pytest.mark.parametrize("tree", ["scanned_orbax", "scanned_params.npz", "zoo"])
def test_a_config_of_another_width_is_told_in_a_line(tree, tmp_path):
    source = MAXTEXT / tree
    config = config_of(6)
    if tree == "zoo":
        source = tmp_path / "bare.npz"
        specs = shared.trees.flatten(shared.abstract_params(config))
        np.savez(source, **{"/".join(path): np.zeros(x.shape) for path, x in specs})
    wide = tmp_path / "wide"
    wide.mkdir()
    text = json.dumps(config.to_hf() | {"hidden_size": 48})
    (wide / "config.json").write_text(text)
    status, out = main(source, tmp_path / "new", f"--config={wide}")
    assert status == 2 and len(out.splitlines()) == 1, out
    assert "hidden_size is 32 in the checkpoint and 48 in the config" in out


def test_the_width_of_the_shared_expert_matters_where_maxtext_is_written(
    tmp_path, caplog
):
    assert main(TINY, tmp_path / "maxtext", "--to=maxtext")[0] == 0
    assert "MaxText will not load this model" in caplog.text
    caplog.clear()
    assert main(tmp_path / "maxtext", tmp_path / "hf", "--to=hf")[0] == 0
    assert not caplog.records


def test_the_older_layout_of_maxtext_is_upgraded(tmp_path):
    """MaxText's own files: old_layout is scanned8 in its tree of today."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text(json.dumps(config_of(8).to_hf()))
    old = MAXTEXT / "old_layout_params.npz"
    status, out = main(old, tmp_path / "new", "--to=maxtext", f"--config={config}")
    assert status == 0 and "MaxText, flat, param_scan_axis=1" in out
    console = rich.console.Console(file=io.StringIO())
    left = ["diff", str(tmp_path / "new"), str(MAXTEXT / "scanned8_params.npz")]
    assert parity.__main__.main([*left, "--left_prefix=params/params"], console) == 0


def test_a_dry_run_writes_nothing(tmp_path):
    status, out = main(GOLDEN, tmp_path / "zoo", "--dry_run", "--cast=bfloat16")
    assert status == 0
    assert "would write zoo: 53 leaves, 377,168 bytes" in out
    assert "cast: 220 tensors from float32 to bfloat16, so not the same bytes" in out
    assert list(tmp_path.iterdir()) == []


BAD = [
    (["only one"], "Give a source and a destination. Got 1."),
    (["none", "new"], "There is no none. Give a checkpoint."),
    ([GOLDEN, "new", "--to=vllm", "--carry"], "--carry is for --to=hf or zoo"),
    ([GOLDEN, "new", "--experts=fused"], "--experts is for --to=hf. Got --to=zoo."),
    ([GOLDEN, "new", "--config=qwen3-next-tiny"], "another config cannot be given"),
    ([GOLDEN, "new", "--from=zoo"], "is said to be zoo, but it is hf"),
    (
        [GOLDEN, "new", "--to=maxtext", "--noscan_layers"],
        "--scan_layers is for --to=zoo",
    ),
    (
        [GOLDEN, "new", "--to=hf", "--param_scan_axis=0"],
        "--param_scan_axis is for --to=zoo",
    ),
    (
        [
            GOLDEN,
            "new",
            "--to=maxtext",
            "--maxtext_layout=unscanned",
            "--param_scan_axis=0",
        ],
        "--maxtext_layout=unscanned has no --param_scan_axis",
    ),
    ([GOLDEN, ".", "--dry_run", "--step=3"], "step=3 cannot be given"),
    ([GOLDEN, GOLDEN, "--dry_run"], "exists. It has"),
    ([GOLDEN, "new", "--to=nnx"], "value should be one of <zoo|hf|maxtext|vllm>"),
    ([GOLDEN, "new", "--scan_period=3"], "scan_period=3 contradicts the layers"),
    ([GOLDEN, "new", "--process=1"], "Give --coordinator, --processes and --process"),
    (
        [GOLDEN, "new", "--coordinator=x:1", "--processes=2", "--process=2"],
        "--process=2 is none of 0 to 1",
    ),
    ([MAXTEXT / "scanned_orbax", "new"], "does not say which model it is of"),
    (
        [MAXTEXT / "scanned_orbax", "new", "--config=qwen3-next-8l-tiny"],
        "the shapes contradict the config",
    ),
]


@pytest.mark.parametrize("argv, message", BAD)
def test_bad_input_is_told(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out = main(*argv)
    assert status == 2 and message in out, out
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    status, out = main(GOLDEN, tmp_path)
    assert status == 2 and "It has mine.txt. Give a new or an empty folder" in out
    status, out = main(GOLDEN, tmp_path / "mine.txt")
    assert status == 2 and "It is a file" in out
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_missing_and_unexpected_tensors_are_listed_together(tmp_path):
    golden = copy_golden("qwen3_next_8l/sharded", tmp_path / "hf")
    index = golden / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    file = data["weight_map"].pop("model.norm.weight")
    data["weight_map"]["model.layers.0.nobody.weight"] = file
    index.write_text(json.dumps(data))
    status, out = main(golden, tmp_path / "zoo")
    assert status == 2 and "model.layers.0.nobody.weight is not in" in out
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


MEMORY = """
import os, pathlib, sys
import jax
import parity.__main__

source, folder = sys.argv[1:]

def mebibytes(name):
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024

def convert(devices):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    assert len(jax.devices()) == devices
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = mebibytes("VmRSS")
    assert parity.__main__.main(["convert", source, f"{folder}/{devices}"]) == 0
    print("above", mebibytes("VmHWM") - before, flush=True)

for devices in (1, 8):
    child = os.fork()  # so that what both need is imported once
    if child == 0:
        convert(devices)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_eight_devices_need_no_more_memory_than_one(tmp_path):
    """A converter of MaxText asked for 16 devices and gave the whole model to each.

    AI-Hypercomputer/maxtext, PR 3192: 231 GB for a model of 4 billion parameters.
    """
    config = shared.preset("qwen3-next-8l-tiny")
    config = config.replace(moe=dataclasses.replace(config.moe, expert_size=4096))
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), shared.abstract_params(config)
    )
    sizes = [leaf.nbytes / 2**20 for leaf in jax.tree.leaves(params)]
    assert max(sizes) == 24 and sum(sizes) > 96
    shared.checkpoint.save_hf(tmp_path / "hf", config, params)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path / "hf", tmp_path],
        cwd=pathlib.Path(shared.__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, eight = (
        float(line.split()[1])
        for line in done.stdout.splitlines()
        if line.startswith("above")
    )
    # One whole copy more would be 96; what is read of a file counts, too.
    assert eight < one + 2 * max(sizes)
    assert max(one, eight) < 2 * sum(sizes)
    assert equal(tmp_path / "1", tmp_path / "8")
