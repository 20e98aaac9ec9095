"""What both networks are called with, and how."""

import jax
import numpy as np

import parity

IMAGES = jax.ShapeDtypeStruct((4, 6, 6, 3), np.float32)  # to be drawn


def inputs() -> jax.ShapeDtypeStruct:
    """One batch of images."""
    return IMAGES


def calls() -> list[parity.Call]:
    """Training, two batches in turn so that batch statistics go on, and evaluation."""
    batches = parity.Steps([IMAGES, IMAGES])
    return [
        parity.Call("train", linen={"train": True}, mode="train", inputs=batches),
        parity.Call("eval", mode="eval", gradient=False),
    ]
