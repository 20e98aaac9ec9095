"""The models of `tests/goldens`, loaded and compiled once for all tests.

Each folder is a Hugging Face checkpoint with the reference's numbers beside it. Unless
said otherwise, tests take every one of them.
"""

import functools
import pathlib

import numpy as np
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, oracle

GOLDENS = pathlib.Path(__file__).parent / "goldens"
QWEN3_NEXT = ("qwen3_next_6l", "qwen3_next_8l", "qwen3_next_dense_mix")
QWEN3_5 = (
    "qwen3_5_dense_8l",
    "qwen3_5_moe_6l",
    "qwen3_5_moe_8l",
    "qwen3_5_moe_vl_wrapper",
)
GEMMA_3 = ("gemma3_text",)
GEMMA_4 = ("gemma4_dense", "gemma4_moe", "gemma4_ple_kvshare")
DEEPSEEK_V3 = ("deepseek_v3",)
CASES = (*QWEN3_NEXT, *QWEN3_5, *GEMMA_3, *GEMMA_4, *DEEPSEEK_V3)
FRONTENDS = ("linen", "nnx")


@functools.cache
def load(case: str, scan_layers: bool):
    return shared.checkpoint.load_hf(GOLDENS / case, scan_layers=scan_layers)


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    return oracle.read_golden(GOLDENS / case / "golden.npz")


@functools.cache
def frontend(case: str, scan_layers: bool, name: str):
    """The model as a function, one for all tests, so that it compiles once a shape."""
    pair = decoders.make_pair(*load(case, scan_layers))
    if name == "linen":
        return zoo_linen.as_function(pair.linen)
    return zoo_nnx.as_function(pair.nnx)


def layouts(case: str) -> tuple[bool, ...]:
    """Whether layers are scanned: yes, and no where that is another plan."""
    config = shared.DecoderConfig.from_hf(GOLDENS / case)
    unscanned = config.replace(scan_layers=False)
    return (True,) if config.plan == unscanned.plan else (True, False)


def in_layouts(*cases: str):
    """Parametrises a test with the cases, each in all its layouts.

    Both frontends lower to one program, which is compiled once if they run in one test.
    """
    return pytest.mark.parametrize(
        ("case", "scan_layers"),
        [
            pytest.param(case, scan, id=f"{case}-{'scanned' if scan else 'unscanned'}")
            for case in cases
            for scan in layouts(case)
        ],
    )
