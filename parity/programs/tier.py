"""The program tier of a report, put together function by function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from parity.programs import program
from parity.reporting.report import Tier
from parity.trees import Comparison, Difference

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
NOTE = "canonical StableHLO of forward, and of loss with gradients"

# What each frontend computes: the same arguments, results of the same paths.
Functions = tuple[Callable[..., Any], Callable[..., Any]]


def check_programs(
    functions: Mapping[str, Functions],
    given: Sequence[Any],
    platforms: Sequence[str | None] = (None,),
) -> Tier:
    """Lowers Linen's and NNX's functions and compares the programs; nothing is run.

    Args:
      functions: by the path they have in reports.
      given: arguments of each, arrays or abstract.
      platforms: to lower for, of `PLATFORMS`; None: this machine's.

    Raises:
      ProgramError: a platform is unknown.
    """
    _check_platforms(platforms)
    compared, details = Comparison(), []
    for (path, pair), platform in itertools.product(functions.items(), platforms):
        where = path if platform is None else f"{path} on {platform}"
        left, right = (program.lower(f, *given, platform=platform) for f in pair)
        equal, lines = program.compare(left, right)
        found = () if equal else (Difference(where, "program", lines[0]),)
        compared += Comparison(1, len(left.operations), found)
        details += [f"{where}: {line}" for line in lines[1:]]
    return Tier("program", compared, note=NOTE, details=tuple(details))


def _check_platforms(platforms: Sequence[str | None]) -> None:
    unknown = [name for name in platforms if name not in (None, *PLATFORMS)]
    if unknown or not platforms:
        raise program.ProgramError(
            f"Platforms to lower for must be some of {', '.join(PLATFORMS)}. "
            f"Got {', '.join(map(str, unknown)) or 'none'}."
        )


def abstract(tree: Any) -> Any:
    """Shapes and dtypes instead of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
