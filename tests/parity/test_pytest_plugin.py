"""The pytest plugin in sample projects: it fails and passes as it should."""

import importlib.metadata
import json
import pathlib
import sys

import jsonschema
import junitparser
import pytest

from tests.parity.reporting.test_junit import SCHEMA as XML_SCHEMA
from tests.parity.reporting.test_report import SCHEMA as JSON_SCHEMA

pytest_plugins = ["pytester"]

ROOT = pathlib.Path(__file__).parents[2]
_INSTALLED = importlib.metadata.entry_points(group="pytest11", name="parity")
# An installation from before the plugin does not load it.
PLUGIN = () if _INSTALLED else ("-p", "parity.pytest_plugin")

# `parity.check` itself has tests of its own: here it compares two numbers.
STUB = """
import numpy as np
import pytest
import parity

@pytest.fixture(autouse=True)
def stub(monkeypatch):
    def check(linen, nnx, inputs, *, fail_on=(), target="pair"):
        if linen is None:
            raise parity.CheckError("no module")
        from parity.reporting import gate
        tree, bits = (
            parity.compare_bytes({"a": np.float32(x)}, {"a": np.float32(y)})
            for x, y in ((0, 0), (linen, nnx))
        )
        tiers = parity.Tier("tree", tree), parity.Tier("bits", bits)
        tolerance = parity.Tier("tolerance", tree)
        return parity.Report(target, (*tiers, tolerance), gate.required(fail_on))

    monkeypatch.setattr(parity, "check", check, raising=False)
"""

TESTS = """
import pytest

def test_equal(parity):
    report = parity(1, 1, None)
    assert report.ok
    assert parity(2, 2, None, target="second").target == "second"

def test_near(parity):
    parity(1, 1.0000001, None)

def test_unchecked(parity):
    parity(None, 1, None)

@pytest.mark.parity(linen=lambda: 1, nnx=1, inputs=lambda: None)
def test_marked():
    pass

@pytest.mark.parity(linen=lambda: 1, nnx=2, inputs=None)
def test_marked_unequal():
    raise RuntimeError("the body is not reached")

@pytest.mark.parity(linen=1, nnx=1, inputs=None)
def test_the_body_counts_too():
    raise RuntimeError("reached")

def test_without():
    pass
"""


@pytest.fixture
def project(pytester):
    pytester.makeconftest(STUB)
    pytester.makepyfile(test_port=TESTS)
    return pytester


def run(project, *options):
    return project.runpytest_inprocess(*PLUGIN, "--strict-markers", *options)


def entry(**changes):
    values = {
        "target": "'test_port.py::test_near'",
        "tier": "'bits'",
        "path": "'a'",
        "max_ulps": 1,
        "reason": "'known'",
        "expires": "9999-12-31",
    } | changes
    return "\n".join(["[[accept]]", *(f"{k} = {v}" for k, v in values.items() if v)])


def test_a_sample_project_fails_and_passes_as_it_should(project):
    result = run(project)
    result.assert_outcomes(passed=3, failed=4)
    out = result.stdout.str()
    assert "parity: no module" in out
    # Reports, not tracebacks.
    assert "bits: a: value: 1 of 1 entries" in out
    assert "the body is not reached" not in out
    assert "reached" in out
    assert "pytest_plugin.py" not in out
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("workers", [0, 2])
def test_reports_are_written_with_workers_and_without(workers, project):
    files = [project.path / name for name in ("parity.xml", "parity.json")]
    options = [f"--parity-junit={files[0]}", f"--parity-json={files[1]}"]
    result = run(project, *options, f"-n{workers}", "--junit-xml=own.xml")
    result.assert_outcomes(passed=3, failed=4)

    XML_SCHEMA.validate(files[0].read_text())
    suites = junitparser.JUnitXml.fromfile(str(files[0]))
    unequal = ("test_near", "test_unchecked", "test_marked_unequal")
    assert {suite.name: suite.failures for suite in suites} == {
        "parity.second": 0,
        **{
            f"parity.test_port.py::{name}": int(name in unequal)
            for name in (
                "test_equal",
                "test_marked",
                "test_the_body_counts_too",
                *unequal,
            )
        },
    }
    data = json.loads(files[1].read_text())
    jsonschema.validate(data, JSON_SCHEMA)
    assert data["ok"] is False
    assert len(data["reports"]) == 7


def test_tiers_to_fail_on(project):
    out = run(project, "--parity-fail-on=tolerance")
    out.assert_outcomes(passed=4, failed=3)  # two bodies raise, one pair is none
    result = run(project, "--parity-fail-on=bits,speed")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "speed" in result.stderr.str()


def test_a_baseline(project):
    file = project.path / "accepted.toml"
    options = f"--parity-baseline={file}", "-k", "near or equal and not unequal"
    file.write_text(entry())
    run(project, *options).assert_outcomes(passed=2, deselected=5)

    for wrong, word in (
        ({"path": "'b'"}, "stale"),
        ({"expires": "2001-01-01"}, "expired"),
    ):
        file.write_text(entry(**wrong))
        result = run(project, *options)
        result.assert_outcomes(passed=1, failed=1, deselected=5)
        assert word in result.stdout.str()

    for wrong, word in (({"reason": None}, "reason"), ({"target": None}, "target")):
        file.write_text(entry(**wrong))
        result = run(project, *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert word in result.stderr.str()


def test_files_that_cannot_be_written_are_told_before_anything_runs(project):
    result = run(project, "--parity-json=nowhere/report.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "nowhere" in result.stderr.str()


def test_a_marker_that_lacks_something_says_what(pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parity(1, nnx=2)
        def test_wrong():
            pass
        """
    )
    result = run(pytester)
    result.assert_outcomes(failed=1)
    assert "Missing: linen, inputs; without a name: 1" in result.stdout.str()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--help", ["--parity-junit", "--parity-baseline", "--parity-fail-on"]),
        ("--markers", ["pytest.mark.parity(linen, nnx, inputs, **options)"]),
        ("--fixtures", ["A function like `parity.check` that fails the test"]),
    ],
)
def test_what_there_is_is_told(option, words, pytester):
    text = run(pytester, option).stdout.str()
    for word in words:
        assert word in text


def test_a_suite_without_models_does_not_pay_for_them(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(
        """
        import sys

        def test_light(request):
            request.config.getoption("--parity-json")
            heavy = {"jax", "flax", "numpy", "shared", "rich"}
            heavy.add("parity.reporting.report")
            assert not heavy & set(sys.modules)
        """
    )
    # Other plugins of this environment import what they like.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-m", "pytest", "-p", "parity.pytest_plugin"]
    pytester.run(*command).assert_outcomes(passed=1)


REAL = """
import flax.linen
import jax
import numpy as np
import pytest
from flax import nnx

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)

def make(rngs):
    return nnx.Linear(3, 4, rngs=rngs)

class Doubled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)

def test_equal(parity):
    report = parity(flax.linen.Dense(4), make, X)
    assert report.tier("bits").compared.elements > 20

def test_unequal(parity):
    parity(flax.linen.Dense(4), lambda rngs: Doubled(3, 4, rngs=rngs), X)

@pytest.mark.parity(
    linen=lambda: flax.linen.Dense(4), nnx=make, inputs=lambda: X, examples=1
)
def test_marked():
    pass

@pytest.mark.parity(linen=lambda: flax.linen.Dense(5), nnx=make, inputs=lambda: X)
def test_marked_unequal():
    pass
"""


def test_a_real_pair(pytester):
    pytester.makepyfile(test_port=REAL)
    result = run(pytester)
    result.assert_outcomes(passed=2, failed=2)
    out = result.stdout.str()
    assert "bits: outputs" in out or "bits: output" in out
    assert "(3, 5)" in out
