"""Accepted differences: only distances, only for a while, and none without need."""

import dataclasses
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity import Report
from parity.reporting import baseline
from parity.reporting.baseline import BaselineError
from tests.parity.reporting.reports import EQUAL, MISSING, NEAR, UNEQUAL, tier

TODAY = datetime.date(2030, 6, 15)
NEEDED = ("tree", "bits")


def entry(**changes):
    """The text of an entry that accepts NEAR."""
    values = {
        "tier": '"bits"',
        "path": '"a/b"',
        "max_ulps": "1",
        "reason": '"a fused multiply-add"',
        "expires": "2030-06-15",
    } | changes
    lines = [f"{key} = {value}" for key, value in values.items() if value is not None]
    return "\n".join(["[[accept]]", *lines, ""])


def applied(text, *tiers):
    tiers = tiers or (tier("tree"), tier("bits", "failed", NEAR))
    report = Report("x", tiers, NEEDED)
    return baseline.apply(report, baseline.parse(text, "b.toml"), TODAY)


def complaints(report):
    return [(d.what, d.path) for d in report.tier("baseline").differences]


def test_a_small_difference_is_accepted_with_its_reason_to_its_last_day():
    report = applied(entry())
    assert report.ok
    assert report.verdict == "accepted"
    assert report.tier("bits").status == "accepted"
    assert report.tier("bits").differences == ()
    (accepted,) = report.accepted
    assert accepted.tier == "bits"
    assert accepted.difference == NEAR.differences[0]
    assert accepted.reason == "a fused multiply-add"
    assert accepted.expires == TODAY
    assert report.tier("baseline").status == "proved"
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("limits", "ok"),
    [
        ({"max_ulps": "1"}, True),
        ({"max_ulps": "0.5"}, False),
        ({"max_ulps": None, "max_abs": "1e-6"}, True),
        ({"max_ulps": None, "max_abs": "1e-7"}, False),
        ({"max_ulps": "1", "max_abs": "1e-7"}, False),
    ],
)
def test_a_difference_must_be_within_every_limit(limits, ok):
    report = applied(entry(**limits))
    assert report.ok is ok
    assert bool(report.accepted) is ok
    assert report.tier("bits").status == ("accepted" if ok else "failed")
    assert complaints(report) == []  # it is about something


def test_the_rest_of_a_tier_still_fails():
    both = NEAR + UNEQUAL
    report = applied(entry(), tier("tree"), tier("bits", "failed", both))
    assert not report.ok
    assert [d.path for d in report.tier("bits").differences] == ["a"]
    assert len(report.accepted) == 1


def test_an_expired_entry_accepts_nothing_and_fails():
    for tiers in ((), (tier("tree"), tier("bits"))):
        report = applied(entry(expires="2030-06-14"), *tiers)
        assert not report.ok
        assert complaints(report) == [("expired", "a/b")]
        assert "2030-06-14" in report.to_text()
        assert "entry 1" in report.to_text()
        assert not report.accepted


@pytest.mark.parametrize(
    ("path", "compared"),
    [("a/c", NEAR), ("a/b", EQUAL), ("a", NEAR), ("a/b/*", NEAR), ("A/b", NEAR)],
)
def test_a_stale_entry_fails(path, compared):
    bits = tier("bits", "proved" if compared is EQUAL else "failed", compared)
    text = entry(path=f'"{path}"')
    report = applied(text, tier("tree"), bits)
    assert complaints(report) == [("stale", path)]
    assert not report.ok
    assert "delete the entry" in report.to_text()


def test_the_baseline_fails_a_verdict_that_is_proved_otherwise():
    report = applied(entry(), tier("tree"), tier("bits"))
    assert [failure.tier for failure in report.failures] == ["baseline"]
    # Also one that does not require it.
    assert not dataclasses.replace(report, required=("tree",)).ok


def test_a_tier_that_was_not_run_judges_no_entry():
    report = applied(entry(tier='"tolerance"'), tier("tree"), tier("bits"))
    assert report.ok
    assert report.tier("baseline").status == "skipped"
    report = applied(entry(), tier("tree"), tier("bits", "inconclusive"))
    assert complaints(report) == []


def test_an_entry_for_another_report_is_left_alone():
    assert applied(entry(target='"x"')).ok
    report = applied(entry(target='"y"'))
    assert not report.ok
    assert not report.accepted
    assert complaints(report) == []


@pytest.mark.parametrize("what", ["missing", "shape", "dtype", "not finite", "axes"])
def test_only_distances_of_values_can_be_accepted(what):
    odd = dataclasses.replace(
        NEAR, differences=(NEAR.differences[0]._replace(what=what),)
    )
    report = applied(entry(), tier("tree"), tier("bits", "failed", odd))
    assert not report.ok
    assert not report.accepted


def test_a_distance_that_nobody_measured_is_not_accepted():
    unknown = NEAR.differences[0]._replace(ulps=None, absolute=float("nan"))
    compared = dataclasses.replace(NEAR, differences=(unknown,))
    for limits in ({}, {"max_ulps": None, "max_abs": "1e300"}):
        report = applied(
            entry(**limits), tier("tree"), tier("bits", "failed", compared)
        )
        assert not report.accepted


def test_other_tiers_are_not_touched():
    text = entry(path='"b"')
    report = applied(text, tier("tree", "failed", MISSING), tier("bits"))
    assert report.tier("tree").status == "failed"
    assert not report.accepted


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("a/*", "a/b", True),
        ("a/*", "a/b/c", False),
        ("*/b", "a/b", True),
        ("**", "a/b/c", True),
        ("a/**", "a/b/c", True),
        ("a/**", "b/a/c", False),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/x/y/c", True),
        ("a/**/c", "a/xc", False),
        ("**/kernel", "kernel", True),
        ("**/kernel", "a/akernel", False),
        ("a/layer_*/c", "a/layer_12/c", True),
        ("a.b", "axb", False),
        ("a[0]/b", "a[0]/b", True),
        ("a[0]/b", "a0/b", False),
    ],
)
def test_paths_with_wildcards(pattern, path, found):
    there = NEAR.differences[0]._replace(path=path)
    compared = dataclasses.replace(NEAR, differences=(there,))
    report = applied(
        entry(path=f'"{pattern}"'), tier("tree"), tier("bits", "failed", compared)
    )
    assert bool(report.accepted) is found
    assert complaints(report) == ([] if found else [("stale", pattern)])


@given(st.text(st.characters(exclude_characters="*\r"), min_size=1))
def test_a_path_without_wildcards_means_itself(path):
    made = baseline.Entry(1, "bits", path, "r", TODAY, max_ulps=1)
    difference = NEAR.differences[0]
    assert made.names("bits", difference._replace(path=path))
    assert not made.names("bits", difference._replace(path=path + "x"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[accept", ["b.toml", "TOML"]),
        ("[accept]\n", ["[[accept]]"]),
        ("x = 1\n" + entry(), ["x"]),
        ("accept = [1]", ["entry 1", "table"]),
        (entry(reason=None), ["entry 1", "reason"]),
        (entry(reason='" "'), ["reason"]),
        (entry(expires=None), ["expires"]),
        (entry(expires='"2030-01-01"'), ["expires", "quotes"]),
        (entry(expires="2030-01-01T10:00:00"), ["expires"]),
        (entry(expires="2030"), ["expires", "2030"]),
        (entry(path=None), ["path"]),
        (entry(path="3"), ["path", "3"]),
        (entry(tier=None), ["tier"]),
        (entry(tier='"tree"'), ["tree", "bits", "tolerance"]),
        (entry(max_ulps=None), ["max_ulps", "max_abs"]),
        (entry(max_ulps="0"), ["max_ulps", "0"]),
        (entry(max_ulps="-1"), ["-1"]),
        (entry(max_ulps="true"), ["True"]),
        (entry(max_ulps="inf"), ["inf"]),
        (entry(max_abs="nan"), ["max_abs", "nan"]),
        (entry(max_abs='"1"'), ["max_abs", "'1'"]),
        (entry(max_ulp="1"), ["max_ulp", "max_ulps"]),
        (entry(target='""'), ["target"]),
        (entry() + entry(reason='"twice"'), ["1", "2", "a/b"]),
    ],
    ids=range(24),
)
def test_a_malformed_entry_is_refused(text, words):
    with pytest.raises(BaselineError) as caught:
        baseline.parse(text, "b.toml")
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    file = tmp_path / "none.toml"
    with pytest.raises(BaselineError, match=r"none\.toml"):
        baseline.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BaselineError, match=r"none\.toml"):
        baseline.read(file)
    file.write_text("")
    assert baseline.read(file).entries == ()
