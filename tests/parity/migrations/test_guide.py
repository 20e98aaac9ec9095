"""The examples of docs/migrate.md, run from the first to the last."""

import pathlib
import re

import jax
import numpy as np
import pytest

GUIDE = pathlib.Path(__file__).parents[3] / "docs" / "migrate.md"


@pytest.mark.filterwarnings("ignore:.*int64.*:UserWarning")
def test_the_examples_do_what_the_text_says(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
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
