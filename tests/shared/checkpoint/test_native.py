"""Checkpoints of ours: what was saved comes back, and nothing else is taken for it.

Expected values are those that went in, NumPy's and hashlib's view of their bytes, and
what stock orbax restores.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import shared
import shared.stores.orbax_writer
from parity.trees import compare_bytes
from shared.checkpoint.manifest import Manifest
from shared.checkpoint.native import open_checkpoint, write_checkpoint
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from shared.stores import CheckpointError, digest, from_tree, open_store, path_text
from shared.stores.orbax_writer import write_array, write_tree_file
from shared.stores.tree import array_leaf
from shared.trees import flatten

LINEAR = LayerKind("linear_attention", "dense")
SPARSE = LayerKind("linear_attention", "moe")
FULL = LayerKind("full_attention", "dense")

# Two blocks of two local layers and a full one, and a remainder: layers 0 to 6.
SCANNED = qwen3_next_tiny(7).replace(layers=(LINEAR, LINEAR, FULL) * 2 + (LINEAR,))
EQUAL = qwen3_next_tiny(4).replace(layers=(SPARSE,) * 4)
SMALL = qwen3_next_tiny(1).replace(layers=(LINEAR,))
LAYOUTS = {
    "scanned": {},
    "unscanned": {"scan_layers": False},
    "axis 1": {"param_scan_axis": 1},
}
CONFIGS = {
    **{name: SCANNED.replace(**layout) for name, layout in LAYOUTS.items()},
    "period 2": EQUAL.replace(scan_period=2),
    "period 4 at axis 1": EQUAL.replace(scan_period=4, param_scan_axis=1),
    "tied": EQUAL.replace(tie_word_embeddings=True),
    "bfloat16": SCANNED.replace(param_dtype="bfloat16", dtype="bfloat16"),
}


def coded(config):
    """Parameters no two of whose entries are the same, but for dtypes' rounding."""
    count, params = 0, {}
    for path, spec in flatten(shared.abstract_params(config)):
        node = params
        for name in path[:-1]:
            node = node.setdefault(name, {})
        entries = np.arange(count, count + np.prod(spec.shape))
        node[path[-1]] = entries.reshape(spec.shape).astype(spec.dtype)
        count += entries.size
    return params


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


# There and back.


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_comes_back(name, tmp_path):
    config = CONFIGS[name]
    params = coded(config)
    shared.checkpoint.save(tmp_path / "x", config, params)
    for verify in (True, False):
        found, restored = shared.checkpoint.load(tmp_path / "x", verify=verify)
        assert compare_bytes(restored, params).equal
        assert found.plan == config.plan
        assert found.to_hf() == config.to_hf()
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_arrays_on_devices_and_of_other_orders_of_memory(tmp_path):
    params = jax.tree.map(jnp.asarray, coded(SMALL))
    turned = np.asfortranarray(params["embed_tokens"])
    assert not turned.flags["C_CONTIGUOUS"]
    shared.checkpoint.save(tmp_path / "x", SMALL, params | {"embed_tokens": turned})
    assert compare_bytes(shared.checkpoint.load(tmp_path / "x")[1], params).equal


@pytest.mark.parametrize("new", LAYOUTS)
@pytest.mark.parametrize("old", LAYOUTS)
def test_another_layout_on_loading_is_that_of_relayout(old, new, tmp_path):
    config = CONFIGS[old]
    params = coded(config)
    layout = {
        name: getattr(CONFIGS[new], name) for name in ("scan_layers", "param_scan_axis")
    }
    shared.checkpoint.save(tmp_path / "x", config, params)
    found, loaded = shared.checkpoint.load(tmp_path / "x", **layout)
    expected_config, expected = shared.relayout(config, params, **layout)
    assert found.plan == expected_config.plan
    assert compare_bytes(loaded, expected).equal


def test_another_period_on_loading(tmp_path):
    params = coded(EQUAL)
    shared.checkpoint.save(tmp_path / "x", EQUAL, params)
    for period in (1, 2, 4):
        _, loaded = shared.checkpoint.load(tmp_path / "x", scan_period=period)
        _, expected = shared.relayout(EQUAL, params, scan_period=period)
        assert compare_bytes(loaded, expected).equal


def test_the_manifest_tells_layout_config_and_digests(tmp_path):
    config = CONFIGS["axis 1"]
    params = coded(config)
    shared.checkpoint.save(tmp_path / "x", config, params)
    manifest = manifest_of(tmp_path / "x")
    assert manifest["config"] == config.to_hf()
    assert manifest["layout"] == {
        "scan_layers": True,
        "scan_period": None,
        "param_scan_axis": 1,
        "vocab_padding": 0,
    }
    assert manifest["tree"] == "zoo" and manifest["writer"].startswith("parity-zoo")
    expected = {"params/" + "/".join(path): leaf for path, leaf in flatten(params)}
    assert set(manifest["leaves"]) == set(expected)
    for path, leaf in expected.items():
        assert manifest["leaves"][path] == {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
            "sha256": hashlib.sha256(leaf.tobytes()).hexdigest(),
        }


def test_parameters_that_do_not_fit_the_config_are_refused(tmp_path):
    params = coded(SMALL)
    params["more"] = params.pop("norm")
    params["lm_head"] = params["lm_head"].T
    with pytest.raises(CheckpointError) as error:
        shared.checkpoint.save(tmp_path / "x", SMALL, params)
    for line in ("missing: norm (32,)", "unexpected: more", "wrong shape: lm_head"):
        assert line in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_wide_parameters_are_not_narrowed_by_jax_without_a_word(tmp_path):
    config = SMALL.replace(param_dtype="float64")
    params = jax.tree.map(lambda leaf: leaf.astype(np.float64), coded(SMALL))
    shared.checkpoint.save(tmp_path / "x", config, params)
    with pytest.raises(CheckpointError, match="(?s)jax_enable_x64.*norm is float64"):
        shared.checkpoint.load(tmp_path / "x")


def test_only_a_new_or_an_empty_folder_is_written(tmp_path):
    (tmp_path / "x").mkdir()
    shared.checkpoint.save(tmp_path / "x", SMALL, coded(SMALL))
    before = files(tmp_path / "x")
    with pytest.raises(CheckpointError, match="x exists. It has .*Give a new or an em"):
        shared.checkpoint.save(tmp_path / "x", SMALL, coded(SMALL))
    assert files(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# Stock orbax.


def odd_tree():
    """Everything that a user's tree may hold and orbax can."""
    return {
        "bfloat16": jnp.array([1.5, -0.0, jnp.nan], jnp.bfloat16),
        "float8": jnp.array([[0.5], [-448.0]], jnp.float8_e4m3fn),
        "int4": jnp.array([-8, 7], jnp.int4),
        "bool": np.array([[True, False]]),
        "scalar": np.full((), 2.5, np.float32),
        "int64": np.array([2**40, -1]),
        "complex": np.array([1 + 2j], np.complex64),
        "layers": [{"w": np.full(2, i, np.int32)} for i in range(12)],
        "text": {"0": np.zeros(2), "10": np.ones(2)},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
        "raw": jax.random.PRNGKey(5),
        "none": None,
        "nothing": {"dict": {}, "list": [], "tuple": ()},
        "tuple": (np.arange(3.0), None),
    }


def write(folder, tree):
    store = from_tree(tree)
    return write_checkpoint(
        folder,
        store.leaves,
        lambda leaves: Manifest("linen", leaves),
        empty=store.empty,
    )


def host(value):
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value))
    return "", np.asarray(value)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("reader", ["StandardCheckpointer", "PyTreeCheckpointer"])
def test_stock_orbax_restores_what_we_write(reader, with_target, tmp_path):
    tree = odd_tree()
    write(tmp_path / "x", tree)
    checkpointer = getattr(ocp, reader)()
    target = {k: v for k, v in tree.items() if k != "tuple"}
    if not with_target:
        found = checkpointer.restore(tmp_path / "x")
        assert [leaf.tolist() for leaf in found.pop("tuple")[:1]] == [[0, 1, 2]]
    elif reader == "StandardCheckpointer":
        target["tuple"] = tree["tuple"]
        found = checkpointer.restore(tmp_path / "x", target)
    else:
        target["tuple"] = tree["tuple"]
        found = checkpointer.restore(tmp_path / "x", item=target)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    for have, want in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        (kind, have), (expected_kind, want) = host(have), host(want)
        assert (kind, have.dtype, have.shape) == (expected_kind, want.dtype, want.shape)
        assert have.tobytes() == want.tobytes()


def test_odd_trees_come_back_through_our_own_stores(tmp_path):
    tree = odd_tree() | {"empty": np.zeros((0, 3), np.float32)}
    manifest = write(tmp_path / "x", tree)
    written, expected = open_store(tmp_path / "x"), from_tree(tree)
    assert list(written.leaves) == list(expected.leaves)
    assert set(written.empty) == set(expected.empty)
    for path, leaf in expected.leaves.items():
        found = written.leaves[path]
        assert (found.shape, found.type_name) == (leaf.shape, leaf.type_name)
        assert digest(found, "") == digest(leaf, "")
        assert digest(leaf, "") == manifest.leaves[path_text(path)].sha256


def test_dtypes_that_cannot_be_stored_are_named_first(tmp_path):
    tree = {"a": np.ones(3), "b": {"c": jnp.zeros(3, "uint4")}}
    with pytest.raises(CheckpointError, match="(?s)no such dtypes.*b/c is uint4"):
        write(tmp_path / "x", tree)
    assert list(tmp_path.iterdir()) == []


def test_two_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="keeps .* and .* under one name, a.b"):
        write(tmp_path / "x", {"a": {"b": np.ones(2)}, "a.b": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


# Chunks.

ARRAYS = {
    "whole": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "uneven": np.arange(7 * 5, dtype=np.int16).reshape(7, 5),
    "long": np.arange(1000, dtype=np.uint8),
    "scalar": np.array(3.5),
    "zeros": np.zeros((5, 7), np.float32),
    "nothing": np.zeros((0, 4), np.float32),
    "turned": np.arange(60, dtype=np.float64).reshape(3, 4, 5).transpose(2, 0, 1),
    "bfloat16": np.arange(33).reshape(3, 11).astype(ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("limit", [1, 16, 40, 2**20])
def test_chunks_of_any_size_hold_the_array(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(shared.stores.orbax_writer, "CHUNK_BYTES", limit)
    monkeypatch.setattr(shared.stores.orbax_writer, "BLOCK_BYTES", 2 * limit)
    leaves = {(name,): array_leaf(array) for name, array in ARRAYS.items()}
    for path, leaf in leaves.items():
        told = []
        found = write_array(tmp_path, path, leaf, told.append)
        entries = np.ascontiguousarray(ARRAYS[path[0]]).tobytes()
        assert found == hashlib.sha256(entries).hexdigest()
        assert sum(told) == len(entries)
    write_tree_file(tmp_path, leaves, {})
    sizes = {
        file.stat().st_size
        for file in tmp_path.glob("*/[0-9]*")
        if file.parent.name == "long"
    }
    assert sizes == {min(limit, 1000)}
    restored = ocp.PyTreeCheckpointer().restore(tmp_path)
    ours = open_store(tmp_path).leaves
    for name, array in ARRAYS.items():
        assert restored[name].dtype == array.dtype
        np.testing.assert_array_equal(restored[name], array)
        with ours[(name,)].open() as read:
            whole = read(tuple(slice(0, n) for n in array.shape))
        np.testing.assert_array_equal(whole, array)


def test_the_first_chunk_is_the_first_rows(tmp_path, monkeypatch):
    """Uncompressed, in C order, little-endian: what zarr 2 calls it."""
    monkeypatch.setattr(shared.stores.orbax_writer, "CHUNK_BYTES", 4 * 24)
    array = np.arange(60, dtype=np.float32).reshape(10, 6)
    write_array(tmp_path, ("a", "b"), array_leaf(array))
    for i, rows in ((0, array[:4]), (1, array[4:8])):
        assert (tmp_path / "a.b" / f"{i}.0").read_bytes() == rows.tobytes()
    header = json.loads((tmp_path / "a.b" / ".zarray").read_text())
    assert (header["shape"], header["chunks"]) == ([10, 6], [4, 6])
    assert (header["dtype"], header["compressor"]) == ("<f4", None)


# Damage.


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native") / "whole"
    shared.checkpoint.save(folder, SMALL, coded(SMALL))
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return pathlib.Path(shutil.copytree(whole, tmp_path / "copy"))


def chunks(folder):
    found = sorted(path for path in folder.rglob("*") if re.match(r"\d", path.name))
    assert len(found) >= 10
    return found


def assert_refused(folder, *messages):
    """Each way in tells what is wrong."""
    for read in (shared.checkpoint.load, check):
        with pytest.raises(CheckpointError) as error:
            read(folder)
        for message in messages:
            assert re.search(message, str(error.value)), error.value


def check(folder):
    store, manifest = open_checkpoint(folder)
    shared.checkpoint.manifest.check_digests(store, manifest)


def test_a_flipped_bit_in_any_chunk_is_named(copy):
    for chunk in chunks(copy):
        data = bytearray(chunk.read_bytes())
        data[-1] ^= 0x40
        chunk.write_bytes(data)
        name = chunk.parent.name.replace(".", "/")
        assert_refused(copy, f"1 of .* have changed since.*\n  {name}: its SHA-256 is")
        data[-1] ^= 0x40
        chunk.write_bytes(data)
    check(copy)


@pytest.mark.parametrize("damage", ["absent", "cut", "longer", "empty"])
def test_a_chunk_of_another_size_is_named(damage, copy):
    for chunk in chunks(copy):
        data = chunk.read_bytes()
        if damage == "absent":
            chunk.unlink()
        else:
            chunk.write_bytes(
                {"cut": data[:-1], "longer": data + b"\0", "empty": b""}[damage]
            )
        assert_refused(copy, re.escape(chunk.parent.name.replace(".", "/")))
        chunk.write_bytes(data)
    check(copy)


def test_zeros_that_are_absent_are_not_made_up(tmp_path):
    params = coded(SMALL) | {"norm": np.zeros(32, np.float32)}
    shared.checkpoint.save(tmp_path / "x", SMALL, params)
    assert compare_bytes(shared.checkpoint.load(tmp_path / "x")[1], params).equal
    (tmp_path / "x" / "params.norm" / "0").unlink()
    assert_refused(tmp_path / "x", "params/norm cannot be read")
    with pytest.raises(CheckpointError, match="norm cannot be read"):
        shared.checkpoint.load(tmp_path / "x", verify=False)


def test_an_absent_array_is_named(copy):
    shutil.rmtree(copy / "params.norm")
    assert_refused(copy, "the array params.norm is in _METADATA and cannot be opened")


def test_an_array_too_many_is_named(copy):
    shutil.copytree(copy / "params.norm", copy / "params.norm2")
    assert_refused(copy, "(?s)arrays that are not in its tree.*params.norm2")


def edit(file, change):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def test_an_array_in_the_tree_that_the_manifest_lacks_is_named(copy):
    edit(copy / "manifest.json", lambda data: data["leaves"].pop("params/norm"))
    assert_refused(copy, "not what its manifest says", "unexpected: params/norm")


def test_a_leaf_that_the_tree_lacks_is_named(copy):
    def drop(data):
        del data["tree_metadata"]["('params', 'norm')"]

    edit(copy / "_METADATA", drop)
    shutil.rmtree(copy / "params.norm")
    assert_refused(copy, "missing: params/norm")


LIES = {
    "shape": ("shape", [16, 2], r"\(32,\), and the manifest says float32 \(16, 2\)"),
    "dtype": ("dtype", "int32", r"is float32 \(32,\), and the manifest says int32"),
    "digest": (
        "sha256",
        "0" * 64,
        "its SHA-256 is [0-9a-f]{64}, and the manifest says",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_named(lie, copy):
    field, value, message = LIES[lie]
    edit(
        copy / "manifest.json",
        lambda data: data["leaves"]["params/norm"].update({field: value}),
    )
    assert_refused(copy, message, "params/norm")


def test_a_header_that_lies_is_named(copy):
    """As large as before, so that no byte is missing."""
    header = copy / "params.norm" / ".zarray"
    edit(header, lambda data: data.update(dtype="<i4"))
    assert_refused(copy, r"params/norm is int32 \(32,\), and the manifest says float32")
    edit(header, lambda data: data.update(dtype="<f4", shape=[16], chunks=[16]))
    assert_refused(
        copy, r"params/norm is float32 \(16,\), and the manifest says float32"
    )


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda d: d.update(version=2), "has version 2, and 1 is what is known here"),
        (lambda d: d.pop("version"), "has version None"),
        (lambda d: d.pop("layout"), "is damaged"),
        (lambda d: d.update(leaves=[]), "is damaged"),
        (lambda d: d["leaves"].update(x={"shape": 3}), "is damaged"),
    ],
)
def test_manifests_of_another_version_or_damaged(change, message, copy):
    edit(copy / "manifest.json", change)
    assert_refused(copy, re.escape(str(copy / "manifest.json")), message)


def test_manifests_that_are_no_json(copy):
    file = copy / "manifest.json"
    file.write_text(file.read_text()[:-20])
    assert_refused(copy, "manifest.json is not JSON .*fetch or write it again")
    file.unlink()
    assert_refused(copy, "has no manifest.json, so it is no checkpoint of ours")


def test_what_was_not_finished_is_not_opened(copy, tmp_path):
    partial = copy.rename(tmp_path / ".x.partial")
    for folder in (partial, partial / "params.norm"):
        with pytest.raises(CheckpointError, match="was not finished when it was writt"):
            open_store(folder)
    assert_refused(partial, "was not finished when it was written")


# Runs that are killed, and runs that meet.


def tree(fill=0):
    return {
        "a": np.arange(200_000, dtype=np.float32) + fill,
        "b": {str(i): np.full((100, i + 1), i, np.int16) for i in range(12)},
        "z": np.float32(1),
    }


def write_some(folder, fingerprint, fail_at=None):
    """Writes `tree()`; breaks off, as a killed process does, at a leaf."""
    leaves = dict(from_tree(tree()).leaves)
    if fail_at is not None:
        path = ("b", str(fail_at))

        class Killed(BaseException):
            pass

        def opened():
            raise Killed

        leaves[path] = leaves[path]._replace(open=opened)
    try:
        write_checkpoint(
            folder,
            leaves,
            lambda records: Manifest("linen", records),
            fingerprint=fingerprint,
        )
    except BaseException as error:
        if type(error).__name__ != "Killed":
            raise


def test_a_run_with_other_options_does_not_go_on_with_a_killed_one(tmp_path):
    write_some(tmp_path / "x", {"source": 1}, fail_at=7)
    partial = tmp_path / ".x.partial"
    before = files(partial)
    assert len(before) > 10
    with pytest.raises(CheckpointError, match="left by a run with another source or o"):
        write_some(tmp_path / "x", {"source": 2})
    assert files(partial) == before
    assert not (tmp_path / "x").exists()
    write_some(tmp_path / "x", {"source": 1})
    write_some(tmp_path / "y", {"source": 1})
    assert files(tmp_path / "x") == files(tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


def test_leaves_that_are_finished_are_not_written_again(tmp_path, monkeypatch):
    write_some(tmp_path / "x", {"source": 1}, fail_at=7)
    written = []

    def note(folder, path, leaf, progress=None):
        written.append(path_text(path))
        return write_array(folder, path, leaf, progress)

    monkeypatch.setattr("shared.checkpoint.native.write_array", note)
    write_some(tmp_path / "x", {"source": 1})
    assert written == ["b/7", "b/8", "b/9", "b/10", "b/11", "z"]


def test_what_a_killed_run_wrote_is_checked_before_it_counts(tmp_path):
    write_some(tmp_path / "x", {"source": 1}, fail_at=7)
    chunk = next((tmp_path / ".x.partial" / "b.3").glob("[0-9]*"))
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    with pytest.raises(CheckpointError, match="b/3: its SHA-256"):
        write_some(tmp_path / "x", {"source": 1})
    assert list(tmp_path.iterdir()) == []  # so that the next run starts anew
    write_some(tmp_path / "x", {"source": 1})
    check(tmp_path / "x")


HEAD = """
import os, pathlib, shutil, signal, sys, time
import numpy as np
from shared.checkpoint.manifest import Manifest
from shared.checkpoint.native import write_checkpoint
from shared.stores import from_tree

folder = pathlib.Path(sys.argv[1])

def write(tree, **options):
    describe = lambda records: Manifest("linen", records)
    leaves = from_tree(tree).leaves
    write_checkpoint(folder, leaves, describe, fingerprint={"source": 1}, **options)
"""


def start(program, *args):
    command = [sys.executable, "-c", HEAD + textwrap.dedent(program), *map(str, args)]
    return subprocess.Popen(
        command,
        cwd=pathlib.Path(shared.__file__).parent.parent,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return out


KILLED = """
tree = {str(i): np.arange(300 * 300, dtype=np.float32) + i for i in range(30)}

def child():
    # The parent has no threads: each child starts what it needs after the fork.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            write(tree)
            status = 0
        finally:
            os._exit(status)
    return pid

def files():
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in found}

begin = time.monotonic()
assert os.waitpid(child(), 0)[1] == 0
whole = time.monotonic() - begin
expected = files()
random = np.random.default_rng(0)
killed = resumed = 0
while killed < int(sys.argv[2]):
    shutil.rmtree(folder)
    while not folder.exists():
        resumed += (folder.parent / f".{folder.name}.partial").exists()
        pid = child()
        time.sleep(random.uniform(0.0, 1.2) * whole)
        os.kill(pid, signal.SIGKILL)
        killed += os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert files() == expected
assert [p.name for p in folder.parent.iterdir()] == [folder.name]
print(killed, resumed)
"""


def test_runs_killed_at_any_moment_are_finished_by_the_next(tmp_path):
    """The folder appears whole, and is then that of an uninterrupted run."""
    (tmp_path / "in").mkdir()
    out = finish(start(KILLED, tmp_path / "in" / "x", 20))
    killed, resumed = map(int, out.split())
    assert killed >= 20
    assert resumed >= 5


MEETING = """
def told(count):
    if not told.once:
        told.once = True
        print("writing", flush=True)
        sys.stdin.readline()

told.once = False
write({"a": np.arange(10.0)}, progress=told)
"""


def test_a_second_run_into_one_folder_is_refused(tmp_path):
    first = start(MEETING, tmp_path / "x")
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(
        CheckpointError, match="Another process is writing .*wait for it"
    ):
        write_some(tmp_path / "x", {"source": 1})
    first.stdin.write("\n")
    first.stdin.flush()
    finish(first)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    check(tmp_path / "x")
    np.testing.assert_array_equal(
        ocp.PyTreeCheckpointer().restore(tmp_path / "x")["a"], np.arange(10.0)
    )
    assert os.listdir(tmp_path) == ["x"]
