"""The command line: `parity COMMAND`, or `python -m parity COMMAND`.

Exit status 0: proved, or done; 1: not equal; 2: bad input; 3: a fault of our own.
"""

from __future__ import annotations

import collections
import importlib.metadata
import logging
import sys
import traceback
from collections.abc import Sequence
from typing import IO

import rich.console
from absl import flags

import shared
from parity.cli import (
    UsageError,
    check,
    compare,
    convert,
    diff,
    generate,
    golden,
    inspect,
    memory,
    migrate,
    models,
    shardings,
    suggest,
    train,
)
from parity.mapping.rules import RuleError
from parity.oracle import OracleError
from parity.pairs.calls import CheckError
from parity.programs.program import ProgramError
from parity.programs.topology import TopologyError
from parity.reporting.baseline import BaselineError
from parity.reporting.gate import GateError
from parity.training.settings import SettingsError
from parity.zoo import TargetError
from shared.sharding import ShardingError
from shared.training import DataError

COMMANDS = {
    "check": check,
    "compare": compare,
    "convert": convert,
    "diff": diff,
    "generate": generate,
    "models": models,
    "golden": golden,
    "inspect": inspect,
    "memory": memory,
    "migrate": migrate,
    "shardings": shardings,
    "suggest": suggest,
    "train": train,
}
# Told in a message; whatever else is raised is our own fault and keeps its traceback.
BAD_INPUT = (
    UsageError,
    TargetError,
    OracleError,
    CheckError,
    RuleError,
    GateError,
    ProgramError,
    TopologyError,
    BaselineError,
    shared.checkpoint.CheckpointError,
    shared.ConfigError,
    shared.PlanError,
    ShardingError,
    SettingsError,
    DataError,
    flags.Error,
    OSError,
)
SHOWN = 20  # lines of one sort in an error message
WIDTH = 120  # of tables that go to a file or a pipe


def main(argv: Sequence[str], console: rich.console.Console | None = None) -> int:
    """Runs a command; returns the exit status.

    Args:
      argv: command, arguments and flags, without the program's name.
      console: where to print; None: standard output.
    """
    out = console or _console(sys.stdout)
    err = console or _console(sys.stderr)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if list(argv) in (["--version"], ["-V"]):
        out.print(f"parity {importlib.metadata.version('parity-zoo')}", highlight=False)
        return 0
    if not argv or argv[0] in ("-h", "--help", "help"):
        out.print(_usage(), markup=False, highlight=False)
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        err.print(f"parity: no command {name!r}\n{_usage()}", markup=False)
        return 2
    command = COMMANDS[name]
    values = flags.FlagValues()
    flags.DEFINE_bool(
        "help", False, "Print this text.", short_name="h", flag_values=values
    )
    command.define_flags(values)
    try:
        arguments = values([f"parity {name}", *map(_underscored, rest)])[1:]
        if values["help"].value:
            text = f"{command.__doc__}\n{_flag_help(values)}"
            out.print(text, markup=False, highlight=False)
            return 0
        options = {flag: values[flag].value for flag in values}
        return command.run(arguments, options, out)
    except BAD_INPUT as error:
        text = f"parity {name}: {_message(error)}"
        err.print(text, markup=False, highlight=False, soft_wrap=True)
        return 2


def _message(error: Exception) -> str:
    """An error as it is, but for long lists of what is wrong: some of each sort."""
    if not isinstance(error, shared.checkpoint.CheckpointError):
        return str(error)
    summary = str(error).removesuffix("\n  ".join(["", *error.problems]))
    seen: collections.Counter[str] = collections.Counter()
    shown: list[str] = []
    hints: list[str] = []
    for line in error.problems:
        sort = line.partition(":")[0]
        seen[sort] += 1
        if sort == "hint":
            hints.append(line)
        elif seen[sort] <= SHOWN and len(shown) < 3 * SHOWN:
            shown.append(line)
    more = len(error.problems) - len(shown) - len(hints)
    shown += [f"and {more:,} more"] if more else []
    return "\n  ".join([summary, *shown, *hints])


def run() -> None:
    """Entry point of the console script."""
    try:
        status = main(sys.argv[1:])
    except Exception:
        traceback.print_exc()
        status = 3  # Python's own would be 1, which says that models differ
    sys.exit(status)


def _underscored(argument: str) -> str:
    """A flag as absl knows it: `--fail-on=init` is `--fail_on=init`."""
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _console(stream: IO[str]) -> rich.console.Console:
    return rich.console.Console(
        file=stream, emoji=False, width=None if stream.isatty() else WIDTH
    )


def _usage() -> str:
    lines = ["Usage: parity COMMAND ...", ""]
    for name, command in COMMANDS.items():
        assert command.__doc__ is not None
        lines.append(f"  {name:<8} {command.__doc__.splitlines()[0]}")
    return "\n".join([*lines, "", "parity COMMAND --help tells more."])


def _flag_help(values: flags.FlagValues) -> str:
    lines = ["Flags:"]
    for name in sorted(values):
        flag = values[name]
        if name == flag.name:
            shown = name.replace("_", "-")
            default = flag.default_as_str
            tail = "" if default is None else f" (default: {default})"
            lines.append(f"  --{shown}: {flag.help}{tail}")
    return "\n".join(lines)


if __name__ == "__main__":
    run()
