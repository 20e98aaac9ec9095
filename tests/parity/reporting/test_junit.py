"""JUnit XML: valid, read back by a reader of others, and it counts what failed."""

import pathlib

import junitparser
import pytest
import xmlschema
from hypothesis import given

from parity.reporting import junit
from tests.parity.reporting.reports import drawn, nasty, report

SCHEMA = xmlschema.XMLSchema(pathlib.Path(__file__).with_name("junit.xsd"))


def read(*reports):
    text = junit.render(reports)
    SCHEMA.validate(text)
    return junitparser.JUnitXml.fromstring(text.encode())


def cases(suite):
    return {case.name: case for case in suite}


@given(drawn())
def test_any_report_gives_valid_xml_that_fails_when_the_verdict_does(made):
    (suite,) = read(made)
    assert (suite.failures > 0) is not made.ok
    assert suite.tests >= max(1 - made.ok, len(made.tiers))
    assert {tier.name for tier in made.tiers} <= set(cases(suite))


def test_outcomes():
    made = report(
        ("tree", "program", "bits"),
        tree="proved",
        init="failed",
        program="inconclusive",
        tolerance="skipped",
        bits="failed",
    )
    (suite,) = read(made)
    assert suite.name == "parity.linen = nnx"
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (5, 2, 2, 0)
    found = cases(suite)
    assert found["tree"].classname == "parity.linen = nnx"
    assert found["tree"].is_passed
    (init,) = found["init"].result
    assert isinstance(init, junitparser.Skipped)
    assert "differs, not required" in init.message
    (program,) = found["program"].result
    assert (type(program), program.type) == (junitparser.Failure, "inconclusive")
    (bits,) = found["bits"].result
    assert isinstance(bits, junitparser.Failure)
    assert "a: value: 3 of 3 entries" in bits.message
    assert "a: value: 3 of 3 entries" in bits.text


def test_a_required_tier_that_was_not_run_is_a_failure():
    (suite,) = read(report(("tree", "oracle"), tree="proved"))
    (oracle,) = cases(suite)["oracle"].result
    assert oracle.type == "not run"
    (suite,) = read(report(None))
    assert suite.failures == 1


def test_properties_are_the_environment():
    (suite,) = read(report(tree="proved"))
    facts = {item.name: item.value for item in suite.properties()}
    assert facts["backend"] == "cpu"
    assert facts["matmul_precision"] == "highest"
    assert facts["verdict"] == "NOT EQUAL"


def test_texts_that_xml_cannot_hold_are_escaped():
    (suite,) = read(nasty())
    (bits,) = cases(suite)["bits"].result
    assert "\\x1b[2J\\x00\\ud800]]> & <b>" in bits.text
    assert len(bits.text.splitlines()) > 30


def test_several_reports_in_one_file():
    good = report(tree="proved", bits="proved")
    found = read(good, nasty())
    assert len(list(found)) == 2
    assert found.tests == sum(suite.tests for suite in found)
    assert found.failures == sum(suite.failures for suite in found) > 0
    assert read().tests == 0


def test_the_schema_refuses_what_it_should():
    text = report(tree="proved").to_junit()
    for old, new in (
        ("testcase", "case"),
        ('tests="2"', ""),
        ('name="tree"', 'name=""'),
        ("<failure", "<failed"),
    ):
        assert old in text
        with pytest.raises((xmlschema.XMLSchemaException, SyntaxError)):
            SCHEMA.validate(text.replace(old, new))
