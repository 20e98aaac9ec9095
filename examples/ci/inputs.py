"""What both networks are called with."""

import jax
import numpy as np


def make() -> jax.ShapeDtypeStruct:
    """A shape, to be drawn; arrays or a Hypothesis strategy will do as well."""
    return jax.ShapeDtypeStruct((4, 16), np.float32)
