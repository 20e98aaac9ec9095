"""Rows times the matrix of their group, by JAX's grouped matmul for TPUs.

Letters: R rows, E groups, D width of a row, F of a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

LANES = 128  # a TPU works on vectors of so many numbers
MOST_ROWS = 512
MOST_BLOCK_BYTES = 2048  # of a row of a tile; larger ones do not fit in VMEM


def fits(rows: Array, weights: Array) -> bool:
    """Whether the kernel takes arrays of these shapes and types.

    Widths must be multiples of 128. With 64-bit types switched on the kernel mixes them
    and cannot be traced.
    """
    types = {rows.dtype, weights.dtype}
    return (
        not jax.config.read("jax_enable_x64")
        and all(width % LANES == 0 for width in weights.shape[1:])
        and types in ({np.dtype(jnp.bfloat16)}, {np.dtype("f4")})
    )


def matmul(
    rows: Float[Array, "R D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    *,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """`shared.ops.experts.grouped_matmul`; arrays must suit `fits`.

    Sums are in float32, and only they: no product is held in more than its own type.

    Args:
      rows: sorted by group.
      weights: a matrix for each group.
      group_sizes: how many rows each has.
      interpret: on any platform, slowly: for tests.
    """
    return _multiply(rows, weights, group_sizes, interpret, transposed=False)


def gradients(
    rows: Float[Array, "R D"],
    weights: Float[Array, "E D F"],
    group_sizes: Int[Array, " E"],
    gradient: Float[Array, "R F"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Float[Array, "E D F"]]:
    """Gradients of `matmul` to rows and weights."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    d_rows = _multiply(gradient, weights, group_sizes, interpret, transposed=True)
    tile_rows = _tile_rows(rows.shape[0], weights.shape[0])
    with jax.numpy_dtype_promotion("standard"):
        d_weights = tgmm(
            _fill(rows, tile_rows).T,
            _fill(gradient, tile_rows),
            group_sizes.astype(jnp.int32),
            weights.dtype,
            (tile_rows, *(_tile(a.shape[1], a.dtype) for a in (rows, gradient))),
            interpret=interpret,
        )
    return d_rows, d_weights


def _multiply(
    rows: Array,
    weights: Array,
    group_sizes: Array,
    interpret: bool,
    *,
    transposed: bool,
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tile_rows = _tile_rows(rows.shape[0], weights.shape[0])
    width = weights.shape[1] if transposed else weights.shape[2]
    with jax.numpy_dtype_promotion("standard"):
        y = gmm(
            _fill(rows, tile_rows),
            weights,
            group_sizes.astype(jnp.int32),
            rows.dtype,
            (tile_rows, *(_tile(size, rows.dtype) for size in (rows.shape[1], width))),
            transpose_rhs=transposed,
            interpret=interpret,
        )
    return y[: rows.shape[0]]


def _tile_rows(rows: int, groups: int) -> int:
    """About a mean group: a group takes at least one tile, however few rows it has."""
    mean = -(-rows // groups)
    return min(max(LANES, 1 << (mean - 1).bit_length()), MOST_ROWS)


def _tile(width: int, dtype: np.dtype) -> int:
    return min(width, MOST_BLOCK_BYTES // dtype.itemsize)


def _fill(rows: Array, tile_rows: int) -> Array:
    """With rows of zeros up to a whole number of tiles; they are in no group."""
    return jnp.pad(rows, ((0, -rows.shape[0] % tile_rows), (0, 0)))
