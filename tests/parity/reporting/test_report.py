"""The verdict: what it takes, what it says, and that each format can be read back."""

import dataclasses
import datetime
import importlib.resources
import io
import json

import jsonschema
import numpy as np
import pytest
import rich.console
from hypothesis import given

import parity
from parity import Comparison, Report, Tier, compare_bytes
from parity.reporting import gate
from parity.reporting.markdown import LIMIT
from parity.reporting.report import Accepted, ReportError, environment
from tests.parity.reporting.reports import (
    EQUAL,
    NASTY,
    NEAR,
    UNEQUAL,
    drawn,
    nasty,
    report,
    tier,
)

SCHEMA = json.loads(
    (
        importlib.resources.files("parity.reporting") / "schemas/report-1.json"
    ).read_text()
)


def printed(report):
    out = io.StringIO()
    report.print(rich.console.Console(file=out, width=200))
    return out.getvalue()


# What a verdict takes.


@pytest.mark.parametrize(
    ("fail_on", "statuses", "ok"),
    [
        ("", {"bits": "proved"}, True),
        ("", {"bits": "failed"}, False),
        ("", {"bits": "accepted"}, True),
        ("", {"bits": "inconclusive"}, False),
        ("", {"bits": "skipped"}, False),
        ("", {}, False),
        ("", {"program": "proved"}, True),
        ("", {"program": "proved", "bits": "inconclusive"}, True),
        ("", {"program": "proved", "bits": "failed"}, False),
        ("", {"program": "failed", "bits": "proved"}, True),
        ("", {"init": "failed", "bits": "proved"}, True),
        ("", {"bits": "failed", "tolerance": "proved"}, False),
        ("", {"bits": "proved", "oracle": "failed"}, False),
        ("", {"bits": "proved", "oracle": "inconclusive"}, True),
        ("init", {"init": "failed", "bits": "proved"}, False),
        ("init", {"init": "proved", "bits": "proved"}, True),
        ("init", {"init": "proved", "bits": "failed"}, False),
        ("program", {"program": "failed", "bits": "proved"}, False),
        ("program", {"program": "proved"}, True),
        ("program", {"program": "proved", "bits": "failed"}, False),
        ("program", {"bits": "proved"}, False),
        ("tolerance", {"bits": "failed", "tolerance": "proved"}, True),
        ("tolerance", {"bits": "failed", "tolerance": "failed"}, False),
        ("tolerance", {"bits": "proved", "tolerance": "skipped"}, True),
        ("tolerance", {"program": "proved"}, True),
        ("tolerance", {}, False),
        ("oracle", {"bits": "proved"}, False),
        ("oracle", {"bits": "proved", "oracle": "inconclusive"}, False),
        ("tolerance,oracle", {"tolerance": "proved", "oracle": "proved"}, True),
    ],
    ids=str,
)
def test_what_fails_a_verdict(fail_on, statuses, ok):
    made = report(tree="proved", **statuses)
    decided = gate.apply(made, [name for name in fail_on.split(",") if name])
    assert decided.ok is ok
    for broken in ("failed", "skipped", "inconclusive"):
        made = report(tree=broken, **statuses)
        assert not gate.apply(made, fail_on.split(",") if fail_on else ()).ok


def test_without_required_tiers_every_tier_that_was_run_counts():
    assert report(None, tree="proved", init="proved", oracle="skipped").ok
    assert not report(None, tree="proved", init="failed").ok
    assert not report(None, tree="proved", init="inconclusive").ok
    assert not report(None, oracle="skipped").ok
    assert not report(None).ok
    assert not report(()).ok


@pytest.mark.parametrize(
    ("text", "wrong"), [("bit", "bit"), ("bits,x", "x"), ("", "nothing"), ("a,b", "a")]
)
def test_an_unknown_tier_to_fail_on_is_named(text, wrong):
    with pytest.raises(gate.GateError, match=wrong) as caught:
        gate.required(text)
    assert "tolerance" in str(caught.value)


def test_tiers_to_fail_on_stand_in_order():
    assert gate.required() == ("tree", "bits")
    assert gate.required("oracle, init") == ("tree", "init", "bits", "oracle")
    assert gate.required("program") == ("tree", "program")


def test_a_tier_is_never_proved_by_nothing_or_in_spite_of_a_difference():
    assert Tier("program", Comparison(), status="proved").status == "failed"
    assert Tier("program", Comparison(3, 0), status="proved").status == "failed"
    assert Tier("program", UNEQUAL, status="proved").status == "failed"
    proved = Tier("program", EQUAL)
    assert dataclasses.replace(proved, compared=UNEQUAL).status == "failed"
    assert Tier("bits", Comparison(), note="later", status="skipped").differences == ()


def test_bits_that_a_frontend_does_not_repeat_itself_prove_nothing():
    once = tier("bits", deterministic=False)
    assert once.status == "inconclusive"
    made = Report("x", (tier("tree"), once), ("tree", "bits"))
    assert made.verdict == "INCONCLUSIVE"
    assert not made.ok
    assert "not deterministic" in printed(made)
    # Equal programs do not depend on it.
    program = dataclasses.replace(made, tiers=(*made.tiers, tier("program")))
    assert program.ok


@pytest.mark.parametrize(
    ("backend", "deterministic", "word"),
    [
        ("cpu", None, "proved"),
        ("gpu", None, "equal in one run"),
        ("gpu", True, "proved"),
        ("tpu", None, "proved"),
    ],
)
def test_one_run_is_called_one_run(backend, deterministic, word):
    made = Report(
        "x",
        (tier("tree"), tier("bits", deterministic=deterministic)),
        environment={"backend": backend},
    )
    assert made.word(made.tiers[0]) == "proved"
    assert made.word(made.tiers[1]) == word
    for text in (printed(made), made.to_markdown(), made.to_junit()):
        assert word in text
        assert "identical" not in text


def test_what_is_not_required_differs_and_what_is_has_failed():
    made = report(tree="proved", init="failed", bits="failed")
    assert [made.word(tier) for tier in made.tiers] == ["proved", "differs", "FAILED"]
    assert [failure.tier for failure in made.failures] == ["bits"]
    out = printed(made)
    assert "differs" in out
    assert "FAILED" in out
    assert "init: a: value" in out


def test_what_was_not_run_is_said():
    made = report(("tree", "program"), tree="proved", program="inconclusive")
    assert made.verdict == "INCONCLUSIVE"
    assert "program is required, but inconclusive" in printed(made)
    made = report(("tree", "program"), tree="proved")
    assert made.verdict == "NOT EQUAL"
    assert "program is required, but was not run" in printed(made)


def test_the_environment_says_what_a_verdict_depends_on(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    facts = environment()
    assert facts["xla_flags"] == "--xla_something=1"
    assert facts["libtpu_init_args"] == "--other"
    assert facts["backend"] == "cpu"
    assert facts["matmul_precision"] == "highest"
    assert facts["prng"] == "threefry2x32"
    assert facts["x64"] in ("True", "False")
    assert all(isinstance(value, str) for value in facts.values())


# Differences carry numbers.


def test_distances_of_values_are_numbers_too():
    (near,) = NEAR.differences
    assert near.ulps == 1
    assert near.absolute == pytest.approx(2.0**-23)
    assert str(near) == f"a/b: value: {near.detail}"
    (far,) = UNEQUAL.differences
    assert far.absolute == 2
    left, right = np.float32([np.inf, 1]), np.float32([np.inf, 2])
    assert compare_bytes({"a": left}, {"a": right}).differences[0].absolute == 1
    (nan,) = compare_bytes({"a": left}, {"a": left * np.nan}).differences
    assert nan.absolute == nan.ulps == np.inf
    (whole,) = compare_bytes({"a": np.int32([7])}, {"a": np.int32([4])}).differences
    assert (whole.absolute, whole.ulps) == (3, None)
    (complex_,) = compare_bytes(
        {"a": np.ones(1) * 1j}, {"a": np.ones(1) * 2j}
    ).differences
    assert complex_.absolute == 1
    assert [d.absolute for d in compare_bytes({"a": left}, {}).differences] == [None]


# Formats.


@given(drawn())
def test_json_is_read_back_and_fits_the_schema(made):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = made.to_json()
    jsonschema.validate(json.loads(text, parse_constant=refuse), SCHEMA)
    again = Report.from_json(text)
    # NaN is not equal to itself.
    assert again.to_json() == text
    assert (again.ok, again.failures) == (made.ok, made.failures)
    assert again.environment == made.environment


@given(drawn())
def test_any_report_can_be_printed(made):
    assert printed(made)
    assert made.to_text()
    assert len(made.to_markdown()) <= LIMIT


def test_the_schema_is_a_schema_and_refuses_a_false_proof():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    data = report(tree="proved", bits="proved").as_dict()
    jsonschema.validate(data, SCHEMA)
    for change in (
        {"version": 2},
        {"ok": True, "verdict": "NOT EQUAL"},
        {"tiers": [{**data["tiers"][0], "leaves": 0}]},
        {"tiers": [{**data["tiers"][0], "status": "equal"}]},
        {"environment": {}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**data, **change}, SCHEMA)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "parity-zoo/report", "version": 1}']
)
def test_what_is_no_report_is_not_read(text):
    with pytest.raises(ReportError, match="no report"):
        Report.from_json(text)


def test_another_version_is_named():
    text = report(tree="proved").to_json().replace('"version": 1', '"version": 2')
    with pytest.raises(ReportError, match="version 2"):
        Report.from_json(text)


def test_accepted_differences_are_read_back_and_shown():
    entry = Accepted("bits", NEAR.differences[0], "known", datetime.date(2030, 1, 2))
    made = dataclasses.replace(
        report(tree="proved", bits="accepted"), accepted=(entry,)
    )
    assert made.verdict == "accepted"
    jsonschema.validate(made.as_dict(), SCHEMA)
    assert Report.from_json(made.to_json()) == made
    for text in (printed(made), made.to_markdown(), made.to_junit()):
        for word in ("known", "2030-01-02", "a/b", "accepted"):
            assert word in text


def test_markdown_of_a_report():
    text = report(tree="proved", init="failed", bits="failed").to_markdown()
    first, title, *rest = text.splitlines()
    assert first == "<!-- parity-zoo: linen = nnx -->"
    assert title == "## parity: `linen = nnx`: NOT EQUAL"
    rows = [line for line in rest if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert rows[3].startswith("| init | differs | 1 | 3 |")
    assert text.count("<details>") == text.count("</details>") == 3
    assert "- `a: value: 3 of 3 entries" in text
    assert "jax" in text


def test_markdown_is_not_broken_by_what_is_in_it():
    text = nasty().to_markdown()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    # Bars that are not escaped part cells.
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}
    assert text.splitlines()[0].count("-->") == 1
    assert "\x1b" not in text
    assert "and 12 more" in text  # 31 differences and a detail, 20 shown
    text.encode()
    for line in text.splitlines():
        if "<b>" in line.replace("\\<b\\>", ""):
            assert line.startswith(("## parity: ```", "- ```", "<!--"))


def test_markdown_fits_into_a_comment():
    long = "x" * 10_000
    tiers = [
        tier(name, "failed", note=long, details=(long,) * 1000)
        for name in ("tree", "init", "program", "bits", "tolerance", "oracle")
    ]
    made = Report(long, tuple(tiers) * 5)
    text = made.to_markdown()
    assert len(text) <= LIMIT
    assert "the JSON report holds them" in text
    assert text.count("<details>") == text.count("</details>") > 1


def test_printed_text_is_not_markup():
    made = Report("[red]x", (tier("tree", note="[bold]y[/]"),))
    out = printed(made)
    assert "[red]x" in out
    assert "[bold]y[/]" in out
    assert "\x1b" not in printed(nasty()).replace("\\x1b", "")
    assert NASTY.split("\x1b")[0] in printed(nasty())


def test_every_public_name_is_there():
    for name in parity.__all__:
        assert getattr(parity, name) is not None
        assert name in dir(parity)
    with pytest.raises(AttributeError, match="chekc"):
        parity.chekc  # noqa: B018
