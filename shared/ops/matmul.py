"""Products with a weight matrix; a few rows a CPU does better one at a time.

Letters: n rows, D width, F output width.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# XLA for CPU packs the weights for a product of 2 to 4 rows, which costs more than the
# product: reading them once a row from the cache is up to 1.8 times faster, if they are
# large enough for a loop to be worth its while.
MOST_ROWS = 4
LEAST_WEIGHTS = 2**18


def matmul(
    x: Float[Array, "*B D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "*B F"]:
    """The last axis of `x` times a matrix.

    Two forms: few rows are multiplied by a large matrix one by one on a CPU. Then a
    row's result does not depend on how many there are, to the bit.

    Args:
      x: rows.
      weight: the matrix.
      dtype: that sums are kept and given in; None: as JAX chooses.
    """
    few = 1 < math.prod(x.shape[:-1]) <= MOST_ROWS
    if not few or weight.size < LEAST_WEIGHTS:
        return matmul_at_once(x, weight, dtype)
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.platform_dependent(
        rows,
        weight,
        cpu=lambda x, weight: matmul_by_row(x, weight, dtype),
        default=lambda x, weight: matmul_at_once(x, weight, dtype),
    )
    return y.reshape(*x.shape[:-1], -1)


def matmul_at_once(
    x: Float[Array, "*B D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "*B F"]:
    """One product. An einsum, not `@`: LoRA and quantisation libraries intercept it."""
    return jnp.einsum("...d,df->...f", x, weight, preferred_element_type=dtype)


def matmul_by_row(
    x: Float[Array, "n D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "n F"]:
    """A product for each row."""

    def one(row: Array) -> Array:
        return jnp.einsum("d,df->f", row, weight, preferred_element_type=dtype)

    return jax.lax.map(one, x)
