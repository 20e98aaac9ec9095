"""What a checkpoint of anyone's holds: the state of a model, and what is beside it.

A checkpoint is a tree of names; nothing in it says which part is the model. Here it is
found: `params` with other collections beside it (Linen), `model` (NNX), or the whole.
All the rest (optimizer state, step, keys) is kept apart, path by path.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parity.migration.trees import BOX, Tree, name_of
from shared.stores import CheckpointError, Leaf, Path, Store, path_text
from shared.stores.store import some

# What a train state has beside a model, and a model has not.
STATE = ("step", "opt_state", "optimizer", "optimizer_state", "opt", "opt_states")
OPTIMIZER = tuple(word for word in STATE if word != "step")
COLLECTIONS = ("batch_stats", "cache", "intermediates", "perturbations")
PARAMS = "params"
RNG = "nnx_rngs"  # where a Linen checkpoint keeps the RNG state of an NNX module
# Nodes that a module saved as an object has, which hold nothing.
OBJECT_NODES = ("_pytree__state", "_object__state", "_pytree__nodes")


class ModelLeaf(NamedTuple):
    """A leaf of the model's state.

    Attributes:
      path: in the checkpoint.
      collection: it stands in; "": the checkpoint does not say.
      name: its path in the collection, without box.
      leaf: what is stored.
    """

    path: Path
    collection: str
    name: Path
    leaf: Leaf


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint, taken apart.

    Attributes:
      store: the checkpoint.
      side: whose tree it is, "linen" or "nnx".
      roots: where the collections stand; "" is a model whose collections are merged.
      outer: the node of the train state that the model is a part of.
      whole: whether there is nothing but the model.
      model: leaves of the model, without RNG state.
      rng: RNG state of an NNX model.
      rest: what is no part of the model.
      boxed: paths of the leaves that stand in a box.
      notes: what was chosen.
    """

    store: Store
    side: str
    roots: Mapping[str, Path]
    outer: Path
    whole: bool
    model: tuple[ModelLeaf, ...]
    rng: tuple[ModelLeaf, ...]
    rest: Mapping[Path, Leaf]
    boxed: frozenset[Path]
    notes: tuple[str, ...]

    @functools.cached_property
    def lists(self) -> frozenset[Path]:
        """Nodes of the model that have a number as a key, whose texts stay texts."""
        return frozenset(
            leaf.name[:i]
            for leaf in self.model
            for i, key in enumerate(leaf.name)
            if isinstance(key, int)
        )

    @property
    def params(self) -> Path:
        """Where the parameters are."""
        return self.roots.get(PARAMS, self.roots.get("", ()))

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the state of an `nnx.Optimizer` is beside the model."""
        node = (*self.outer, "optimizer", "opt_state")
        return any(path[: len(node)] == node for path in self.rest)

    @property
    def mirrors(self) -> Path:
        """The node that an optimizer's trees are copies of, where it is another.

        A train state may hold all variables under `params`; then its optimizer's trees
        have a level `params`, too.
        """
        above = self.params[:-1]
        return above if above[-1:] == (PARAMS,) else self.params

    def unboxed(self, path: Path) -> Path:
        """A path without the level that is a box."""
        for i, key in enumerate(path):
            if key == BOX and path[: i + 1] in self.boxed:
                return (*path[:i], *path[i + 1 :])
        return path


def read_source(
    store: Store,
    side: str,
    *,
    params: str | None = None,
    why: str = "--params",
    collection_names: Iterable[str] = (),
    own: Tree | None = None,
    boxes: bool | None = None,
) -> Source:
    """Takes a checkpoint apart; only metadata is looked at.

    Args:
      store: the checkpoint.
      side: whose tree it is, "linen" or "nnx".
      params: path of the parameters; None: they are looked for.
      why: who says so.
      collection_names: further names of collections beside Linen's parameters.
      own: the tree of the module that wrote it, if it is known.
      boxes: whether a last level `value` is a box; None: found out.

    Raises:
      CheckpointError: leaves cannot be read, or it is unclear where the model is.
    """
    if store.refused:
        raise CheckpointError(
            f"{len(store.refused)} leaves of {store.path} cannot be read:",
            [f"{path_text(path)}: {why}" for path, why in store.refused.items()],
        )
    if not store.leaves:
        raise CheckpointError(f"{store.path} has no leaves: there is nothing to carry.")
    nodes = _Nodes(store)
    names = [*collection_names]
    names += [] if own is None else [leaf.collection for leaf in own.leaves]
    if params is not None:
        at = _given(nodes, params, why)
    else:
        at, why = _best(nodes, *_locate(nodes, side, names), own)
    roots, outer = _roots(nodes, side, at, names)
    inside = {
        path: collection
        for path in store.leaves
        for collection, root in roots.items()
        if path[: len(root)] == root
    }
    boxed, box_note = _boxes(store, roots, inside, side, own, boxes)
    rest = {p: leaf for p, leaf in store.leaves.items() if p not in inside}
    source = Source(
        store,
        side,
        roots,
        outer,
        whole=all(path[len(outer) : len(outer) + 1] == (RNG,) for path in rest),
        model=(),
        rng=(),
        rest=rest,
        boxed=boxed,
        notes=(f"parameters at {path_text(at)}: {why}", *box_note),
    )
    leaves = [
        ModelLeaf(
            path,
            collection,
            source.unboxed(path)[len(roots[collection]) :],
            store.leaves[path],
        )
        for path, collection in inside.items()
    ]
    rng = _rng_paths(leaves, own) if side == "nnx" else set()
    return dataclasses.replace(
        source,
        model=tuple(leaf for leaf in leaves if leaf.path not in rng),
        rng=tuple(leaf for leaf in leaves if leaf.path in rng),
    )


class _Nodes:
    """The nodes of a checkpoint: what is directly below each."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.below: dict[Path, dict[Any, None]] = {}
        for path in (*store.leaves, *store.empty):
            for length in range(len(path)):
                self.below.setdefault(path[:length], {})[path[length]] = None

    def children(self, path: Path) -> list[Any]:
        return list(self.below.get(path, ()))

    def has(self, path: Path) -> bool:
        """Whether it is a node with something below it."""
        return path in self.below

    def is_model(self, path: Path) -> bool:
        """Whether it may be a model: a node that is no part of a train state."""
        return self.has(path) and not self.is_state(path)

    def is_state(self, path: Path) -> bool:
        """Whether it is a part of a train state, and not a module called so."""
        if path[-1] == "step":
            return path in self.store.leaves or self.children(path) == [BOX]
        known = str(path[-1]) in STATE
        return known and (self.has(path) or path in self.store.empty)


def _given(nodes: _Nodes, params: str, why: str) -> Path:
    at = next(
        (p for p in sorted(nodes.below, key=len) if name_of(p) == params.strip("/.")),
        None,
    )
    if at is None:
        tops = [str(key) for key in nodes.children(())]
        raise CheckpointError(
            f"{nodes.store.path} has no node {params!r}, where {why} says that the "
            f"parameters are. At the top it has {some(tops, 8)}; --params=/ is the top."
        )
    return at


_NAMES: Mapping[str, tuple[str, ...]] = {
    "linen": ("params", "model", "variables", "target", "state"),
    "nnx": ("model", "params", "state"),
}


def _locate(nodes: _Nodes, side: str, names: Iterable[str]) -> tuple[Path, str]:
    """Where the parameters are, and why there."""
    known = {PARAMS, *COLLECTIONS, *names}
    if side == "linen":
        found = [
            path
            for path in nodes.below
            if path[-1:] == (PARAMS,)
            and not {*map(str, path)} & {*OPTIMIZER}
            and PARAMS not in path[:-1]
        ]
        shallow = [p for p in found if len(p) == min(map(len, found))]
        if len(shallow) > 1:
            raise CheckpointError(
                f"{nodes.store.path} has several nodes `params`: say which one is the "
                "model's, such as --params=" + path_text(shallow[0]) + ".",
                [path_text(path) for path in shallow],
            )
        if shallow:
            at = shallow[0]
            # A train state may hold all variables; or a module may be called `params`.
            inner = nodes.has((*at, PARAMS)) and known >= {*nodes.children(at)}
            beside = (known - {PARAMS}) & {*nodes.children(at[:-1])}
            return (*at, PARAMS) if inner and not beside else at, "the name"
    outer: Path = ()
    while True:
        tops = nodes.children(outer)
        words = [word for word in STATE if nodes.is_state((*outer, word))]
        for name in _NAMES[side]:
            others = {str(key) for key in tops} - {name, *words, *COLLECTIONS, RNG}
            if not nodes.has((*outer, name)):
                continue
            if words or not others:
                return (*outer, name), "the name"
        if words:
            raise CheckpointError(
                f"{nodes.store.path} has {', '.join(words)} and so is a train state, "
                f"but no {' or '.join(_NAMES[side][:2])}. It has "
                f"{some([str(key) for key in tops], 8)}: say where the parameters are, "
                "such as --params="
                + str(next((k for k in tops if nodes.is_model((*outer, k))), "/"))
                + "."
            )
        if len(tops) != 1 or not _holds_state(nodes, (*outer, *tops)):
            return (), "nothing says where they are, so all of it is the model's state"
        outer = (*outer, *tops)


def _best(nodes: _Nodes, at: Path, why: str, own: Tree | None) -> tuple[Path, str]:
    """The place found, or one where more of a module's own leaves are."""
    if own is None:
        return at, why
    wanted = [leaf for leaf in own.leaves if own.nnx or leaf.collection == PARAMS]
    names = {name_of(leaf.path) for leaf in wanted}
    names |= {name_of(own.place(leaf.text)) for leaf in wanted}
    paths = nodes.store.leaves

    def hits(root: Path) -> int:
        inside = (path for path in paths if path[: len(root)] == root)
        return sum(name_of(path[len(root) :]) in names for path in inside)

    tops = [(key,) for key in nodes.children(()) if nodes.has((key,))]
    best = max([at, (), *tops], key=hits)
    return (at, why) if best == at else (best, "the module's leaves are there")


def _holds_state(nodes: _Nodes, path: Path) -> bool:
    return any(nodes.is_state((*path, key)) for key in nodes.children(path))


def _roots(
    nodes: _Nodes,
    side: str,
    at: Path,
    names: Iterable[str],
) -> tuple[dict[str, Path], Path]:
    """Where the collections are, and the node of the train state around them."""
    above = at[:-1]
    beside = [key for key in nodes.children(above) if (*above, key) != at] if at else []
    if side == "nnx" and at[-1:] != (PARAMS,):
        return {"": at}, above
    known = {*COLLECTIONS, *names}
    beside = [key for key in beside if key != RNG]
    dicts = [key for key in beside if nodes.has((*above, key))]
    state = {key for key in beside if nodes.is_state((*above, key))}
    # Where there is no sign of a train state, all that stands there is variables.
    if at[-1:] == (PARAMS,) and len(dicts) == len(beside) and not state & {*dicts}:
        known |= {key for key in dicts if not _is_copy(nodes, at, (*above, key))}
    roots = {PARAMS: at}
    roots |= {str(key): (*above, key) for key in dicts if str(key) in known - state}
    outer = above[:-1] if above[-1:] == (PARAMS,) else above
    return roots, outer


def _is_copy(nodes: _Nodes, one: Path, other: Path) -> bool:
    """Whether every leaf below `other` is below `one`, too, in the same shape."""
    leaves = nodes.store.leaves
    inside = [path for path in leaves if path[: len(other)] == other]
    twins = [leaves.get((*one, *path[len(other) :])) for path in inside]
    return bool(inside) and all(
        twin is not None and twin.shape == leaves[path].shape
        for path, twin in zip(inside, twins, strict=True)
    )


# Boxes.


def box_candidates(paths: Iterable[Path]) -> set[Path]:
    """Paths that end in `value`, the only leaf below its node."""
    paths = list(paths)
    below = collections.Counter(path[:n] for path in paths for n in range(len(path)))
    return {p for p in paths if p[-1:] == (BOX,) and below[p[:-1]] == 1}


def _boxes(
    store: Store,
    roots: Mapping[str, Path],
    inside: Mapping[Path, str],
    side: str,
    own: Tree | None,
    boxes: bool | None,
) -> tuple[frozenset[Path], tuple[str, ...]]:
    """The paths of leaves in boxes, and what to say of it."""
    if not store.boxes or boxes is False:
        return frozenset(), ()
    tops = {(*root, BOX) for root in roots.values()}  # no box, for it has no name
    candidates = box_candidates(store.leaves) - tops
    if boxes is None and own is not None:
        # A module knows its names.
        found = _boxed_places(roots, inside, own)
        rest = {path for path in candidates if path not in inside}
        names = {name_of(leaf.path) for leaf in own.leaves}
        extra = {
            path
            for path in candidates - found
            if path in inside and name_of(path[len(roots[inside[path]]) :]) not in names
        }
        return frozenset(found | rest | extra), ()
    mine = [path for path in inside if path in candidates]
    others = [path for path in inside if path not in candidates]
    # Linen boxes what it pleases; of an NNX state, nearly all Variables have one.
    if boxes is None and side == "nnx" and len(others) > len(mine):
        taken = f"{len(mine)} leaves called `value` are taken for parameters"
        return frozenset(), (taken,) if mine else ()
    if not mine or (side == "nnx" and not others):
        return frozenset(candidates), ()
    note = (
        f"{len(mine)} leaves stand below `value`, taken for their box "
        "(--noboxes: it is a parameter's name)"
    )
    return frozenset(candidates), (note,)


def _boxed_places(
    roots: Mapping[str, Path], inside: Mapping[Path, str], own: Tree
) -> set[Path]:
    """The paths up to the level `value` that a module has as boxes."""
    boxed = {}
    for leaf in own.leaves:
        place = own.place(leaf.text)
        if len(place) > len(leaf.path):
            at = _box_level(leaf, place)
            boxed[name_of(place)] = len(place) - at
    found = set()
    for path, collection in inside.items():
        below = path[len(roots[collection]) :]
        after = boxed.get(name_of(below))
        if after is not None:
            found.add(path[: len(path) - after + 1])
    return found


def _box_level(leaf: Any, place: Path) -> int:
    """Which level of a place is the box: the first that is not in the leaf's path."""
    for i, key in enumerate(place):
        if i >= len(leaf.path) or str(leaf.path[i]) != key:
            return i
    return len(place) - 1


# RNG state.


def _rng_paths(leaves: Sequence[ModelLeaf], own: Tree | None) -> set[Path]:
    """The paths of RNG state, by type where the module is known, else by its looks."""
    if own is not None and own.nnx is not None:
        state = {name_of(leaf.path) for leaf in own.nnx.rng}
        names = {name_of(leaf.path) for leaf in own.leaves}
        sure = {leaf.path for leaf in leaves if name_of(leaf.name) in state}
        open_ = [leaf for leaf in leaves if name_of(leaf.name) not in names | state]
        return sure | looks_random(open_)
    return looks_random(leaves)


def looks_random(leaves: Sequence[ModelLeaf]) -> set[Path]:
    """Paths of typed keys, their counts, and what is `rngs/.../key` or `count`."""
    typed = {leaf.name[:-1] for leaf in leaves if leaf.leaf.kind.startswith("key<")}
    return {
        leaf.path
        for leaf in leaves
        if str(leaf.name[-1:] and leaf.name[-1]) in ("key", "count")
        and leaf.leaf.dtype.kind in "ui"
        and (leaf.name[:-1] in typed or "rngs" in map(str, leaf.name[:-1]))
    } | {leaf.path for leaf in leaves if leaf.leaf.kind.startswith("key<")}
