"""A verdict as data, as a table a person reads, and in the formats machines read."""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import flax
import jax
import jaxlib.version
import rich.console
import rich.table
import rich.text

from parity.reporting import junit, markdown
from parity.reporting.text import json_number, number, one_line, printable
from parity.trees import Comparison, Difference

Status = Literal["proved", "accepted", "failed", "inconclusive", "skipped"]
SCHEMA, VERSION = "parity-zoo/report", 1  # parity/reporting/schemas/report-1.json
TEXT_WIDTH = 120
EXACT = ("bits", "decode")  # what compares results of a run to the bit
SHOWN = 5  # differences shown a tier; JSON holds all
# One of these that ran and failed fails every verdict.
_DIFFERS = {
    "oracle": "oracle differs",
    "baseline": "the baseline has entries that are stale or have expired",
}
# Elsewhere, equal bits of one run say nothing of the next.
REPEATABLE = ("cpu", "tpu")
_PASSED = ("proved", "accepted")
_COLOURS = {"proved": "green", "accepted": "yellow", "skipped": "dim"}


class ReportError(ValueError):
    """A file that is no report this version can read."""


class Accepted(NamedTuple):
    """A difference that the baseline accepts.

    Attributes:
      tier: where it was found.
      difference: what differs.
      reason: why it is accepted, in the words of the baseline.
      expires: the last day on which it is.
    """

    tier: str
    difference: Difference
    reason: str
    expires: datetime.date

    def __str__(self) -> str:
        return (
            f"{self.tier}: {self.difference}; accepted until {self.expires}: "
            f"{self.reason}"
        )


class Failure(NamedTuple):
    """Why a verdict is not "proved".

    Attributes:
      tier: the tier that stands in the way, or "".
      kind: "failed", "inconclusive", "skipped" or "not run".
      reason: a sentence.
    """

    tier: str
    kind: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Tier:
    """What one tier compared and found.

    Attributes:
      name: "tree", "init", "program", "bits", "decode", "tolerance", "oracle" or
        "baseline".
      compared: leaves, elements and differences.
      examples: how many inputs were run.
      note: in a few words, what was compared to what, or why nothing was.
      status: if not given, proved if something was compared and nothing differs, else
        failed. Given or not, a tier that compared nothing or found a difference is
        never proved, nor are bits that a frontend does not repeat itself.
      details: lines to show, e.g. the first operation that differs.
      deterministic: whether each frontend, run twice, gave the same bytes; None: it was
        run once.
    """

    name: str
    compared: Comparison
    examples: int = 0
    note: str = ""
    status: Status = None  # type: ignore[assignment]  # filled below
    details: tuple[str, ...] = ()
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        status = self.status or "proved"
        if status == "proved" and not self.compared.equal:
            status = "failed"
        if status == "proved" and self.name in EXACT and self.deterministic is False:
            status = "inconclusive"
        object.__setattr__(self, "status", status)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All that differs; a tier that failed on nothing compared says so."""
        compared = self.compared
        if self.status == "failed" and not compared.elements | len(
            compared.differences
        ):
            detail = f"{compared.leaves} leaves, 0 elements were compared"
            return (Difference("(nothing)", "empty", detail),)
        return compared.differences


def environment(matmul_precision: str = "highest") -> dict[str, str]:
    """What a verdict depends on besides the models.

    Args:
      matmul_precision: under which the tiers ran their models.
    """
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "flax": flax.__version__,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "platform_version": one_line(device.client.platform_version),
        "matmul_precision": matmul_precision,
        "default_matmul_precision": _setting("jax_default_matmul_precision"),
        "x64": _setting("jax_enable_x64"),
        "prng": _setting("jax_default_prng_impl"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


def _setting(name: str) -> str:
    return str(getattr(jax.config, name))


@dataclasses.dataclass(frozen=True)
class Report:
    """The verdict on a pair of models: its tiers, never merged.

    Attributes:
      target: what was checked.
      tiers: in order.
      required: tiers that decide; None: every tier that was run. Bits are satisfied
        too by equal programs, and a tolerance by equal bits; see `gate`.
      accepted: differences that a baseline accepts; they stand in no tier any more.
      environment: what else the verdict depends on.
    """

    target: str
    tiers: tuple[Tier, ...]
    required: tuple[str, ...] | None = None
    accepted: tuple[Accepted, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(
        default_factory=environment, hash=False, compare=False
    )

    @property
    def ok(self) -> bool:
        """Whether something was required and all that was is proved or accepted."""
        return not self.failures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Each tier that stands in the way, and why."""
        names = self._required()
        found = [self._failure(name) for name in names]
        if not names:
            found = [Failure("", "not run", "no tier was run")]
        found += [
            Failure(tier.name, "failed", _DIFFERS[tier.name])
            for tier in self.tiers
            if tier.name in _DIFFERS and tier.status == "failed"
        ]
        return tuple(dict.fromkeys(failure for failure in found if failure))

    @property
    def verdict(self) -> str:
        """Proved, accepted (by a baseline), INCONCLUSIVE or NOT EQUAL."""
        if self.ok:
            return "accepted" if self.accepted else "proved"
        if all(failure.kind == "inconclusive" for failure in self.failures):
            return "INCONCLUSIVE"
        return "NOT EQUAL"

    @property
    def deterministic(self) -> bool | None:
        """Whether frontends that were run twice gave the same bytes; None: none was."""
        seen = {tier.deterministic for tier in self.tiers} - {None}
        return None if not seen else False not in seen

    @property
    def repeatability(self) -> str:
        """What equal bits are worth, as a sentence; empty if no bits were compared."""
        if all(self._status(name) in ("not run", "skipped") for name in EXACT):
            return ""
        if self.deterministic:
            return "Each frontend, run twice, gave the same bytes."
        if self.deterministic is False:
            return (
                "This backend is not deterministic: a frontend run twice gave other "
                "bytes, so that bits of one run prove nothing."
            )
        return "Each frontend was run once."

    def tier(self, name: str) -> Tier:
        """The tier called `name`."""
        return next(tier for tier in self.tiers if tier.name == name)

    def word(self, tier: Tier) -> str:
        """The status of a tier as people are told it."""
        if tier.status == "failed":
            stands = any(failure.tier == tier.name for failure in self.failures)
            return "FAILED" if stands else "differs"
        backend = self.environment.get("backend")
        known = tier.deterministic or backend in REPEATABLE
        if tier.status == "proved" and tier.name in EXACT and not known:
            return "equal in one run"
        return tier.status

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data that JSON can hold."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "target": self.target,
            "ok": self.ok,
            "verdict": self.verdict,
            "failures": [failure._asdict() for failure in self.failures],
            "required": None if self.required is None else list(self.required),
            "environment": dict(self.environment),
            "deterministic": self.deterministic,
            "tiers": [_tier_as_dict(tier) for tier in self.tiers],
            "accepted": [
                {
                    "tier": accepted.tier,
                    "difference": _difference_as_dict(accepted.difference),
                    "reason": accepted.reason,
                    "expires": accepted.expires.isoformat(),
                }
                for accepted in self.accepted
            ],
        }

    def to_json(self) -> str:
        """The report as JSON, after parity/reporting/schemas/report-1.json."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n"

    def to_text(self) -> str:
        """The report as it is printed, for messages and logs."""
        text = io.StringIO()
        self.print(rich.console.Console(file=text, emoji=False, width=TEXT_WIDTH))
        return text.getvalue()

    def to_markdown(self) -> str:
        """The report as a comment for a pull request."""
        return markdown.render(self)

    def to_junit(self) -> str:
        """The report as a JUnit XML file with one test suite."""
        return junit.render([self])

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Reads what `to_json` wrote.

        Raises:
          ReportError: it is something else, or of another version.
        """
        try:
            data = json.loads(text)
            head = data["schema"], data["version"]
            if head != (SCHEMA, VERSION):
                raise ReportError(
                    f"This reads {SCHEMA} version {VERSION}. Got {head[0]} version "
                    f"{head[1]}."
                )
            return _from_dict(data)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(f"This is no report of parity: {error!r}") from error

    def print(self, console: rich.console.Console) -> None:
        """Prints the table and, below it, the first differences of each tier."""
        title = rich.text.Text(f"parity: {one_line(self.target)}")
        table = rich.table.Table(title=title, title_justify="left")
        for name in ("tier", "status", "leaves", "elements", "examples", "compared"):
            right = name in ("leaves", "elements", "examples")
            table.add_column(name, justify="right" if right else "left")
        for tier in self.tiers:
            cells = [rich.text.Text(cell) for cell in self.row(tier)]
            cells[1].stylize(_COLOURS.get(tier.status, "bold red"))
            table.add_row(*cells)
        console.print(table)
        for line in self.lines():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def row(self, tier: Tier) -> list[str]:
        """A tier as cells: name, status, counts and note."""
        return [
            tier.name,
            self.word(tier),
            f"{tier.compared.leaves:,}",
            f"{tier.compared.elements:,}",
            f"{tier.examples:,}",
            one_line(tier.note),
        ]

    def lines(self) -> Iterator[str]:
        """What to say below the table.

        How programs differ is of interest where the verdict is not "proved", and long:
        it comes last.
        """
        for tier in self.tiers:
            details = () if tier.name == "program" else tier.details
            for text in (*tier.differences[:SHOWN], *details):
                yield f"{tier.name}: {printable(str(text))}"
            if len(tier.differences) > SHOWN:
                more = len(tier.differences) - SHOWN
                yield f"{tier.name}: and {more} more, which JSON and Markdown hold"
        for accepted in self.accepted[:SHOWN]:
            yield printable(str(accepted))
        if len(self.accepted) > SHOWN:
            yield f"and {len(self.accepted) - SHOWN} more are accepted"
        if self.repeatability:
            yield self.repeatability
        for failure in self.failures:
            if failure.kind != "failed":  # those are seen above
                yield failure.reason
        programs = [t for t in self.tiers if t.name == "program" and not self.ok]
        for line in (line for tier in programs for line in tier.details):
            yield f"program: {printable(line)}"

    def _tier(self, name: str) -> Tier | None:
        return next((tier for tier in self.tiers if tier.name == name), None)

    def _status(self, name: str) -> str:
        tier = self._tier(name)
        return "not run" if tier is None else tier.status

    def _required(self) -> tuple[str, ...]:
        if self.required is not None:
            return self.required
        return tuple(tier.name for tier in self.tiers if tier.status != "skipped")

    def _failure(self, name: str) -> Failure | None:
        if self._satisfied(name):
            return None
        status = self._status(name)
        if name == "program" and status in _PASSED:  # and yet bits differ
            name, status = "bits", "failed"
        reason = {
            "failed": _DIFFERS.get(name, f"{name} differs"),
            "inconclusive": f"{name} is required, but inconclusive",
            "skipped": f"{name} is required, but was skipped",
            "not run": f"{name} is required, but was not run",
        }[status]
        return Failure(name, status, reason)

    def _satisfied(self, name: str) -> bool:
        passed = self._status(name) in _PASSED
        if name == "program":
            return passed and self._status("bits") != "failed"
        if name == "bits":
            return passed or self._satisfied("program")
        if name == "tolerance":
            failed = self._status("tolerance") == "failed"
            return passed or (self._satisfied("bits") and not failed)
        return passed


def _tier_as_dict(tier: Tier) -> dict[str, Any]:
    return {
        "tier": tier.name,
        "status": tier.status,
        "leaves": tier.compared.leaves,
        "elements": tier.compared.elements,
        "examples": tier.examples,
        "note": tier.note,
        "deterministic": tier.deterministic,
        "details": list(tier.details),
        "differences": [_difference_as_dict(d) for d in tier.differences],
    }


def _difference_as_dict(difference: Difference) -> dict[str, Any]:
    return {
        "path": difference.path,
        "what": difference.what,
        "detail": difference.detail,
        "absolute": json_number(difference.absolute),
        "ulps": json_number(difference.ulps),
    }


def _from_dict(data: Mapping[str, Any]) -> Report:
    required = data["required"]
    return Report(
        data["target"],
        tuple(map(_tier_from_dict, data["tiers"])),
        None if required is None else tuple(required),
        tuple(
            Accepted(
                entry["tier"],
                _difference_from_dict(entry["difference"]),
                entry["reason"],
                datetime.date.fromisoformat(entry["expires"]),
            )
            for entry in data["accepted"]
        ),
        dict(data["environment"]),
    )


def _tier_from_dict(data: Mapping[str, Any]) -> Tier:
    differences = map(_difference_from_dict, data["differences"])
    return Tier(
        data["tier"],
        Comparison(data["leaves"], data["elements"], tuple(differences)),
        data["examples"],
        data["note"],
        data["status"],
        tuple(data["details"]),
        data["deterministic"],
    )


def _difference_from_dict(data: Mapping[str, Any]) -> Difference:
    return Difference(
        data["path"],
        data["what"],
        data["detail"],
        number(data["absolute"]),
        number(data["ulps"]),
    )
