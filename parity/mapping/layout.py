"""Exact changes of layout: each moves entries, none computes with them.

A step takes a list of arrays to a list of arrays and back. All are plain reshapes,
transposes, slices and concatenations, so they work on NumPy and JAX arrays alike, under
`jax.jit`, and keep every bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]


class Step(Protocol):
    """One change of layout."""

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """From Linen's layout towards NNX's."""

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """The exact inverse."""

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What `forward` makes of shapes.

        Raises:
          ValueError: it does not fit them.
        """


class Transpose(NamedTuple):
    """Axes in another order, as in `jax.numpy.transpose`."""

    axes: tuple[int, ...]

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """From Linen's layout towards NNX's."""
        return [x.transpose(self.axes) for x in arrays]

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """The exact inverse."""
        inverse = tuple(int(i) for i in np.argsort(self.axes))
        return [x.transpose(inverse) for x in arrays]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What `forward` makes of shapes."""
        for shape in shapes:
            if len(shape) != len(self.axes):
                raise ValueError(
                    f"an order of {len(self.axes)} axes {self.axes} does not fit the "
                    f"{len(shape)} of shape {shape}"
                )
        return [tuple(shape[i] for i in self.axes) for shape in shapes]


class Reshape(NamedTuple):
    """Another shape for the same entries in the same order."""

    before: Shape
    after: Shape

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """From Linen's layout towards NNX's."""
        return [x.reshape(self.after) for x in arrays]

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """The exact inverse."""
        return [x.reshape(self.before) for x in arrays]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What `forward` makes of shapes."""
        return [self.after for _ in shapes]


class Concatenate(NamedTuple):
    """Several arrays become one, of these sizes along one axis."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """From Linen's layout towards NNX's."""
        return [_concatenated(arrays, self.axis)]

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """The exact inverse."""
        return _pieces(arrays[0], self.axis, self.sizes)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What `forward` makes of shapes."""
        others = {shape[: self.axis] + shape[self.axis + 1 :] for shape in shapes}
        if len(others) > 1:
            raise ValueError(
                f"shapes {', '.join(map(str, shapes))} differ off axis {self.axis}"
            )
        return [_with(shapes[0], self.axis, sum(self.sizes))]


class Split(NamedTuple):
    """One array becomes several, of these sizes along one axis."""

    axis: int
    sizes: tuple[int, ...]

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """From Linen's layout towards NNX's."""
        return _pieces(arrays[0], self.axis, self.sizes)

    def backward(self, arrays: Sequence[Any]) -> list[Any]:
        """The exact inverse."""
        return [_concatenated(arrays, self.axis)]

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """What `forward` makes of shapes."""
        if shapes[0][self.axis] != sum(self.sizes):
            raise ValueError(
                f"axis {self.axis} of shape {shapes[0]} is not "
                f"{' + '.join(map(str, self.sizes))} = {sum(self.sizes)} long"
            )
        return [_with(shapes[0], self.axis, size) for size in self.sizes]


def axis_of(axis: int, ndim: int) -> int:
    """An axis counted from the front.

    Raises:
      ValueError: there is no such axis.
    """
    if not -ndim <= axis < ndim:
        raise ValueError(f"there is no axis {axis} among {ndim}")
    return axis % ndim


def moved(source: int, target: int, ndim: int) -> Transpose:
    """The step that moves one axis, as in `jax.numpy.moveaxis`."""
    source, target = axis_of(source, ndim), axis_of(target, ndim)
    order = [i for i in range(ndim) if i != source]
    order.insert(target, source)
    return Transpose(tuple(order))


def reshaped(before: Shape, after: Sequence[int]) -> Reshape:
    """The step to a shape of which one size may be -1.

    Raises:
      ValueError: the entries do not fit.
    """
    known = math.prod(n for n in after if n != -1)
    size = math.prod(before)
    if -1 in after and (known == 0 or size % known):
        raise ValueError(f"{size} entries of {before} do not fit {tuple(after)}")
    full = tuple(size // known if n == -1 else n for n in after)
    if math.prod(full) != size:
        raise ValueError(f"{size} entries of {before} do not fit {tuple(after)}")
    return Reshape(before, full)


def describe(steps: Sequence[Step]) -> str:
    """Steps as text, for reports."""
    return ", ".join(map(_describe_one, steps))


def _describe_one(step: Step) -> str:
    match step:
        case Transpose(axes):
            return f"transpose {list(axes)}"
        case Reshape(before, after):
            return f"reshape {before} to {after}"
        case Concatenate(axis, sizes):
            return f"concatenate {len(sizes)} on axis {axis}"
        case Split(axis, sizes):
            return f"split axis {axis} into {list(sizes)}"
    return str(step)


def _concatenated(arrays: Sequence[Any], axis: int) -> Any:
    # JAX without x64 would narrow NumPy's float64.
    if all(isinstance(x, np.ndarray) for x in arrays):
        return np.concatenate(arrays, axis)
    return jnp.concatenate(arrays, axis)


def _pieces(array: Any, axis: int, sizes: Sequence[int]) -> list[Any]:
    ends = list(itertools.accumulate(sizes))
    return [
        array[(slice(None),) * axis + (slice(end - size, end),)]
        for size, end in zip(sizes, ends, strict=True)
    ]


def _with(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])
