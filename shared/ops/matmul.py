"""Products with a weight matrix, in the form that costs least.

Letters: n rows, D width, F output width; k blocks of b of the D.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

# For a product of 2 to 4 rows XLA for CPU first packs the whole matrix, which costs
# more than the product. One by one the rows find it in the cache: up to twice as fast,
# if it is large enough for a loop. A wide matrix is better cut into blocks, each of
# which is packed within the cache: the smaller the better, as long as the partial sums
# (of 2 MiB) do not want fresh memory at each call.
MOST_ROWS = 4
LEAST_WEIGHTS = 2**17
LEAST_WIDTH = 2**11
BLOCKS = (16, 32, 64)
MOST_SUMS = 2**19


def matmul(
    x: Float[Array, "*B D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "*B F"]:
    """The last axis of `x` times a matrix.

    Three forms: on a CPU few rows are multiplied by a large matrix one by one, or in
    blocks; all else by one product.

    Args:
      x: rows.
      weight: the matrix.
      dtype: that sums are kept and given in; None: as JAX chooses.
    """
    rows = math.prod(x.shape[:-1])
    if not 1 < rows <= MOST_ROWS or weight.size < LEAST_WEIGHTS:
        return matmul_at_once(x, weight, dtype)
    few = _form_for_few(rows, *weight.shape)
    y = jax.lax.platform_dependent(
        x.reshape(rows, -1),
        weight,
        cpu=lambda x, weight: few(x, weight, dtype),
        default=lambda x, weight: matmul_at_once(x, weight, dtype),
    )
    return y.reshape(*x.shape[:-1], -1)


def _form_for_few(rows: int, depth: int, width: int) -> Callable[..., Array]:
    for block in BLOCKS if width >= LEAST_WIDTH else ():
        if not depth % block and depth // block * rows * width <= MOST_SUMS:
            return functools.partial(matmul_in_blocks, block=block)
    return matmul_by_row


def matmul_at_once(
    x: Float[Array, "*B D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "*B F"]:
    """One product, in a form that Qwix's LoRA and quantisation see.

    They do not see `@`. Of an einsum LoRA notes something down in the module, which
    Linen forbids.
    """
    return jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=dtype
    )


def matmul_in_blocks(
    x: Float[Array, "n D"],
    weight: Float[Array, "D F"],
    dtype: DTypeLike | None = None,
    *,
    block: int,
) -> Float[Array, "n F"]:
    """The sum of the products of `block` columns of `x` with as many rows of `weight`.

    `block` must divide D.
    """
    narrow = jnp.dtype(dtype or jnp.promote_types(x.dtype, weight.dtype))
    wide = np.promote_types(narrow, np.float32)
    x = x.reshape(x.shape[0], -1, block)
    weight = weight.reshape(-1, block, weight.shape[1])
    sums = jnp.einsum("nkb,kbf->knf", x, weight, preferred_element_type=wide)
    return jnp.sum(sums, axis=0).astype(narrow)


def matmul_by_row(
    x: Float[Array, "n D"], weight: Float[Array, "D F"], dtype: DTypeLike | None = None
) -> Float[Array, "n F"]:
    """A product for each row."""

    def one(row: Array) -> Array:
        return matmul_at_once(row, weight, dtype)

    return jax.lax.map(one, x)
