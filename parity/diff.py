"""Two checkpoints or trees, by path, to the bit: a part of one pair in memory."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from parity.trees import Comparison, Difference, ulps
from shared.stores import CheckpointError, Leaf, Path, Store, blocks, path_text, reading

BLOCK = 2**20  # entries of each side that are compared at once

# A sign and a magnitude in whole bytes: neighbours differ by one in the last bit.
_HAVE_ULPS = {
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e3m4"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
}


class ValueDifference(NamedTuple):
    """How far apart two leaves of one shape and dtype are.

    Attributes:
      unequal: entries of which the bits differ.
      entries: in the leaf.
      first: index of the first that differs.
      left: its value.
      right: its value.
      absolute: the largest distance; None where the dtype has none.
      ulps: the same in floating-point numbers that lie between.
    """

    unequal: int
    entries: int
    first: tuple[int, ...]
    left: str
    right: str
    absolute: float | None
    ulps: float | None


@dataclasses.dataclass(frozen=True)
class Diff(Comparison):
    """A comparison with what a reader of two checkpoints also wants to know.

    Attributes:
      values: by path, how far apart the leaves with other bits are.
      not_finite: by path, how many entries of either side are NaN or infinite.
      notes: which paths were matched though they are not written alike.
    """

    values: dict[str, ValueDifference] = dataclasses.field(default_factory=dict)
    not_finite: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def diff(
    left: Store,
    right: Store,
    *,
    names: tuple[str, str] = ("left", "right"),
    block: int = BLOCK,
) -> Diff:
    """Compares two stores to the bit: paths, then shapes and dtypes, then values.

    A list's index is the same as its text, unless a store has both; a last level
    `value` stands for the box of its leaf, where the format writes boxes so and the
    other side has none. Apart from that, another path is another leaf.

    Args:
      left: as `open_store` or `from_tree` give it.
      right: the same.
      names: what to call the two.
      block: entries to have in memory of each side.

    Raises:
      CheckpointError: leaves cannot be read.
    """
    _check_readable(left, right)
    pairs, only, notes = _pair(left, right, names)
    differences = [
        Difference(path_text(path), "missing", f"only in {name}: {_facts(leaf)}")
        for name, leaves in zip(names, only, strict=True)
        for path, leaf in leaves.items()
    ]
    values, not_finite, elements = {}, {}, 0
    for path, (a, b) in pairs.items():
        text = path_text(path)
        facts = _unlike(text, a, b, names)
        differences += facts
        if facts:
            continue
        elements += a.size
        tally = _compare(
            (a, f"{text} of {left.path}"),
            (b, f"{text} of {right.path}"),
            block,
        )
        if any(tally.not_finite):
            not_finite[text] = (tally.not_finite[0], tally.not_finite[1])
        if tally.unequal:
            values[text] = tally.result(a.shape)
            differences.append(_describe(text, values[text], names))
    if not elements and not differences:
        counted = f"{len(pairs)} leaves, 0 elements were compared"
        differences.append(Difference("(nothing)", "empty", counted))
    return Diff(len(pairs), elements, tuple(differences), values, not_finite, notes)


def _check_readable(*stores: Store) -> None:
    for store in stores:
        if store.refused:
            raise CheckpointError(
                f"{len(store.refused)} leaves of {store.path} cannot be compared:",
                [f"{path_text(path)}: {why}" for path, why in store.refused.items()],
            )


# Which leaf is which.

_Pairs = dict[Path, tuple[Leaf, Leaf]]


def _pair(
    left: Store, right: Store, names: tuple[str, str]
) -> tuple[_Pairs, tuple[dict[Path, Leaf], dict[Path, Leaf]], tuple[str, ...]]:
    """Pairs by the left's path, what is left over of each, and notes."""
    rest = dict(left.leaves), dict(right.leaves)
    boxed = _boxed(left), _boxed(right)
    matched: dict[Path, Path] = {}
    opened: tuple[list[Path], list[Path]] = ([], [])

    def match(*name_of: Callable[[Path], str | Path]) -> None:
        groups = [_groups(r, n) for r, n in zip(rest, name_of, strict=True)]
        for name in groups[0]:
            if len(groups[0][name]) == len(groups[1].get(name, ())) == 1:
                pair = groups[0][name][0], groups[1][name][0]
                matched[pair[0]] = pair[1]
                for side in range(2):
                    del rest[side][pair[side]]
                    if name not in (pair[side], path_text(pair[side])):
                        opened[side].append(pair[side])

    match(lambda path: path, lambda path: path)
    match(path_text, path_text)
    for side in range(2):
        opener = _without_box(boxed[side])
        match(*((opener, path_text) if side == 0 else (path_text, opener)))
    pairs = {
        path: (left.leaves[path], right.leaves[matched[path]])
        for path in left.leaves
        if path in matched
    }
    notes = tuple(
        f"{len(paths)} leaves of {name} stand below `value`, which is taken for their "
        f"box: {path_text(paths[0])}"
        for name, paths in zip(names, opened, strict=True)
        if paths
    )
    return pairs, rest, notes


def _without_box(boxed: set[Path]) -> Callable[[Path], str]:
    return lambda path: path_text(path[:-1] if path in boxed else path)


def _groups(
    leaves: dict[Path, Leaf], name_of: Callable[[Path], str | Path]
) -> dict[str | Path, list[Path]]:
    groups: dict[str | Path, list[Path]] = {}
    for path in leaves:
        groups.setdefault(name_of(path), []).append(path)
    return groups


def _boxed(store: Store) -> set[Path]:
    """Paths that end in `value`, the only leaf below its node."""
    if not store.boxes:
        return set()
    below = Counter(path[:n] for path in store.leaves for n in range(len(path)))
    return {p for p in store.leaves if p[-1:] == ("value",) and below[p[:-1]] == 1}


# How two leaves differ.


def _facts(leaf: Leaf) -> str:
    return f"{leaf.type_name} {leaf.shape}"


def _unlike(path: str, a: Leaf, b: Leaf, names: tuple[str, str]) -> list[Difference]:
    facts = [("shape", a.shape, b.shape), ("dtype", a.type_name, b.type_name)]
    return [
        Difference(path, what, f"{names[0]} {x}, {names[1]} {y}")
        for what, x, y in facts
        if x != y
    ]


def _compare(left: tuple[Leaf, str], right: tuple[Leaf, str], block: int) -> _Tally:
    """Two leaves, each with what to call it where it is damaged."""
    tally = _Tally()
    with reading(*left) as read_left, reading(*right) as read_right:
        for part in blocks(left[0].shape, block):
            tally.add(read_left(part), read_right(part))
    return tally


class _Tally:
    """Adds up the differences of a leaf, part by part."""

    def __init__(self) -> None:
        self.entries = 0
        self.unequal = 0
        self.not_finite = [0, 0]
        self._first = (0, "", "")
        self._absolute: float | None = None
        self._ulps: float | None = None

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        """Counts the next part."""
        a, b = (np.ascontiguousarray(_widened(x)).reshape(-1) for x in (a, b))
        inexact = jnp.issubdtype(a.dtype, np.inexact)
        if inexact:
            for side, x in enumerate((a, b)):
                self.not_finite[side] += int(x.size - np.isfinite(x).sum())
        where = np.flatnonzero(_bits_differ(a, b))
        if where.size:
            self._add_unequal(a[where], b[where], self.entries + int(where[0]))
        self.entries += a.size

    def _add_unequal(self, a: np.ndarray, b: np.ndarray, first: int) -> None:
        if not self.unequal:
            self._first = (first, *_shown(a[0], b[0]))
        self.unequal += a.size
        self._absolute = _largest(self._absolute, _absolute(a, b))
        self._ulps = _largest(self._ulps, _ulps(a, b))

    def result(self, shape: tuple[int, ...]) -> ValueDifference:
        """What was found in a leaf of this shape."""
        first, left, right = self._first
        index = tuple(int(i) for i in np.unravel_index(first, shape))
        return ValueDifference(
            self.unequal,
            math.prod(shape),
            index,
            left,
            right,
            self._absolute,
            self._ulps,
        )


def _widened(x: np.ndarray) -> np.ndarray:
    """Integers of less than a byte as bytes: what pads them is no part of the value."""
    if jnp.issubdtype(x.dtype, np.integer) and x.dtype.kind not in "iu":
        return x.astype(np.int8)
    return x


def _bits_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    size = a.dtype.itemsize
    if size in (1, 2, 4, 8):
        return a.view(f"u{size}") != b.view(f"u{size}")
    rows = [x.view(np.uint8).reshape(x.size, size) for x in (a, b)]
    return (rows[0] != rows[1]).any(axis=1)


def _largest(so_far: float | None, more: float | None) -> float | None:
    return more if so_far is None or more is None else max(so_far, more)


def _absolute(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.dtype.kind in "iu":
        # Unsigned, the difference is exact: it may exceed what int64 can hold.
        high, low = (f(a, b).astype(np.uint64) for f in (np.maximum, np.minimum))
        return int(np.max(high - low))
    if not jnp.issubdtype(a.dtype, np.inexact):
        return None
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
        distance = np.abs(x - y)
    # Two that are no numbers are not apart; infinity is as far as can be from the rest.
    both = np.isnan(x) & np.isnan(y)
    distance = np.where(np.isnan(distance), np.inf, distance)
    return float(np.max(np.where(both, 0, distance)))


def _ulps(a: np.ndarray, b: np.ndarray) -> float | None:
    if a.dtype.kind == "c":
        a, b = (x.view(np.float32 if x.itemsize == 8 else np.float64) for x in (a, b))
    if a.dtype.name not in _HAVE_ULPS:
        return None
    with np.errstate(all="ignore"):
        both = np.isnan(a) & np.isnan(b)
        return float(np.max(np.where(both, 0, ulps(a, b))))


def _shown(a: np.ndarray, b: np.ndarray) -> tuple[str, str]:
    """Two entries as text; with their bits where the numbers look the same."""
    texts = str(a), str(b)
    if texts[0] != texts[1]:
        return texts
    bits = (np.asarray(x).tobytes()[::-1].hex() for x in (a, b))
    return tuple(f"{t} (0x{bit})" for t, bit in zip(texts, bits, strict=True))  # type: ignore[return-value]


def _describe(path: str, found: ValueDifference, names: tuple[str, str]) -> Difference:
    detail = (
        f"{found.unequal:,} of {found.entries:,} entries, first at "
        f"{list(found.first)}: {names[0]} {found.left}, {names[1]} {found.right}"
    )
    if found.absolute is not None:
        detail += f"; at most {found.absolute:.3g}"
    if found.ulps is not None:
        detail += f" or {found.ulps:.0f} ulps"
    if found.absolute is not None:
        detail += " apart"
    return Difference(path, "value", detail, found.absolute, found.ulps)
