"""Which tiers a verdict needs: `--fail-on`.

The tree always counts. Of the levels of equality the one that is named counts, bits if
none is: `program` (equal for all inputs) is stricter than `bits` (equal on the inputs
that were run), and `tolerance` laxer. `init`, `decode` and `oracle` come on top. An
oracle that ran and failed fails every verdict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parity.reporting.report import Report

TIERS = ("tree", "init", "program", "bits", "decode", "tolerance", "oracle")
PAIR_TIERS = tuple(name for name in TIERS if name != "decode")  # of any two modules
LEVELS = ("program", "bits", "tolerance")


class GateError(ValueError):
    """Tiers to fail on that there are not."""


def required(fail_on: str | Iterable[str] = ()) -> tuple[str, ...]:
    """The tiers that decide, from names or one text with commas.

    >>> required("init")
    ('tree', 'init', 'bits')
    >>> required(["tolerance"])
    ('tree', 'tolerance')

    Raises:
      GateError: a tier is unknown, or a text names none.
    """
    given = fail_on.split(",") if isinstance(fail_on, str) else list(fail_on)
    names = {name.strip() for name in given}
    unknown = sorted(names - set(TIERS))
    if unknown:
        raise GateError(
            f"--fail-on takes tiers of {', '.join(TIERS)}. "
            f"Got {', '.join(name or '(nothing)' for name in unknown)}."
        )
    level = set() if names & set(LEVELS) else {"bits"}
    return tuple(name for name in TIERS if name in {"tree"} | names | level)


def apply(report: Report, fail_on: str | Iterable[str] | None) -> Report:
    """The report, decided by `fail_on`; None leaves it as it is."""
    if fail_on is None:
        return report
    return dataclasses.replace(report, required=required(fail_on))
