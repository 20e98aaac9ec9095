"""Modules, inputs and calls of the user's own, named on the command line."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from parity.cli import UsageError
from parity.pairs import calls

# Called as they are, and so no factories.
_VALUES = (nn.Module, nnx.Module, calls.Args, calls.Call)


PAIR = ("linen", "nnx", "inputs")


def make_pair(options: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Linen's side, NNX's, inputs and calls, as the flags of a command name them.

    Raises:
      UsageError: one that is needed is not given, or cannot be made.
    """
    lacking = [f"--{name}" for name in PAIR if options[name] is None]
    if lacking:
        raise UsageError(
            f"A pair needs --linen, --nnx and --inputs: give {lacking[0]}."
        )
    sys.path.insert(0, os.getcwd())
    return (
        make("linen", options["linen"]),
        load("nnx", options["nnx"]),
        make("inputs", options["inputs"]),
        options["calls"] and make("calls", options["calls"]),
    )


def load(flag: str, spec: str) -> Any:
    """What `spec`, "pkg.mod:name", stands for.

    Args:
      flag: that named it, for messages.
      spec: module and attribute.

    Raises:
      UsageError: there is no such module or attribute, or importing it raises.
    """
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise UsageError(
            f"--{flag} must be pkg.mod:name, for example model.linen:make. "
            f"Got {spec!r}."
        )
    try:
        found = importlib.import_module(name)
    except Exception as error:
        raise UsageError(
            f"--{flag}={spec}: importing {name} raises {type(error).__name__}: "
            f"{error}. Modules are looked for in the working directory and where "
            "Python looks."
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            hint = f" Did you mean {', '.join(near)}?" if near else ""
            raise UsageError(f"--{flag}={spec}: {name} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found


def make(flag: str, spec: str) -> Any:
    """The value that `spec` stands for; a function without arguments is called.

    Raises:
      UsageError: as `load`, or calling it raises.
    """
    found = load(flag, spec)
    # Modules of Flax are called by the check, which knows how.
    is_module = isinstance(found, type) and issubclass(found, nn.Module | nnx.Module)
    return found if is_module else _called(flag, spec, found)


def _called(flag: str, spec: str, found: Any) -> Any:
    if isinstance(found, _VALUES) or not _is_function(found):
        return found
    try:
        return found()
    except Exception as error:
        raise UsageError(
            f"--{flag}={spec}: calling it raises {type(error).__name__}: {error}"
        ) from error


def _is_function(value: Any) -> bool:
    return isinstance(value, type) or inspect.isroutine(value)
