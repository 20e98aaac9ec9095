"""Views against numpy: every part of every view is what numpy's own function gives."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.stores import Leaf, blocks, views
from shared.stores.reading import read_whole
from shared.stores.store import ByRuns, Piece, constant, part_shape


class Flat:
    """A stream of entries, of which runs are read."""

    def __init__(self, array):
        self.flat = np.ascontiguousarray(array).reshape(-1)

    def fill(self, first, memory):
        count = len(memory) // self.flat.itemsize
        memory[:] = self.flat[first : first + count].view(np.uint8)


def streamed(array):
    @contextlib.contextmanager
    def opened():
        yield ByRuns(array.shape, array.dtype, Flat(array))

    return Leaf(array.shape, array.dtype, opened)


SIZES = [1, 2, 3, 4, 6, 8, 12, 24, 30, 36]


@st.composite
def shapes(draw, size):
    """Shapes of so many entries, ones among them."""
    shape = []
    while size > 1:
        factor = draw(st.sampled_from([d for d in range(2, size + 1) if not size % d]))
        shape.append(factor)
        size //= factor
    for _ in range(draw(st.integers(0, 2))):
        shape.insert(draw(st.integers(0, len(shape))), 1)
    return tuple(shape)


@st.composite
def arrays(draw):
    """Numbered entries, in memory or in a stream."""
    size = draw(st.sampled_from(SIZES))
    array = np.arange(size).reshape(draw(shapes(size)))
    return array, draw(st.sampled_from([constant, streamed]))(array)


@st.composite
def parts(draw, shape):
    bounds = [
        sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape
    ]
    return tuple(slice(*pair) for pair in bounds)


def check(data, leaf, expected):
    assert leaf.shape == expected.shape
    assert leaf.dtype == expected.dtype
    np.testing.assert_array_equal(read_whole(leaf, "it"), expected)
    with leaf.open() as read:
        for _ in range(3):
            part = data.draw(parts(expected.shape))
            got = read(part)
            np.testing.assert_array_equal(got, expected[part], strict=True)
        limit = data.draw(st.integers(1, max(1, expected.size)))
        for part in blocks(expected.shape, limit):
            np.testing.assert_array_equal(read(part), expected[part], strict=True)


@pytest.fixture(params=[False, True], ids=["large", "small"], scope="module")
def limits(request):
    """With the limits as they are, and so small that all ways of reading are taken."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            for name, limit in {
                "shared.stores.views.KEPT_BYTES": 64,
                "shared.stores.views.SHORT_RUN": 64,
                "shared.stores.store._SHORT_BYTES": 32,
                "shared.stores.store._SKIPPED_BYTES": 64,
                "shared.stores.store._SLAB_BYTES": 128,
            }.items():
                patch.setattr(name, limit)
        yield


@given(st.data(), arrays())
def test_streams(limits, data, array):
    check(data, array[1], array[0])


@given(st.data(), arrays())
def test_permuted(limits, data, array):
    array, leaf = array
    axes = data.draw(st.permutations(range(array.ndim)))
    check(data, views.permuted(leaf, axes), array.transpose(axes))


@given(st.data(), arrays())
def test_reshaped(limits, data, array):
    array, leaf = array
    shape = data.draw(shapes(array.size))
    check(data, views.reshaped(leaf, shape), array.reshape(shape))


@given(st.data(), arrays())
def test_part_of(limits, data, array):
    array, leaf = array
    part = data.draw(parts(array.shape))
    index = tuple(
        s.start if s.start < s.stop and data.draw(st.booleans()) else s for s in part
    )
    index = index[: data.draw(st.integers(0, len(index)))]
    check(data, views.part_of(leaf, index), array[index])


@given(st.data(), arrays())
def test_views_of_views(limits, data, array):
    array, leaf = array
    for _ in range(2):
        axes = data.draw(st.permutations(range(array.ndim)))
        array, leaf = array.transpose(axes), views.permuted(leaf, axes)
        shape = data.draw(shapes(array.size))
        array, leaf = array.reshape(shape), views.reshaped(leaf, shape)
    check(data, leaf, array)


@given(st.data(), arrays())
def test_assembled_of_what_it_was_cut_into(limits, data, array):
    """Pieces in any order, some with an axis less."""
    array, leaf = array
    if not array.ndim:
        return
    axis = data.draw(st.integers(0, array.ndim - 1))
    cut = data.draw(st.integers(0, array.shape[axis]))
    before = (slice(None),) * axis
    indices = [(*before, slice(0, cut))]
    indices += [(*before, i) for i in range(cut, array.shape[axis])]
    pieces = [
        Piece(index, views.part_of(leaf, index))
        for index in data.draw(st.permutations(indices))
    ]
    whole = views.assembled(array.shape, array.dtype, lambda: iter(pieces))
    check(data, whole, array)


@given(st.data(), arrays())
def test_cast(data, array):
    array, leaf = array
    check(data, views.cast(leaf, np.float16), array.astype(np.float16))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 0)])
def test_nothing(shape):
    empty = np.empty(shape)
    for view, expected in [
        (views.permuted(constant(empty), range(len(shape))[::-1]), empty.T),
        (views.reshaped(constant(empty), (0, 7)), empty.reshape(0, 7)),
        (views.part_of(streamed(empty), (slice(0, 0),)), empty[:0]),
    ]:
        got = read_whole(view, "it")
        assert got.shape == expected.shape


class Counted:
    """A file-like source that counts what is read of it."""

    def __init__(self, array):
        self.array, self.entries, self.opened = array, 0, 0

    @contextlib.contextmanager
    def open(self):
        self.opened += 1
        yield self.read

    def read(self, part):
        self.entries += math.prod(part_shape(part))
        return self.array[part]

    @property
    def leaf(self):
        return Leaf(self.array.shape, self.array.dtype, self.open)


def test_nothing_is_read_until_it_is_asked_for_and_no_more_than_that():
    source = Counted(np.arange(24).reshape(2, 3, 4))
    leaf = views.part_of(views.permuted(source.leaf, (2, 0, 1)), (3,))
    assert source.opened == 0
    with leaf.open() as read:
        np.testing.assert_array_equal(
            read((slice(0, 1), slice(1, 3))), source.array[:1, 1:, 3]
        )
    assert source.entries <= 24
    source.entries = 0
    stacked = views.assembled(
        (2, 2, 3, 4),
        source.array.dtype,
        lambda: [Piece((i,), source.leaf) for i in range(2)],
    )
    with stacked.open() as read:
        read((slice(0, 1), slice(1, 2), slice(0, 3), slice(0, 4)))
    assert source.entries == 12


def test_a_transposed_leaf_is_read_in_few_passes(monkeypatch):
    """Parts that cross the stored order are served from what was read at once."""
    monkeypatch.setattr(views, "KEPT_BYTES", 8 * 100 * 25)
    source = Counted(np.arange(100 * 100).reshape(100, 100))
    leaf = views.permuted(source.leaf, (1, 0))
    with leaf.open() as read:
        for part in blocks(leaf.shape, 100):
            np.testing.assert_array_equal(read(part), source.array.T[part])
    assert source.entries == 100 * 100


def test_every_bit_pattern_survives():
    bits = np.arange(2**16, dtype=np.uint16)
    half = bits.view(np.float16).reshape(256, 256)
    for leaf in (
        views.permuted(streamed(half), (1, 0)),
        views.permuted(views.reshaped(streamed(half), (64, 1024)), (1, 0)),
    ):
        again = views.permuted(leaf, (1, 0))
        got = read_whole(again, "it")
        assert got.tobytes() == bits.tobytes()
