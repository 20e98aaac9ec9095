"""Weights in the dtype of activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def cast_weight(weight: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """A weight in another dtype, converted where it is used and nowhere before.

    If all uses of an array round it to bfloat16, XLA for TPU holds it so from the
    start: a weight sliced from a stack in a loop over layers makes it convert the whole
    stack before the loop, a second copy of all weights (the pass is
    `bfloat16-propagation`; libtpu 0.0.52). It follows floats through loops, slices and
    barriers, but not bits; between the two views of them a barrier stands, since XLA
    would take away a view of a view.

    Args:
      weight: as it is stored.
      dtype: that it is wanted in.
    """
    if np.dtype(weight.dtype).itemsize > np.dtype(dtype).itemsize:
        weight = _held_as_stored(weight)
    return weight.astype(dtype)


@jax.custom_jvp
def _held_as_stored(weight: Array) -> Array:
    bits = jnp.dtype(f"uint{8 * weight.dtype.itemsize}")
    seen = jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(weight, bits))
    return jax.lax.bitcast_convert_type(seen, weight.dtype)


@_held_as_stored.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _held_as_stored(*primals), *tangents
