"""Verdicts as JUnit XML, which GitLab, Jenkins and GitHub's reporters show.

A suite is a report, a test case is a tier. A tier that stands in the way of the verdict
is a failure; one that differs but is not required is shown as skipped, with the reason.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import TYPE_CHECKING

from parity.reporting.text import one_line, printable

if TYPE_CHECKING:
    from parity.reporting.report import Failure, Report, Tier


def render(reports: Sequence[Report]) -> str:
    """One file with a test suite for each report."""
    suites = ET.Element("testsuites", name="parity")
    for report in reports:
        _add_suite(suites, report)
    for name in ("tests", "failures", "errors", "skipped"):
        suites.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    ET.indent(suites)
    text = ET.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_suite(suites: ET.Element, report: Report) -> None:
    name = f"parity.{one_line(report.target)}"
    suite = ET.SubElement(suites, "testsuite", name=name)
    properties = ET.SubElement(suite, "properties")
    facts = {"verdict": report.verdict, "deterministic": str(report.deterministic)}
    for key, value in {**facts, **report.environment}.items():
        ET.SubElement(properties, "property", name=key, value=one_line(value))

    failures = {failure.tier: failure for failure in report.failures}
    for tier in report.tiers:
        case = ET.SubElement(suite, "testcase", classname=name, name=tier.name)
        _add_outcome(case, report, tier, failures.pop(tier.name, None))
        ET.SubElement(case, "system-out").text = printable(_account(report, tier))
    for failure in failures.values():  # required, but not run
        case = ET.SubElement(
            suite, "testcase", classname=name, name=failure.tier or "verdict"
        )
        ET.SubElement(case, "failure", type=failure.kind, message=failure.reason)

    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", "0")
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))


def _add_outcome(
    case: ET.Element, report: Report, tier: Tier, failure: Failure | None
) -> None:
    lines = [str(difference) for difference in tier.differences]
    if failure is not None:
        message = one_line("; ".join([failure.reason, *lines[:1]]))
        element = ET.SubElement(case, "failure", type=failure.kind, message=message)
        element.text = printable("\n".join([*lines, *tier.details]))
    elif tier.status not in ("proved", "accepted"):
        message = f"{report.word(tier)}, not required: {'; '.join(lines[:1])}"
        message = one_line(message if lines else f"{tier.status}: {tier.note}")
        ET.SubElement(case, "skipped", message=message)


def _account(report: Report, tier: Tier) -> str:
    lines = [
        f"{report.word(tier)}: {tier.compared.leaves} leaves, "
        f"{tier.compared.elements} elements, {tier.examples} examples. {tier.note}",
        *map(str, tier.differences),
        *tier.details,
        *(str(entry) for entry in report.accepted if entry.tier == tier.name),
    ]
    return "\n".join(lines)
