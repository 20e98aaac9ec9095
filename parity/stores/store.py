"""What every format is opened as: leaves by path, of which parts are read."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

# A list's or a tuple's index is an int; a dict's key is text, whatever it looks like.
Path = tuple[str | int, ...]
Part = tuple[slice, ...]
Read = Callable[[Part], np.ndarray]


class StoreError(ValueError):
    """A checkpoint that cannot be read.

    Attributes:
      problems: everything that is wrong, one line each.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()):
        self.problems = tuple(problems)
        super().__init__("\n  ".join([summary, *self.problems]))


class Leaf(NamedTuple):
    """An array that is not in memory.

    Attributes:
      shape: of the whole.
      dtype: of the entries.
      open: a context that gives `read(part)`; parts are asked for in the order of
        `blocks`, and a format that is a stream then reads each byte once.
      kind: what the entries stand for, where the dtype does not tell.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    open: Callable[[], AbstractContextManager[Read]]
    kind: str = ""

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

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
    """

    path: str
    format: str
    leaves: Mapping[Path, Leaf]
    refused: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    boxes: bool = False
    notes: tuple[str, ...] = ()
    step: int | None = None

    def under(self, prefix: str) -> Store:
        """The subtree at a path such as `params/decoder`.

        Raises:
          StoreError: there is none.
        """
        above = tuple(part for part in prefix.split("/") if part)

        def inside(path: Path) -> bool:
            return tuple(map(str, path[: len(above)])) == above

        leaves = {p[len(above) :]: leaf for p, leaf in self.leaves.items() if inside(p)}
        refused = {p[len(above) :]: why for p, why in self.refused.items() if inside(p)}
        if not leaves and not refused:
            tops = sorted({str(path[0]) for path in self.leaves if path})
            raise StoreError(
                f"{self.path} has nothing under {prefix!r}. It has {some(tops, 8)}."
            )
        return dataclasses.replace(
            self, path=f"{self.path}:{prefix}", leaves=leaves, refused=refused
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


def constant(value: Any) -> Leaf:
    """A leaf that is in memory."""
    array = np.asarray(value)

    @contextlib.contextmanager
    def opened() -> Iterator[Read]:
        yield lambda part: array[part]

    return Leaf(array.shape, array.dtype, opened)


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

    @contextlib.contextmanager
    def opened() -> Iterator[Read]:
        with pathlib.Path(file).open("rb") as stream:

            def read(part: Part) -> np.ndarray:
                first, count = run_of(shape, part)
                runs = []
                for extent in extents:
                    start, stop = max(first, 0), min(first + count, extent.entries)
                    if start < stop:
                        stream.seek(extent.offset + start * dtype.itemsize)
                        data = stream.read((stop - start) * dtype.itemsize)
                        runs.append(np.frombuffer(data, dtype))
                    first -= extent.entries
                array = np.concatenate(runs) if runs else np.empty(0, dtype)
                return array.reshape([s.stop - s.start for s in part])

            yield read

    return Leaf(shape, dtype, opened)


def some(names: Sequence[str], count: int) -> str:
    """The first few names."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more if names else "nothing"
