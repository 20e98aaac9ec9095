"""Trees that follow the parameters: an optimizer's mu, nu, trace, averaged weights.

Optax knows nothing of models: it maps over whatever tree it is given, so that a part of
its state has the paths and shapes of the parameters. Where such a tree stands is found
by that, not by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parity.migration.source import PARAMS, Source
from parity.migration.trees import BOX, name_of
from shared.stores import Leaf, Path


class Twin(NamedTuple):
    """A leaf of a follower: where it is, and the model's leaf that it belongs to."""

    path: Path
    leaf: Leaf
    model: Path


@dataclasses.dataclass(frozen=True)
class Follower:
    """A subtree that has the names of parameters.

    Attributes:
      prefix: its path.
      twins: its leaves.
      empty: of its nodes without leaves (masked ones), those with a parameter's name.
      exact: whether shapes are the parameters', too.
      mirrors: whether collections are a level of it.
    """

    prefix: Path
    twins: tuple[Twin, ...]
    empty: Mapping[Path, Path]
    exact: bool
    mirrors: bool

    def __str__(self) -> str:
        how = "" if self.exact else ", of other shapes"
        return f"{name_of(self.prefix)} ({len(self.twins):,} leaves{how})"


def find_followers(source: Source) -> tuple[Follower, ...]:
    """The largest subtrees beside the model that have parameters' names."""
    above = len(source.mirrors)
    whole = source.mirrors != source.params
    found: list[Follower] = []
    for mirrors in (True, False) if whole else (False,):
        names = {
            name_of(
                (*leaf.path[above : len(source.roots[leaf.collection])], *leaf.name)
                if mirrors
                else leaf.name
            ): (leaf.path, leaf.leaf.shape)
            for leaf in source.model
            if mirrors or leaf.collection in (PARAMS, "")
        }
        search = _Search(source, names, mirrors, found)
        search.visit((), sorted(source.rest, key=name_of))
    return tuple(found)


class _Search(NamedTuple):
    source: Source
    names: Mapping[str, tuple[Path, tuple[int, ...]]]
    mirrors: bool
    found: list[Follower]

    def visit(self, prefix: Path, paths: Sequence[Path]) -> None:
        """Looks at a node, and below it where it is no follower."""
        if any(prefix == follower.prefix for follower in self.found):
            return
        if prefix and not self._is_one_box(prefix, paths):
            follower = self._follower(prefix, paths)
            if follower is not None:
                self.found.append(follower)
                return
        below: dict[Path, list[Path]] = {}
        for path in paths:
            if len(path) > len(prefix) + 1:
                below.setdefault(path[: len(prefix) + 1], []).append(path)
        for child, inside in below.items():
            self.visit(child, inside)

    def _is_one_box(self, prefix: Path, paths: Sequence[Path]) -> bool:
        """Whether a node is a leaf in its box, not a tree with a leaf `value`."""
        if [(*prefix, BOX)] != list(paths) or paths[0] not in self.source.boxed:
            return False
        known = self.names.get(BOX)
        leaves = self.source.store.leaves
        return known is None or leaves[known[0]].dtype != leaves[paths[0]].dtype

    def _follower(self, prefix: Path, paths: Sequence[Path]) -> Follower | None:
        names = [self._name(path, len(prefix)) for path in paths]
        if not all(name in self.names for name in names):
            return None
        pairs = list(zip(paths, names, strict=True))
        exact = all(
            self.source.rest[path].shape == self.names[name][1] for path, name in pairs
        )
        # Of other shapes (Adafactor's rows), a single leaf may have a name by chance.
        if not exact and len(names) == 1 < len(self.names):
            return None
        twins = [
            Twin(path, self.source.rest[path], self.names[name][0])
            for path, name in pairs
        ]
        empty = {
            path: self.names[name][0]
            for path in self.source.store.empty
            if path[: len(prefix)] == prefix
            and (name := self._name(path, len(prefix))) in self.names
        }
        return Follower(prefix, tuple(twins), empty, exact, self.mirrors)

    def _name(self, path: Path, start: int) -> str:
        name = name_of(path[start:])
        if name in self.names:
            return name
        for i in range(start, len(path)):
            if path[i] == BOX:
                shorter = name_of((*path[start:i], *path[i + 1 :]))
                if shorter in self.names:
                    return shorter
        return name
