"""The activations of gated feed-forward layers, by the name that a config has."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float


def activate(x: Float[Array, "*S"], name: str) -> Float[Array, "*S"]:
    """The activation `name` of every element.

    Args:
        x: The elements.
        name: "silu", `x * sigmoid(x)`, or "gelu_tanh", `x * Phi(x)` with `Phi(x)` near
            `(1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2` (Hendrycks and Gimpel,
            arXiv:1606.08415).
    """
    return _ACTIVATIONS[name](x)


def _gelu_tanh(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """In at least float32: the cube in bfloat16 would be off by its own rounding."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return jax.nn.gelu(wide, approximate=True).astype(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": _gelu_tanh,
}
