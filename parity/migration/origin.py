"""How a Linen checkpoint was laid out: what the way back from NNX needs to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from parity.mapping.correspondence import Correspondence
from parity.migration import guessed
from parity.migration.source import PARAMS, ModelLeaf, Source
from parity.migration.trees import name_of, parse_text
from shared.stores import CheckpointError, Path


class Origin(NamedTuple):
    """How an NNX source is laid out, and the Linen checkpoint that it was made of.

    Attributes:
      model: path of the model's state in NNX's; None: not known.
      boxed_state: whether each leaf of NNX's stands in a box.
      params: path of the parameters in Linen's.
      collections: by the path of an NNX leaf, where it is not `params`.
      known: where names or layouts are not the same, what they were.
      boxed: collection and path of the Linen leaves in boxes.
      empty: nodes without leaves, which NNX does not keep.
      mirrors: whether collections are a level of the optimizer's trees.
    """

    model: str | None = None
    boxed_state: bool = True
    params: str = ""
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
        """From a manifest.

        Raises:
          CheckpointError: it is damaged.
        """
        if not data:
            return cls()
        try:
            return cls(
                data["model"],
                data["boxed_state"],
                data["params"],
                data["collections"],
                tuple(_known(entry) for entry in data["known"]),
                frozenset(data["boxed"]),
                {tuple(path): what for path, what in data["empty"]},
                data["mirrors"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The manifest's `origin` is damaged ({error!r}): fetch or write the "
                "checkpoint again."
            ) from None


def _known(entry: Mapping[str, Any]) -> guessed.Known:
    shapes = tuple(map(tuple, entry["shapes"]))
    return guessed.Known(
        tuple(entry["linen"]), tuple(entry["nnx"]), shapes, entry["layout"]
    )


def origin_of(
    source: Source,
    leaves: Mapping[str, ModelLeaf],
    trees: Correspondence,
    empty: Mapping[Path, str],
    model: Path,
    *,
    boxed_state: bool,
) -> Origin:
    """How a Linen source is laid out, for the way back.

    Args:
      source: the checkpoint.
      leaves: of its model, by text.
      trees: which leaf is which.
      empty: nodes without leaves, which are no part of the model.
      model: where the model is in the target.
      boxed_state: whether the target has boxes.
    """
    collections = {
        name_of(parse_text(text)[1]): parse_text(entry.linen[0])[0]
        for entry in trees.entries
        for text in entry.nnx
    }
    known = [
        guessed.known_from(entry, [leaves[text].leaf.shape for text in entry.linen])
        for entry in trees.entries
        if leaves.keys() >= set(entry.linen)
    ]
    return Origin(
        name_of(model),
        boxed_state,
        name_of(source.params),
        {name: found for name, found in collections.items() if found != PARAMS},
        tuple(entry for entry in known if entry is not None),
        frozenset(
            name_of((leaf.collection or PARAMS, *leaf.name))
            for leaf in leaves.values()
            if any(leaf.path[:i] in source.boxed for i in range(len(leaf.path) + 1))
        ),
        empty,
        source.mirrors != source.params,
    )
