"""What both taggers are called with, and how."""

import numpy as np

import parity

SENTENCES = parity.Integers((3, 5), high=17)  # to be drawn
LENGTHS = np.array([5, 3, 1], np.int32)


def inputs() -> parity.Args:
    """Three sentences of different length."""
    return parity.Args(SENTENCES, LENGTHS)


def calls() -> list[parity.Call]:
    """Training and evaluation."""
    return [
        parity.Call("train", linen={"train": True}, mode="train"),
        parity.Call("eval", mode="eval", gradient=False),
    ]
