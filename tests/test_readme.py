"""The README's example of a user's own pair, followed to the letter."""

import pathlib
import shlex
import sys

import pytest

from parity.__main__ import main

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("pair", None)


def blocks():
    """Fenced blocks after a line that begins with a file's name: its text by name."""
    text = README.read_text()
    found = {}
    for name in ("pair.py", "rules.toml"):
        _, _, rest = text.partition(f"\n`{name}`")
        _, _, rest = rest.partition("```")
        found[name] = rest.partition("\n")[2].partition("```")[0]
    return found


def command(word):
    lines = [line.strip() for line in README.read_text().splitlines()]
    (line,) = (x for x in lines if x.startswith(f"parity {word} --linen"))
    return shlex.split(line)[1:]


def test_the_example_is_proved(folder, capsys):
    for name, text in blocks().items():
        (folder / name).write_text(text)
    assert main(command("check")) == 0
    assert capsys.readouterr().out.rstrip().endswith("proved")


def test_without_its_rules_it_is_not(folder, capsys):
    (folder / "pair.py").write_text(blocks()["pair.py"])
    arguments = [x for x in command("check") if not x.startswith("--rules")]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "params/Dense_0/kernel" in out
    assert "params/out/kernel" in out


def test_the_drafted_rules_prove_it(folder, capsys):
    (folder / "pair.py").write_text(blocks()["pair.py"])
    draft = [x for x in command("check") if not x.startswith("--rules")]
    assert main(["suggest", *draft[1:], "--out=rules.toml"]) == 0
    assert main(command("check")) == 0


DOUBLED = """
from hypothesis import strategies as st
import jax.numpy as jnp


class Doubled(NNXMLP):
    def __call__(self, x):
        return 2 * super().__call__(x)


inputs = st.just(jnp.ones((2, 8)))
"""


def test_the_command_that_draws_again_asks_for_the_same(folder, capsys):
    for name, text in blocks().items():
        (folder / name).write_text(text)
    with (folder / "pair.py").open("a") as file:
        file.write(DOUBLED)
    arguments = [x.replace(":NNXMLP", ":Doubled") for x in command("check")]
    asked = [*arguments[1:], "--seed=3", "--tiers=tree,bits", "--nofinite"]
    assert main(["check", *asked]) == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "again: " in x]
    again = shlex.split(line.partition("again: ")[2])
    assert again[:2] == ["parity", "check"]
    assert set(again[2:]) == set(asked)
