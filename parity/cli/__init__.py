"""One module a command: `define_flags`, and `run`, which gives the exit status."""

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import rich.console
from absl import flags


class UsageError(ValueError):
    """A command line that asks for nothing we can do."""


def say(console: rich.console.Console, text: str) -> None:
    """Prints a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def define_step(values: flags.FlagValues) -> None:
    """Declares `step`, for commands that open checkpoints."""
    flags.DEFINE_integer(
        "step",
        None,
        "Of a checkpoint manager's folder. Default: the latest.",
        lower_bound=0,
        flag_values=values,
    )


def check_files(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Says what cannot be written before anything is run.

    Args:
      options: of the command.
      names: of those that are files to write.

    Raises:
      UsageError: one is no name of a file, or cannot be written.
    """
    for name in names:
        if options[name] is None:
            continue
        path = pathlib.Path(options[name])
        if not options[name] or path.is_dir():
            raise UsageError(f"--{name}={options[name]}: that is no name of a file.")
        if not path.parent.is_dir():
            raise UsageError(f"--{name}={options[name]}: there is no such folder.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UsageError(f"--{name}={options[name]} cannot be written.")
