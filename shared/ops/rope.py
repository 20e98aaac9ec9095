"""Partial rotary position embedding.

Letters: B batch, T time, N heads, H head width, R the rotary width
(`rotary_dim`, even).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int


def rotary_frequencies(
    rotary_dim: int, theta: float, dtype: DTypeLike = jnp.float32
) -> Float[Array, " {rotary_dim//2}"]:
    """The angle each pair of components turns by from one position to the next.

    `theta ** (-2 j / R)` for `j = 0 .. R/2 - 1`. The exponent counts the rotary width,
    not the width of the head. Computed in float64 and rounded once.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return jnp.asarray(theta**-exponent, dtype=dtype)


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    *,
    rotary_dim: int,
    theta: float,
) -> Float[Array, "B T N H"]:
    """Turns the first `rotary_dim` components of every head by its position.

    Component `j` pairs with `j + rotary_dim / 2` (half-split, as in GPT-NeoX and the
    Hugging Face models, not interleaved); with the angle `a = position * frequency_j`
    the pair `(u, v)` becomes `(u cos a - v sin a, v cos a + u sin a)` (Su et al.,
    arXiv:2104.09864). Components from `rotary_dim` on pass through untouched. Angles
    and products are in at least float32.
    """
    dtype = np.promote_types(x.dtype, np.float32)
    half = rotary_dim // 2
    frequencies = rotary_frequencies(rotary_dim, theta, dtype)
    steps = positions[:, :, None, None].astype(dtype)
    angles = steps * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    u, v = x[..., :half].astype(dtype), x[..., half:rotary_dim].astype(dtype)
    turned = jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rotary_dim:]], axis=-1)
