"""The examples of docs/migrate.md, run from the first to the last."""

import io
import pathlib
import re
import sys
import types

import jax
import numpy as np
import pytest
import rich.console

import parity.__main__
from tests.parity.migrations.models import save_standard

GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "migrate.md"


@pytest.mark.filterwarnings("ignore:.*int64.*:UserWarning")
def test_the_examples_do_what_the_text_says(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks[1:]:
        exec(compile(block, str(GUIDE), "exec"), names)
    out = capsys.readouterr().out
    assert "model: 2 rule 1" in out
    assert "with its parameters: opt_state/0/mu (4 leaves)" in out
    assert (names["loaded"].leaves, names["same"]) == (4, True)
    for a, b in zip(
        *map(jax.tree.leaves, (names["back"], names["state"])), strict=True
    ):
        assert np.array_equal(a, b)
    kernel = names["restored"]["model"]["out"]["kernel"][...]
    assert np.array_equal(kernel, names["params"]["Dense_0"]["kernel"])


def migrate(*argv):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=400)
    status = parity.__main__.main(["migrate", *map(str, argv)], console)
    return status, out.getvalue()


def test_the_check_of_a_model_with_dropout_does_what_the_text_says(
    tmp_path, monkeypatch
):
    block = re.search(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    module = types.ModuleType("mymodel")
    exec(compile(block[1], str(GUIDE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "mymodel", module)
    x = np.ones((2, 4), np.float32)
    variables = module.LinenNet().init(jax.random.key(0), x)
    source = save_standard(variables, tmp_path / "linen")
    flags = ["--to=nnx", "--nnx=mymodel:NNXNet", "--check=mymodel:pair"]
    status, out = migrate(source, tmp_path / "nnx", *flags, "--calls=mymodel:calls")
    assert status == 0, out
    assert "eval, train: outputs, state, loss" in out
    assert [line for line in out.splitlines() if line][-2:] == [
        "proved",
        "nothing was written: --write writes it",
    ]

    status, out = migrate(source, tmp_path / "nnx", *flags, "--write")
    assert status == 1, out
    assert out.splitlines()[-2:] == [
        "NOT EQUAL",
        f"the check failed; {tmp_path / 'nnx'} was written and stays",
    ]
    assert (tmp_path / "nnx" / "manifest.json").is_file()
    bits, counts = out.index("bits: (random keys): count"), out.index("linen 0, nnx")
    assert bits < counts
    assert "is dropout on in one of them only?" in out and "(--calls)" in out
