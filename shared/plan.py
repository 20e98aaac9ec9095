"""The order of layers, said once: groups of repeated periods, cut into runs.

A `LayerPlan` lists *groups* in order. A group is a number of repeats (None: it stands
once and is not stacked) of a short list of *runs*; a run is a stretch of equal layers.
Both frontends, the parameter tree, the caches and the checkpoint formats follow it.

    layers            2 x [local_layers: 3 x linear, global_layer: full]
    layers_remainder      [local_layers: 2 x linear]

Nothing is dropped or reordered: the layers of a plan, in order, are the list it was
made from.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

logger = logging.getLogger(__name__)

Tree = TypeVar("Tree")

STACK_AXES = ("blocks", "layers")  # names of the axes of repeats and of a run's layers


@runtime_checkable
class Kind(Protocol):
    """What a plan needs to know of a layer kind besides equality.

    Kinds with a `section` (a string) that differs never share a group.
    """

    @property
    def is_global(self) -> bool:
        """Whether the layer is of the rare, full-attention sort."""
        ...


class PlanError(ValueError):
    """An explicit period that the kinds of the layers contradict."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A stretch of equal layers inside a group.

    Attributes:
      name: key of the run below its group; None: the group *is* the layer.
      kind: kind of its layers.
      offset: place of its first layer in the period.
      length: number of layers.
      stacked: whether its leaves have an axis for the layers of the run.
    """

    name: str | None
    kind: Any
    offset: int
    length: int
    stacked: bool


@dataclasses.dataclass(frozen=True)
class Group:
    """Repeats of a period of runs; `repeats` None stands once and is not stacked."""

    name: str
    start: int
    repeats: int | None
    runs: tuple[Run, ...]

    @property
    def period(self) -> int:
        """Layers in one repeat."""
        return sum(run.length for run in self.runs)

    @property
    def num_layers(self) -> int:
        """Layers in all repeats."""
        return self.period * (self.repeats or 1)


class Place(NamedTuple):
    """Where one layer lives: below `path`, at `slot` of the stack axes."""

    path: tuple[str, ...]
    slot: tuple[int, ...]
    kind: Any


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """Groups in order of execution."""

    groups: tuple[Group, ...]

    @property
    def num_layers(self) -> int:
        """Layers in all groups."""
        return sum(group.num_layers for group in self.groups)

    def runs(self) -> Iterator[tuple[Group, Run]]:
        """Every run with its group, in order."""
        for group in self.groups:
            for run in group.runs:
                yield group, run

    def places(self) -> list[Place]:
        """The place of every layer, by its absolute index."""
        places: dict[int, Place] = {}
        for group, run in self.runs():
            for index, slot in layer_slots(group, run):
                places[index] = Place(run_path(group, run), slot, run.kind)
        return [places[i] for i in range(self.num_layers)]

    def stack(self, layers: Sequence[Tree], axis: int = 0) -> dict[str, Any]:
        """Trees of single layers, by index, as one tree in the layout of the plan.

        Args:
          layers: one tree a layer; layers of a run have equal structure and shapes.
          axis: where the stack axes stand in a leaf (repeats first, then layers).
        """
        tree: dict[str, Any] = {}
        for group, run in self.runs():
            slots = [layers[index] for index, _ in layer_slots(group, run)]
            sizes = stack_sizes(group, run)
            leaf = slots[0] if not sizes else _stack_trees(slots, sizes, axis)
            insert(tree, run_path(group, run), leaf)
        return tree

    def build(
        self, make: Callable[[Array, Any], Any], axis: int = 0, *, traced: bool = False
    ) -> dict[str, Any]:
        """The tree of layers that `make` gives from an index and a kind.

        Args:
          make: from absolute index (int32 scalar) and kind to a tree of arrays.
          axis: where the stack axes stand in a leaf.
          traced: see `map_layers`.
        """
        tree: dict[str, Any] = {}
        for group, run in self.runs():
            one = functools.partial(_call, make, run.kind)
            sizes, indices = stack_sizes(group, run), run_indices(group, run)
            layers = one(indices) if not sizes else map_layers(one, indices, traced)
            if sizes:
                layers = jax.tree.map(
                    lambda leaf, sizes=sizes: spread_new(leaf, sizes, axis), layers
                )
            insert(tree, run_path(group, run), layers)
        return tree

    def unstack(self, tree: dict[str, Any], axis: int = 0) -> list[Any]:
        """The inverse of `stack`: one tree a layer, by absolute index."""
        layers: list[Any] = [None] * self.num_layers
        for group, run in self.runs():
            node = node_at(tree, run_path(group, run))
            for index, slot in layer_slots(group, run):
                layers[index] = jax.tree.map(
                    lambda leaf, slot=slot: _take(leaf, slot, axis), node
                )
        return layers

    def gather(self, tree: Mapping[str, Any], select: Callable[[Any], Any]) -> Any:
        """What `select` takes from each run, as arrays with one axis for all layers.

        Args:
          tree: in the layout of the plan, stack axes first.
          select: from the node of a run to a tree of arrays, or None for none.

        Returns:
          The layers for which there is something, in order; None if there are none.
        """
        parts = []
        for group in self.groups:
            chosen = [
                (run, select(node_at(tree, run_path(group, run)))) for run in group.runs
            ]
            parts += _in_layer_order(group, [c for c in chosen if c[1] is not None])
        if not parts:
            return None
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)

    def indices(self) -> dict[str, Any]:
        """The absolute index of every layer, as int32 arrays in the plan's layout."""
        tree: dict[str, Any] = {}
        for group, run in self.runs():
            insert(tree, run_path(group, run), run_indices(group, run))
        return tree

    def describe(self) -> str:
        """The plan as text, one group a line."""
        return "\n".join(_describe_group(group) for group in self.groups)


def run_path(group: Group, run: Run) -> tuple[str, ...]:
    """Keys that lead to a run in a tree."""
    return (group.name,) if run.name is None else (group.name, run.name)


def stack_axes(group: Group, run: Run) -> tuple[str, ...]:
    """The names of the stack axes of a run."""
    blocks, layers = STACK_AXES
    return (blocks,) * (group.repeats is not None) + (layers,) * run.stacked


def stack_sizes(group: Group, run: Run) -> tuple[int, ...]:
    """Sizes of the stack axes of a run's leaves: repeats, then layers of the run."""
    repeats = () if group.repeats is None else (group.repeats,)
    return repeats + ((run.length,) if run.stacked else ())


def run_indices(group: Group, run: Run) -> np.ndarray:
    """The absolute index of each layer of a run, int32, shaped as its stack axes."""
    indices = [index for index, _ in layer_slots(group, run)]
    return np.array(indices, np.int32).reshape(stack_sizes(group, run))


def cache_slot(group: Group, run: Run, index: ArrayLike) -> tuple[Array, ...]:
    """Where layer `index` of a run stands in the run's stack axes, as int32 scalars."""
    since = jnp.asarray(index, jnp.int32) - group.start
    repeat, place = jnp.divmod(since, jnp.int32(group.period))
    slot = () if group.repeats is None else (repeat,)
    return (*slot, place - run.offset) if run.stacked else slot


def map_layers(make: Callable[[Array], Any], indices: np.ndarray, traced: bool) -> Any:
    """What `make` gives for each index, with one leading axis.

    Args:
      make: from an absolute index to a tree of arrays.
      indices: of the layers of a run.
      traced: inside `jit`, a loop keeps the program from growing with depth; outside,
        Python's loop compiles each drawing function once a shape, for all layers and
        all models. The values are the same.
    """
    flat = jnp.asarray(indices).ravel()
    if traced:
        return jax.lax.map(make, flat)
    layers = [make(index) for index in flat]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def _call(make: Callable[[Array, Any], Any], kind: Any, index: Any) -> Any:
    return make(jnp.asarray(index), kind)


def layer_slots(group: Group, run: Run) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Absolute index and stack slot of each layer of a run, slots in order."""
    repeats = 1 if group.repeats is None else group.repeats
    for repeat, position in itertools.product(range(repeats), range(run.length)):
        index = group.start + repeat * group.period + run.offset + position
        slot = () if group.repeats is None else (repeat,)
        yield index, slot + ((position,) if run.stacked else ())


def make_plan(
    kinds: Sequence[Any], *, period: int | None = None, scan_layers: bool = True
) -> LayerPlan:
    """Groups `kinds` for running them.

    Without an explicit period, the shortest one that the whole list repeats is taken;
    else a prefix, a period that stands at least twice and covers half of the layers,
    and a free remainder. A list with no useful period runs layer by layer. Each section
    (see `Kind`) is grouped by itself.

    Args:
      kinds: kind of each layer in order.
      period: layers in a period. Layers beyond the last whole period are the remainder.
      scan_layers: False gives `layers_0` … `layers_{n-1}`.

    Raises:
      PlanError: `period` contradicts the kinds, or the layers of a section do not stand
        together; the message names the layers.
    """
    groups: list[Group] = []
    for section in _sections(tuple(kinds)):
        if period is not None:
            _check_period(section, period)
        groups += _plan_section(section, period) if scan_layers else _unscanned(section)
    return LayerPlan(tuple(groups))


class _Section(NamedTuple):
    """A stretch of layers that is grouped by itself: name, first layer, kinds."""

    name: str
    start: int
    kinds: tuple[Any, ...]


def _sections(kinds: tuple[Any, ...]) -> list[_Section]:
    sections: list[_Section] = []
    start = 0
    for name, part in itertools.groupby(kinds, lambda k: getattr(k, "section", "")):
        if any(section.name == name for section in sections):
            raise PlanError(
                f"Layers of section {name!r} stand apart: layer {start} is of it "
                "again. Layers of a section must follow on one another."
            )
        sections.append(_Section(name, start, tuple(part)))
        start += len(sections[-1].kinds)
    return sections


def _plan_section(section: _Section, period: int | None) -> list[Group]:
    kinds = section.kinds
    if period is not None:
        return _scanned(section, 0, period, len(kinds) // period)
    found = _find_period(kinds)
    if found is None:
        logger.info(
            "No period stands twice in these %d layers; they run one by one as "
            "layers_%d to layers_%d.",
            len(kinds),
            section.start,
            section.start + len(kinds) - 1,
        )
        return _unscanned(section)
    return _scanned(section, *found)


def _check_period(section: _Section, period: int) -> None:
    if period < 1:
        raise PlanError(f"scan_period must be at least 1. Got {period}.")
    for index, kind in enumerate(section.kinds):
        first = section.kinds[index % period]
        if kind != first:
            raise PlanError(
                f"scan_period={period} contradicts the layers: layer "
                f"{section.start + index} is {kind}, but layer "
                f"{section.start + index % period}, at the same place of the first "
                f"period, is {first}. Give another period, or None to have it found."
            )


def _find_period(kinds: tuple[Any, ...]) -> tuple[int, int, int] | None:
    """Start, period and repeats of the part to scan."""
    n = len(kinds)
    shortest = next(
        p for p in range(1, n + 1) if all(kinds[i] == kinds[i - p] for i in range(p, n))
    )
    if n // shortest >= 2 or _is_named(_cut(kinds[:shortest])):
        return 0, shortest, n // shortest
    candidates = []
    for start, size in itertools.product(range(n // 2 + 1), range(1, n // 2 + 1)):
        repeats = _count_repeats(kinds, start, size)
        if repeats >= 2 and 2 * repeats * size >= n:
            end = start + repeats * size
            pieces = kinds[:start], kinds[start : start + size], kinds[end:]
            bodies = sum(len(_cut(piece)) for piece in pieces)
            candidates.append((bodies, -repeats * size, start, size, repeats))
    return min(candidates)[2:] if candidates else None


def _count_repeats(kinds: tuple[Any, ...], start: int, period: int) -> int:
    first = kinds[start : start + period]
    repeats = 1
    while kinds[start + repeats * period :][:period] == first:
        repeats += 1
    return repeats


def _scanned(section: _Section, start: int, period: int, repeats: int) -> list[Group]:
    (name, first, kinds), end = section, start + period * repeats
    scanned = f"layers_{name}" if name else "layers"
    before = f"{scanned}_prefix" if name else "prefix"
    groups = []
    if start:
        groups.append(Group(before, first, None, _name_runs(kinds[:start])))
    if repeats:
        runs = _name_runs(kinds[start : start + period])
        groups.append(Group(scanned, first + start, repeats, runs))
    if end < len(kinds):
        rest = _name_runs(kinds[end:])
        groups.append(Group(f"{scanned}_remainder", first + end, None, rest))
    return groups


def _unscanned(section: _Section) -> list[Group]:
    return [
        Group(f"layers_{i}", i, None, (Run(None, kind, 0, 1, stacked=False),))
        for i, kind in enumerate(section.kinds, section.start)
    ]


def _cut(kinds: Sequence[Kind]) -> list[tuple[Kind, int]]:
    """Equal neighbours together: kind and number of layers."""
    return [(kind, len(list(same))) for kind, same in itertools.groupby(kinds)]


def _is_named(cut: Sequence[tuple[Kind, int]]) -> bool:
    """Whether the runs are local ones around at most one single global layer."""
    full = [i for i, (kind, _) in enumerate(cut) if kind.is_global]
    if not full:
        return len(cut) == 1
    before, after = full[0], len(cut) - full[0] - 1
    single = len(full) == 1 and cut[full[0]][1] == 1
    return single and before <= 1 and after <= 1


def _name_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
    cut = _cut(kinds)
    named = _is_named(cut)
    runs, offset = [], 0
    for i, (kind, length) in enumerate(cut):
        single_global = kind.is_global and length == 1
        if not named:
            name = f"run_{i}"
            stacked = length > 1
        elif single_global:
            name, stacked = "global_layer", False
        else:
            behind = i > 0
            name = "local_layers_after" if behind else "local_layers"
            stacked = True
        runs.append(Run(name, kind, offset, length, stacked))
        offset += length
    return tuple(runs)


def stack_leaves(leaves: Sequence[Any], sizes: tuple[int, ...], axis: int) -> Any:
    """Equal arrays as one, with stack axes of `sizes` put in at `axis`."""
    return spread_stack(jnp.stack(leaves), sizes, axis)


def spread_stack(stacked: Any, sizes: tuple[int, ...], axis: int) -> Any:
    """One leading axis for all layers of a run as its stack axes, put in at `axis`."""
    at = min(axis, stacked.ndim - 1)
    moved = jnp.moveaxis(stacked, 0, at)
    shape = moved.shape
    return moved.reshape(shape[:at] + sizes + shape[at + 1 :])


def spread_new(stacked: Any, sizes: tuple[int, ...], axis: int) -> Any:
    """As `spread_stack`, for leaves that a scan will slice at `axis`.

    Raises:
      ValueError: a layer's leaf has too few dimensions to have its stack axes there.
    """
    if axis > stacked.ndim - 1:
        raise ValueError(
            f"A stack axis at {axis} does not fit into a leaf of {stacked.ndim - 1} "
            "dimensions: use param_scan_axis=0, or give the parameter an axis."
        )
    return spread_stack(stacked, sizes, axis)


def _stack_trees(trees: Sequence[Any], sizes: tuple[int, ...], axis: int) -> Any:
    return jax.tree.map(lambda *leaves: stack_leaves(leaves, sizes, axis), *trees)


def _take(leaf: Any, slot: tuple[int, ...], axis: int) -> Any:
    at = min(axis, leaf.ndim - len(slot))
    return leaf[(slice(None),) * at + slot]


def _in_layer_order(group: Group, chosen: Sequence[tuple[Run, Any]]) -> list[Any]:
    """The runs' trees as at most one tree with one leading axis, layers in order."""
    if not chosen:
        return []
    repeats = 1 if group.repeats is None else group.repeats

    def by_repeat(run: Run, leaf: Any) -> Any:
        shape = leaf.shape[len(stack_sizes(group, run)) :]
        return leaf.reshape(repeats, run.length, *shape)

    trees = [
        jax.tree.map(lambda leaf, run=run: by_repeat(run, leaf), tree)
        for run, tree in chosen
    ]
    return [
        jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves, axis=1).reshape(
                -1, *leaves[0].shape[2:]
            ),
            *trees,
        )
    ]


def node_at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    """What stands at `path` in nested dicts."""
    node: Any = tree
    for name in path:
        node = node[name]
    return node


def insert(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    """Puts `leaf` at `path` in nested dicts, making those on the way."""
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf


def _describe_group(group: Group) -> str:
    runs = ", ".join(
        f"{run.name or 'layer'}: {run.length} x {run.kind}" for run in group.runs
    )
    repeats = "" if group.repeats is None else f"{group.repeats} x "
    last = group.start + group.num_layers - 1
    return f"{group.name} (layers {group.start}-{last}): {repeats}[{runs}]"
