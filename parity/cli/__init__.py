"""One module a command: `define_flags`, and `run`, which gives the exit status."""

import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any


class UsageError(ValueError):
    """A command line that asks for nothing we can do."""


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
