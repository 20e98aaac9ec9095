"""Leaves made of leaves: another order of axes, a part, several as one; still unread.

A view reads of its sources only what a part of it needs. It moves entries, none is
changed, but for `cast`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from shared.stores.store import (
    Index,
    Leaf,
    Part,
    Piece,
    Read,
    last_cut,
    part_shape,
    take,
)

# So much of a leaf is kept where parts of another order of axes are read from it.
KEPT_BYTES = 64 * 2**20
SHORT_RUN = 64 * 2**10  # bytes


def permuted(leaf: Leaf, axes: Sequence[int]) -> Leaf:
    """The leaf with its axes in another order, as in `numpy.transpose`."""
    axes = tuple(axes)
    if axes == tuple(range(len(axes))):
        return leaf
    shape = tuple(leaf.shape[i] for i in axes)
    return _view(leaf, _Permuted(leaf, axes), shape)


class _Permuted(NamedTuple):
    leaf: Leaf
    axes: tuple[int, ...]

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self.leaf.open() as source:
            yield functools.partial(self._read, source, {})

    def _read(self, source: Read, kept: dict[str, Any], part: Part) -> np.ndarray:
        if not _is_scattered(self.leaf, self._own(part)):
            return source(self._own(part)).transpose(self.axes)
        if not kept or not _is_inside(part, kept["part"]):
            kept.clear()
            wide = self._widened(part)
            kept |= {"part": wide, "array": source(self._own(wide))}
        inner = tuple(
            slice(p.start - k.start, p.stop - k.start)
            for p, k in zip(part, kept["part"], strict=True)
        )
        return kept["array"][self._own(inner)].transpose(self.axes)

    def _own(self, part: Part) -> Part:
        """The part in the order of the leaf's axes."""
        return tuple(part[self.axes.index(i)] for i in range(len(self.axes)))

    def _widened(self, part: Part) -> Part:
        """As much of what will be asked for next as may be kept."""
        shape = tuple(self.leaf.shape[i] for i in self.axes)
        axis = last_cut(shape, part)
        size = part_shape(part)[axis]
        row = math.prod(part_shape(part)) // max(1, size) * self.leaf.dtype.itemsize
        count = max(size, KEPT_BYTES // max(1, row))
        start = part[axis].start
        wide = slice(start, min(start + count, shape[axis]))
        return (*part[:axis], wide, *part[axis + 1 :])


def _is_inside(part: Part, other: Part) -> bool:
    return all(
        o.start <= p.start and p.stop <= o.stop
        for p, o in zip(part, other, strict=True)
    )


def _is_scattered(leaf: Leaf, part: Part) -> bool:
    """Whether a part is many short runs of the leaf."""
    sizes = part_shape(part)
    axis = last_cut(leaf.shape, part)
    run = math.prod(sizes[axis:]) * leaf.dtype.itemsize
    return math.prod(sizes[:axis]) > 1 and run < SHORT_RUN


def part_of(leaf: Leaf, index: Index) -> Leaf:
    """A part of the leaf; an int in the index takes its axis away.

    Args:
      leaf: of which a part is taken.
      index: ints and slices of step 1, for the first axes or all.
    """
    box = _box(index, leaf.shape)
    kept = tuple(
        i for i in range(len(box)) if i >= len(index) or isinstance(index[i], slice)
    )
    if part_shape(box) == leaf.shape and len(kept) == len(box):
        return leaf
    shape = tuple(part_shape(box)[i] for i in kept)
    return _view(leaf, _PartOf(leaf, box, kept), shape)


class _PartOf(NamedTuple):
    leaf: Leaf
    box: Part
    kept: tuple[int, ...]

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self.leaf.open() as source:
            yield functools.partial(self._read, source)

    def _read(self, source: Read, part: Part) -> np.ndarray:
        own = list(self.box)
        for axis, inner in zip(self.kept, part, strict=True):
            start = self.box[axis].start
            own[axis] = slice(start + inner.start, start + inner.stop)
        return source(tuple(own)).reshape(part_shape(part))


def assembled(
    shape: tuple[int, ...], dtype: Any, pieces: Callable[[], Iterable[Piece]]
) -> Leaf:
    """One leaf made of others.

    Args:
      shape: of the whole.
      dtype: of all pieces.
      pieces: gives them when they are needed, for there may be thousands; they fill the
        whole and do not overlap.
    """
    dtype = np.dtype(dtype)
    opened = functools.partial(_open_assembled, shape, dtype, pieces)
    return Leaf(shape, dtype, opened, pieces=pieces)


@contextlib.contextmanager
def _open_assembled(
    shape: tuple[int, ...], dtype: np.dtype, pieces: Callable[[], Iterable[Piece]]
) -> Iterator[Read]:
    assembly = _Assembly(shape, dtype, list(pieces()))
    try:
        yield assembly.read
    finally:
        assembly.close(set())


class _Assembly:
    """Reads parts of an assembled leaf."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, pieces: Sequence[Piece]
    ):
        self._dtype, self._pieces = dtype, pieces
        self._boxes = [_box(piece.at, shape) for piece in pieces]
        size = len(pieces), len(shape)
        starts = [[s.start for s in box] for box in self._boxes]
        stops = [[s.stop for s in box] for box in self._boxes]
        self._starts = np.array(starts, np.int64).reshape(size)
        self._stops = np.array(stops, np.int64).reshape(size)
        self._open: dict[int, tuple[Read, ExitStack]] = {}

    def read(self, part: Part) -> np.ndarray:
        """The part."""
        low, high = (np.array([getattr(s, e) for s in part]) for e in _ENDS)
        inside = (self._starts < high) & (self._stops > low)
        hit = np.flatnonzero(inside.all(axis=1)).tolist()
        # Parts come in order: what one part does not need is not needed soon.
        self.close(set(hit))
        if len(hit) == 1:
            return self._overlap(hit[0], part)[1].reshape(part_shape(part))
        out = np.empty(part_shape(part), self._dtype)
        for number in hit:
            at, array = self._overlap(number, part)
            take(out, at)[...] = array.reshape(take(out, at).shape)
            del array  # before the next one is read
        return out

    def _overlap(self, number: int, part: Part) -> tuple[Part, np.ndarray]:
        """Where in a part a piece lies, and what of it lies there."""
        piece, box = self._pieces[number], self._boxes[number]
        common = [
            slice(max(b.start, p.start), min(b.stop, p.stop))
            for b, p in zip(box, part, strict=True)
        ]
        index = (*piece.at, *(slice(None),) * (len(box) - len(piece.at)))
        own = tuple(
            slice(c.start - b.start, c.stop - b.start)
            for c, b, at in zip(common, box, index, strict=True)
            if isinstance(at, slice)
        )
        at = tuple(
            slice(c.start - p.start, c.stop - p.start)
            for c, p in zip(common, part, strict=True)
        )
        if number not in self._open:
            stack = ExitStack()
            self._open[number] = stack.enter_context(piece.leaf.open()), stack
        return at, self._open[number][0](own)

    def close(self, needed: set[int]) -> None:
        """Closes all pieces but those that are needed."""
        for number in self._open.keys() - needed:
            self._open.pop(number)[1].close()


_ENDS = ("start", "stop")


def reshaped(leaf: Leaf, shape: Sequence[int]) -> Leaf:
    """The same entries in the same order, in another shape."""
    shape = tuple(shape)
    if shape == leaf.shape:
        return leaf
    groups = _groups(leaf.shape, shape) if leaf.size else []
    return _view(leaf, _Reshaped(leaf, shape, groups), shape)


class _Group(NamedTuple):
    """Axes of the source and axes of the view that hold the same entries."""

    source: range
    target: range


class _Reshaped(NamedTuple):
    leaf: Leaf
    shape: tuple[int, ...]
    groups: list[_Group]

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self.leaf.open() as source:
            yield functools.partial(self._read, source)

    def _read(self, source: Read, part: Part) -> np.ndarray:
        if not math.prod(part_shape(part)):
            return np.empty(part_shape(part), self.leaf.dtype)
        cuts = [_cut(group, part, self.leaf.shape, self.shape) for group in self.groups]
        array = source(tuple(s for cut in cuts for s in cut.source))
        array = array.reshape([math.prod(part_shape(cut.source)) for cut in cuts])
        array = take(array, tuple(cut.run for cut in cuts))
        array = array.reshape([n for cut in cuts for n in cut.shape])
        return take(array, tuple(s for cut in cuts for s in cut.inner))


class _Cut(NamedTuple):
    """How a part of some axes of the view is found in those of the source.

    Attributes:
      source: the part of the source to read.
      run: of that, flattened, what is needed.
      shape: of the run, in the view's axes.
      inner: of that, the part.
    """

    source: Part
    run: slice
    shape: tuple[int, ...]
    inner: Part


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[_Group]:
    """The finest division of both shapes into axes of equal products."""
    groups, i, j = [], 0, 0
    while i < len(source) or j < len(target):
        start = i, j
        sizes = [1, 1]
        while sizes[0] != sizes[1] or (i, j) == start:
            if (sizes[0] <= sizes[1] and i < len(source)) or j == len(target):
                sizes[0] *= source[i]
                i += 1
            else:
                sizes[1] *= target[j]
                j += 1
        groups.append(_Group(range(start[0], i), range(start[1], j)))
    return groups


def _cut(
    group: _Group, part: Part, source: tuple[int, ...], target: tuple[int, ...]
) -> _Cut:
    have = tuple(source[i] for i in group.source)
    want = tuple(target[j] for j in group.target)
    own = tuple(part[j] for j in group.target)
    if not own:
        return _Cut((slice(0, 1),) * len(have), slice(0, 1), (), ())
    # The run from the part's first entry to its last one, in whole rows of the view.
    lead = next((k for k, s in enumerate(own) if s.stop - s.start > 1), len(own) - 1)
    rows = own[lead].stop - own[lead].start
    start = sum(
        s.start * math.prod(want[k + 1 :]) for k, s in enumerate(own[: lead + 1])
    )
    stop = start + rows * math.prod(want[lead + 1 :])
    covering, origin = _covering(have, start, stop)
    return _Cut(
        covering,
        slice(start - origin, stop - origin),
        (*(1 for _ in own[:lead]), rows, *want[lead + 1 :]),
        (*(slice(0, 1),) * lead, slice(None), *own[lead + 1 :]),
    )


def _covering(shape: tuple[int, ...], start: int, stop: int) -> tuple[Part, int]:
    """The smallest part that is a run and holds `start` to `stop`; its first entry."""
    if not shape:
        return (), 0
    low, high = (np.unravel_index(i, shape) for i in (start, stop - 1))
    pairs = zip(low, high, strict=True)
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
    lead = min(same, len(shape) - 1)
    part = (
        *(slice(int(i), int(i) + 1) for i in low[:lead]),
        slice(int(low[lead]), int(high[lead]) + 1),
        *(slice(0, n) for n in shape[lead + 1 :]),
    )
    return part, int(np.ravel_multi_index([s.start for s in part], shape))


def cast(leaf: Leaf, dtype: Any) -> Leaf:
    """The leaf's values rounded to another dtype."""
    dtype = np.dtype(dtype)
    if dtype == leaf.dtype:
        return leaf
    return _view(leaf, _Cast(leaf, dtype), leaf.shape)._replace(dtype=dtype)


class _Cast(NamedTuple):
    leaf: Leaf
    dtype: np.dtype

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with self.leaf.open() as source:
            yield functools.partial(self._read, source)

    def _read(self, source: Read, part: Part) -> np.ndarray:
        return source(part).astype(self.dtype)


def _view(leaf: Leaf, view: Any, shape: tuple[int, ...]) -> Leaf:
    return leaf._replace(shape=shape, open=view.open, pieces=None)


def _box(index: Index, shape: tuple[int, ...]) -> Part:
    """An index as one slice an axis, all of them whole numbers."""
    box = [
        slice(*at.indices(size)[:2]) if isinstance(at, slice) else slice(at, at + 1)
        for at, size in zip(index, shape, strict=False)
    ]
    return (*box, *(slice(0, size) for size in shape[len(index) :]))
