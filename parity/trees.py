"""Differences between two parameter trees, by path, to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from shared.trees import Path, flatten, path_text


class Difference(NamedTuple):
    """One thing that differs.

    Attributes:
      path: of the leaf, a/b/c.
      what: "missing", "shape", "dtype", "axes", "value" or "not finite".
      detail: both values, or how far apart.
      absolute: of values, the largest distance, if it is known.
      ulps: the same in floating-point numbers that lie between.
    """

    path: str
    what: str
    detail: str
    absolute: float | None = None
    ulps: float | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.what}: {self.detail}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was compared and what differs; nothing compared is no proof."""

    leaves: int = 0
    elements: int = 0
    differences: tuple[Difference, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.leaves > 0 and self.elements > 0 and not self.differences

    def under(self, prefix: str) -> Comparison:
        """The same, with `prefix` before the path of every difference."""
        named = (d._replace(path=prefix + d.path) for d in self.differences)
        return dataclasses.replace(self, differences=tuple(named))

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.leaves + other.leaves,
            self.elements + other.elements,
            self.differences + other.differences,
        )


def compare_structure(
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("linen", "nnx"),
    axes: tuple[Mapping[Path, Any], Mapping[Path, Any]] | None = None,
) -> Comparison:
    """Compares paths, shapes, dtypes and, if given, axis names; values are not read."""
    have = dict(flatten(left)), dict(flatten(right))
    differences = _missing(*have, names)
    common = [path for path in have[0] if path in have[1]]
    for path in common:
        facts = [_facts(tree[path]) for tree in have]
        if axes is not None:
            for fact, names_of in zip(facts, axes, strict=True):
                fact["axes"] = names_of.get(path)
        differences += [
            Difference(
                path_text(path),
                what,
                f"{names[0]} {facts[0][what]}, {names[1]} {facts[1][what]}",
            )
            for what in facts[0]
            if facts[0][what] != facts[1][what]
        ]
    elements = sum(int(np.prod(have[0][path].shape)) for path in common)
    return Comparison(len(common), elements, tuple(differences))


def compare_bytes(
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("linen", "nnx"),
    finite: bool = False,
) -> Comparison:
    """Compares every leaf to the bit: shape and dtype first, then values.

    Args:
      left: nested dict of arrays.
      right: nested dict of arrays.
      names: what to call the two.
      finite: NaN and infinity count as differences, equal or not: two models that
        both break prove nothing.
    """
    have = dict(flatten(left)), dict(flatten(right))
    differences = _missing(*have, names)
    elements = 0
    common = [path for path in have[0] if path in have[1]]
    for path in common:
        a, b = (np.asarray(tree[path]) for tree in have)
        elements += a.size
        difference = _value_difference(path_text(path), a, b, names, finite)
        differences += [] if difference is None else [difference]
    return Comparison(len(common), elements, tuple(differences))


def abstract(tree: Any) -> Any:
    """A pytree with shapes and dtypes instead of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def ulps(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """How many floating-point numbers lie between two arrays' entries, as float64.

    Entries of which one is not a number are infinitely far apart.
    """
    a, b = (_ordinal(x) for x in (left, right))
    # Unsigned, the difference is exact: it may exceed what int64 and float64 can hold.
    distance = np.maximum(a, b).view(np.uint64) - np.minimum(a, b).view(np.uint64)
    nan = np.isnan(left.astype(np.float64)) != np.isnan(right.astype(np.float64))
    return np.where(nan, np.inf, distance.astype(np.float64))


def _facts(leaf: Any) -> dict[str, Any]:
    return {"shape": tuple(leaf.shape), "dtype": str(leaf.dtype)}


def _missing(
    left: Mapping[Path, Any], right: Mapping[Path, Any], names: tuple[str, str]
) -> list[Difference]:
    return [
        Difference(path_text(path), "missing", f"only in {name}")
        for name, one, other in ((names[0], left, right), (names[1], right, left))
        for path in one
        if path not in other
    ]


def _value_difference(
    path: str, a: np.ndarray, b: np.ndarray, names: tuple[str, str], finite: bool
) -> Difference | None:
    for what, x, y in (("shape", a.shape, b.shape), ("dtype", a.dtype, b.dtype)):
        if x != y:
            return Difference(path, what, f"{names[0]} {x}, {names[1]} {y}")
    a, b = _parts(a), _parts(b)
    if a.tobytes() != b.tobytes():
        return _distance(path, a, b)
    is_float = a.dtype.kind not in "iub"
    if finite and is_float and not np.isfinite(a.astype(np.float64)).all():
        return Difference(path, "not finite", "NaN or infinity in both")
    return None


def _distance(path: str, a: np.ndarray, b: np.ndarray) -> Difference:
    unequal = _bits(a) != _bits(b)
    detail = f"{int(np.sum(unequal))} of {a.size} entries"
    a, b = a[unequal], b[unequal]
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    largest = float(np.max(np.where(np.isnan(apart), np.inf, apart)))
    if a.dtype.kind in "iub":
        return Difference(path, "value", detail, largest)
    steps = float(np.max(ulps(a, b)))
    detail += f", at most {largest:.3g} or {steps:.0f} ulps"
    return Difference(path, "value", detail, largest, steps)


def _parts(x: np.ndarray) -> np.ndarray:
    """The real and imaginary parts of complex numbers as entries of their own."""
    x = np.ascontiguousarray(x)
    return x.view(x.real.dtype) if x.dtype.kind == "c" else x


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _ordinal(x: np.ndarray) -> np.ndarray:
    """Integers in the order of the floating-point numbers they stand for."""
    bits = _bits(x).astype(np.uint64)
    sign = np.uint64(1) << np.uint64(8 * x.dtype.itemsize - 1)
    magnitude = (bits & (sign - np.uint64(1))).astype(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)
