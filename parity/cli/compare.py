"""Measures both frontends on one model, side by side: which API?

parity compare TARGET [flags]

TARGET is a preset (see `parity models`) or a folder with a Hugging Face checkpoint.
Seconds to trace, lower and compile; temporary memory, arithmetic and operations; the
time a jitted call takes beside the computation (dispatch); lines of code. Compiling a
tiny preset takes some minutes, most of them for the gradient, which
--functions=forward leaves out. A measurement, not a verdict.
Exit status 0: measured; 2: bad input.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags

from parity.cli import UsageError, check_files
from parity.comparison import page, side_by_side
from parity.comparison.side_by_side import SideBySide

_FILES = ("json", "svg", "html")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_list(
        "functions",
        list(side_by_side.FUNCTIONS),
        "Functions to lower and compile: forward, and gradient of the loss.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "abstract",
        False,
        "Without weights, so for any size; leaves out the time of a call.",
        flag_values=values,
    )
    for name, default, text in (
        ("batch", 1, "Rows of tokens."),
        ("length", 64, "Tokens in a row."),
        ("repeats", 3, "How often to trace and lower; the median counts."),
        ("rounds", 20, "Pairs of a call's time; more is less noise."),
    ):
        flags.DEFINE_integer(name, default, text, lower_bound=1, flag_values=values)
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
    for name, what in zip(_FILES, ("numbers", "plots", "page"), strict=True):
        flags.DEFINE_string(name, None, f"Write the {what} there.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Measures one target."""
    if len(arguments) != 1:
        raise UsageError(
            f"Give one target, a preset or a folder. Got {len(arguments)}."
        )
    _check_files(options)
    names = ("functions", "abstract", "batch", "length", "repeats", "rounds")
    layout = ("scan_layers", "scan_period")
    chosen = {name: options[name] for name in (*names, *layout)}
    result = side_by_side.compare_target(arguments[0], **chosen)
    console.print(_table(result))
    for sentence in page.summary(result):
        console.print(sentence, markup=False, highlight=False)
    machine = ", ".join(f"{name} {text}" for name, text in result.machine.items())
    console.print(machine, markup=False, highlight=False)
    _write(result, options)
    return 0


def _check_files(options: Mapping[str, Any]) -> None:
    """Before minutes of measuring, whether the results can be written."""
    check_files(options, _FILES)
    if options["svg"] or options["html"]:
        try:
            page.require_matplotlib()
        except ImportError as error:
            raise UsageError(str(error)) from error


def _write(result: SideBySide, options: Mapping[str, Any]) -> None:
    render = {
        "json": SideBySide.to_json,
        "svg": page.render_svg,
        "html": page.render_html,
    }
    for name in _FILES:
        if options[name]:
            pathlib.Path(options[name]).write_text(render[name](result), "utf-8")


def _table(result: SideBySide) -> rich.table.Table:
    table = rich.table.Table(title="Linen and NNX", title_justify="left")
    for name in ("of", "quantity", *page.COLUMNS, "unit"):
        right = name in page.COLUMNS
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    section = None
    for row in result.rows:
        if section not in (None, row.section):
            table.add_section()
        table.add_row(
            "" if row.section == section else row.section,
            row.quantity,
            *page.values(row),
            row.unit,
        )
        section = row.section
    return table
