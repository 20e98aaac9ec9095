"""Dropout by a key, the same in both frontends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


def dropout(x: Float[Array, "..."], key: PRNGKeyArray, rate: float) -> Array:
    """Zeroes each entry with probability `rate` and divides the rest by 1 - rate."""
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    scale = jnp.asarray(1.0 / (1.0 - rate), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros_like(x))
