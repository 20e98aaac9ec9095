"""Where things stand in the target of a migration."""

from __future__ import annotations

from typing import Any

from parity.migration.draft import Options
from parity.migration.optimizer import Follower
from parity.migration.origin import Origin
from parity.migration.source import PARAMS, RNG, STATE, Source
from parity.migration.trees import BOX, Tree
from shared.stores import Path

MODEL = "model"


class Places:
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
        if self._origin.model is None:
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
