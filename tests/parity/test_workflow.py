"""The example workflow: its steps are run as they stand, on the example's own pair.

Left out: the actions (`uses`), and the step that installs, since the package under test
is here already; a command `parity` on PATH stands for what it would have installed, and
one called `gh` for GitHub's.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib

import jsonschema
import pytest
import yaml

from parity.reporting import baseline
from tests.parity.reporting.test_junit import SCHEMA as XML_SCHEMA
from tests.parity.reporting.test_report import SCHEMA as JSON_SCHEMA

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ci"
WORKFLOW = yaml.safe_load((EXAMPLE / "parity.yml").read_text())
JOBS = WORKFLOW["jobs"]
STEPS = {
    step["name"]: step
    for job in JOBS.values()
    for step in job["steps"]
    if "run" in step
}
# As GitHub runs a step with `shell: bash`.
BASH = ["bash", "--noprofile", "--norc", "-eo", "pipefail"]

GH = """
import json, os, pathlib, sys
import jq

store = pathlib.Path(os.environ["COMMENTS"])
comments = json.loads(store.read_text())
command, *rest = sys.argv[1:]
assert command == "api" and os.environ["GH_TOKEN"]
options = {}
words = iter(rest)
places = []
for word in words:
    if word in ("--paginate", "--silent"):
        continue
    if word in ("--method", "--jq", "-F"):
        options[word] = next(words)
        continue
    assert not word.startswith("-"), word
    places.append(word)
(place,) = places
method = options.get("--method", "GET")
if method == "GET":
    assert place == "repos/me/mine/issues/7/comments"
    for value in jq.compile(options["--jq"]).input_value(comments).all():
        print(value)
    sys.exit()
key, _, file = options["-F"].partition("=@")
assert key == "body"
body = pathlib.Path(file).read_text()
if method == "POST":
    assert place == "repos/me/mine/issues/7/comments"
    number = 1 + max((c["id"] for c in comments), default=0)
    user = {"login": "github-actions[bot]"}
    comments.append({"id": number, "user": user, "body": body})
else:
    assert method == "PATCH"
    number = place.removeprefix("repos/me/mine/issues/comments/")
    (comment,) = [c for c in comments if str(c["id"]) == number]
    comment["body"] = body
store.write_text(json.dumps(comments))
"""


class Project:
    """A checkout of the example, with what GitHub would give its steps."""

    def __init__(self, folder):
        self.folder = folder / "checkout"
        shutil.copytree(
            EXAMPLE, self.folder, ignore=shutil.ignore_patterns("__pycache__")
        )
        self.comments = folder / "comments.json"
        self.comments.write_text("[]")
        bin = folder / "bin"
        bin.mkdir()
        # A console script does not put the working directory on the path either.
        run = f"{sys.executable} -P -c 'from parity.__main__ import run; run()'"
        self._command(bin / "parity", f'#!/bin/bash\nexec {run} "$@"\n')
        self._command(bin / "gh", f"#!{sys.executable}\n{GH}")
        self.output, self.summary = folder / "output", folder / "summary"
        self.environment = {
            **os.environ,
            "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GITHUB_OUTPUT": str(self.output),
            "GITHUB_STEP_SUMMARY": str(self.summary),
            "GITHUB_REPOSITORY": "me/mine",
            "COMMENTS": str(self.comments),
            # What the expressions in the step's `env` would be.
            "PULL_REQUEST": "7",
            "GH_TOKEN": "token",
        }

    def _command(self, file, text):
        file.write_text(text)
        file.chmod(0o755)

    def run(self, name):
        script = self.folder.parent / "step.sh"
        script.write_text(STEPS[name]["run"])
        return subprocess.run(
            [*BASH, str(script)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_the_pair_of_the_example_is_proved_and_told(project):
    done = project.run("Name the processor")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"id=[0-9a-f]{16}\n", project.output.read_text())

    done = project.run("Check")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = project.folder / "reports"
    data = json.loads((reports / "parity.json").read_text())
    jsonschema.validate(data, JSON_SCHEMA)
    assert data["ok"] is True
    assert data["required"] == ["tree", "bits"]
    XML_SCHEMA.validate((reports / "parity.xml").read_text())

    assert project.run("Show").returncode == 0
    assert project.summary.read_text() == (reports / "parity.md").read_text()


def test_a_pair_that_differs_fails_the_check_and_is_told_all_the_same(project):
    model = project.folder / "model" / "nnx_mlp.py"
    text = model.read_text()
    model.write_text(text.replace("nnx.gelu(", "nnx.relu("))
    assert text != model.read_text()
    done = project.run("Check")
    assert done.returncode == 1, done.stdout + done.stderr
    report = project.folder / "reports" / "parity.md"
    assert "bits" in report.read_text()
    assert project.run("Show").returncode == 0
    assert project.run("Comment").returncode == 0
    (comment,) = json.loads(project.comments.read_text())
    assert comment["body"] == report.read_text()
    assert "NOT EQUAL" in comment["body"]


def test_the_comment_is_written_once_and_then_updated(project):
    report = project.folder / "reports" / "parity.md"
    report.parent.mkdir()
    marker = "<!-- parity-zoo: a = b -->"
    others = [
        {"id": 1, "user": {"login": "somebody"}, "body": f"{marker}\nmine"},
        {"id": 2, "user": {"login": "github-actions[bot]"}, "body": "other"},
        {
            "id": 3,
            "user": {"login": "github-actions[bot]"},
            "body": "<!-- parity-zoo: a = c -->\nanother pair",
        },
    ]
    project.comments.write_text(json.dumps(others))
    for text in ("first", 'second "quoted" $(touch x) `y`'):
        report.write_text(f"{marker}\n{text}\n")
        done = project.run("Comment")
        assert done.returncode == 0, done.stderr
        *kept, own = json.loads(project.comments.read_text())
        assert kept == others
        assert own["body"] == f"{marker}\n{text}\n"
    assert not (project.folder / "x").exists()


def test_without_a_report_nothing_is_shown_and_nothing_fails(project):
    assert project.run("Show").returncode == 0
    assert not project.summary.exists()
    done = project.run("Comment")
    assert done.returncode == 0
    assert "no report" in done.stdout
    assert json.loads(project.comments.read_text()) == []


def test_rights_are_least_and_actions_pinned():
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in JOBS["check"]
    assert JOBS["comment"]["permissions"] == {"pull-requests": "write"}
    assert "head.repo.full_name == github.repository" in JOBS["comment"]["if"]
    used = [
        step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step
    ]
    # The job that may write runs no code of the pull request.
    assert not any(
        "checkout" in step.get("uses", "") for step in JOBS["comment"]["steps"]
    )
    for action in used:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", action)


def test_no_expression_is_put_into_a_script():
    """What a pull request chooses (titles, branches) would be run."""
    for step in STEPS.values():
        assert "${{" not in step["run"]
    assert set(STEPS) == {"Name the processor", "Install", "Check", "Show", "Comment"}


def test_the_baseline_of_the_readme_is_one():
    text = (EXAMPLE / "README.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (entry,) = baseline.parse(textwrap.dedent(block)).entries
    assert entry.max_ulps == tomllib.loads(block)["accept"][0]["max_ulps"]
