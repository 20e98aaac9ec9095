"""The comparison of checkpoints: any format, to the bit, a part at a time."""

import contextlib
import io
import json
import math
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint
import pytest
import rich.console
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

import parity.__main__
from parity.diff import diff
from shared.stores import CheckpointError, Leaf, Store, from_tree, open_store
from tests.parity.checkpoints import WRITERS, stepped, write_npz, write_orbax

TREE = {
    "params": {
        "dense": {"kernel": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)},
        "scale": np.array([1.5, 0.25, 2], ml_dtypes.bfloat16),
    },
    "step": np.array(7, np.int32),
}


def without_bfloat16(tree):
    """npz has none."""
    scale = tree["params"]["scale"].astype(np.float16)
    return tree | {"params": tree["params"] | {"scale": scale}}


def write(name, tree, path):
    return WRITERS[name](without_bfloat16(tree) if name == "npz" else tree, path)


def with_last_bit_flipped(tree):
    kernel = tree["params"]["dense"]["kernel"].copy()
    kernel.view(np.uint32)[1, 2] ^= 1
    return tree | {"params": tree["params"] | {"dense": {"kernel": kernel}}}


def compare(left, right, **options):
    return diff(from_tree(left), from_tree(right), **options)


def found(comparison):
    return [(d.path, d.what) for d in comparison.differences]


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["diff", *map(str, argv)], console)
    return status, out.getvalue()


# Every format against itself and against the others.


@pytest.mark.parametrize("name", WRITERS)
def test_a_single_flipped_last_bit_is_found_and_named(name, tmp_path):
    left = write(name, TREE, tmp_path / "left")
    right = write(name, with_last_bit_flipped(TREE), tmp_path / "right")
    file = tmp_path / "diff.json"
    status, out = main(left, right, f"--json={file}")
    assert status == 1, out
    for words in ("params/dense/kernel: value: 1 of 12", "first at [1, 2]", "1 ulps"):
        assert words in out
    result = json.loads(file.read_text())
    assert result["ok"] is False
    assert (result["leaves"], result["elements"]) == (3, 16)
    assert result["left"]["format"] == result["right"]["format"] == name
    (difference,) = result["differences"]
    values = [TREE, with_last_bit_flipped(TREE)]
    values = [tree["params"]["dense"]["kernel"][1, 2] for tree in values]
    assert difference["path"] == "params/dense/kernel"
    assert difference["first"] == [1, 2]
    assert (difference["unequal"], difference["entries"]) == (1, 12)
    assert difference["ulps"] == 1
    assert difference["absolute"] == abs(float(values[0]) - float(values[1])) > 0
    assert [np.float32(difference[s]) for s in ("left", "right")] == values


def test_one_tree_is_equal_in_every_format(tmp_path):
    tree = without_bfloat16(TREE)
    paths = {name: WRITERS[name](tree, tmp_path / name) for name in WRITERS}
    for left in paths.values():
        for right in paths.values():
            status, out = main(left, right)
            assert status == 0, out
            assert "equal to the bit: 3 leaves and 16 entries" in out


def test_a_tree_in_memory_against_a_checkpoint(tmp_path):
    store = open_store(WRITERS["orbax"](TREE, tmp_path / "x"))
    assert diff(store, from_tree(TREE)).equal
    assert not diff(from_tree(with_last_bit_flipped(TREE)), store).equal


# What careless comparisons let pass.


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (ONES.astype(ml_dtypes.bfloat16), "dtype"),
        (ONES.astype(np.float64), "dtype"),
        (ONES.view(np.int32), "dtype"),
        (ONES.reshape(3, 2), "shape"),
        (ONES[None], "shape"),
        (ONES[:1], "shape"),
        (np.float32(1), "shape"),
    ],
    ids=["bfloat16", "float64", "int32", "transposed", "new axis", "row", "scalar"],
)
def test_dtype_and_broadcastable_shapes_differ(other, what):
    for pair in ((ONES, other), (other, ONES)):
        compared = compare({"a": pair[0]}, {"a": pair[1]})
        assert found(compared) == [("a", what)]
        for side in pair:
            fact = side.dtype if what == "dtype" else side.shape
            assert str(fact) in compared.differences[0].detail


@pytest.mark.parametrize(
    "tree",
    [{}, {"a": {}}, {"a": np.ones((0, 3))}, {"a": np.ones(0), "b": np.ones((2, 0))}],
    ids=["empty", "empty node", "zero-size", "two zero-size"],
)
def test_nothing_compared_is_no_proof(tree):
    compared = compare(tree, tree)
    assert not compared.equal
    assert found(compared) == [("(nothing)", "empty")]
    assert "0 elements" in compared.differences[0].detail


def test_zero_size_leaves_of_other_shapes_differ():
    left = {"a": ONES, "b": np.ones((0, 3))}
    assert compare(left, left).equal
    assert found(compare(left, {"a": ONES, "b": np.ones((0, 2))})) == [("b", "shape")]


def test_each_side_says_what_it_misses():
    compared = compare({"a": ONES, "b": ONES}, {"a": ONES, "c": {"d": ONES}})
    assert found(compared) == [("b", "missing"), ("c/d", "missing")]
    details = [difference.detail for difference in compared.differences]
    assert details == [f"only in {s}: float32 (2, 3)" for s in ("left", "right")]


def test_a_leaf_is_not_a_subtree():
    assert len(compare({"a": ONES}, {"a": {"b": ONES}}).differences) == 2


def test_equal_nan_are_equal_and_counted():
    tree = {"a": np.float32([1, np.nan, np.inf]), "b": ONES}
    compared = compare(tree, tree)
    assert compared.equal
    assert compared.not_finite == {"a": (2, 2)}
    other = {"a": np.float32([1, np.nan, 5]), "b": ONES}
    compared = compare(tree, other)
    assert compared.not_finite == {"a": (2, 1)}
    assert compared.values["a"].absolute == math.inf


def test_nan_with_other_bits_differ():
    bits = np.uint32([0x7FC00000, 0x7FC00001])
    compared = compare(*({"a": bits[i : i + 1].view(np.float32)} for i in range(2)))
    value = compared.values["a"]
    assert (value.unequal, value.absolute, value.ulps) == (1, 0, 0)
    assert (value.left, value.right) == ("nan (0x7fc00000)", "nan (0x7fc00001)")


def test_a_number_is_infinitely_far_from_nan():
    value = compare({"a": np.float32([0])}, {"a": np.float32([np.nan])}).values["a"]
    assert value.absolute == value.ulps == math.inf


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2"])
def test_zeros_of_either_sign_differ(dtype):
    zeros = ({"a": np.array([1, zero], dtype)} for zero in (0.0, -0.0))
    value = compare(*zeros).values["a"]
    assert (value.unequal, value.first) == (1, (1,))
    signs = [math.copysign(1, float(v)) for v in (value.left, value.right)]
    assert signs == [1, -1]
    assert (value.absolute, value.ulps) == (0, 0)


def test_integers_are_exact_beyond_float64():
    left, right = np.int64([2**62 + 1, -(2**63)]), np.int64([2**62, 2**63 - 1])
    assert compare({"a": left[:1]}, {"a": right[:1]}).values["a"].absolute == 1
    assert compare({"a": left}, {"a": right}).values["a"].absolute == 2**64 - 1


def test_what_pads_half_bytes_is_no_part_of_the_value():
    bits = np.uint8([0x0F, 0xFF])
    same = ({"a": bits[i : i + 1].view(ml_dtypes.int4)} for i in range(2))
    assert compare(*same).equal
    other = ({"a": np.array([value], ml_dtypes.int4)} for value in (-8, 7))
    assert compare(*other).values["a"].absolute == 15


def test_complex_booleans_and_text():
    left = {"c": np.complex64([1 + 1j]), "b": np.array([True]), "t": np.array("yes")}
    right = {"c": np.complex64([1 - 1j]), "b": np.array([False]), "t": np.array("yet")}
    values = compare(left, right).values
    assert values["c"].absolute == 2
    assert (values["b"].left, values["b"].right) == ("True", "False")
    assert values["b"].absolute is None
    assert (values["t"].left, values["t"].right) == ("yes", "yet")
    assert compare(left, left).equal


@given(
    hnp.array_shapes(max_dims=3, min_side=1, max_side=6).flatmap(
        lambda shape: st.tuples(*[hnp.arrays(np.float32, shape)] * 2)
    ),
    st.integers(1, 50),
)
def test_distances_are_of_the_whole_leaf_whatever_the_parts(pair, block):
    left, right = pair
    compared = compare({"a": left}, {"a": right}, block=block)
    unequal = left.view(np.uint32) != right.view(np.uint32)
    assert compared.equal == (not unequal.any())
    if compared.equal:
        return
    value = compared.values["a"]
    assert value.unequal == unequal.sum()
    assert value.first == tuple(np.argwhere(unequal)[0])
    if np.isfinite(left).all() and np.isfinite(right).all():
        wide = np.abs(left.astype(np.float64) - right.astype(np.float64))
        assert value.absolute == wide.max()


# Which leaf is which.


def test_an_index_is_its_text_unless_both_are_there(tmp_path):
    lists = {"a": [ONES, 2 * ONES]}
    texts = {"a": {"0": ONES, "1": 2 * ONES}}
    assert compare(lists, texts).equal
    assert compare(texts, lists).equal

    paths = []
    for name, tree in {"both": {0: 1, "0": 2}, "text": {"0": 2}, "int": {0: 1}}.items():
        (tmp_path / name).write_bytes(msgpack.packb({"a": tree}))
        paths.append(open_store(tmp_path / name))
    both, text, index = paths
    assert found(diff(both, text)) == found(diff(both, index)) == [("a/0", "missing")]
    assert found(diff(text, index)) == [("a/0", "value")]
    assert diff(both, both).leaves == 2
    assert diff(both, both).equal


def test_layer_10_is_not_layer_2(tmp_path):
    """Were they sorted as text, or paired by place, these would be confused."""
    layers = [np.full(2, i, np.float32) for i in range(12)]
    stores = [
        from_tree({"layers": layers}),
        open_store(write_orbax({"layers": layers}, tmp_path / "x")),
        from_tree({"layers": {str(i): layer for i, layer in enumerate(layers)}}),
    ]
    for left in stores:
        assert all(diff(left, right).equal for right in stores)
    layers[2], layers[10] = layers[10], layers[2]
    swapped = from_tree({"layers": layers})
    for left in stores:
        assert [path for path, _ in found(diff(left, swapped))] == [
            "layers/2",
            "layers/10",
        ]


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(3, 2, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])


def test_nnx_state_against_the_linen_dict_of_the_same_params(tmp_path):
    state = nnx.state(Model(), nnx.Param)
    pure = nnx.to_pure_dict(state)
    linen = {"params": jax.tree.map(np.asarray, pure)}
    linen["params"]["layers"] = {str(i): v for i, v in pure["layers"].items()}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", state)
        checkpointer.save(tmp_path / "linen", linen)
        checkpointer.wait_until_finished()
    left, right = tmp_path / "nnx", tmp_path / "linen"
    status, out = main(left, right, "--right_prefix=params")
    assert status == 0, out
    assert "6 leaves of left stand below `value`" in out
    assert main(right, left, "--left_prefix=params")[0] == 0

    status, out = main(left, right)
    assert status == 1
    assert "dense/kernel/value: missing: only in left" in out
    assert "params/dense/kernel: missing: only in right" in out


def test_boxed_linen_variables_against_plain_ones(tmp_path):
    init = nn.with_partitioning(nn.initializers.ones, ("embed", "mlp"))
    boxed = nn.Dense(2, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 3)))
    paths = [
        WRITERS[name](tree, tmp_path / f"{name}{i}")
        for name in ("orbax", "msgpack")
        for i, tree in enumerate((boxed, nn.unbox(boxed)))
    ]
    for path in paths:
        assert diff(open_store(path), from_tree(nn.unbox(boxed))).equal
        assert diff(from_tree(boxed), open_store(path)).equal


def test_a_level_called_value_is_dropped_only_where_it_must_be_a_box(tmp_path):
    def stores(tree):
        return from_tree(tree), open_store(write_npz(tree, tmp_path / "x"))

    # Beside another leaf it is no box; and an npz writes none.
    two = from_tree({"a": {"value": ONES, "other": ONES}})
    assert ("a/value", "missing") in found(diff(two, from_tree({"a": ONES})))
    boxed, flat = stores({"a": {"value": ONES}})
    plain = from_tree({"a": ONES})
    assert diff(boxed, plain).equal
    assert not diff(flat, plain).equal
    assert diff(flat, boxed).notes == ()


def test_typed_keys_are_compared_as_keys(tmp_path):
    typed, raw = {"k": jax.random.key(3)}, {"k": jax.random.key_data(jax.random.key(3))}
    store = open_store(write_orbax(typed, tmp_path / "x"))
    assert diff(store, from_tree(typed)).equal
    assert found(diff(store, from_tree(raw))) == [("k", "dtype")]
    assert found(diff(store, from_tree({"k": jax.random.key(4)}))) == [("k", "value")]


# Memory.


def counting(array, log):
    """A leaf that notes what is asked of it, and refuses to be read whole."""

    @contextlib.contextmanager
    def opened():
        log.append("open")

        def read(part):
            asked = math.prod(s.stop - s.start for s in part)
            assert asked < array.size, "read whole"
            log.append(asked)
            return array[part]

        yield read
        log.append("close")

    return Leaf(array.shape, array.dtype, opened)


def test_leaves_are_read_in_parts_one_pair_at_a_time():
    shapes = {"a": (1000, 7), "b": (3, 5, 500), "c": (1, 5000)}
    log: list = []
    leaves = {(n,): counting(np.ones(s, np.float32), log) for n, s in shapes.items()}
    store = Store("fake", "fake", leaves)
    assert diff(store, store, block=64).equal
    asked = [n for n in log if isinstance(n, int)]
    assert max(asked) <= 64
    assert sum(asked) == 2 * sum(math.prod(shape) for shape in shapes.values())
    opened = [word for word in log if isinstance(word, str)]
    assert opened == ["open", "open", "close", "close"] * 3


@pytest.mark.parametrize("name", ["safetensors", "msgpack", "npz"])
def test_files_are_read_in_parts(name, tmp_path, monkeypatch):
    """Whatever the size of the leaf, numpy is given a part's bytes at a time."""
    path = WRITERS[name]({"w": np.ones((64, 50), np.float32)}, tmp_path / "x")
    sizes = []
    plain = np.frombuffer

    def counted(data, *args, **options):
        sizes.append(len(data))
        return plain(data, *args, **options)

    store = open_store(path)
    monkeypatch.setattr(np, "frombuffer", counted)
    assert diff(store, store, block=120).equal
    assert max(sizes) == 100 * 4
    assert sum(sizes) == 2 * 64 * 50 * 4


# Damage.


def test_a_leaf_that_cannot_be_read_is_named(tmp_path):
    path = write_npz({"a": np.ones(1000), "b": np.ones(1000)}, tmp_path / "x")
    data = bytearray(path.read_bytes())
    data[data.index(b"b.npy") + 400] ^= 1  # within the data: the checksum fails
    path.write_bytes(data)
    store = open_store(path)
    with pytest.raises(CheckpointError, match=r"^b of .*x.npz cannot be read.*CRC"):
        diff(store, store)


def test_a_file_cut_after_it_was_opened(tmp_path):
    path = WRITERS["msgpack"](TREE, tmp_path / "x")
    store = open_store(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CheckpointError, match="cannot be read"):
        diff(store, store)


def test_leaves_that_cannot_be_compared_are_listed(tmp_path):
    np.savez(tmp_path / "x.npz", a=ONES, b=np.array([None]), c=np.ones(1, "M8[s]"))
    store = open_store(tmp_path / "x.npz")
    with pytest.raises(CheckpointError, match="2 leaves") as error:
        diff(store, from_tree({"a": ONES}))
    assert [line.split(":")[0] for line in error.value.problems] == ["b", "c"]
    assert diff(store.under("a"), from_tree({"a": ONES}).under("a")).equal


# The command.


def refused(*argv):
    status, out = main(*argv)
    assert status == 2, out
    assert "Traceback" not in out
    return out


def test_steps(tmp_path):
    left, right = (stepped(tmp_path / n, s) for n, s in (("l", [1, 2]), ("r", [2, 10])))
    status, out = main(left, right)
    assert status == 1
    assert "step 2, the latest of 2" in out
    assert "step 10, the latest of 2" in out
    file = tmp_path / "out.json"
    assert main(left, right, "--step=2", f"--json={file}")[0] == 0
    assert json.loads(file.read_text())["right"]["step"] == 2
    assert "no step 1" in refused(left, right, "--step=1")
    assert "neither" in refused(left / "1", left / "1", "--step=1")


def test_the_first_differences_are_shown_and_the_json_has_all(tmp_path):
    trees = [{f"w{i}": np.full(2, i + j) for i in range(30)} for j in range(2)]
    paths = [write_npz(tree, tmp_path / f"{i}") for i, tree in enumerate(trees)]
    file = tmp_path / "out.json"
    status, out = main(*paths, f"--json={file}", "--show=4")
    assert status == 1
    assert out.count(": value: ") == 4
    assert "and 26 more" in out
    result = json.loads(file.read_text())
    assert [d["path"] for d in result["differences"]] == sorted(trees[0])
    assert {d["absolute"] for d in result["differences"]} == {1}


def test_json_stays_json_with_infinite_distances(tmp_path):
    trees = [{"w": np.float32([x])} for x in (1, np.nan)]
    paths = [write_npz(tree, tmp_path / f"{i}") for i, tree in enumerate(trees)]
    file = tmp_path / "out.json"
    status, out = main(*paths, f"--json={file}")
    assert status == 1
    assert "NaN or infinite" in out

    def refuse(name):
        raise ValueError(name)

    result = json.loads(file.read_text(), parse_constant=refuse)
    assert result["differences"][0]["ulps"] == "inf"
    assert result["not_finite"] == {"w": [0, 1]}


def test_nothing_in_common_is_not_equal(tmp_path):
    path = write_npz({"a": np.ones((0, 3))}, tmp_path / "x")
    status, out = main(path, path)
    assert status == 1
    assert "0 elements were compared" in out


def test_bad_input_is_told_without_a_traceback(tmp_path):
    path = write_npz({"a": ONES}, tmp_path / "x")
    assert "Got 1" in refused(path)
    assert str(tmp_path / "none") in refused(path, tmp_path / "none")
    assert "nothing under 'b'" in refused(path, path, "--left_prefix=b")
    assert "no such folder" in refused(path, path, f"--json={tmp_path}/no/x.json")
    cut = shutil.copy(path, tmp_path / "cut.npz")
    cut.write_bytes(cut.read_bytes()[:-30])
    assert "cut.npz is a damaged zip" in refused(path, cut)

    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": ONES}, folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "two.safetensors" in refused(folder, path)

    np.savez(tmp_path / "o.npz", a=ONES, b=np.array([None]))
    assert "never read" in refused(path, tmp_path / "o.npz")
    (tmp_path / "junk").write_bytes(flax.serialization.to_bytes(TREE)[:-5])
    assert "junk" in refused(path, tmp_path / "junk")
