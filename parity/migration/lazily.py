"""Changes of layout applied to leaves that are not in memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from parity.mapping.layout import Concatenate, Reshape, Split, Step, Transpose
from shared.stores import Leaf
from shared.stores.store import Index, Piece
from shared.stores.views import assembled, part_of, permuted, reshaped


def forward(steps: Sequence[Step], leaves: Sequence[Leaf]) -> list[Leaf]:
    """From Linen's layout to NNX's; nothing is read."""
    found = list(leaves)
    for step in steps:
        match step:
            case Transpose(axes):
                found = [permuted(leaf, axes) for leaf in found]
            case Reshape(_, after):
                found = [reshaped(leaf, after) for leaf in found]
            case Concatenate(axis, _):
                found = [_joined(found, axis)]
            case Split(axis, sizes):
                found = _parts(found[0], axis, sizes)
            case _:
                raise TypeError(f"a step that is not known: {step}")
    return found


def backward(steps: Sequence[Step], leaves: Sequence[Leaf]) -> list[Leaf]:
    """From NNX's layout to Linen's: the inverse of `forward`."""
    return forward([_inverse(step) for step in reversed(steps)], leaves)


def _inverse(step: Step) -> Step:
    match step:
        case Transpose(axes):
            return Transpose(tuple(int(i) for i in np.argsort(axes)))
        case Reshape(before, after):
            return Reshape(after, before)
        case Concatenate(axis, sizes):
            return Split(axis, sizes)
        case Split(axis, sizes):
            return Concatenate(axis, sizes)
    raise TypeError(f"a step that is not known: {step}")


def _joined(leaves: Sequence[Leaf], axis: int) -> Leaf:
    sizes = [leaf.shape[axis] for leaf in leaves]
    shape = (*leaves[0].shape[:axis], sum(sizes), *leaves[0].shape[axis + 1 :])
    pieces = [
        Piece(at, leaf) for at, leaf in zip(_cuts(axis, sizes), leaves, strict=True)
    ]
    return assembled(shape, leaves[0].dtype, functools.partial(list, pieces))


def _parts(leaf: Leaf, axis: int, sizes: Sequence[int]) -> list[Leaf]:
    return [part_of(leaf, at) for at in _cuts(axis, sizes)]


def _cuts(axis: int, sizes: Sequence[int]) -> list[Index]:
    ends = itertools.accumulate(sizes)
    return [
        (*(slice(None),) * axis, slice(end - size, end))
        for size, end in zip(sizes, ends, strict=True)
    ]
