"""The examples of docs/decoding.md, run from the first to the last."""

import pathlib
import re

import numpy as np

import shared

DECODING = pathlib.Path(__file__).resolve().parent.parent / "docs" / "decoding.md"


def test_the_examples_of_decoding_do_what_the_text_says(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", DECODING.read_text(), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(DECODING), "exec"), names)

    assert [len(answer.tokens) for answer in names["answers"]] == [64, 64]
    assert {answer.reason for answer in names["answers"]} == {"length"}
    # Row 0 decoded a token more than its prompt; row 1 was emptied at the end.
    layers = shared.to_layer_list(names["config"], names["cache"])
    for layer in layers:
        np.testing.assert_array_equal(layer.position, [8, 0])
    told = [line for line in capsys.readouterr().out.splitlines() if "Token(" in line]
    assert [sum(f"row={row}," in line for line in told) for row in range(3)] == [10] * 3
