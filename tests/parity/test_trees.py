"""The comparison of trees: what careless comparisons let pass, it does not."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity import Comparison, Report, Tier, compare_bytes, compare_structure, ulps
from parity.strategies import SPECIAL_FLOATS, floats

ONES = np.ones((2, 3), np.float32)


def paths(comparison):
    return [(d.path, d.what) for d in comparison.differences]


def test_equal_trees_are_equal_and_counted():
    tree = {"a": {"b": ONES, "c": np.arange(4)}, "d": np.float32(1)}
    compared = compare_bytes(tree, tree)
    assert compared.equal
    assert (compared.leaves, compared.elements) == (3, 11)


@pytest.mark.parametrize("compare", [compare_bytes, compare_structure])
def test_nothing_compared_is_no_proof(compare):
    assert not compare({}, {}).equal
    assert not compare({"a": {}}, {"a": {}}).equal
    tier = Tier("bits", compare({}, {}))
    assert tier.status == "failed"
    assert "0 leaves" in str(tier.differences[0])
    assert not Report("x", (tier,)).ok
    assert not Report("x", ()).ok


@pytest.mark.parametrize("compare", [compare_bytes, compare_structure])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_leaves_without_entries_are_no_proof(compare, shape):
    tree = {"a": {"b": np.ones(shape, np.float32)}}
    compared = compare(tree, tree)
    assert (compared.leaves, compared.elements, compared.equal) == (1, 0, False)
    assert not Report("x", (Tier("bits", compared),)).ok
    # Beside others they are compared by shape and dtype.
    assert compare({**tree, "c": ONES}, {**tree, "c": ONES}).equal
    other = {"a": {"b": np.ones((*shape, 2), np.float32)}, "c": ONES}
    assert paths(compare({**tree, "c": ONES}, other)) == [("a/b", "shape")]


@pytest.mark.parametrize("compare", [compare_bytes, compare_structure])
@pytest.mark.parametrize(
    "shapes", [((1, 3), (3,)), ((3, 1), (3, 3)), ((), (1,))], ids=str
)
def test_shapes_that_would_broadcast_to_equal_values_differ(compare, shapes):
    trees = [{"a": np.ones(shape, np.float32)} for shape in shapes]
    for left, right in (trees, trees[::-1]):
        assert paths(compare(left, right)) == [("a", "shape")]


@pytest.mark.parametrize("compare", [compare_bytes, compare_structure])
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (ONES.astype(ml_dtypes.bfloat16), "dtype"),
        (ONES.astype(np.float64), "dtype"),
        (ONES.reshape(3, 2), "shape"),
        (ONES[None], "shape"),
        (np.ones(3, np.float32), "shape"),
        (np.float32(1), "shape"),
    ],
    ids=["bfloat16", "float64", "transposed", "one more axis", "row", "scalar"],
)
def test_dtype_and_broadcastable_shapes_differ(compare, other, what):
    for left, right in ((ONES, other), (other, ONES)):
        compared = compare({"a": {"b": left}}, {"a": {"b": right}})
        assert paths(compared) == [("a/b", what)]


def test_each_side_says_what_it_misses():
    compared = compare_bytes({"a": ONES, "b": ONES}, {"a": ONES, "c": ONES})
    assert paths(compared) == [("b", "missing"), ("c", "missing")]
    assert "linen" in compared.differences[0].detail
    assert "nnx" in compared.differences[1].detail


def test_a_leaf_is_not_a_subtree():
    assert not compare_bytes({"a": ONES}, {"a": {"b": ONES}}).equal


def test_values_that_are_no_numbers_prove_nothing():
    for bad in (np.nan, np.inf, -np.inf):
        tree = {"a": np.float32([1, bad])}
        assert paths(compare_bytes(tree, tree, finite=True)) == [("a", "not finite")]
        assert compare_bytes(tree, tree).equal
    # Two NaN with other bits are other bits.
    pair = [np.uint32([0x7FC00000 + i]).view(np.float32) for i in range(2)]
    assert not compare_bytes({"a": pair[0]}, {"a": pair[1]}).equal


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_against_none_differs_by_infinity(bad, finite):
    left, right = {"a": np.float32([1, bad])}, {"a": np.float32([1, 2])}
    compared = compare_bytes(left, right, finite=finite)
    assert paths(compared) == [("a", "value")]
    assert "at most inf" in compared.differences[0].detail


def test_the_order_in_memory_is_no_difference():
    tree = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    assert compare_bytes(tree, {"a": np.asfortranarray(tree["a"])}).equal
    assert compare_bytes(tree, {"a": np.repeat(tree["a"], 2, axis=1)[:, ::2]}).equal
    # Bytes in the order of memory would be the same here.
    other = tree["a"].ravel().reshape(3, 2).T
    assert not compare_bytes(tree, {"a": other}).equal


def test_zeros_of_either_sign_differ():
    compared = compare_bytes({"a": np.float32([0.0])}, {"a": np.float32([-0.0])})
    assert paths(compared) == [("a", "value")]


def test_axis_names_are_compared_where_given():
    names = {("a",): ("embed", "mlp")}, {("a",): ("mlp", "embed")}
    compared = compare_structure({"a": ONES}, {"a": ONES}, axes=names)
    assert paths(compared) == [("a", "axes")]
    assert "'mlp', 'embed'" in compared.differences[0].detail
    missing = compare_structure({"a": ONES}, {"a": ONES}, axes=(names[0], {}))
    assert paths(missing) == [("a", "axes")]


def test_a_difference_says_how_far_apart():
    other = ONES.copy()
    other[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    (difference,) = compare_bytes({"a": ONES}, {"a": other}).differences
    assert "1 of 6 entries" in difference.detail
    assert "1 ulps" in difference.detail


def test_comparisons_add_up():
    one = compare_bytes({"a": ONES}, {"a": ONES})
    other = compare_bytes({"b": ONES}, {"b": -ONES})
    assert (one + one).equal
    assert not (one + other).equal
    assert (one + other).leaves == 2
    assert not (Comparison() + Comparison()).equal


# Distance in floating-point numbers, against steps from neighbour to neighbour.


@given(st.sampled_from(SPECIAL_FLOATS), st.integers(0, 40))
def test_ulps_count_steps(start, steps):
    x = end = np.float32(start)
    for _ in range(steps):
        end = np.nextafter(end, np.float32(np.inf))
    # Both zeros are one number; between -1e-45 and 1e-45 lie two steps.
    distance = ulps(np.array([x]), np.array([end]))
    assert distance == steps
    assert ulps(np.array([end]), np.array([x])) == steps


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_ulps_of_other_dtypes(dtype):
    one = np.array([1], dtype)
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert ulps(one, np.array([1 + 3 * eps], dtype)) == 3
    assert ulps(one, np.array([1 - eps / 2], dtype)) == 1
    assert ulps(one, one) == 0


@given(floats(7))
def test_ulps_are_a_distance(x):
    y = np.roll(x, 1)
    assert np.all(ulps(x, x) == 0)
    np.testing.assert_array_equal(ulps(x, y), ulps(y, x))
    assert np.all((ulps(x, y) == 0) == (x == y))


def test_a_number_is_infinitely_far_from_what_is_none():
    assert ulps(np.float32([1]), np.float32([np.nan]))[0] == math.inf


def test_jax_arrays_are_compared_like_numpy():
    assert compare_bytes({"a": jnp.ones((2, 3))}, {"a": ONES}).equal
