"""The examples of docs/*.md, each page run from the first to the last."""

import pathlib
import re
import shutil
import subprocess
import sys

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
    names = run("decoding.md", 5)
    assert [len(answer.tokens) for answer in names["answers"]] == [64, 64]
    assert {answer.reason for answer in names["answers"]} == {"length"}
    # Row 0 decoded a token more than its prompt; row 1 was emptied at the end.
    layers = shared.to_layer_list(names["config"], names["cache"])
    for layer in layers:
        np.testing.assert_array_equal(layer.position, [8, 0])
    told = [line for line in capsys.readouterr().out.splitlines() if "Token(" in line]
    assert [sum(f"row={row}," in line for line in told) for row in range(3)] == [10] * 3


def test_the_examples_of_training_do_what_the_text_says():
    names = run("training.md", 3)
    assert names["losses"][2] < names["losses"][0]
    assert float(names["metrics"].loss) < names["losses"][2]
    assert int(names["state"]["step"]) == 4
    assert [record.step for record in names["records"]] == [1, 2]


def test_the_examples_of_lora_do_what_the_text_says():
    names = run("lora.md", 2)
    assert names["losses"][2] < names["losses"][0]
    own, back = names["state"]["params"], names["adapters"]
    for (path, a), (_, b) in zip(
        shared.trees.flatten(own), shared.trees.flatten(back), strict=True
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)


def test_the_examples_of_checkpoints_do_what_the_text_says():
    names = run("checkpoints.md", 5)
    try:
        assert names["flat_config"].scan_layers is False
        assert sorted(names["flat"])[:3] == ["embed_tokens", "layers_0", "layers_1"]
        np.testing.assert_array_equal(
            names["tree"]["params"]["norm"], names["params"]["norm"]
        )
        assert list(names["steps"]) == [1, 2]
        assert int(names["state"]["step"]) == 2
        # What Linen saved went into NNX and came back to Linen.
        for path, leaf in shared.trees.flatten(names["params"]):
            for node in (names["linen"].params, names["own"]["params"]):
                for key in path:
                    node = node[key]
                np.testing.assert_array_equal(node, leaf)
        _, again = shared.checkpoint.load_hf(names["place"] / "hf")
        np.testing.assert_array_equal(again["norm"], names["params"]["norm"])
        assert len(names["digests"]) == len(names["plan"].leaves)
    finally:
        shutil.rmtree(names["place"])


def test_names_in_checkpoints_md_are_there_after_importing_shared():
    table = (DOCS / "checkpoints.md").read_text().partition("## For code")[2]
    cells = re.findall(r"^\| (`shared.*?) \|", table, re.MULTILINE)
    names = re.findall(r"`(shared[\w.]+)`", " ".join(cells))
    assert "shared.checkpoint.source.open_source" in names
    program = "\n".join(["import shared", *names])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=DOCS.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
