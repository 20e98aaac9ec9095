"""Lists the presets with their layers and parameter counts.

parity models [--json=FILE]
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
from shared.trees import flatten


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
    for column in rows[0]:
        justify: Literal["left", "right"] = "left" if column == "preset" else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*(f"{v:,}" if isinstance(v, int) else v for v in row.values()))
    console.print(table)
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
    }


def count_parameters(config: shared.DecoderConfig) -> int:
    """Numbers in the parameter tree."""
    return sum(leaf.size for _, leaf in flatten(shared.abstract_params(config)))
