"""One run of `plan`: which leaf goes where, and what would be lost.

The model's leaves go by the correspondence of both trees (`parity.mapping`), trees of
an optimizer go where their parameters go, all else keeps its path.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from parity.mapping.correspondence import Correspondence, Entry, match
from parity.mapping.known import normal
from parity.mapping.layout import Step, describe
from parity.mapping.leaves import Leaf as Named
from parity.mapping.leaves import NNXLeaves
from parity.mapping.rules import Ignore, Rules
from parity.migration import guessed, lazily
from parity.migration.optimizer import Follower, Twin, find_followers
from parity.migration.source import (
    OBJECT_NODES,
    OPTIMIZER,
    PARAMS,
    RNG,
    STATE,
    ModelLeaf,
    Source,
)
from parity.migration.trees import (
    BOX,
    Tree,
    boxed_place,
    name_of,
    parse_text,
    text_of,
    unboxed_place,
)
from parity.trees import Difference
from shared.stores import Leaf, Path, path_text
from shared.stores.orbax_writer import array_name
from shared.stores.store import numeric_order, some
from shared.stores.views import cast

MODEL = "model"


class Options(NamedTuple):
    """How a migration is asked for; see `plan`."""

    to: str
    form: str
    optimizer: str
    cast: bool


class Move(NamedTuple):
    """How some leaves of the source become some of the target.

    Attributes:
      sources: paths in the source.
      targets: paths in the target.
      steps: changes of layout, from Linen to NNX.
      why: "same", "rule 2", "with its parameter", "as it is".
      cast: dtypes from and to, where values are rounded.
    """

    sources: tuple[Path, ...]
    targets: tuple[Path, ...]
    steps: tuple[Step, ...] = ()
    why: str = "as it is"
    cast: tuple[str, str] | None = None

    def __str__(self) -> str:
        sources, targets = (
            ", ".join(map(path_text, paths)) for paths in (self.sources, self.targets)
        )
        how = f" by {describe(self.steps)}" if self.steps else ""
        how += f" cast {self.cast[0]} to {self.cast[1]}" if self.cast else ""
        return f"{sources} -> {targets}{how} ({self.why})"


@dataclasses.dataclass
class Draft:
    """What a run has found so far; see `Plan`."""

    trees: Correspondence = dataclasses.field(
        default_factory=lambda: Correspondence(())
    )
    leaves: dict[Path, Leaf] = dataclasses.field(default_factory=dict)
    empty: dict[Path, str] = dataclasses.field(default_factory=dict)
    moves: list[Move] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    followers: tuple[Follower, ...] = ()
    carried: list[Path] = dataclasses.field(default_factory=list)
    ignored: list[Path] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)

    def differ(self, path: str, what: str, detail: str) -> None:
        """Notes why nothing can be written."""
        self.differences.append(Difference(path, what, detail))


class Origin(NamedTuple):
    """How the Linen checkpoint was laid out that an NNX source was made of.

    Attributes:
      params: path of the parameters; None: not known.
      collections: by the path of an NNX leaf, where it is not `params`.
      known: where names or layouts are not the same, what they were.
      boxed: texts of the Linen leaves in boxes.
      empty: nodes without leaves, which NNX does not keep.
      mirrors: whether collections are a level of the optimizer's trees.
    """

    params: str | None = None
    collections: Mapping[str, str] = {}
    known: tuple[guessed.Known, ...] = ()
    boxed: frozenset[str] = frozenset()
    empty: Mapping[Path, str] = {}
    mirrors: bool = False

    def as_dict(self) -> dict[str, Any]:
        """As a manifest keeps it."""
        empty = [[list(path), what] for path, what in self.empty.items()]
        known = [entry._asdict() for entry in self.known]
        lists = {"boxed": sorted(self.boxed), "empty": empty, "known": known}
        return {**self._asdict(), **lists}

    @classmethod
    def of(cls, data: Mapping[str, Any] | None) -> Origin:
        """From a manifest."""
        if not data:
            return cls()
        return cls(
            data["params"],
            data["collections"],
            tuple(_known(entry) for entry in data["known"]),
            frozenset(data["boxed"]),
            {tuple(path): what for path, what in data["empty"]},
            data["mirrors"],
        )


def _known(entry: Mapping[str, Any]) -> guessed.Known:
    shapes = tuple(map(tuple, entry["shapes"]))
    return guessed.Known(
        tuple(entry["linen"]), tuple(entry["nnx"]), shapes, entry["layout"]
    )


class OwnTree(NamedTuple):
    """The tree of the source, and its leaves by text."""

    tree: Tree
    leaves: dict[str, ModelLeaf]


def make_draft(
    source: Source,
    options: Options,
    trees: Mapping[str, Tree | None],
    rules: Rules,
    origin: Origin,
) -> Draft:
    """Finds a place for each leaf of a source.

    Args:
      source: the checkpoint.
      options: what is asked for.
      trees: of the modules, by side, where they are given.
      rules: the user's.
      origin: of a source that was itself migrated.
    """
    draft = Draft()
    rules, out = _left_out(source, rules, draft)
    own = _own_tree(source, trees, rules, options, origin, draft)
    other, rules = _other_tree(
        own.tree, options, trees[options.to], rules, origin, draft
    )
    linen, nnx = (own.tree, other) if options.to == "nnx" else (other, own.tree)
    draft.trees = match(linen.leaves, nnx.nnx or NNXLeaves(nnx.leaves), rules)
    places = _Places(source, options, other, origin)
    migration = _Migration(source, options, own, other, places, origin, out, draft)
    migration.run()
    if options.to == "nnx":
        draft.origin = _origin(source, own, draft, migration.former_empty).as_dict()
    return draft


# What rules leave out of what is no part of the model.


def _left_out(source: Source, rules: Rules, draft: Draft) -> tuple[Rules, set[Path]]:
    """The rules that are for the model, and paths of leaves that others leave out."""
    beside = {path_text(path): path for path in source.rest}
    for leaf in source.rng:
        beside[path_text(leaf.path)] = beside[name_of((RNG, *leaf.name))] = leaf.path
    texts = [text_of(leaf.collection or PARAMS, leaf.name) for leaf in source.model]
    kept: list[Ignore] = []
    out: set[Path] = set()
    for rule in rules.ignored:
        hits = {
            path
            for text, path in beside.items()
            if rule.side == source.side and rule.pattern.fullmatch(text)
        }
        if not hits or any(map(rule.pattern.fullmatch, texts)):
            kept.append(rule)
        if hits:
            draft.notes.append(f"left out: {len(hits)} beside the model, {rule}")
        out |= hits
    draft.ignored += sorted(out, key=numeric_order)
    return dataclasses.replace(rules, ignored=tuple(kept)), out


# The two trees.


def _own_tree(
    source: Source,
    trees: Mapping[str, Tree | None],
    rules: Rules,
    options: Options,
    origin: Origin,
    draft: Draft,
) -> OwnTree:
    """The tree of the source: its module's, or what the checkpoint says."""
    tree = trees[source.side]
    if tree is not None:
        return _module_tree(source, tree, options, draft)
    leaves = [_named(source, leaf) for leaf in source.model]
    if source.side == "nnx":
        linen = trees["linen"]
        if linen is not None:
            known = guessed.collections_from(linen.leaves, rules)
            leaves = [_collected(leaf, known) for leaf in leaves]
        else:
            back = guessed.linen_from_nnx(
                leaves, rules, origin.collections, origin.known
            )
            leaves = list(back.nnx)
    by_text = {x.text: leaf for x, leaf in zip(leaves, source.model, strict=True)}
    places = {leaf.text: unboxed_place(leaf) for leaf in leaves}
    return OwnTree(Tree(tuple(leaves), None, places), by_text)


def _module_tree(source: Source, tree: Tree, options: Options, draft: Draft) -> OwnTree:
    """A module's tree with the leaves that the source has for it."""
    by_name = _names_in(tree, source.side)
    leaves = {leaf.text: leaf for leaf in tree.leaves}
    places = dict(tree.places)
    found: dict[str, ModelLeaf] = {}
    for mine in source.model:
        key = (mine.collection or PARAMS) if source.side == "linen" else ""
        known = by_name.get((key, name_of(mine.name)))
        if known is None or known.text in found:
            # Too much: the matching says so, or a rule may leave it out.
            known = _named(source, mine)
            places[known.text] = unboxed_place(known)
        else:
            _compare(known, mine, source.side, options, draft)
        found[known.text] = mine
        leaves[known.text] = known._replace(
            shape=mine.leaf.shape, dtype=mine.leaf.dtype, axes=None
        )
    kept = tuple(leaf._replace(axes=None) for leaf in leaves.values())
    nnx = tree.nnx and dataclasses.replace(tree.nnx, leaves=kept)
    return OwnTree(Tree(kept, nnx, places), found)


def _names_in(tree: Tree, side: str) -> dict[tuple[str, str], Named]:
    """A module's leaves by collection (of Linen) and path."""
    found: dict[tuple[str, str], Named] = {}
    for leaf in tree.leaves:
        paths = [leaf.path]
        if tree.nnx is not None:
            aliases = tree.nnx.aliases.get(leaf.text, ())
            paths += [parse_text(text)[1] for text in aliases]
        for path in paths:
            key = leaf.collection if side == "linen" else ""
            found.setdefault((key, name_of(path)), leaf)
    return found


def _compare(
    known: Named, mine: ModelLeaf, side: str, options: Options, draft: Draft
) -> None:
    """Compares a leaf of the source with what its own module says of it."""
    module = f"the {side} module that was given"
    if mine.leaf.shape != known.shape:
        draft.differ(
            known.text,
            "shape",
            f"the checkpoint has {mine.leaf.shape}, {module} {known.shape}: give the "
            "module that the checkpoint is of",
        )
    elif str(mine.leaf.dtype) != str(known.dtype) and not options.cast:
        draft.differ(
            known.text,
            "dtype",
            f"the checkpoint has {mine.leaf.dtype}, {module} {known.dtype}: give the "
            "module that the checkpoint is of, or --cast to round values where the "
            "target's dtype is another",
        )


def _named(source: Source, leaf: ModelLeaf) -> Named:
    """A leaf of the source in the mapping's naming."""
    name, collection = leaf.name, leaf.collection
    if source.side == "nnx":  # a list's indices are text in a checkpoint
        name = tuple(
            int(key) if _is_index(key) and name[:i] not in source.lists else key
            for i, key in enumerate(name)
        )
    else:
        collection = collection or PARAMS
    return Named(collection, name, leaf.leaf.shape, leaf.leaf.dtype)


def _collected(leaf: Named, known: Mapping[str, str]) -> Named:
    """An NNX leaf in the collection that Linen has it in."""
    name = normal(text_of(PARAMS, leaf.path)).partition("/")[2]
    return leaf._replace(collection=leaf.collection or known.get(name) or PARAMS)


def _is_index(key: str | int) -> bool:
    return isinstance(key, str) and key.isdecimal() and str(int(key)) == key


def _other_tree(
    own: Tree,
    options: Options,
    tree: Tree | None,
    rules: Rules,
    origin: Origin,
    draft: Draft,
) -> tuple[Tree, Rules]:
    """The tree of the target and the rules that lead there.

    It is its module's, or what rules, an earlier migration and names say.
    """
    if tree is not None:
        return tree, rules
    if options.to == "nnx":
        guess = guessed.nnx_from_linen(own.leaves, rules)
        draft.differences += guess.differences
        places = {leaf.text: boxed_place(leaf) for leaf in guess.leaves}
        draft.notes.append(
            "no NNX module was given: names are those of rules, else Linen's"
        )
        return Tree(guess.leaves, NNXLeaves(guess.leaves), places), rules
    back = guessed.linen_from_nnx(own.leaves, rules, origin.collections, origin.known)
    draft.differences += back.differences
    places = {
        leaf.text: boxed_place(leaf)
        if leaf.text in origin.boxed
        else unboxed_place(leaf)
        for leaf in back.linen
    }
    counts = collections.Counter(leaf.collection for leaf in back.linen)
    found = ", ".join(f"{count} in {name}" for name, count in counts.items())
    draft.notes.append(
        "no Linen module was given: names are those of rules and of the manifest, "
        "else NNX's; collections are those, or of the NNX module's types, else params: "
        f"{found}"
    )
    return Tree(back.linen, None, places), back.rules


# Places in the target.


class _Places:
    """Where things stand in the target."""

    def __init__(
        self, source: Source, options: Options, tree: Tree, origin: Origin
    ) -> None:
        self._source, self._options, self._tree = source, options, tree
        self._origin = origin
        self._below: dict[Path, set[Any]] = {}
        for path in (*source.rest, *source.store.empty):
            for length in range(len(path)):
                self._below.setdefault(path[:length], set()).add(path[length])
        # Of a type-blind format, and of what NNX saves, a tuple's indices are text.
        blind = source.store.format not in ("orbax", "tree")
        self._text_indices = blind or source.side == "nnx"

    @property
    def own_optimizer(self) -> bool:
        """Whether the target is what an `nnx.Optimizer` keeps."""
        return self._options.to == "nnx" and self._options.optimizer == "nnx"

    def model(self, collection: str) -> Path:
        """Of a collection."""
        outer = self._source.outer
        if self._options.to == "nnx":
            return () if self._source.whole else (*outer, MODEL)
        if self._origin.params is None:
            return (*outer, collection)
        params = tuple(key for key in self._origin.params.split("/") if key)
        if collection == PARAMS or not params:
            return params
        return (*params[:-1], collection)

    def leaf(self, text: str) -> Path:
        """Of a leaf of the model."""
        collection = self._tree.leaf(text).collection
        return (*self.model(collection), *self._within(text))

    def twin(self, follower: Follower, text: str) -> Path:
        """Of a follower's leaf that belongs to a leaf of the model."""
        level: Path = ()
        if self._options.to == "linen" and self._origin.mirrors:
            level = (self._tree.leaf(text).collection,)
        return (*self.beside(follower.prefix), *level, *self._within(text))

    def _within(self, text: str) -> Path:
        boxed = self._options.to == "linen" or self._options.form == "state"
        return self._tree.place(text, boxed=boxed)

    def former(self, path: Path) -> Path:
        """Of what is no part of the model, as optax would keep it."""
        return self.beside(path, own=False)

    def beside(self, path: Path, *, own: bool | None = None) -> Path:
        """Of what is no part of the model.

        Args:
          path: in the source.
          own: whether NNX's optimizer keeps it; None: as the options say.
        """
        outer = self._source.outer
        inside = path[len(outer) :]
        if path[: len(outer)] != outer or not {*map(str, inside[:1])} & {*STATE}:
            return path
        if self._text_indices:
            inside = tuple(
                self._index((*outer, *inside[:i]), key) for i, key in enumerate(inside)
            )
        if own is None:
            own = self.own_optimizer
        if own and inside[0] in ("opt_state", "step"):
            return (*outer, "optimizer", *map(str, inside))
        to_linen = self._options.to == "linen"
        if to_linen and inside[:1] == ("optimizer",) and inside[1:2] in _OWN:
            inside = inside[1:]
        return (*outer, *inside)

    def _index(self, node: Path, key: Any) -> Any:
        """A key that is an index as a number."""
        siblings = self._below.get(node, set())
        if all(str(other).isdecimal() for other in siblings) and siblings:
            return int(key)
        return key

    def carried(self, path: Path) -> Path:
        """Of a leaf that is no part of the model, nor follows it."""
        outer = self._source.outer
        state = str(path[len(outer)]) in STATE if len(path) > len(outer) else False
        boxes = state and self._source.side == "nnx" and path in self._source.boxed
        place = self.beside(path[:-1] if boxes else path)
        if self.own_optimizer and place[: len(outer) + 1] == (*outer, "optimizer"):
            return (*place, BOX) if self._options.form == "state" else place
        return place

    def random(self, name: Path) -> Path:
        """Of RNG state of the model, by its path in it."""
        if self._options.to == "linen":
            return (*self._source.outer, RNG, *name)
        boxed: Path = (BOX,) if self._options.form == "state" else ()
        return (*self.model(PARAMS), *map(str, name), *boxed)


_OWN = (("opt_state",), ("step",))


# The migration.


class _Migration:
    """Gives each leaf of the source its place, into a draft."""

    def __init__(
        self,
        source: Source,
        options: Options,
        own: OwnTree,
        other: Tree,
        places: _Places,
        origin: Origin,
        out: set[Path],
        draft: Draft,
    ) -> None:
        self.source, self.options, self.origin = source, options, origin
        self.own, self.other, self.places = own, other, places
        self.out, self.draft = out, draft
        self.to_nnx = options.to == "nnx"
        self.texts = {leaf.path: text for text, leaf in own.leaves.items()}
        self.made_of: dict[Path, str] = {}
        self.former_empty: dict[Path, str] = {}

    def run(self) -> None:
        self._take_differences()
        leaves = {text: leaf.leaf for text, leaf in self.own.leaves.items()}
        paths = {text: leaf.path for text, leaf in self.own.leaves.items()}
        for entry in self.draft.trees.entries:
            self._move_model(entry, leaves, paths)
        self.draft.followers = find_followers(self.source)
        following: set[Path] = set()
        for follower in self.draft.followers:
            following.update(twin.path for twin in follower.twins)
            self._move_follower(follower)
        for path, leaf in self.source.rest.items():
            if path not in following and path not in self.out:
                self._carry(path, leaf)
        self._move_random()
        self._place_empty()
        self._check_names()

    def _take_differences(self) -> None:
        """The correspondence's, but for dtypes that may be cast."""
        trees, draft = self.draft.trees, self.draft
        draft.differences += [
            d
            for d in trees.differences
            if not (d.what == "dtype" and self.options.cast)
        ]
        ignored = trees.ignored.get(self.source.side, ())
        draft.ignored += [
            self.own.leaves[text].path for text in ignored if text in self.own.leaves
        ]
        here = {text for entry in trees.entries for text in self._sides(entry)[0]}
        lacking = here - self.own.leaves.keys()
        for text in sorted(lacking):
            leaf = self.own.tree.leaf(text)
            draft.differ(
                text,
                "missing",
                f"the {self.source.side} module that was given has it ({leaf.shape} "
                f"{leaf.dtype}), the checkpoint has not: give the module that the "
                "checkpoint is of",
            )

    def _sides(self, entry: Entry) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Texts of the source and of the target."""
        pair = (entry.linen, entry.nnx)
        return pair if self.to_nnx else (pair[1], pair[0])

    def _laid_out(self, entry: Entry, leaves: Sequence[Leaf]) -> list[Leaf]:
        way = lazily.forward if self.to_nnx else lazily.backward
        return way(entry.steps, leaves)

    def _move_model(
        self, entry: Entry, leaves: Mapping[str, Leaf], paths: Mapping[str, Path]
    ) -> None:
        sources, targets = self._sides(entry)
        if not all(text in leaves for text in sources):
            return  # said already
        made = self._laid_out(entry, [leaves[text] for text in sources])
        places = tuple(self.places.leaf(text) for text in targets)
        casts = None
        if self.options.cast:
            wanted = [self.other.leaf(text).dtype for text in targets]
            casts = self._casts(sources, made, wanted)
            made = [
                cast(leaf, dtype) if casts else leaf
                for leaf, dtype in zip(made, wanted, strict=True)
            ]
        move = Move(
            tuple(paths[text] for text in sources),
            places,
            entry.steps,
            entry.origin,
            casts,
        )
        self._add(move, made)

    def _casts(
        self, texts: Sequence[str], leaves: Sequence[Leaf], wanted: Sequence[Any]
    ) -> tuple[str, str] | None:
        """What dtypes are rounded, if so; those of which none is a float are not."""
        pairs = {
            (str(leaf.dtype), str(dtype))
            for leaf, dtype in zip(leaves, wanted, strict=True)
        }
        [(have, want), *_] = sorted(pairs)
        if have == want:
            return None
        if all(jnp.issubdtype(x, jnp.floating) for pair in pairs for x in pair):
            return have, want
        self.draft.differ(
            ", ".join(texts),
            "dtype",
            f"{have} is not rounded to {want}: only floats are",
        )
        return None

    def _move_follower(self, follower: Follower) -> None:
        twins = {self.texts[twin.model]: twin for twin in follower.twins}
        ignored = set(self.draft.trees.ignored.get(self.source.side, ()))
        self.draft.ignored += [x.path for text, x in twins.items() if text in ignored]
        for entry in self.draft.trees.entries:
            sources, targets = self._sides(entry)
            have = [twins[text] for text in sources if text in twins]
            if have and self._can_follow(follower, entry, sources, have):
                made = self._laid_out(entry, [twin.leaf for twin in have])
                places = tuple(self.places.twin(follower, text) for text in targets)
                paths = tuple(twin.path for twin in have)
                self._add(Move(paths, places, entry.steps, "with its parameter"), made)

    def _can_follow(
        self,
        follower: Follower,
        entry: Entry,
        sources: Sequence[str],
        have: Sequence[Twin],
    ) -> bool:
        """Whether an entry can be applied to a follower's leaves; else says why not."""
        where = f"{name_of(follower.prefix)} of {', '.join(sources)}"
        if len(have) < len(sources):
            self.draft.differ(
                where,
                "missing",
                f"{', '.join(entry.linen)} and {', '.join(entry.nnx)} are one, and of "
                f"{len(sources)} parts only {len(have)} are here. {self._ignore(have)}",
            )
            return False
        shapes = [(x.leaf.shape, self.own.leaves[self.texts[x.model]]) for x in have]
        same = all(shape == model.leaf.shape for shape, model in shapes)
        if entry.steps and not same:
            self.draft.differ(
                where,
                "shape",
                f"its parameter changes its layout ({describe(entry.steps)}), and it "
                f"has another shape, {shapes[0][0]} and not "
                f"{shapes[0][1].leaf.shape}, so that it cannot follow. "
                f"{self._ignore(have)}",
            )
            return False
        return True

    def _ignore(self, twins: Sequence[Twin]) -> str:
        text = path_text(twins[0].path)
        return f"To leave it out: [[ignore]] with {self.source.side} = '{text}'"

    def _carry(self, path: Path, leaf: Leaf) -> None:
        outer = len(self.source.outer)
        if self.to_nnx and path[outer : outer + 1] == (RNG,):
            target = self.places.random(path[outer + 1 :])
            self._add(Move((path,), (target,), (), "RNG state"), [leaf])
            return
        self.draft.carried.append(path)
        self._add(Move((path,), (self.places.carried(path),)), [leaf])

    def _move_random(self) -> None:
        draft = self.draft
        for leaf in self.source.rng:
            if leaf.path not in self.out:
                target = self.places.random(leaf.name)
                move = Move((leaf.path,), (target,), (), "RNG state")
                self._add(move, [leaf.leaf])
        kept = [leaf for leaf in self.source.rng if leaf.path not in self.out]
        if kept:
            draft.notes.append(
                f"{len(kept)} leaves of RNG state, which Linen does not keep, stand "
                f"under {RNG}; [[ignore]] nnx = '{RNG}/.*' leaves them out"
            )
        if self.to_nnx and self.other.nnx is not None:
            here = {target for move in draft.moves for target in move.targets}
            lacking = [
                leaf
                for leaf in self.other.nnx.rng
                if self.places.random(tuple(leaf.path)) not in here
            ]
            if lacking:
                draft.notes.append(
                    f"{len(lacking)} leaves of RNG state of the NNX module are not in "
                    "the source and are not written: the model keeps its own "
                    f"({some([name_of(x.path) for x in lacking], 3)})"
                )

    def _place_empty(self) -> None:
        """Nodes without leaves: where the optimizer's state has them, they are kept."""
        roots = tuple(self.source.roots.values())
        lost = []
        for path, what in self.source.store.empty.items():
            if any(path[: len(root)] == root for root in roots):
                if path[-1] not in OBJECT_NODES:
                    lost.append(path)
                continue
            # Only orbax tells an empty state from an empty dict, and calls it so.
            if self.source.store.format != "orbax" and self._is_state(path):
                what = "None"
            self.former_empty[self.places.former(path)] = what
            if not (self.places.own_optimizer and self._is_state(path)):
                self.draft.empty[self._empty_place(path)] = what
        if lost:
            self.draft.notes.append(
                f"{len(lost)} nodes of the model hold nothing and are not kept: "
                f"{some([path_text(path) for path in lost], 4)}"
            )
        if not self.to_nnx:
            self._fill_gaps()
        taken = set(self.draft.leaves)
        self.draft.empty = {
            path: what
            for path, what in self.draft.empty.items()
            if path not in taken and not _holds(path, taken)
        }

    def _is_state(self, path: Path) -> bool:
        """Whether it is a part of an optimizer's state."""
        outer = len(self.source.outer)
        return len(path) > outer and str(path[outer]) in OPTIMIZER

    def _empty_place(self, path: Path) -> Path:
        for follower in self.draft.followers:
            if path in follower.empty:
                text = self.texts[follower.empty[path]]
                for entry in self.draft.trees.entries:
                    sources, targets = self._sides(entry)
                    if sources == (text,) and len(targets) == 1:
                        return self.places.twin(follower, targets[0])
        return self.places.beside(path)

    def _fill_gaps(self) -> None:
        """An `nnx.Optimizer` drops empty states, and a tuple needs them."""
        draft = self.draft
        for path, what in self.origin.empty.items():
            draft.empty.setdefault(path, what)
        indices: dict[Path, set[int]] = {}
        for path in (*draft.leaves, *draft.empty):
            for i, key in enumerate(path):
                if isinstance(key, int) and {*map(str, path[:i])} & {*OPTIMIZER}:
                    indices.setdefault(path[:i], set()).add(key)
        filled = 0
        for node, have in indices.items():
            for index in set(range(max(have))) - have:
                draft.empty[(*node, index)] = "None"
                filled += 1
        if filled:
            draft.notes.append(
                f"{filled} empty states that NNX does not keep were put back before "
                "others; any at the end of a chain are not known"
            )

    # The draft.

    def _add(self, move: Move, leaves: Sequence[Leaf]) -> None:
        source = ", ".join(map(path_text, move.sources))
        self.draft.moves.append(move)
        for path, leaf in zip(move.targets, leaves, strict=True):
            other = self.made_of.setdefault(path, source)
            if path in self.draft.leaves:
                self.draft.differ(
                    path_text(path),
                    "two sources",
                    f"both {other} and {source} become it: a rule may rename one, or "
                    "leave it out",
                )
            self.draft.leaves[path] = leaf

    def _check_names(self) -> None:
        """No leaf below a leaf, and no two that orbax keeps under one name."""
        names: dict[str, Path] = {}
        for path in self.draft.leaves:
            for length in range(len(path)):
                if path[:length] in self.draft.leaves:
                    above = path[:length]
                    self.draft.differ(
                        path_text(path),
                        "two sources",
                        f"{path_text(above)} (of {self.made_of[above]}) is a leaf, and "
                        f"{self.made_of[path]} would stand below it: rename one",
                    )
            other = names.setdefault(array_name(path), path)
            if other != path:
                self.draft.differ(
                    path_text(path),
                    "two sources",
                    f"orbax keeps {other} and {path} under one name: the one is made "
                    f"of {self.made_of[other]}, the other of {self.made_of[path]}; "
                    "rename one with a rule",
                )


def _holds(path: Path, leaves: Iterable[Path]) -> bool:
    return any(leaf[: len(path)] == path for leaf in leaves)


def _origin(
    source: Source, own: OwnTree, draft: Draft, empty: Mapping[Path, str]
) -> Origin:
    """How the source is laid out, for the way back."""
    collections = {
        name_of(parse_text(text)[1]): parse_text(entry.linen[0])[0]
        for entry in draft.trees.entries
        for text in entry.nnx
    }
    shapes = {leaf.text: leaf.shape for leaf in own.tree.leaves}
    known = [
        guessed.known_from(entry, [shapes[text] for text in entry.linen])
        for entry in draft.trees.entries
    ]
    return Origin(
        name_of(source.params),
        {name: found for name, found in collections.items() if found != PARAMS},
        tuple(entry for entry in known if entry is not None),
        frozenset(
            text
            for text, leaf in own.leaves.items()
            if any(leaf.path[:i] in source.boxed for i in range(len(leaf.path) + 1))
        ),
        empty,
        source.mirrors != source.params,
    )
