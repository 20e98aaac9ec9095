"""One run of `plan`: which leaf goes where, and what would be lost.

The model's leaves go by the correspondence of both trees (`parity.mapping`), trees of
an optimizer go where their parameters go, all else keeps its path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from parity.mapping.correspondence import Entry, match
from parity.mapping.layout import describe
from parity.mapping.leaves import NNXLeaves
from parity.mapping.rules import Rules
from parity.migration import lazily
from parity.migration.draft import Draft, Move, Options
from parity.migration.optimizer import Follower, Twin, find_followers
from parity.migration.origin import Origin, origin_of
from parity.migration.places import Places
from parity.migration.sides import OwnTree, left_out, other_tree, own_tree
from parity.migration.source import OBJECT_NODES, OPTIMIZER, PARAMS, RNG, Source
from parity.migration.trees import BOX, Tree, name_of
from shared.stores import Leaf, Path, path_text
from shared.stores.orbax_writer import array_name
from shared.stores.store import some
from shared.stores.views import cast


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
    rules, out = left_out(source, rules, draft)
    own = own_tree(source, trees, rules, options, origin, draft)
    other, rules = other_tree(
        own.tree, options, trees[options.to], rules, origin, draft
    )
    linen, nnx = (own.tree, other) if options.to == "nnx" else (other, own.tree)
    draft.trees = match(linen.leaves, nnx.nnx or NNXLeaves(nnx.leaves), rules)
    places = Places(source, options, other, origin)
    migration = _Migration(source, options, own, other, places, origin, out, draft)
    migration.run()
    if options.to == "nnx":
        draft.origin = origin_of(
            source,
            own.leaves,
            draft.trees,
            migration.former_empty,
            places.model(PARAMS),
            boxed_state=options.form == "state",
        ).as_dict()
    return draft


class _Migration:
    """Gives each leaf of the source its place, into a draft."""

    def __init__(
        self,
        source: Source,
        options: Options,
        own: OwnTree,
        other: Tree,
        places: Places,
        origin: Origin,
        out: set[Path],
        draft: Draft,
    ) -> None:
        self.source, self.options, self.origin = source, options, origin
        self.own, self.other, self.places = own, other, places
        self.out, self.draft = out, draft
        self.to_nnx = options.to == "nnx"
        self.texts = {leaf.path: text for text, leaf in own.leaves.items()}
        self.made_of: dict[Path, tuple[Path, ...]] = {}
        self.former_empty: dict[Path, str] = {}

    def run(self) -> None:
        self._take_differences()
        leaves = {text: leaf.leaf for text, leaf in self.own.leaves.items()}
        paths = {text: leaf.path for text, leaf in self.own.leaves.items()}
        for entry in self.draft.trees.entries:
            self._move_model(entry, leaves, paths)
        sides = map(self._sides, self.draft.trees.entries)
        self.renamed = {
            sources[0]: targets[0]
            for sources, targets in sides
            if len(sources) == len(targets) == 1
        }
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
        self._check_all()

    def _take_differences(self) -> None:
        """The correspondence's, but for dtypes that may be cast."""
        trees, draft = self.draft.trees, self.draft
        told = {d.path for d in draft.differences if d.what == "rule"}
        draft.differences += [
            d
            for d in trees.differences
            if not (d.what == "dtype" and self.options.cast)
            and not (d.what == "rule" and d.path in told)
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
        twins = {
            self.texts[twin.model]: twin
            for twin in follower.twins
            if twin.path not in self.out
        }
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
        taken = {
            path[:length]
            for path in self.draft.leaves
            for length in range(len(path) + 1)
        }
        self.draft.empty = {
            path: what for path, what in self.draft.empty.items() if path not in taken
        }

    def _is_state(self, path: Path) -> bool:
        """Whether it is a part of an optimizer's state."""
        outer = len(self.source.outer)
        return len(path) > outer and str(path[outer]) in OPTIMIZER

    def _empty_place(self, path: Path) -> Path:
        for follower in self.draft.followers:
            if path in follower.empty:
                text = self.renamed.get(self.texts[follower.empty[path]])
                if text is not None:
                    return self.places.twin(follower, text)
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
        if self.source.has_own_optimizer and self.origin.model is None:
            draft.notes.append(
                f"an nnx.Optimizer keeps no empty states: {filled} were put back "
                "before others; any at the end of a chain are not known"
            )

    # The draft.

    def _add(self, move: Move, leaves: Sequence[Leaf]) -> None:
        self.draft.moves.append(move)
        for path, leaf in zip(move.targets, leaves, strict=True):
            other = self.made_of.setdefault(path, move.sources)
            if path in self.draft.leaves:
                self.draft.differ(
                    path_text(path),
                    "two sources",
                    f"{_both(other, move.sources)} become it: a rule may rename one, "
                    "or leave it out",
                )
            self.draft.leaves[path] = leaf

    def _check_names(self) -> None:
        """No leaf below a leaf, and no two that orbax keeps under one name."""
        names: dict[str, Path] = {}
        # In NNX, a leaf's box is no node that may hold anything else.
        boxes = self.to_nnx and self.options.form == "state"
        ends = {
            path[:-1] if boxes and path[-1:] == (BOX,) else path: path
            for path in self.draft.leaves
        }
        for path in self.draft.leaves:
            for length in range(len(path)):
                above = ends.get(path[:length], path)
                if above != path:
                    self.draft.differ(
                        path_text(path),
                        "two sources",
                        f"{path_text(above)} is a leaf, and this would stand below "
                        f"it; they are made of "
                        f"{_both(self.made_of[above], self.made_of[path])}: a rule may "
                        "rename one, or leave it out",
                    )
            other = names.setdefault(array_name(path), path)
            if other != path:
                self.draft.differ(
                    path_text(path),
                    "two sources",
                    f"orbax keeps {other} and {path} under one name; they are made of "
                    f"{_both(self.made_of[other], self.made_of[path])}: a rule may "
                    "rename one",
                )

    def _check_all(self) -> None:
        """Every leaf has a place, is left out by a rule, or is a difference."""
        if self.draft.differences:
            return
        told = {path for move in self.draft.moves for path in move.sources}
        for path in self.source.store.leaves.keys() - told - {*self.draft.ignored}:
            self.draft.differ(path_text(path), "lost", "no place was found for it")


def _both(one: Sequence[Path], other: Sequence[Path]) -> str:
    """Two sources, told apart even where only the types of their keys differ."""
    texts = [", ".join(map(path_text, paths)) for paths in (one, other)]
    if texts[0] == texts[1]:
        texts = [", ".join(map(str, paths)) for paths in (one, other)]
    return " and ".join(texts)
