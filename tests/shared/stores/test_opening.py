"""Stores: what was written by the format's own library is found, path by path."""

import contextlib
import json
import math
import pickle
import shutil
import zipfile

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import shared.stores.npz
from parity.diff import diff
from shared.stores import CheckpointError, blocks, from_tree, open_store, path_text
from tests.parity.checkpoints import WRITERS, stepped, write_msgpack, write_orbax

TREE = {
    "params": {
        "dense": {"kernel": np.arange(12, dtype=np.float32).reshape(3, 4) / 7},
        "scale": np.array([1.5, -0.0, 2], np.float16),
    },
    "step": np.array(7, np.int32),
    "mask": np.array([True, False]),
}


def read(leaf, limit=2**20):
    """All of a leaf, put together from parts."""
    with leaf.open() as read:
        parts = [np.array(read(part)).reshape(-1) for part in blocks(leaf.shape, limit)]
    return np.concatenate(parts).reshape(leaf.shape)


def contents(store):
    return {path_text(path): read(leaf) for path, leaf in store.leaves.items()}


def flat(tree):
    return contents(from_tree(tree))


def assert_same(found, expected):
    assert list(found) == list(expected)
    for path, value in expected.items():
        value = np.asarray(value)
        assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape)
        assert found[path].tobytes() == value.tobytes(), path


# Every format.


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_is_known_by_its_content(name, tmp_path):
    path = WRITERS[name](TREE, tmp_path / "no_suffix_that_tells")
    store = open_store(path)
    assert store.format == name
    assert not store.refused
    assert_same(contents(store), flat(TREE))


@pytest.mark.parametrize("name", WRITERS)
def test_layer_10_comes_after_layer_2(name, tmp_path):
    tree = {"layers": {str(i): {"w": np.full(2, i, np.int32)} for i in range(12)}}
    found = contents(open_store(WRITERS[name](tree, tmp_path / "x")))
    assert [int(value[0]) for value in found.values()] == list(range(12))
    assert list(found) == [f"layers/{i}/w" for i in range(12)]


@pytest.mark.parametrize("name", ["orbax", "safetensors", "msgpack"])
def test_dtypes_that_numpy_lacks(name, tmp_path):
    names = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
    names += [] if name == "safetensors" else ["int4"]
    tree = {dtype: np.array([1, -2, 0], dtype) for dtype in names}
    assert_same(contents(open_store(WRITERS[name](tree, tmp_path / "x"))), flat(tree))


def test_bits_of_bfloat16_are_kept(tmp_path):
    """NaN with a payload, -0, a subnormal and infinity."""
    bits = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0xFF80], np.uint16)
    tree = {"w": bits.view(ml_dtypes.bfloat16)}
    for name in ("orbax", "safetensors", "msgpack"):
        found = contents(open_store(WRITERS[name](tree, tmp_path / name)))
        np.testing.assert_array_equal(found["w"].view(np.uint16), bits)


@pytest.mark.parametrize("name", ["safetensors", "msgpack", "npz"])
def test_leaves_without_entries(name, tmp_path):
    tree = {"a": np.zeros((0, 3), np.float32), "b": np.zeros((2, 0), np.int32)}
    assert_same(contents(open_store(WRITERS[name](tree, tmp_path / "x"))), flat(tree))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("limit", [1, 3, 5, 7, 24, 100])
def test_parts_make_up_the_whole(name, limit, checkpoints):
    leaf = open_store(checkpoints[name]).leaves[("w",)]
    np.testing.assert_array_equal(read(leaf, limit), checkpoints["array"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    made = {name: WRITERS[name]({"w": array}, folder / name) for name in WRITERS}
    return made | {"array": array}


@given(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.integers(1, 30),
)
def test_blocks_cover_an_array_once_in_order_within_the_limit(shape, limit):
    array = np.arange(math.prod(shape)).reshape(shape)
    parts = [array[part] for part in blocks(shape, limit)]
    assert all(np.size(part) <= limit for part in parts)
    joined = np.concatenate([np.reshape(part, -1) for part in parts])
    np.testing.assert_array_equal(joined, np.arange(array.size))


def test_a_prefix_is_a_subtree(tmp_path):
    store = open_store(WRITERS["npz"](TREE, tmp_path / "x"))
    assert_same(contents(store.under("params")), flat(TREE["params"]))
    assert_same(contents(store.under("params/dense/")), flat(TREE["params"]["dense"]))
    with pytest.raises(CheckpointError, match="param'.*It has mask, params, step"):
        store.under("param")


# Orbax.


class Model(nnx.Module):
    def __init__(self, rngs):
        linear = lambda: nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        self.layers = nnx.List([linear() for _ in range(11)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.fixture(scope="module")
def state():
    return nnx.state(Model(nnx.Rngs(0)))


def save_standard(tree, path):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
    return open_store(path)


def test_nnx_state_with_int_keys_boxes_and_typed_keys(state, tmp_path):
    store = save_standard(state, tmp_path / "x")
    assert store.boxes
    assert_same(contents(store), flat(state))
    assert ("layers", "10", "kernel", "value") in store.leaves
    key = store.leaves[("dropout", "rngs", "key", "value")]
    assert key.kind == from_tree(state).leaves[("dropout", "rngs", "key", "value")].kind
    assert "threefry2x32" in key.type_name


def test_train_state_has_indices_and_leaves_nothing_for_empty_states(tmp_path):
    optax = pytest.importorskip("optax")
    params = {"kernel": jnp.ones((2, 2))}
    state = TrainState.create(apply_fn=len, params=params, tx=optax.adam(1e-3))
    store = save_standard(state, tmp_path / "x")
    assert ("opt_state", 0, "mu", "kernel") in store.leaves
    assert {path[0] for path in store.leaves} == {"step", "params", "opt_state"}
    assert {path[1] for path in store.leaves if path[0] == "opt_state"} == {0}


def test_boxed_linen_params(tmp_path):
    init = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
    layer = nn.Dense(2, kernel_init=init, use_bias=False)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 2)))
    store = save_standard(variables, tmp_path / "x")
    assert list(store.leaves) == [("params", "kernel", "value")]
    assert list(from_tree(variables).leaves) == [("params", "kernel", "value")]


@pytest.mark.parametrize(
    "options",
    [{"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True}],
    ids=str,
)
def test_other_layouts_of_orbax(options, tmp_path):
    tree = TREE | {"scalar": 3, "text": "words", "nothing": None, "empty": {}}
    store = open_store(write_orbax(tree, tmp_path / "x", **options))
    expected = flat(TREE | {"scalar": np.int64(3), "text": np.array("words")})
    assert_same(contents(store), expected)


def test_a_leaf_in_many_chunks(tmp_path):
    array = np.arange(1024, dtype=np.float32).reshape(32, 32)
    save_args = {"w": orbax.checkpoint.SaveArgs(chunk_byte_size=512)}
    args = orbax.checkpoint.args.PyTreeSave({"w": jnp.asarray(array)}, save_args)
    handler = orbax.checkpoint.PyTreeCheckpointHandler()
    with orbax.checkpoint.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "x", args=args)
    leaf = open_store(tmp_path / "x").leaves[("w",)]
    for limit in (40, 100, 5000):
        np.testing.assert_array_equal(read(leaf, limit), array)


def test_steps_of_a_manager(tmp_path):
    folder = stepped(tmp_path / "run", [2, 9, 10])
    latest = open_store(folder)
    assert latest.step == 10
    assert "step 10, the latest of 3" in latest.notes
    assert read(latest.leaves[("a",)])[0] == 10
    assert read(open_store(folder, step=9).leaves[("a",)])[0] == 9
    assert read(open_store(folder / "2").leaves[("a",)])[0] == 2
    with pytest.raises(CheckpointError, match="no step 3. It has 2, 9, 10"):
        open_store(folder, step=3)


def test_several_items_are_not_guessed_between(tmp_path):
    args = orbax.checkpoint.args
    items = {name: args.StandardSave({"a": jnp.ones(2)}) for name in ("ema", "state")}
    with orbax.checkpoint.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=args.Composite(**items, data=args.JsonSave({"x": 1})))
        manager.wait_until_finished()
    with pytest.raises(CheckpointError, match=r"2 trees.*1/ema, .*1/state"):
        open_store(tmp_path / "run")
    assert list(open_store(tmp_path / "run" / "1" / "ema").leaves) == [("a",)]


def test_two_arrays_in_one_place_are_refused(tmp_path):
    """Orbax joins keys with a dot, and writes both of these to a.b."""
    tree = {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}
    store = open_store(write_orbax(tree, tmp_path / "x"))
    assert set(map(path_text, store.refused)) == {"a/b", "a.b"}


def test_damaged_orbax_folders(tmp_path):
    folder = write_orbax(TREE, tmp_path / "x", use_ocdbt=False)

    def damaged(change):
        copy = shutil.copytree(folder, tmp_path / "damaged")
        change(copy)
        with pytest.raises(CheckpointError) as error:
            diff(open_store(copy), open_store(folder))
        shutil.rmtree(copy)
        return str(error.value)

    assert "not JSON" in damaged(lambda f: (f / "_METADATA").write_text('{"tree'))
    assert "tree metadata" in damaged(lambda f: (f / "_METADATA").write_text("{}"))
    assert "_METADATA" in damaged(lambda f: (f / "_METADATA").unlink())
    lost = damaged(lambda f: shutil.rmtree(f / "params.scale"))
    assert "params.scale" in lost
    assert "tensorstore_spec" not in lost
    # Not taken for zeros.
    assert "missing" in damaged(lambda f: (f / "params.dense.kernel" / "0.0").unlink())
    with pytest.raises(CheckpointError, match="not finished"):
        open_store(shutil.copytree(folder, tmp_path / "x.orbax-checkpoint-tmp"))


# safetensors.


def write_shards(folder):
    folder.mkdir()
    weight_map = {}
    for i in range(3):
        save_file({f"layers/{i}": np.full(2, i)}, folder / f"part-{i}.safetensors")
        weight_map[f"layers/{i}"] = f"part-{i}.safetensors"
    index = {"metadata": {"total_size": 48}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_and_their_index(tmp_path, caplog):
    folder = write_shards(tmp_path / "x")
    save_file({"layers/1": np.full(2, 99)}, folder / "stray.safetensors")
    store = open_store(folder)
    assert_same(contents(store), {f"layers/{i}": np.full(2, i) for i in range(3)})
    assert "stray.safetensors" in store.notes[0]
    assert "stray.safetensors" in caplog.text


def test_a_shard_that_is_not_there_is_named(tmp_path):
    folder = write_shards(tmp_path / "x")
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="part-1.safetensors"):
        open_store(folder)


def test_files_without_an_index(tmp_path):
    folder = tmp_path / "x"
    folder.mkdir()
    save_file({"a": np.ones(2)}, folder / "weights.safetensors")
    assert list(open_store(folder).leaves) == [("a",)]
    save_file({"a": np.ones(2)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match="more.safetensors, weights.safetensors"):
        open_store(folder)


def test_a_dtype_of_half_bytes_is_refused_by_name(tmp_path):
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}})
    size = len(header).to_bytes(8, "little")
    (tmp_path / "x").write_bytes(size + header.encode() + b"\0\0")
    assert "F4" in open_store(tmp_path / "x").refused[("w",)]


# msgpack.


def test_msgpack_with_int_keys_lists_and_python_values(tmp_path):
    tree = {
        "layers": {0: np.ones(1), 10: np.ones(2), 2: np.ones(3)},
        "list": [np.zeros(1), np.zeros(2)],
        "complex": 1 + 2j,
        "float": 2.5,
        "long": "x" * 300,
        "negative": -200,
        "none": None,
        "scalar": np.float32(3),
        "true": True,
    }
    (tmp_path / "x").write_bytes(flax.serialization.msgpack_serialize(tree))
    store = open_store(tmp_path / "x")
    assert ("layers", 10) in store.leaves
    assert ("list", 1) in store.leaves
    assert_same(contents(store), flat(tree))


def test_msgpack_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 20)
    array = np.arange(77, dtype=np.float32).reshape(7, 11)
    tree = {"params": {"big": array, "small": np.ones(2)}}
    path = write_msgpack(tree, tmp_path / "x")
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    for limit in (4, 11, 1000):
        leaf = open_store(path).leaves[("params", "big")]
        np.testing.assert_array_equal(read(leaf, limit), array)
    assert_same(contents(open_store(path)), flat(tree))


def test_an_int_key_and_its_text_are_two_leaves(tmp_path):
    (tmp_path / "x").write_bytes(msgpack.packb({"a": {0: 1.5, "0": 2.5}}))
    assert set(open_store(tmp_path / "x").leaves) == {("a", 0), ("a", "0")}


# npz.


def test_npz_in_fortran_order_and_compressed(tmp_path):
    tree = {"f": np.asfortranarray(TREE["params"]["dense"]["kernel"]), "c": np.ones(9)}
    np.savez_compressed(tmp_path / "x.npz", **tree)
    store = open_store(tmp_path / "x.npz")
    for limit in (2, 5, 100):
        for name, value in tree.items():
            np.testing.assert_array_equal(read(store.leaves[(name,)], limit), value)


def test_objects_are_refused_by_name_and_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    np.savez(tmp_path / "x.npz", good=np.ones(2), bad=np.array([Bomb()], object))
    store = open_store(tmp_path / "x.npz")
    assert list(store.leaves) == [("good",)]
    assert "pickle" in store.refused[("bad",)]

    (tmp_path / "y").write_bytes(pickle.dumps({"a": Bomb()}))
    with pytest.raises(CheckpointError, match="pickle.*never read"):
        open_store(tmp_path / "y")
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pickle.*never read"):
        open_store(tmp_path / "model.pt")


def test_bfloat16_in_npz_has_lost_its_dtype(tmp_path):
    np.savez(tmp_path / "x.npz", w=np.ones(2, ml_dtypes.bfloat16))
    assert "does not keep bfloat16" in open_store(tmp_path / "x.npz").refused[("w",)]


def test_a_stream_is_read_in_parts(tmp_path, monkeypatch):
    """No part is larger than asked for, and each byte comes once."""
    np.savez_compressed(tmp_path / "x.npz", w=np.zeros((100, 10), np.float32))
    reads = []
    plain = zipfile.ZipExtFile.read

    def counted(self, n=-1):
        data = plain(self, n)
        reads.append(len(data))
        return data

    monkeypatch.setattr(shared.stores.npz.zipfile.ZipExtFile, "read", counted)
    leaf = open_store(tmp_path / "x.npz").leaves[("w",)]
    reads.clear()
    read(leaf, limit=70)
    assert max(reads) <= 70 * 4
    assert sum(reads) < 4000 + 200


# What is none.


@pytest.mark.parametrize("name", ["safetensors", "msgpack", "npz"])
@pytest.mark.parametrize("keep", [0.2, 0.6, -1], ids=["early", "late", "last byte"])
def test_a_truncated_file_is_refused(name, keep, tmp_path):
    path = WRITERS[name](TREE, tmp_path / "x")
    data = path.read_bytes()
    path.write_bytes(data[:-1] if keep == -1 else data[: int(len(data) * keep)])
    with pytest.raises(CheckpointError, match="fetch or write it again"):
        open_store(path)


def test_bytes_after_the_end_are_refused(tmp_path):
    path = write_msgpack(TREE, tmp_path / "x")
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes follow"):
        open_store(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 bytes"),
        (b"hello world, this is text", "is no checkpoint"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x93NUMPY\x01\x00v\x00", "npy"),
    ],
)
def test_files_of_another_kind(content, words, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        open_store(tmp_path / "x")


def test_what_is_not_there_and_folders_of_another_kind(tmp_path):
    with pytest.raises(
        CheckpointError, match="There is no .*none. Give an orbax folder"
    ):
        open_store(tmp_path / "none")
    with pytest.raises(CheckpointError, match="It has nothing. Give an orbax folder"):
        open_store(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="It has notes.txt"):
        open_store(tmp_path)


def test_deep_nesting_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"\x81\xa1a" + b"\x91" * 10**5 + b"\xc0")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        open_store(tmp_path / "x")


@given(st.binary(min_size=1, max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        store = open_store(path)
        diff(store, store)


CHANGED = flax.serialization.msgpack_serialize(
    {
        "a": {"b": np.arange(3)},
        "c": 1 + 2j,
        "d": {
            "__msgpack_chunked_array__": True,
            "shape": {"0": 2, "1": 2},
            "chunks": {"0": np.ones(3), "1": np.ones(1)},
        },
    }
)


@given(st.integers(0, len(CHANGED) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(tmp_path_factory, place, byte):
    data = bytearray(CHANGED)
    data[place] = byte
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(data)
    with contextlib.suppress(CheckpointError):
        store = open_store(path)
        diff(store, store)
