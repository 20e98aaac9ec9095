"""Proves that Linen and NNX hold and compute the same model.

parity check TARGET [flags]

TARGET is a preset (see `parity models`) or a folder with a Hugging Face checkpoint.
Exit status 0: every tier proved; 1: something differs; 2: bad input.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from absl import flags

from parity import zoo
from parity.cli import UsageError


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_list(
        "tiers",
        None,
        f"Tiers to check, of {','.join(zoo.TIERS)}. Default: all, with the oracle if "
        "--expect is given.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "expect", None, "The reference's numbers, an npz.", flag_values=values
    )
    flags.DEFINE_integer(
        "seed", 0, "Of first values and inputs.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer(
        "examples", 2, "Inputs for the bits tier.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_bool(
        "scan_layers",
        True,
        "Whether layers are stacked and scanned.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "scan_period",
        None,
        "Layers in a period; by default it is found.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "Write the report there.", flag_values=values)
    flags.DEFINE_string("markdown", None, "Write the report there.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Checks one target."""
    if len(arguments) != 1:
        raise UsageError(
            f"Give one target, a preset or a folder. Got {len(arguments)}."
        )
    for name in ("json", "markdown"):
        if options[name] and not pathlib.Path(options[name]).parent.is_dir():
            raise UsageError(f"--{name}={options[name]}: there is no such folder.")
    report = zoo.check_target(
        arguments[0],
        options["tiers"],
        expect=options["expect"],
        seed=options["seed"],
        scan_layers=options["scan_layers"],
        scan_period=options["scan_period"],
        examples=options["examples"],
    )
    report.print(console)
    for name, text in (("json", report.to_json()), ("markdown", report.to_markdown())):
        if options[name]:
            pathlib.Path(options[name]).write_text(text)
    console.print("proved" if report.ok else "NOT EQUAL", style="bold")
    return 0 if report.ok else 1
