"""The two trees of a migration: the source's, and the one that it becomes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from parity.mapping.known import normal
from parity.mapping.leaves import Leaf as Named
from parity.mapping.leaves import NNXLeaves
from parity.mapping.rules import Ignore, Rules
from parity.migration import guessed
from parity.migration.draft import Draft, Options
from parity.migration.origin import Origin
from parity.migration.source import PARAMS, RNG, ModelLeaf, Source
from parity.migration.trees import (
    Tree,
    as_tuple,
    boxed_place,
    name_of,
    parse_text,
    text_of,
    unboxed_place,
)
from shared.stores import Path, path_text
from shared.stores.store import numeric_order


class OwnTree(NamedTuple):
    """The tree of the source, and its leaves by text."""

    tree: Tree
    leaves: dict[str, ModelLeaf]


def left_out(source: Source, rules: Rules, draft: Draft) -> tuple[Rules, set[Path]]:
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
        if not hits and is_random(rule):
            continue  # there is none, or the target's own module keeps it
        if not hits or any(map(rule.pattern.fullmatch, texts)):
            kept.append(rule)
        if hits:
            draft.notes.append(f"left out: {len(hits)} beside the model, {rule}")
        out |= hits
    draft.ignored += sorted(out, key=numeric_order)
    return dataclasses.replace(rules, ignored=tuple(kept)), out


def is_random(rule: Ignore) -> bool:
    """Whether a rule leaves out RNG state: then one file may serve both directions."""
    return rule.side == "nnx" and rule.pattern.pattern.startswith(RNG)


def own_tree(
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
            draft.differences += back.differences
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
    if source.side == "nnx":  # other keys than texts are texts in a checkpoint
        tokens = [
            int(key) if _is_index(key) and name[:i] not in source.lists else key
            for i, key in enumerate(name)
        ]
        return Named(
            collection, tuple(map(as_tuple, tokens)), leaf.leaf.shape, leaf.leaf.dtype
        )
    return Named(collection or PARAMS, name, leaf.leaf.shape, leaf.leaf.dtype)


def _collected(leaf: Named, known: Mapping[str, str]) -> Named:
    """An NNX leaf in the collection that Linen has it in."""
    name = normal(text_of(PARAMS, leaf.path)).partition("/")[2]
    return leaf._replace(collection=leaf.collection or known.get(name) or PARAMS)


def _is_index(key: str | int) -> bool:
    return isinstance(key, str) and key.isdecimal() and str(int(key)) == key


def other_tree(
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
        if name_of((leaf.collection, *leaf.path)) in origin.boxed
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
