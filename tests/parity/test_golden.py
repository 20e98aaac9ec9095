"""`parity golden`: the reference's numbers from the reference itself."""

import importlib.util
import io
import pathlib

import numpy as np
import pytest
import rich.console

from parity import oracle
from parity.__main__ import main

FOLDER = pathlib.Path(__file__).parent.parent / "goldens" / "qwen3_next_6l"


def run(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    status = main(argv, rich.console.Console(file=out, width=200))
    return status, out.getvalue()


@pytest.mark.hf
@pytest.mark.filterwarnings("ignore")  # the reference's own
def test_golden_is_what_the_check_expects(tmp_path):
    status, _ = run("golden", str(FOLDER), str(tmp_path / "g.npz"), "--lengths=5")
    assert status == 0
    golden = oracle.read_golden(tmp_path / "g.npz")
    assert {"fwd/5/input_ids", "fwd/5/logits", "loss/total"} <= golden.keys()
    status, text = run(
        "check", str(FOLDER), "--tiers=oracle", f"--expect={tmp_path / 'g.npz'}"
    )
    assert status == 0, text


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="the extra is there"
)
def test_without_the_extra_the_message_says_what_to_install(tmp_path):
    status, text = run("golden", str(FOLDER), str(tmp_path / "g.npz"))
    assert status == 2
    assert "parity-zoo[hf]" in text
    assert not list(tmp_path.iterdir())


def test_a_golden_of_another_model_is_refused(tmp_path):
    path = tmp_path / "g.npz"
    np.savez(path, **{"weights/a": np.zeros(3)})
    status, text = run("check", str(FOLDER), f"--expect={path}")
    assert status == 2
    assert "weights" in text and "fwd" in text
