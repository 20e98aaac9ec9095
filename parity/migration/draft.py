"""What a run of `plan` has found so far."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from parity.mapping.correspondence import Correspondence
from parity.mapping.layout import Step, describe
from parity.migration.optimizer import Follower
from parity.trees import Difference
from shared.stores import Leaf, Path, path_text


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
