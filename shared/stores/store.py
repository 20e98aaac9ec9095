"""What every format is opened as: leaves by path, of which parts are read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

# A list's or a tuple's index is an int; a dict's key is text, whatever it looks like.
Path = tuple[str | int, ...]
Part = tuple[slice, ...]
Read = Callable[[Part], np.ndarray]


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked.

    Attributes:
      problems: everything that is wrong, one line each.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()):
        self.problems = tuple(problems)
        super().__init__("\n  ".join([summary, *self.problems]))


Index = tuple[int | slice, ...]


class Piece(NamedTuple):
    """A leaf in a larger one, at an index of which the ints are no axes of the leaf."""

    at: Index
    leaf: Leaf


class Leaf(NamedTuple):
    """An array that is not in memory.

    Attributes:
      shape: of the whole.
      dtype: of the entries.
      open: a context that gives `read(part)`; where parts are asked for in the order
        of `blocks`, a format that is a stream reads each byte once.
      kind: what the entries stand for, where the dtype does not tell.
      pieces: of a leaf made of others, these; they fill it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    open: Callable[[], AbstractContextManager[Read]]
    kind: str = ""
    pieces: Callable[[], Iterable[Piece]] | None = None

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return self.size * self.dtype.itemsize

    @property
    def type_name(self) -> str:
        """The dtype, and what the entries stand for."""
        return f"{self.kind} as {self.dtype}" if self.kind else str(self.dtype)


@dataclasses.dataclass(frozen=True)
class Store:
    """Leaves by path.

    Attributes:
      path: what was opened.
      format: "orbax", "safetensors", "msgpack", "npz" or "tree".
      leaves: what can be read.
      refused: what is there and cannot be read, with the reason and the way out.
      boxes: whether the format writes a box (`nnx.Variable`, `nn.Partitioned`) as a
        last level `value`.
      notes: what was chosen or ignored on opening.
      step: of a checkpoint manager's folder.
      empty: nodes without leaves (None, optax's EmptyState, an empty dict), and what
        the format calls them.
    """

    path: str
    format: str
    leaves: Mapping[Path, Leaf]
    refused: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    boxes: bool = False
    notes: tuple[str, ...] = ()
    step: int | None = None
    empty: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    def under(self, prefix: str) -> Store:
        """The subtree at a path such as `params/decoder`.

        Raises:
          CheckpointError: there is none.
        """
        above = tuple(part for part in prefix.split("/") if part)

        def inside(path: Path) -> bool:
            return tuple(map(str, path[: len(above)])) == above

        leaves = {p[len(above) :]: leaf for p, leaf in self.leaves.items() if inside(p)}
        refused = {p[len(above) :]: why for p, why in self.refused.items() if inside(p)}
        if not leaves and not refused:
            tops = sorted({str(path[0]) for path in self.leaves if path})
            raise CheckpointError(
                f"{self.path} has nothing under {prefix!r}. It has {some(tops, 8)}."
            )
        empty = {p[len(above) :]: what for p, what in self.empty.items() if inside(p)}
        return dataclasses.replace(
            self,
            path=f"{self.path}:{prefix}",
            leaves=leaves,
            refused=refused,
            empty=empty,
        )


def path_text(path: Path) -> str:
    """A path as people write it: a/b/0."""
    return "/".join(map(str, path)) or "(root)"


def split_name(name: str) -> Path:
    """The path that a flat name stands for: a/b is b in a."""
    return tuple(name.split("/"))


def numeric_order(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Sorts layer 10 behind layer 2."""
    return tuple(
        (0, int(key), "") if str(key).isdecimal() else (1, 0, str(key)) for key in path
    )


def collect(
    store: Store, found: Iterable[tuple[Path, Leaf | str]], **changes: Any
) -> Store:
    """A store of what was found, in numeric order: leaves, and reasons for refusal."""
    leaves: dict[Path, Leaf] = {}
    refused: dict[Path, str] = {}
    for path, leaf in found:
        if path in leaves or path in refused:
            leaves.pop(path, None)
            refused[path] = "two leaves have this path: rename one"
        elif isinstance(leaf, str):
            refused[path] = leaf
        else:
            leaves[path] = leaf
    ordered = {path: leaves[path] for path in sorted(leaves, key=numeric_order)}
    return dataclasses.replace(store, leaves=ordered, refused=refused, **changes)


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[Part]:
    """Parts of an array, in C order, each a run of at most `limit` entries."""
    if math.prod(shape) <= limit:
        yield tuple(slice(0, size) for size in shape)
        return
    axis, inner = len(shape), 1
    while inner * shape[axis - 1] <= limit:
        axis -= 1
        inner *= shape[axis]
    whole = tuple(slice(0, size) for size in shape[axis:])
    cut, rows = shape[axis - 1], max(1, limit // inner)
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, cut, rows):
            part = slice(start, min(start + rows, cut))
            yield (*(slice(i, i + 1) for i in outer), part, *whole)


def run_of(shape: tuple[int, ...], part: Part) -> tuple[int, int]:
    """First entry and number of entries of a part that is a run in C order."""
    count = math.prod(s.stop - s.start for s in part)
    if not shape or not count:
        return 0, count
    return int(np.ravel_multi_index([s.start for s in part], shape)), count


def part_shape(part: Part) -> tuple[int, ...]:
    """Sizes of a part."""
    return tuple(s.stop - s.start for s in part)


@runtime_checkable
class Runs(Protocol):
    """Where only runs in C order can be read."""

    def fill(self, first: int, memory: np.ndarray) -> None:
        """Reads from the entry `first` on into memory (uint8) until it is full."""


@dataclasses.dataclass(frozen=True)
class ByRuns:
    """Reads any part of an array of which only runs can be read.

    Attributes:
      shape: of the whole.
      dtype: of the entries.
      runs: what reads a run.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    runs: Runs

    def __call__(self, part: Part) -> np.ndarray:
        """The part."""
        sizes = part_shape(part)
        axis = last_cut(self.shape, part)
        if math.prod(sizes[:axis]) <= 1 or not math.prod(sizes):
            return self._run(part)
        row = math.prod(self.shape[axis:]) * self.dtype.itemsize
        short = math.prod(sizes[axis:]) * self.dtype.itemsize
        # To read what is skipped may cost less than to read another run.
        if short < _SHORT_BYTES and row - short <= _SKIPPED_BYTES:
            return self._cut_out(part, axis, max(1, _SLAB_BYTES // row))
        memory = np.empty((math.prod(sizes[:axis]), short), np.uint8)
        for outer, line in zip(np.ndindex(*sizes[:axis]), memory, strict=True):
            at = (s.start + i for s, i in zip(part, outer, strict=False))
            one = (*(slice(i, i + 1) for i in at), *part[axis:])
            self.runs.fill(run_of(self.shape, one)[0], line)
        return np.frombuffer(memory, self.dtype).reshape(sizes)

    def _run(self, part: Part) -> np.ndarray:
        first, count = run_of(self.shape, part)
        memory = np.empty(count * self.dtype.itemsize, np.uint8)
        self.runs.fill(first, memory)
        return np.frombuffer(memory, self.dtype).reshape(part_shape(part))

    def _cut_out(self, part: Part, axis: int, rows: int) -> np.ndarray:
        """The part, cut out of slabs of whole rows."""
        sizes = part_shape(part)
        out = np.empty(sizes, self.dtype)
        whole = (slice(0, self.shape[axis]), *part[axis + 1 :])
        for outer in np.ndindex(*sizes[: axis - 1]):
            for start in range(0, sizes[axis - 1], rows):
                at = (*(slice(i, i + 1) for i in outer), slice(start, start + rows))
                slab = self._run((*_shifted(at, part), *whole))
                out[at] = slab[(slice(None),) * axis + (part[axis],)]
        return out


_SHORT_BYTES = 16 * 2**10
_SKIPPED_BYTES = 32 * 2**10
_SLAB_BYTES = 8 * 2**20


def last_cut(shape: tuple[int, ...], part: Part) -> int:
    """The last axis that a part does not take whole; 0 if there is none."""
    cut = [i for i, s in enumerate(part) if (s.start, s.stop) != (0, shape[i])]
    return cut[-1] if cut else 0


def _shifted(at: Part, part: Part) -> Part:
    """A part of a part."""
    return tuple(
        slice(p.start + a.start, min(p.start + a.stop, p.stop))
        for a, p in zip(at, part, strict=False)
    )


def constant(value: Any) -> Leaf:
    """A leaf that is in memory."""
    array = np.asarray(value)
    return Leaf(array.shape, array.dtype, _Memory(array).open)


def take(array: np.ndarray, part: Part) -> np.ndarray:
    """A part of an array; of one without axes, the array."""
    index: Any = (*part, ...)
    return array[index]


class _Memory(NamedTuple):
    array: np.ndarray

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        yield functools.partial(take, self.array)


class Extent(NamedTuple):
    """A run of entries in a file: where it starts, in bytes, and how many there are."""

    offset: int
    entries: int


def file_leaf(
    file: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: np.dtype,
    extents: Sequence[Extent],
) -> Leaf:
    """A leaf whose entries stand in a file, uncompressed, in C order."""
    return Leaf(shape, dtype, _File(file, shape, dtype, tuple(extents)).open)


class _File(NamedTuple):
    file: str | os.PathLike[str]
    shape: tuple[int, ...]
    dtype: np.dtype
    extents: tuple[Extent, ...]

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        with pathlib.Path(self.file).open("rb", buffering=0) as stream:
            runs = _FileRuns(stream, self.dtype.itemsize, self.extents)
            yield ByRuns(self.shape, self.dtype, runs)


class _FileRuns(NamedTuple):
    stream: io.RawIOBase
    itemsize: int
    extents: tuple[Extent, ...]

    def fill(self, first: int, memory: np.ndarray) -> None:
        left = memory.data
        for extent in self.extents:
            start = max(first, 0)
            count = min(extent.entries - start, len(left) // self.itemsize)
            if count > 0:
                self.stream.seek(extent.offset + start * self.itemsize)
                read_into(self.stream, left[: count * self.itemsize])
                left = left[count * self.itemsize :]
            first -= extent.entries


def read_into(stream: Any, memory: memoryview) -> None:
    """Reads until the memory is full."""
    while memory:
        count = stream.readinto(memory)
        if not count:
            raise EOFError(f"the file ends {len(memory)} bytes too early")
        memory = memory[count:]


def some(names: Sequence[str], count: int) -> str:
    """The first few names."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more if names else "nothing"
