"""Experts on a mesh: tokens go to the devices that hold their experts.

Each device routes its own tokens. Along the mesh axes of the experts rows are exchanged
(all-to-all); along those of the model width a device gathers the rest of the matrices,
a part of the experts at a time, and forgets them; along those of the expert width it
adds up partial products.

Letters: B batch, T time, A experts a token, E experts, D model width, F expert width,
R rows = B T A of one device, P devices along the experts' axes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from shared.ops import experts as ops
from shared.ops.cast import cast_weight
from shared.sharding import as_tuple

Matrices = tuple[Array, Array, Array]  # gate, up and down projection


class _Axes(NamedTuple):
    """Mesh axes over which each dimension of the matrices is spread; (): none."""

    expert: tuple[str, ...]
    width: tuple[str, ...]
    inner: tuple[str, ...]


def sharded_expert_mlp(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T A"],
    weights: Float[Array, "B T A"],
    real: Bool[Array, "B T"],
    matrices: Matrices,
    *,
    tokens_at: PartitionSpec,
    inward_at: PartitionSpec,
    outward_at: PartitionSpec,
    chunks: int,
    activation: str,
    kernel: str = "auto",
) -> Float[Array, "B T D"]:
    """`expert_mlp` of arrays that stand on the mesh at hand (`jax.set_mesh`).

    Args:
      x: tokens.
      experts: the experts of each token.
      weights: their weights.
      real: False at padding.
      matrices: gate and up projection [E, D, F], down projection [E, F, D].
      tokens_at: where the tokens stand; their width is whole everywhere.
      inward_at: where gate and up projection stand.
      outward_at: where the down projection stands.
      chunks: in how many parts a device gathers its experts.
      activation: its name.
      kernel: see `grouped_matmul`.

    Raises:
      ValueError: the experts of a device do not divide into so many parts.
    """
    axes = _Axes(*(as_tuple(entry) for entry in inward_at))
    own = PartitionSpec(*tokens_at[:2], None)
    body = functools.partial(
        _own_tokens, axes=axes, chunks=chunks, activation=activation, kernel=kernel
    )
    flags = PartitionSpec(*tokens_at[:2])
    sharded = jax.shard_map(
        body,
        in_specs=(own, own, own, flags, (inward_at, inward_at, outward_at)),
        out_specs=own,
        check_vma=False,
    )
    return sharded(x, experts, weights, real, matrices)


def _own_tokens(
    x: Array,
    experts: Array,
    weights: Array,
    real: Array,
    matrices: Matrices,
    *,
    axes: _Axes,
    chunks: int,
    activation: str,
    kernel: str,
) -> Array:
    """What one device does for its tokens, with its parts of the matrices."""
    parts = 1 if not axes.expert else jax.lax.axis_size(axes.expert)
    flat = real.reshape(-1)
    routed = ops.rows_by_expert(
        x.reshape(-1, x.shape[-1]),
        experts.reshape(-1, experts.shape[-1]),
        weights.reshape(-1, weights.shape[-1]),
        flat,
        parts * matrices[0].shape[0],
    )
    mlp = functools.partial(
        _mlp_in_chunks,
        matrices=matrices,
        axes=axes,
        chunks=chunks,
        activation=activation,
        kernel=kernel,
    )
    if parts == 1:
        y = mlp(routed.rows, routed.scale, routed.sizes)
    else:
        y = _exchange(routed, mlp, axes.expert, parts)
    if axes.inner:
        y = jax.lax.psum(y, axes.inner)
    return ops.sum_by_token(y, routed, flat).reshape(x.shape)


def _mlp_in_chunks(
    rows: Float[Array, "R D"],
    scale: Float[Array, "R 1"],
    sizes: Int[Array, " E"],
    *,
    matrices: Matrices,
    axes: _Axes,
    chunks: int,
    activation: str,
    kernel: str,
) -> Float[Array, "R D"]:
    """The rows' MLPs; what is gathered for a chunk is gathered again going back."""

    def gather(matrix: Array, axis: int) -> Array:
        matrix = cast_weight(matrix, rows.dtype)
        if not axes.width:
            return matrix
        # Tied, and with it its gradient, which XLA for TPU would else try to sum before
        # it is added up over layers, and stop at that (RET_CHECK in
        # while_loop_all_reduce_code_motion, libtpu 0.0.52).
        matrix = jax.lax.optimization_barrier(matrix)
        return jax.lax.all_gather(matrix, axes.width, axis=axis, tiled=True)

    @jax.checkpoint
    def mlp(rows, scale, sizes, matrices):
        gate, up, down = matrices
        whole = gather(gate, 1), gather(up, 1), gather(down, 2)
        # What comes out for rows of no group is undefined, and so is their gradient,
        # which must not go on to whose rows they are.
        own = (jnp.arange(rows.shape[0], dtype=sizes.dtype) < jnp.sum(sizes))[:, None]
        rows, scale = (jnp.where(own, a, 0) for a in (rows, scale))
        return ops.mlp_by_matrix(rows, scale, *whole, sizes, activation, kernel)

    if chunks == 1:
        return mlp(rows, scale, sizes, matrices)
    count = sizes.shape[0]
    if count % chunks:
        raise ValueError(
            f"expert_chunks={chunks} does not divide the {count} experts of a device."
        )
    by_chunk = jax.tree.map(
        lambda m: m.reshape(chunks, count // chunks, *m.shape[1:]), matrices
    )
    sizes = sizes.reshape(chunks, -1)
    ends = jnp.cumsum(jnp.sum(sizes, axis=1))
    starts = jnp.pad(ends[:-1], (1, 0))
    # The rows of a chunk stand together. As many as all are taken from its start on,
    # and multiplied as far as they are its own; what comes out after them is the place
    # of the next chunk, which overwrites it.
    length = rows.shape[0]
    rows, scale = (jnp.pad(a, ((0, length), (0, 0))) for a in (rows, scale))

    def add(y, chunk):
        start, sizes, matrices = chunk
        own = (jax.lax.dynamic_slice_in_dim(a, start, length) for a in (rows, scale))
        part = mlp(*own, sizes, matrices)
        return jax.lax.dynamic_update_slice_in_dim(y, part, start, axis=0), None

    y, _ = jax.lax.scan(add, jnp.zeros_like(rows), (starts, sizes, by_chunk))
    return y[:length]


def _exchange(
    routed: ops.RoutedRows,
    mlp: functools.partial[Array],
    axes: tuple[str, ...],
    parts: int,
) -> Float[Array, "R D"]:
    """Sends rows to the devices of their experts, and gets back what these give.

    Nothing is dropped: there is room for all rows of all devices on each of them.
    """
    length = routed.rows.shape[0]
    sizes = routed.sizes.reshape(parts, -1)
    per_part = jnp.sum(sizes, axis=1)
    starts = jnp.cumsum(per_part) - per_part

    def swap(a):
        return jax.lax.all_to_all(a, axes, split_axis=0, concat_axis=0, tiled=False)

    def by_part(a):
        padded = jnp.pad(a, ((0, length), (0, 0)))
        take = lambda start: jax.lax.dynamic_slice_in_dim(padded, start, length)
        return jax.vmap(take)(starts)

    sizes = swap(sizes)  # of each sender, for the experts here
    rows, scale = (swap(by_part(a)).reshape(parts * length, -1) for a in routed[:2])
    expert = _experts_of(sizes, length).reshape(-1, 1)
    filled = expert[:, 0] < sizes.shape[1]
    order, place, own = ops.sort_by_expert(expert, filled, sizes.shape[1])
    y = mlp(ops.permute(rows, order, place), ops.permute(scale, order, place), own)
    y = swap(ops.permute(y, place, order).reshape(parts, length, -1))

    position = jnp.arange(length, dtype=starts.dtype)
    part = jnp.searchsorted(starts + per_part, position, side="right")
    part = jnp.minimum(part, parts - 1)
    return y[part, position - starts[part]]


def _experts_of(sizes: Int[Array, "P E"], length: int) -> Int[Array, "P r"]:
    """The expert of each of `length` rows of all senders; E where there is no row."""
    ends = jnp.cumsum(sizes, axis=1)
    position = jnp.arange(length, dtype=ends.dtype)
    return jax.vmap(lambda e: jnp.searchsorted(e, position, side="right"))(ends)
