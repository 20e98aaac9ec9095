"""What a checkpoint holds, as `parity inspect` lists it, in every format."""

import hashlib
import io
import json
import pathlib
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import rich.console

import parity.__main__
import shared
from shared.stores import digest, open_store
from shared.stores.reading import BLOCK_BYTES
from shared.stores.store import constant
from tests.parity.checkpoints import WRITERS, stepped

TREE = {
    "params": {
        "dense": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)},
        "scale": np.array([1.5, 0.25], np.float16),
    },
    "step": np.array(7, np.int32),
}
# Of `struct.pack` of the same numbers, independent of NumPy's memory.
SHA256 = {
    "params/scale": hashlib.sha256(bytes.fromhex("003e0034")).hexdigest(),
    "step": hashlib.sha256(bytes.fromhex("07000000")).hexdigest(),
}
GOLDENS = pathlib.Path(__file__).parent.parent / "goldens"


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["inspect", *map(str, argv)], console)
    return status, out.getvalue()


def listed(target, tmp_path, *argv):
    file = tmp_path / "list.json"
    assert main(target, f"--json={file}", *argv)[0] == 0
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_list(name, tmp_path):
    path = WRITERS[name](TREE, tmp_path / "checkpoint")
    data = listed(path, tmp_path, "--digests")
    assert data["format"] == name
    rows = {row["path"]: row for row in data["leaves"]}
    assert {
        path: (row["type"], row["shape"], row["bytes"]) for path, row in rows.items()
    } == {
        "params/dense/kernel": ("float32", [3, 4], 48),
        "params/scale": ("float16", [2], 4),
        "step": ("int32", [], 4),
    }
    assert data["bytes"] == 56
    for leaf, expected in SHA256.items():
        assert rows[leaf]["digest"] == expected


def test_without_digests_no_entry_is_read(tmp_path, monkeypatch):
    path = WRITERS["safetensors"](TREE, tmp_path / "a.safetensors")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # the entries come last
    path.write_bytes(damaged)
    assert {row["digest"] for row in listed(path, tmp_path)["leaves"]} == {None}


def test_one_flipped_bit_changes_one_digest(tmp_path):
    path = WRITERS["safetensors"](TREE, tmp_path / "a.safetensors")
    before = listed(path, tmp_path, "--digests")["leaves"]
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    after = listed(path, tmp_path, "--digests")["leaves"]
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_a_digest_is_of_all_parts_in_order():
    entries = np.arange(BLOCK_BYTES // 2 + 3, dtype=np.uint32).reshape(-1, 1)
    assert entries.nbytes > 2 * BLOCK_BYTES
    counts = []
    found = digest(constant(entries), "x", counts.append)
    assert found == hashlib.sha256(entries.astype("<u4").tobytes()).hexdigest()
    assert sum(counts) == entries.nbytes and max(counts) <= BLOCK_BYTES < sum(counts)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        np.arange(12, dtype=np.int16)[::2],
        np.array([np.nan, 1], ml_dtypes.bfloat16),
        np.zeros((0, 3), np.float32),
        np.array(True),
    ],
)
def test_a_digest_does_not_depend_on_how_memory_lies(array):
    assert sys.byteorder == "little"
    expected = hashlib.sha256(array.tobytes(order="C")).hexdigest()
    assert digest(constant(array), "x") == expected


def test_lines_and_a_table_say_all(tmp_path):
    path = WRITERS["orbax"](TREE, tmp_path / "checkpoint")
    status, out = main(path)
    assert status == 0
    assert [line.split() for line in out.splitlines()][:3] == [
        ["params/dense/kernel", "float32", "3x4", "48"],
        ["params/scale", "float16", "2", "4"],
        ["step", "int32", "scalar", "4"],
    ]
    assert out.splitlines()[-1] == (
        "orbax: 3 leaves, 15 entries, 56 bytes; float32 48; float16 4; int32 4"
    )
    screen = io.StringIO()
    terminal = rich.console.Console(file=screen, width=100, force_terminal=True)
    assert parity.__main__.main(["inspect", str(path)], terminal) == 0
    assert all(line in screen.getvalue() for line in ("shape", "3x4", "56 bytes"))


def test_a_part_and_a_step_are_chosen(tmp_path):
    folder = stepped(tmp_path / "steps", [1, 4])
    assert listed(folder, tmp_path)["step"] == 4
    assert "latest of 2" in main(folder)[1]
    assert listed(folder, tmp_path, "--step=1")["step"] == 1
    path = WRITERS["msgpack"](TREE, tmp_path / "a.msgpack")
    rows = listed(path, tmp_path, "--prefix=params/dense")["leaves"]
    assert [row["path"] for row in rows] == ["kernel"]


def test_a_hugging_face_folder_is_listed():
    status, out = main(GOLDENS / "qwen3_next_8l")
    assert status == 0
    store = open_store(GOLDENS / "qwen3_next_8l")
    names = [line.split()[0] for line in out.splitlines()[:-1]]
    assert len(names) == len(store.leaves) > 100


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "Give one checkpoint"),
        (("a", "b"), "Got 2"),
        (("nowhere",), "nowhere"),
        (("{file}", "--step=3"), "has no steps"),
        (
            ("{file}", "--prefix=optimizer"),
            "has nothing under 'optimizer'. It has params, step",
        ),
        (("{file}", "--json=/nowhere/x.json"), "there is no such folder"),
    ],
)
def test_bad_input_is_told(argv, said, tmp_path):
    file = WRITERS["npz"](TREE, tmp_path / "a")
    status, out = main(*(text.format(file=file) for text in argv))
    assert status == 2
    assert said in out


def test_what_cannot_be_read_is_told_and_the_rest_listed(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, good=np.ones(2), bad=np.array([{}], object))
    status, out = main(path)
    assert status == 1
    assert "cannot be read: bad" in out and "good" in out


def test_a_checkpoint_of_ours_says_its_layout_and_is_compared(tmp_path):
    golden = GOLDENS / "qwen3_next_6l"
    config, params = shared.checkpoint.load_hf(golden, param_scan_axis=1)
    shared.checkpoint.save(tmp_path / "zoo", config, params)
    status, out = main(tmp_path / "zoo", "--digests")
    assert status == 0
    assert "manifest: zoo tree" in out and "param_scan_axis=1" in out
    status, out = main(tmp_path / "zoo", "--prefix=params/layers", "--digests")
    assert status == 0 and "manifest: zoo tree" in out
    data = listed(tmp_path / "zoo", tmp_path, "--digests")
    assert data["manifest"]["layout"]["param_scan_axis"] == 1
    assert all(leaf["digest"] == leaf["expected"] for leaf in data["leaves"])

    chunk = tmp_path / "zoo" / "params.norm" / "0"
    chunk.write_bytes(b"\x01" + chunk.read_bytes()[1:])
    assert main(tmp_path / "zoo")[0] == 0  # nothing was read
    status, out = main(tmp_path / "zoo", "--digests")
    assert status == 1
    [row] = [leaf for leaf in data["leaves"] if leaf["path"] == "params/norm"]
    assert f"changed: params/norm: the manifest says {row['expected']}" in out


def test_a_manifest_that_says_something_else_is_bad_input(tmp_path):
    config, params = shared.checkpoint.load_hf(GOLDENS / "qwen3_next_6l")
    shared.checkpoint.save(tmp_path / "zoo", config, params)
    shutil.rmtree(tmp_path / "zoo" / "params.norm")
    file = tmp_path / "zoo" / "_METADATA"
    data = json.loads(file.read_text())
    del data["tree_metadata"]["('params', 'norm')"]
    file.write_text(json.dumps(data))
    status, out = main(tmp_path / "zoo")
    assert status == 2 and "missing: params/norm" in out
