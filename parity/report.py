"""A verdict as data, as a table a person reads, as JSON and as Markdown."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import Any, Literal

import flax
import jax
import rich.console
import rich.table

from parity.trees import Comparison, Difference

Status = Literal["proved", "failed"]
SHOWN = 5  # differences shown a tier; JSON holds all


@dataclasses.dataclass(frozen=True)
class Tier:
    """What one tier compared and found.

    Attributes:
      name: "tree", "init", "bits" or "oracle".
      compared: leaves, elements and differences.
      examples: how many inputs were run.
      note: in a few words, what was compared to what.
    """

    name: str
    compared: Comparison
    examples: int = 0
    note: str = ""

    @property
    def status(self) -> Status:
        """Proved if something was compared and nothing differs."""
        return "proved" if self.compared.equal else "failed"

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All that differs; a tier that compared nothing says so."""
        if not self.compared.elements and not self.compared.differences:
            compared = f"{self.compared.leaves} leaves, 0 elements were compared"
            return (Difference("(nothing)", "empty", compared),)
        return self.compared.differences


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdict on a pair of models: its tiers, never merged."""

    target: str
    tiers: tuple[Tier, ...]

    @property
    def ok(self) -> bool:
        """Whether there are tiers and each of them is proved."""
        return bool(self.tiers) and all(t.status == "proved" for t in self.tiers)

    def tier(self, name: str) -> Tier:
        """The tier called `name`."""
        return next(tier for tier in self.tiers if tier.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "target": self.target,
            "ok": self.ok,
            "environment": environment(),
            "tiers": [
                {
                    "tier": tier.name,
                    "status": tier.status,
                    "leaves": tier.compared.leaves,
                    "elements": tier.compared.elements,
                    "examples": tier.examples,
                    "note": tier.note,
                    "differences": [d._asdict() for d in tier.differences],
                }
                for tier in self.tiers
            ],
        }

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def to_markdown(self) -> str:
        """The report as a Markdown table, differences below it."""
        lines = [
            f"## parity: {self.target}: {'proved' if self.ok else 'NOT EQUAL'}",
            "",
            "| tier | status | leaves | elements | examples | compared |",
            "|---|---|--:|--:|--:|---|",
            *("| " + " | ".join(_row(tier)) + " |" for tier in self.tiers),
            "",
            *(f"- {tier.name}: `{d}`" for tier in self.tiers for d in tier.differences),
        ]
        return "\n".join(lines).rstrip() + "\n"

    def print(self, console: rich.console.Console) -> None:
        """Prints the table and the first differences of each tier."""
        table = rich.table.Table(title=f"parity: {self.target}", title_justify="left")
        for name in ("tier", "status", "leaves", "elements", "examples", "compared"):
            right = name in ("leaves", "elements", "examples")
            table.add_column(name, justify="right" if right else "left")
        for tier in self.tiers:
            colour = "green" if tier.status == "proved" else "bold red"
            name, status, *rest = _row(tier)
            table.add_row(name, f"[{colour}]{status}[/]", *rest)
        console.print(table)
        for tier in self.tiers:
            self._print_differences(console, tier)

    def _print_differences(self, console: rich.console.Console, tier: Tier) -> None:
        shown = tier.differences[:SHOWN]
        for difference in shown:
            console.print(f"{tier.name}: {difference}", markup=False, soft_wrap=True)
        if len(tier.differences) > SHOWN:
            console.print(f"{tier.name}: and {len(tier.differences) - SHOWN} more")


def environment() -> dict[str, str]:
    """What a verdict depends on besides the models."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "matmul_precision": "highest",
    }


def _row(tier: Tier) -> list[str]:
    return [
        tier.name,
        tier.status,
        f"{tier.compared.leaves:,}",
        f"{tier.compared.elements:,}",
        f"{tier.examples:,}",
        tier.note,
    ]
