"""Proves that a Linen and an NNX model are the same model.

parity check TARGET [flags]
parity check --linen=pkg.mod:name --nnx=pkg.mod:name --inputs=pkg.mod:name [flags]

TARGET is a preset (see `parity models`) or a folder with a Hugging Face checkpoint. A
pair of your own is named by what makes it: --linen a module, (module, variables) or a
function that gives one of these; --nnx a module, or a function that makes one and may
take `rngs`; --inputs arrays, shapes, parity.Args, parity.Steps, a list of these, a
Hypothesis strategy, or a function that gives one of these.
Exit status 0: proved; 1: something differs; 2: bad input; 3: a fault of our own.
"""

from __future__ import annotations

import datetime
import logging
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from absl import flags

from parity import zoo
from parity.cli import UsageError, check_files, factories
from parity.pairs import checking
from parity.reporting import baseline, gate
from parity.reporting.report import Report
from parity.trees import Difference

_PAIR_ONLY = ("rules", "calls", "oracle", "methods", "finite")
_TARGET_ONLY = ("expect", "scan_layers", "scan_period", "draw")
_REPORTS = ("json", "markdown", "junit")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    text = lambda name, help: flags.DEFINE_string(name, None, help, flag_values=values)
    text("linen", "The Linen side, pkg.mod:name.")
    text("nnx", "The NNX side, pkg.mod:name.")
    text("inputs", "Inputs, pkg.mod:name.")
    text("rules", "Rule file (TOML) where names say too little; see `parity suggest`.")
    text("calls", "parity.Call or a list of them, pkg.mod:name.")
    text("oracle", "parity.Oracle, an independent reference, pkg.mod:name.")
    flags.DEFINE_list("methods", None, "Methods to compare.", flag_values=values)
    flags.DEFINE_bool(
        "finite",
        True,
        "Whether NaN and infinity are differences, equal or not.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "tiers",
        None,
        f"Tiers to check, of {','.join(gate.TIERS)}. Default: all; tolerance "
        "where bits of a pair differ, decode for TARGET, oracle if there is one.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "fail_on",
        None,
        "Tiers that decide: tree always, one of program, bits (default), tolerance; "
        "init, decode and oracle as asked. Default for TARGET: every tier.",
        flag_values=values,
    )
    flags.DEFINE_list(
        "platforms",
        None,
        "For which to lower in the program tier, such as cpu,tpu. Default: this one.",
        flag_values=values,
    )
    text("baseline", "File (TOML) of accepted differences.")
    text("expect", "The reference's numbers for TARGET, an npz.")
    flags.DEFINE_integer(
        "seed", 0, "Of first values and inputs.", lower_bound=0, flag_values=values
    )
    flags.DEFINE_integer(
        "examples",
        None,
        "Inputs to draw. Default: 2; 20 from a strategy.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "draw",
        None,
        "For TARGET: so many inputs are drawn by Hypothesis, which looks for the "
        "smallest that differs.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_bool(
        "scan_layers",
        True,
        "Whether layers of TARGET are stacked and scanned.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "scan_period",
        None,
        "Layers of TARGET in a period; by default it is found.",
        lower_bound=1,
        flag_values=values,
    )
    text("json", "Write the report there, after the schema report-1.json.")
    text("markdown", "Write the report there, as a comment for a pull request.")
    text("junit", "Write the report there, as JUnit XML.")


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Checks one target or one pair."""
    check_files(options, _REPORTS)
    if options["fail_on"] is not None:
        gate.required(options["fail_on"])  # before anything is run
    accepted = None
    if options["baseline"] is not None:
        accepted = baseline.read(options["baseline"])
    is_pair = any(options[name] is not None for name in factories.PAIR)
    # It takes a minute or more: a person who waits sees a line a tier.
    level = logging.INFO if sys.stderr.isatty() else logging.WARNING
    logging.getLogger("parity.tiers").setLevel(level)
    check = _check_pair if is_pair else _check_target
    report = check(arguments, options)
    report = gate.apply(report, options["fail_on"])
    if accepted:
        report = baseline.apply(report, accepted, datetime.date.today())
    report.print(console)
    for name in _REPORTS:
        if options[name]:
            text = getattr(report, f"to_{name}")()
            pathlib.Path(options[name]).write_text(text, encoding="utf-8")
    if is_pair and any(d.what == "missing" for d in _of_tree(report)):
        console.print("`parity suggest` drafts rules for leaves with other names.")
    console.print(report.verdict, style="bold")
    return 0 if report.ok else 1


def _of_tree(report: Report) -> tuple[Difference, ...]:
    return tuple(d for t in report.tiers if t.name == "tree" for d in t.differences)


def _check_target(arguments: Sequence[str], options: Mapping[str, Any]) -> Report:
    if len(arguments) != 1:
        raise UsageError(
            "Give one target, a preset or a folder, or a pair with --linen, --nnx and "
            f"--inputs. Got {len(arguments)} targets."
        )
    _refuse(options, _PAIR_ONLY, "a pair of your own (--linen, --nnx, --inputs)")
    return zoo.check_target(
        arguments[0],
        options["tiers"],
        expect=options["expect"],
        seed=options["seed"],
        scan_layers=options["scan_layers"],
        scan_period=options["scan_period"],
        examples=options["examples"] or 2,
        draw=options["draw"],
        platforms=options["platforms"] or (None,),
    )


def _check_pair(arguments: Sequence[str], options: Mapping[str, Any]) -> Report:
    if arguments:
        raise UsageError(
            f"Give a target or a pair (--linen …), not both. Got {arguments[0]!r}, too."
        )
    _refuse(options, _TARGET_ONLY, "a target")
    linen, nnx, inputs, call = factories.make_pair(options)
    return checking.check(
        linen,
        nnx,
        inputs,
        rules=options["rules"],
        call=call,
        methods=options["methods"],
        tiers=gate.PAIR_TIERS if options["tiers"] is None else options["tiers"],
        seed=options["seed"],
        examples=options["examples"],
        oracle=options["oracle"] and factories.make("oracle", options["oracle"]),
        finite=options["finite"],
        platforms=options["platforms"] or (None,),
        target=f"{options['linen']} = {options['nnx']}",
        replay=_command(options),
    )


def _command(options: Mapping[str, Any]) -> str:
    """The command that draws the same examples again."""
    named = (*factories.PAIR, "rules", "calls", "oracle", "seed", "examples")
    given = [f"--{name}={options[name]}" for name in named if options[name] is not None]
    lists = [name for name in ("methods", "tiers", "platforms") if options[name]]
    given += [f"--{name}={','.join(options[name])}" for name in lists]
    given += [] if options["finite"] else ["--nofinite"]
    return shlex.join(["parity", "check", *given])


def _refuse(options: Mapping[str, Any], names: Sequence[str], of: str) -> None:
    defaults = {"finite": True, "scan_layers": True}
    odd = [name for name in names if options[name] != defaults.get(name)]
    if odd:
        raise UsageError(f"--{odd[0]} is for {of}.")
