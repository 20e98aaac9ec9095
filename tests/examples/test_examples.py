"""The pairs in `examples` are proved, and what `suggest` drafts for them is of use."""

import functools
import io
import sys

import pytest
import rich.console

import parity
import parity.__main__
from parity.mapping.correspondence import match
from parity.pairs import calls, checking, frontends
from tests.examples import pairs
from tests.examples.pairs import FOLDER, NAMES

OPTIONS = (
    "--linen=linen_model:make",
    "--nnx=nnx_model:make",
    "--inputs=inputs:inputs",
    "--calls=inputs:calls",
)


@pytest.fixture
def stand_in(monkeypatch):
    """Makes an example's folder the working directory, and forgets its modules."""

    def forget():
        for module in pairs.MODULES:
            sys.modules.pop(module, None)

    def change(name):
        monkeypatch.chdir(FOLDER / name)
        monkeypatch.setattr(sys, "path", list(sys.path))
        forget()

    yield change
    forget()


def main(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    return parity.__main__.main(argv, console), out.getvalue()


def statuses(report):
    return {tier.name: tier.status for tier in report.tiers}


@functools.cache
def draft(name):
    inputs = pairs.load(name).inputs
    make = pairs.load(name).nnx_model.make
    return checking.suggest(
        pairs.linen(name), make, inputs.inputs(), call=inputs.calls()
    )


def correspondence(name, rules):
    pair = pairs.load(name)
    wanted = calls.make_calls(pair.inputs.calls(), None, pair.inputs.inputs())
    args = calls.first_example(wanted[0].inputs)[0]
    left = frontends.make_linen(pairs.linen(name), None, wanted[0], args, 0)
    right = frontends.make_nnx(pair.nnx_model.make, 0)
    return match(left.leaves, right.leaves, parity.Rules.parse(rules))


def moves(found):
    """What goes where and how, whichever rule said so."""
    return {(entry.linen, entry.nnx, entry.steps) for entry in found.entries}


@pytest.mark.parametrize("name", NAMES)
def test_example_is_proved_to_the_bit(name):
    report = pairs.check(name, tiers=("tree", "bits"))
    assert statuses(report) == {"tree": "proved", "bits": "proved"}
    assert report.verdict == "proved"
    assert report.deterministic


def test_fused_tagger_is_the_same_within_rounding():
    pair = pairs.load("tagger")
    [evaluate] = [call for call in pair.inputs.calls() if call.name == "eval"]
    report = pairs.check(
        "tagger",
        pair.nnx_model.make_fused,
        call=evaluate,
        tiers=("tree", "bits", "tolerance"),
        fail_on="tolerance",
    )
    assert report.verdict == "proved"
    [line] = {line for line in report.tier("tree").details if "rule 2" in line}
    assert "gates of an LSTM cell, fused in NNX" in line


def test_command_in_the_readme_proves_the_cnn(stand_in, tmp_path):
    stand_in("cnn")
    file = tmp_path / "report.json"
    status, out = main("check", *OPTIONS, "--rules=rules.toml", f"--json={file}")
    assert status == 0, out
    report = parity.Report.from_json(file.read_text())
    assert statuses(report) == {
        "tree": "proved",
        # First values are Flax's own, and so is the way its layers are lowered: a
        # broadcast here is a reshape there. Neither decides by default.
        "init": "failed",
        "program": "failed",
        "bits": "proved",
    }
    places = "\n".join(report.tier("program").details)
    assert "linen_model.py" in places and "nnx_model.py" in places


@pytest.mark.parametrize("name", NAMES)
def test_readme_has_the_command_that_the_test_runs(name):
    text = " ".join((FOLDER / name / "README.md").read_text().split())
    assert " ".join(["parity check", *OPTIONS[:2]]) in text
    assert " ".join([*OPTIONS[2:], "--rules=rules.toml"]) in text


@pytest.mark.parametrize("name", NAMES)
def test_rule_file_is_needed(name):
    assert correspondence(name, "").differences
    assert not correspondence(name, pairs.load(name).rules).differences


@pytest.mark.parametrize("name", NAMES)
def test_reviewed_draft_says_what_the_rule_file_says(name):
    drafted = correspondence(name, draft(name))
    written = correspondence(name, pairs.load(name).rules)
    assert not drafted.differences
    assert moves(drafted) == moves(written)


def test_reviewed_draft_of_the_tagger_is_proved_to_the_bit():
    rules = parity.Rules.parse(draft("tagger"))
    report = pairs.check("tagger", tiers=("tree", "bits"), rules=rules)
    assert report.verdict == "proved"


def test_suggest_command_prints_the_draft(stand_in):
    stand_in("cnn")
    status, out = main("suggest", *OPTIONS)
    assert status == 0
    assert out.strip() == draft("cnn").strip()
