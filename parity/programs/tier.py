"""The program tier of a report, put together function by function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity.programs import program
from parity.reporting.report import Status, Tier
from parity.trees import Comparison, Difference

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
NOTE = "canonical StableHLO of forward, and of loss with gradients"

# What each frontend computes: the same arguments, results of the same paths.
Functions = tuple[Callable[..., Any], Callable[..., Any]]


def check_programs(
    functions: Mapping[str, Functions],
    givens: Sequence[Sequence[Any]],
    platforms: Sequence[str | None] = (None,),
) -> Tier:
    """Lowers Linen's and NNX's functions and compares the programs; nothing is run.

    Args:
      functions: by the path they have in reports.
      givens: arguments of each, arrays or abstract, once for all shapes of interest.
      platforms: to lower for, of `PLATFORMS`; None: this machine's.

    Returns:
      The tier; not proved if some program has no canonical form, skipped if none has.

    Raises:
      ProgramError: a platform is unknown.
    """
    _check_platforms(platforms)
    shapes = enumerate(givens, 1)
    tiers = []
    for (path, pair), platform, (i, given) in itertools.product(
        functions.items(), platforms, shapes
    ):
        where = path if platform is None else f"{path} on {platform}"
        where += f" with shapes {i}" if i > 1 else ""
        tiers.append(_check(where, pair, given, platform))
    return merged(tiers)


def merged(tiers: Sequence[Tier]) -> Tier:
    """One program tier of several: proved only if each of them is."""
    compared = sum((tier.compared for tier in tiers), Comparison())
    details = tuple(line for tier in tiers for line in tier.details)
    refused = [tier for tier in tiers if tier.status in ("skipped", "inconclusive")]
    if not refused or compared.differences:
        return Tier("program", compared, note=NOTE, details=details)
    status: Status = "inconclusive" if compared.leaves else "skipped"
    return Tier("program", compared, 0, refused[0].note, status, details)


def _check(
    where: str, pair: Functions, given: Sequence[Any], platform: str | None
) -> Tier:
    try:
        left, right = (program.lower(f, *given, platform=platform) for f in pair)
    except program.ProgramError as error:
        said = f"{where}: {error}"
        return Tier("program", Comparison(), 0, said, "skipped", (said,))
    equal, lines = program.compare(left, right)
    found = () if equal else (Difference(where, "program", lines[0]),)
    compared = Comparison(1, len(left.operations), found)
    details = tuple(f"{where}: {line}" for line in lines[1:])
    return Tier("program", compared, note=NOTE, details=details)


def _check_platforms(platforms: Sequence[str | None]) -> None:
    unknown = [name for name in platforms if name not in (None, *PLATFORMS)]
    if unknown or not platforms:
        raise program.ProgramError(
            f"Platforms to lower for must be some of {', '.join(PLATFORMS)}. "
            f"Got {', '.join(map(str, unknown)) or 'none'}."
        )
