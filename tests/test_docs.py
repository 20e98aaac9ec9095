"""The examples of docs/*.md, each page run from the first to the last."""

import pathlib
import re
import shutil

import numpy as np

import shared

DOCS = pathlib.Path(__file__).resolve().parent.parent / "docs"


def run(name, count):
    """Runs the examples of a page; returns the names they have made."""
    text, names = (DOCS / name).read_text(), {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == count
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def test_the_examples_of_decoding_do_what_the_text_says(capsys):
    names = run("decoding.md", 4)
    assert [len(answer.tokens) for answer in names["answers"]] == [64, 64]
    assert {answer.reason for answer in names["answers"]} == {"length"}
    # Row 0 decoded a token more than its prompt; row 1 was emptied at the end.
    layers = shared.to_layer_list(names["config"], names["cache"])
    for layer in layers:
        np.testing.assert_array_equal(layer.position, [8, 0])
    told = [line for line in capsys.readouterr().out.splitlines() if "Token(" in line]
    assert [sum(f"row={row}," in line for line in told) for row in range(3)] == [10] * 3


def test_the_examples_of_checkpoints_do_what_the_text_says():
    names = run("checkpoints.md", 3)
    try:
        assert names["flat_config"].scan_layers is False
        assert sorted(names["flat"])[:3] == ["embed_tokens", "layers_0", "layers_1"]
        np.testing.assert_array_equal(
            names["tree"]["params"]["norm"], names["params"]["norm"]
        )
        assert list(names["steps"]) == [1, 2]
        assert int(names["state"]["step"]) == 2
    finally:
        shutil.rmtree(names["place"])
