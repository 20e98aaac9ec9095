"""Accepted differences: a TOML file with a reason and an expiry for each.

    [[accept]]
    tier = "bits"                        # or "decode", "tolerance"
    path = "gradient/params/**/kernel"   # exact, or * for a name, ** for any names
    max_ulps = 4                         # max_abs, or both: then both must hold
    reason = "XLA fuses the bias differently since jax 0.12, openxla/xla#12345"
    expires = 2026-12-31                 # the last day
    target = "my.linen:model = my.nnx:model"   # optional: only in this report

Only distances between values can be accepted, never a missing leaf, a shape or a dtype.
An entry that has expired, or that nothing differs under any more, fails the verdict.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parity.reporting.report import Accepted, Report, Status, Tier
    from parity.trees import Difference

TIERS = ("bits", "decode", "tolerance")
_LIMITS = ("max_ulps", "max_abs")
_NEEDED = ("tier", "path", "reason", "expires")
_KEYS = {*_NEEDED, *_LIMITS, "target"}


class BaselineError(ValueError):
    """A baseline that cannot be read or that says something it must not."""


class Entry(NamedTuple):
    """One accepted distance.

    Attributes:
      number: of the entry in its file, from 1.
      tier: "bits", "decode" or "tolerance".
      path: of the leaves, exact or with `*` and `**`.
      reason: why.
      expires: the last day on which it holds.
      max_ulps: the largest distance in floating-point numbers, if that is limited.
      max_abs: the largest distance, if that is limited.
      target: of the report; None: every report.
    """

    number: int
    tier: str
    path: str
    reason: str
    expires: datetime.date
    max_ulps: float | None = None
    max_abs: float | None = None
    target: str | None = None

    def __str__(self) -> str:
        return f"entry {self.number} ({self.tier}: {self.path})"

    def names(self, tier: str, difference: Difference) -> bool:
        """Whether this is about the difference, small or large."""
        return self.tier == tier and _matches(self.path, difference.path)

    def allows(self, difference: Difference) -> bool:
        """Whether the difference is one of values and small enough."""
        limits = (
            (self.max_ulps, difference.ulps),
            (self.max_abs, difference.absolute),
        )
        return difference.what == "value" and all(
            limit is None or (distance is not None and distance <= limit)
            for limit, distance in limits
        )


@dataclasses.dataclass(frozen=True)
class Baseline:
    """The entries of a file.

    Attributes:
      name: of the file, for messages.
      entries: in order.
    """

    name: str
    entries: tuple[Entry, ...]


def read(path: str | pathlib.Path) -> Baseline:
    """Reads a baseline file.

    Raises:
      BaselineError: there is no such file, or an entry is not as it must be.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"The baseline {path} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, name: str = "baseline") -> Baseline:
    """Reads the text of a baseline; `name` is what messages call it.

    Raises:
      BaselineError: an entry is not as it must be.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BaselineError(f"{name} is no TOML: {error}") from error
    tables = data.get("accept", [])
    if data.keys() - {"accept"} or not isinstance(tables, list):
        keys = ", ".join(sorted(data))
        raise BaselineError(f"{name} must hold [[accept]] entries only. Got {keys}.")
    entries = tuple(_entry(name, i, table) for i, table in enumerate(tables, start=1))
    seen: dict[tuple[str | None, str, str], int] = {}
    for entry in entries:
        key = entry.target, entry.tier, entry.path
        if key in seen:
            raise BaselineError(
                f"{name}: entries {seen[key]} and {entry.number} are both about "
                f"{entry.tier}: {entry.path}. Keep one."
            )
        seen[key] = entry.number
    return Baseline(name, entries)


def apply(report: Report, baseline: Baseline, today: datetime.date) -> Report:
    """Takes accepted differences out of the tiers, and adds the tier "baseline".

    That tier fails where an entry has expired, or is stale: its tier came to a result
    but nothing differs at its path. A tier that was not run judges no entry.

    Args:
      report: without a baseline so far.
      baseline: what is accepted.
      today: the day on which entries hold or have expired.
    """
    from parity.reporting.report import Tier
    from parity.trees import Comparison, Difference

    entries = [e for e in baseline.entries if e.target in (None, report.target)]
    valid = [entry for entry in entries if today <= entry.expires]
    accepted = [entry for tier in report.tiers for entry in _accepted(tier, valid)]
    tiers = [_without(tier, accepted) for tier in report.tiers]

    expired = [entry for entry in entries if entry not in valid]
    judged = [entry for entry in valid if _is_judged(entry, report)]
    stale = [entry for entry in judged if not _is_found(entry, report)]
    differences = tuple(
        Difference(
            entry.path,
            what,
            f"{baseline.name}, {entry}, accepted until {entry.expires}: {advice}",
        )
        for what, faulty, advice in (
            ("expired", expired, "mend the difference, or renew the date and reason"),
            ("stale", stale, "nothing differs there any more; delete the entry"),
        )
        for entry in faulty
    )
    count = len(expired) + len(judged)
    status: Status = "failed" if differences else "proved" if count else "skipped"
    note = f"{baseline.name}: {len(accepted)} differences accepted"
    tier = Tier("baseline", Comparison(count, count, differences), 0, note, status)
    return dataclasses.replace(
        report, tiers=(*tiers, tier), accepted=(*report.accepted, *accepted)
    )


def _accepted(tier: Tier, entries: Iterable[Entry]) -> list[Accepted]:
    from parity.reporting.report import Accepted

    found = []
    for difference in tier.compared.differences if tier.status == "failed" else ():
        for entry in entries:
            if entry.names(tier.name, difference) and entry.allows(difference):
                reason, expires = entry.reason, entry.expires
                found.append(Accepted(tier.name, difference, reason, expires))
                break
    return found


def _without(tier: Tier, accepted: Iterable[Accepted]) -> Tier:
    taken = {entry.difference for entry in accepted if entry.tier == tier.name}
    if not taken:
        return tier
    compared = tier.compared
    left = tuple(d for d in compared.differences if d not in taken)
    return dataclasses.replace(
        tier,
        compared=dataclasses.replace(compared, differences=left),
        status="failed" if left else "accepted",
    )


def _is_judged(entry: Entry, report: Report) -> bool:
    return any(
        tier.name == entry.tier and tier.status != "inconclusive"
        for tier in report.tiers
    )


def _is_found(entry: Entry, report: Report) -> bool:
    return any(
        entry.names(tier.name, difference)
        for tier in report.tiers
        for difference in tier.compared.differences
    )


def _entry(name: str, number: int, table: Any) -> Entry:
    where = f"{name}, entry {number}"
    if not isinstance(table, Mapping):
        raise BaselineError(f"{where} must be a table, [[accept]]. Got {table!r}.")
    unknown = sorted(table.keys() - _KEYS)
    if unknown:
        raise BaselineError(
            f"{where} has unknown keys {', '.join(unknown)}. There are "
            f"{', '.join(sorted(_KEYS))}."
        )
    missing = [key for key in _NEEDED if key not in table]
    if missing:
        raise BaselineError(f"{where} lacks {', '.join(missing)}.")
    if not any(key in table for key in _LIMITS):
        raise BaselineError(f"{where} needs a limit: {' or '.join(_LIMITS)}.")
    for key in ("tier", "path", "reason", "target"):
        if key in table and not (isinstance(table[key], str) and table[key].strip()):
            raise BaselineError(f"{where}: {key} must be a text. Got {table[key]!r}.")
    if table["tier"] not in TIERS:
        raise BaselineError(
            f"{where}: tier must be {' or '.join(TIERS)}, whose values can be "
            f"accepted. Got {table['tier']!r}."
        )
    for key in _LIMITS:
        if key in table and not _is_limit(table[key]):
            raise BaselineError(
                f"{where}: {key} must be a finite number above 0. Got {table[key]!r}."
            )
    expires = table["expires"]
    # A date with a time is a date to Python, and cannot be compared with one.
    if not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime):
        raise BaselineError(
            f"{where}: expires must be a date such as 2030-12-31, without quotes. "
            f"Got {expires!r}."
        )
    return Entry(number, **table)


def _is_limit(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value > 0


def _matches(pattern: str, path: str) -> bool:
    wild = {"**": ".*", "*": "[^/]*"}
    # A folder pattern may stand for no name at all: a/**/b is also a/b.
    pieces = re.split(r"(\*\*/|\*\*|\*)", pattern)
    parts = [
        "(?:.*/)?" if piece == "**/" else wild.get(piece, re.escape(piece))
        for piece in pieces
    ]
    return re.fullmatch("".join(parts), path, re.DOTALL) is not None
