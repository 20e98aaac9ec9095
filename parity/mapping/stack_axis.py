"""Where stacked layers have their axis: one move for a whole stack, or none.

`nn.scan` and `nnx.vmap` may stack parameters along different axes. One leaf alone can
fit in several ways, or by chance in none; the leaves of one stack move together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parity.mapping.layout import Shape, Transpose, moved
from parity.mapping.leaves import Path


class Stacked(NamedTuple):
    """A pair of leaves that may stand in a stack: path, shapes from and to, number."""

    path: Path
    shape: Shape
    want: Shape
    number: int


class Move(NamedTuple):
    """How one leaf of a stack moves, and what to call it."""

    step: Transpose
    why: str


class Unclear(NamedTuple):
    """Leaves of one stack, by number, and the moves that would fit it."""

    numbers: tuple[int, ...]
    choices: tuple[str, ...]


def stack_moves(
    pairs: Sequence[Stacked],
) -> tuple[dict[int, Move], list[Unclear]]:
    """The moves that make whole stacks fit.

    Returns:
      By number, the leaves that move; and the stacks for which more than one way fits.
      Leaves whose shapes differ for another reason are in neither.
    """
    moves: dict[int, Move] = {}
    unclear: list[Unclear] = []
    _solve(list(pairs), list(pairs), moves, unclear)
    return moves, unclear


def _solve(
    pairs: list[Stacked],
    every: list[Stacked],
    moves: dict[int, Move],
    unclear: list[Unclear],
) -> None:
    differing = [pair for pair in pairs if pair.shape != pair.want]
    if not differing:
        return
    if len(differing) == 1:
        _alone(differing[0], every, unclear)
        return
    root = _common(pair.path for pair in differing)
    inside = _under(root, pairs)
    options = _options(inside)
    if not options:
        groups = _children(inside, len(root))
        # One group is one path in several collections, which do not move alike.
        for group in groups if len(groups) > 1 else []:
            _solve(group, every, moves, unclear)
        return
    # A leaf that fits moved and unmoved tells nothing, and more of the stack may.
    for length in range(len(root) - 1, -1, -1):
        wider = _under(root[:length], every)
        still = _options(wider)
        if not still:
            break
        if len(options) == 1 and len(wider) > len(inside):
            new = {pair.number for pair in wider} - {pair.number for pair in inside}
            unclear.append(Unclear(tuple(sorted(new)), (*options, "not at all")))
            break
        options, inside = still, wider
    if len(options) > 1:
        numbers = tuple(pair.number for pair in inside)
        unclear.append(Unclear(numbers, tuple(options)))
        return
    [(why, steps)] = options.items()
    for pair, step in zip(inside, steps, strict=True):
        if step.axes != tuple(range(len(step.axes))):
            moves[pair.number] = Move(step, why)


def _alone(pair: Stacked, every: Sequence[Stacked], unclear: list[Unclear]) -> None:
    """One leaf is no stack: it may be a transposed matrix in a module of its own."""
    inside = _under(pair.path[:-1], every)
    options = _options(inside)
    if options and len(inside) > 1:
        numbers = tuple(other.number for other in inside)
        unclear.append(Unclear(numbers, (*options, "not at all")))


def _options(pairs: Sequence[Stacked]) -> dict[str, tuple[Transpose, ...]]:
    """The different moves of one axis that make all of them fit, by their names."""
    options: dict[str, tuple[Transpose, ...]] = {}
    for source, target in _axes(max((len(p.shape) for p in pairs), default=0)):
        steps = _fitting(pairs, source, target)
        if steps is not None and steps not in options.values():
            options[f"{source} to {target}"] = steps
    return options


def _axes(ndim: int) -> Iterator[tuple[int, int]]:
    others = [*range(1, ndim), -1]
    yield from ((0, axis) for axis in others)
    yield from ((axis, 0) for axis in others)


def _fitting(
    pairs: Sequence[Stacked], source: int, target: int
) -> tuple[Transpose, ...] | None:
    steps, lengths = [], set()
    for pair in pairs:
        ndim = len(pair.shape)
        if ndim == 0 or max(source, target) >= ndim:
            return None
        step = moved(source, target, ndim)
        lengths.add(pair.shape[source])
        if tuple(pair.shape[i] for i in step.axes) != pair.want or len(lengths) > 1:
            return None
        steps.append(step)
    return tuple(steps)


def _common(paths: Iterator[Path]) -> Path:
    columns = zip(*paths, strict=False)
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, columns)
    return tuple(tokens[0] for tokens in same)


def _under(root: Path, pairs: Sequence[Stacked]) -> list[Stacked]:
    return [pair for pair in pairs if pair.path[: len(root)] == root]


def _children(pairs: Sequence[Stacked], depth: int) -> list[list[Stacked]]:
    groups: dict[object, list[Stacked]] = {}
    for pair in pairs:
        groups.setdefault(pair.path[: depth + 1], []).append(pair)
    return list(groups.values())
