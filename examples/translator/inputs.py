"""What both translators are called with, and how."""

import jax
import numpy as np

import parity

SOURCE = np.array([[3, 7, 2, 9, 0], [5, 1, 0, 0, 0]], np.int32)  # 0 is padding
TARGET = np.array([[1, 4, 8, 2], [1, 6, 2, 0]], np.int32)
TOKEN = parity.Integers((2, 1), high=13, low=1)  # to be drawn
MEMORY = jax.ShapeDtypeStruct((2, 5, 8), np.float32)


def inputs() -> parity.Args:
    """Two sentence pairs of different length."""
    return parity.Args(SOURCE, TARGET)


def calls() -> list[parity.Call]:
    """Training, the encoder alone, and decoding token by token from the cache."""
    token = parity.Args(TOKEN, MEMORY, SOURCE)
    return [
        parity.Call("train", linen={"train": True}, mode="train"),
        parity.Call(
            "encode",
            "encode",
            mode="eval",
            gradient=False,
            inputs=parity.Args(SOURCE),
        ),
        parity.Call(
            "decode",
            ("step", "decode_next"),
            mode="eval",
            gradient=False,
            inputs=parity.Steps([token, token, token]),
        ),
    ]
