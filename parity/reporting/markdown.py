"""A verdict as a comment for a pull request: short, the long parts folded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from parity.reporting.text import one_line

if TYPE_CHECKING:
    from parity.reporting.report import Report, Tier

LIMIT = 65_536  # characters that GitHub takes in a comment
SHOWN = 20  # differences, details and accepted entries shown a tier
WIDTH = 500  # of a line
_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "\\`*_[]|~#&<>"} | {"@": "&#64;"}
)


def marker(target: str) -> str:
    """A comment nobody sees, by which a workflow finds the comment to update."""
    name = one_line(target).replace("--", "- -").replace(">", "&gt;")
    return f"<!-- parity-zoo: {name} -->"


def render(report: Report) -> str:
    """The whole comment, within GitHub's limit."""
    head = [
        marker(report.target),
        f"## parity: {code(report.target)}: {report.verdict}",
        "",
        "| tier | status | leaves | elements | examples | compared |",
        "|---|---|--:|--:|--:|---|",
        *(f"| {' | '.join(map(escape, report.row(tier)))} |" for tier in report.tiers),
        "",
        *(f"- {escape(failure.reason)}" for failure in report.failures),
        "",
        report.repeatability,
    ]
    accepted = (
        f"{code(f'{a.tier}: {a.difference}')} until {a.expires}: {escape(a.reason)}"
        for a in report.accepted
    )
    parts = [
        *(_folded(_title(tier), _of_tier(tier)) for tier in report.tiers),
        _folded(f"accepted differences: {len(report.accepted)}", accepted),
        _folded("environment", _environment(report)),
    ]
    return _bounded("\n".join(head).rstrip(), [part for part in parts if part])


def escape(text: str) -> str:
    """Prose that Markdown and HTML leave as it is, also in a cell of a table."""
    return _short(text).translate(_ESCAPES)


def code(text: str) -> str:
    """Text as code, whatever is in it; not for cells of a table."""
    text = _short(text)
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest or not text.strip() else ""
    return f"{fence}{space}{text}{space}{fence}"


def _title(tier: Tier) -> str:
    count = len(tier.differences)
    return f"{tier.name}: {count} difference{'' if count == 1 else 's'}"


def _of_tier(tier: Tier) -> Iterable[str]:
    yield from (code(str(difference)) for difference in tier.differences)
    yield from (code(line) for line in tier.details)


def _environment(report: Report) -> Iterable[str]:
    for name, value in report.environment.items():
        yield f"{escape(name)}: {code(value) if value else '(none)'}"


def _folded(title: str, lines: Iterable[str]) -> str:
    items = list(lines)
    if not items:
        return ""
    shown = [f"- {item}" for item in items[:SHOWN]]
    if len(items) > SHOWN:
        shown.append(f"- and {len(items) - SHOWN} more, in the JSON report")
    body = "\n".join(shown)
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _bounded(head: str, parts: list[str]) -> str:
    """As many parts as fit, with a word on those that do not."""
    rest = "\n\nSome parts are too long for a comment; the JSON report holds them.\n"
    text = head
    for part in parts:
        if len(text) + len(part) + 2 + len(rest) > LIMIT:
            return text[: LIMIT - len(rest)] + rest
        text += f"\n\n{part}"
    return text + "\n" if len(text) < LIMIT else text[: LIMIT - len(rest)] + rest


def _short(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"
