"""Lists the presets with their layers and parameter counts.

parity models [--json=FILE]

Presets without "-tiny" are published models (of multimodal ones, the text model). What
is published of some value may not be certain: a line below the list says so, and the
field "not_verified" of the file.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import rich.console
import rich.table
from absl import flags

import shared
from parity.cli import UsageError
from shared.presets import not_verified
from shared.trees import flatten

_BELOW = {"not_verified"}  # the table, not in it


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_string("json", None, "Write the list there.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Prints the list."""
    if arguments:
        raise UsageError(f"`parity models` takes no arguments. Got {arguments[0]!r}.")
    rows = [_describe(name) for name in shared.presets()]
    table = rich.table.Table()
    for column in (name for name in rows[0] if name not in _BELOW):
        justify: Literal["left", "right"] = "left" if column == "preset" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        mark = "*" if row["not_verified"] else ""
        shown = {name: v for name, v in row.items() if name not in _BELOW}
        shown["preset"] += mark
        table.add_row(*(f"{v:,}" if isinstance(v, int) else v for v in shown.values()))
    console.print(table)
    for row in rows:
        if row["not_verified"]:
            fields = ", ".join(row["not_verified"])
            console.print(f"* {row['preset']}: not verified: {fields}")
    if options["json"]:
        pathlib.Path(options["json"]).write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _describe(name: str) -> dict[str, Any]:
    config = shared.preset(name)
    return {
        "preset": name,
        "family": config.family,
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
        "parameters": count_parameters(config),
        "active": shared.active_parameters(config),
        "not_verified": list(not_verified(name)),
    }


def count_parameters(config: shared.DecoderConfig) -> int:
    """Numbers in the parameter tree."""
    return sum(leaf.size for _, leaf in flatten(shared.abstract_params(config)))
