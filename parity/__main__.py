"""The command line: `parity COMMAND`, or `python -m parity COMMAND`.

Exit status 0: proved, or done; 1: not equal; 2: bad input.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import rich.console
from absl import flags

from parity.cli import check, golden, models

COMMANDS = {"check": check, "models": models, "golden": golden}


def main(argv: Sequence[str], console: rich.console.Console | None = None) -> int:
    """Runs a command; returns the exit status.

    Args:
      argv: command, arguments and flags, without the program's name.
      console: where to print; None: standard output.
    """
    out = console or rich.console.Console()
    err = console or rich.console.Console(stderr=True)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
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
        arguments = values([f"parity {name}", *rest])[1:]
        if values["help"].value:
            text = f"{command.__doc__}\n{values.main_module_help() or ''}"
            out.print(text + _flag_help(values), markup=False, highlight=False)
            return 0
        options = {flag: values[flag].value for flag in values}
        return command.run(arguments, options, out)
    except (ValueError, OSError, flags.Error) as error:
        # Bad input is told in a message; whatever else is raised is our own fault.
        err.print(
            f"parity {name}: {error}", markup=False, highlight=False, soft_wrap=True
        )
        return 2


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main(sys.argv[1:]))


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
            lines.append(f"  --{name}: {flag.help} (default: {flag.default_as_str})")
    return "\n".join(lines)


if __name__ == "__main__":
    run()
