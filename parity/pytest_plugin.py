"""Parity in pytest: a fixture, a marker, and options for what a CI system reads.

    def test_port(parity):
        parity(linen_module, nnx_module, inputs, rules="rules.toml")

    @pytest.mark.parity(linen=make_linen, nnx=make_nnx, inputs=make_inputs)
    def test_port(): ...

Both take the options of `parity.check` and fail the test with the printed report. The
marker checks before the body of the test runs; `linen` and `inputs` may be functions
without arguments, so that no model is built when tests are collected.

Reports are called after their tests; `--parity-junit` and `--parity-json` write all of
them into one file, under pytest-xdist too. An entry of a `--parity-baseline` names its
report: `target = "tests/test_port.py::test_port"`.
"""

# Nothing heavy here: pytest imports this module wherever the package is installed.

from __future__ import annotations

import datetime
import inspect
import json
import pathlib
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from parity.reporting import baseline, gate

if TYPE_CHECKING:
    from parity.reporting.report import Report

_MARKER = (
    "parity(linen, nnx, inputs, **options): check with parity.check before the body"
)
_NEEDED = ("linen", "nnx", "inputs")


class _Session:
    """The options, and the reports of every test that has run."""

    def __init__(self, config: pytest.Config):
        self.files = {
            kind: config.getoption(f"parity_{kind}") for kind in ("junit", "json")
        }
        self.fail_on: str | None = config.getoption("parity_fail_on")
        self.is_worker = hasattr(config, "workerinput")  # of pytest-xdist
        self.today = datetime.date.today()
        self.baseline: baseline.Baseline | None = None
        self.reports: list[str] = []  # as JSON: a worker sends them as text
        try:
            if self.fail_on is not None:
                gate.required(self.fail_on)
            if config.getoption("parity_baseline"):
                self.baseline = baseline.read(config.getoption("parity_baseline"))
        except (gate.GateError, baseline.BaselineError) as error:
            raise pytest.UsageError(f"parity: {error}") from error
        for entry in self.baseline.entries if self.baseline else ():
            if entry.target is None:
                raise pytest.UsageError(
                    f"parity: {entry} needs a target here, the id of its test such as "
                    "tests/test_port.py::test_port, since there may be many reports."
                )
        for kind, file in self.files.items():
            if file and not pathlib.Path(file).absolute().parent.is_dir():
                raise pytest.UsageError(
                    f"--parity-{kind}={file}: there is no such folder."
                )

    def check(self, item: pytest.Item, options: dict[str, Any]) -> Report:
        """Checks one pair for `item`, and keeps the report."""
        import parity

        made = item.stash.setdefault(_REPORTS, [])
        name = item.nodeid if not made else f"{item.nodeid} ({len(made) + 1})"
        if self.fail_on is not None:
            options = {"fail_on": self.fail_on} | options
        try:
            report = parity.check(**{"target": name} | options)
        except Exception as error:
            made.append(_unchecked(name, error).to_json())
            if isinstance(error, parity.CheckError | parity.RuleError):
                pytest.fail(f"parity: {error}", pytrace=False)
            raise
        if self.baseline is not None:
            report = baseline.apply(report, self.baseline, self.today)
        made.append(report.to_json())
        if not report.ok:
            pytest.fail(f"{report.verdict}\n{report.to_text()}", pytrace=False)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collects what a test, here or in a worker, sent along with its own report."""
        self.reports += getattr(report, "parity", [])

    def pytest_sessionfinish(self) -> None:
        """Writes the files, once all workers are done."""
        if any(self.files.values()) and not self.is_worker:
            self._write()

    def _write(self) -> None:
        from parity.reporting import junit
        from parity.reporting.report import Report

        reports = [Report.from_json(text) for text in self.reports]
        reports.sort(key=lambda report: report.target)
        everything = {
            "schema": "parity-zoo/reports",
            "version": 1,
            "ok": all(report.ok for report in reports),
            "reports": [report.as_dict() for report in reports],
        }
        texts = {
            "junit": junit.render(reports),
            "json": json.dumps(everything, indent=2, allow_nan=False) + "\n",
        }
        for kind, file in self.files.items():
            if file:
                pathlib.Path(file).write_text(texts[kind], encoding="utf-8")


_SESSION = pytest.StashKey[_Session]()
_REPORTS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the options."""
    group = parser.getgroup("parity", "Flax Linen and NNX parity")
    for name, metavar, text in (
        ("junit", "FILE", "write the reports there, as JUnit XML, a suite each"),
        ("json", "FILE", "write the reports there, as JSON"),
        ("fail-on", "TIERS", f"tiers that decide, of {','.join(gate.PAIR_TIERS)}"),
        ("baseline", "FILE", "accepted differences, TOML"),
    ):
        group.addoption(f"--parity-{name}", metavar=metavar, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Reads the options, so that what is wrong with them is said at once."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_SESSION] = session = _Session(config)
    config.pluginmanager.register(session, "parity-session")


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """A function like `parity.check` that fails the test unless the two are equal."""
    session = request.config.stash[_SESSION]

    def check(linen: Any, nnx: Any, inputs: Any, **options: Any) -> Report:
        given = {"linen": linen, "nnx": nnx, "inputs": inputs, **options}
        return session.check(request.node, given)

    return check


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(
    pyfuncitem: pytest.Function,
) -> Generator[None, object | None, object | None]:
    """Checks the pair of the marker before the test's own body."""
    session = pyfuncitem.config.stash[_SESSION]
    for marker in pyfuncitem.iter_markers("parity"):
        session.check(pyfuncitem, _of_marker(pyfuncitem, marker))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Sends reports along with the test's own, which pytest-xdist takes to the main."""
    report = yield
    if call.when == "call":
        reports = item.stash.get(_REPORTS, [])
        report.parity = reports  # type: ignore[attr-defined]
        item.stash[_REPORTS] = []
    return report


def _unchecked(target: str, error: Exception) -> Report:
    """The report of a pair that could not be checked: nothing in it is proved."""
    from parity.reporting.report import Report, Tier
    from parity.trees import Comparison, Difference

    difference = Difference("(check)", type(error).__name__, str(error))
    note = "the pair could not be checked"
    tier = Tier("tree", Comparison(0, 0, (difference,)), note=note)
    return Report(target, (tier,))


def _of_marker(item: pytest.Item, marker: pytest.Mark) -> dict[str, Any]:
    options = dict(marker.kwargs)
    missing = [name for name in _NEEDED if name not in options]
    if marker.args or missing:
        pytest.fail(
            "pytest.mark.parity takes linen=, nnx=, inputs= and options of "
            f"parity.check, all by name. Missing: {', '.join(missing) or 'none'}; "
            f"without a name: {len(marker.args)}.",
            pytrace=False,
        )
    for name in ("linen", "inputs"):  # parity.check itself calls a function for `nnx`
        if inspect.isfunction(options[name]):
            options[name] = options[name]()
    return options
