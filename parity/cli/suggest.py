"""Drafts a rule file for a pair whose names do not say what corresponds to what.

parity suggest --linen=pkg.mod:name --nnx=pkg.mod:name --inputs=pkg.mod:name [flags]

The draft goes by shapes and names: read it before you use it with
`parity check --rules=FILE`. Comments in it say where it guessed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from absl import flags

from parity.cli import UsageError, factories
from parity.pairs import checking


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    texts = {
        "linen": "The Linen side, pkg.mod:name.",
        "nnx": "The NNX side, pkg.mod:name.",
        "inputs": "Inputs, pkg.mod:name.",
        "calls": "parity.Call or a list of them, pkg.mod:name.",
        "out": "Write the draft there instead of printing it.",
    }
    for name, text in texts.items():
        flags.DEFINE_string(name, None, text, flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Prints or writes a draft."""
    if arguments:
        raise UsageError(f"`parity suggest` takes flags only. Got {arguments[0]!r}.")
    out = options["out"] and pathlib.Path(options["out"])
    if out and out.exists():
        raise UsageError(f"--out={out} exists: a reviewed file is not overwritten.")
    linen, nnx, inputs, call = factories.make_pair(options)
    draft = checking.suggest(linen, nnx, inputs, call=call)
    if out:
        out.write_text(draft)
        console.print(f"Wrote {out}: read it before you use it.", soft_wrap=True)
    else:
        console.print(draft, markup=False, highlight=False, soft_wrap=True)
    return 0
