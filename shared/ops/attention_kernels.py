"""Attention of tokens to themselves by kernels that others keep.

All give what `attention.attend` does, with one difference: a window counts places in
the row, not tokens. It is the same for rows without padding inside sequences.

Letters: B batch; T places; N query heads, K key and value heads; H, Hv widths of a
query and of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from shared.ops import attention
from shared.ops.attention import Keys

LANES = 128  # a TPU works on vectors of so many numbers
LONGEST_BLOCK = 512
MOST_BLOCK_BYTES = 2**18  # of one operand; larger ones together do not fit in VMEM


class Options(NamedTuple):
    """What does not change from call to call.

    Attributes:
      scale: what the scores are multiplied by.
      window: how many tokens a query sees, itself included; None: all before it.
      places: of [B, T, K, H] on the mesh at hand, rows whole; None: there is no mesh.
        A kernel is not divided by the compiler: each device runs its own.
    """

    scale: float
    window: int | None = None
    places: PartitionSpec | None = None


def splash_fits(q: Array, source: Keys) -> bool:
    """Whether `splash` takes arrays of these shapes and types.

    Rows must divide into blocks of 128, and head widths be multiples of 64. With 64-bit
    types switched on the kernel mixes them and cannot be traced.
    """
    arrays = q, source.keys, source.values
    return (
        not jax.config.read("jax_enable_x64")
        and q.shape[1] % LANES == 0
        and all(a.shape[-1] % (LANES // 2) == 0 for a in arrays)
        and {a.dtype for a in arrays} in ({np.dtype(jnp.bfloat16)}, {np.dtype("f4")})
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_platform(
    options: Options,
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    index: Int[Array, "B T"],
    source: Keys,
) -> Float[Array, "B T N Hv"]:
    """`splash` where the program is lowered for a TPU, `attention.attend` elsewhere.

    A program for a TPU may be made on a machine without one: its platform is known when
    it is lowered, not when it is traced.

    Args:
      options: see `Options`.
      q: the queries.
      segment_ids: 0 at padding; equal positive ids are one sequence.
      index: the order of the tokens within their sequence.
      source: the same tokens' keys and values; they must suit `splash_fits`.
    """
    return _forward(options, q, segment_ids, index, source)[0]


def _forward(options, q, segment_ids, index, source):
    given = q, segment_ids, index, source
    y, log_total = lax.platform_dependent(
        *given,
        tpu=functools.partial(_splash_forward, options),
        default=functools.partial(_reference_forward, options),
    )
    return y, (*given, y, log_total)


def _backward(options, residuals, y_grad):
    # The choice is made again and not left to autodiff, which would keep the residuals
    # of both forms.
    q_grad, keys_grad, values_grad = lax.platform_dependent(
        *residuals,
        y_grad,
        tpu=functools.partial(_splash_gradients, options),
        default=functools.partial(_reference_gradients, options),
    )
    source_grad = Keys(keys_grad, values_grad, None, None)  # type: ignore[arg-type]
    return q_grad, None, None, source_grad


by_platform.defvjp(_forward, _backward)


def _reference_forward(options: Options, *args: Any) -> tuple[Array, Array]:
    return attention.forward(*args, scale=options.scale, window=options.window)


def _reference_gradients(options: Options, *args: Any) -> tuple[Array, Array, Array]:
    return attention.gradients(*args, scale=options.scale, window=options.window)


def _splash_forward(
    options: Options, q: Array, segment_ids: Array, index: Array, source: Keys
) -> tuple[Array, Array]:
    y = splash(options, q, segment_ids, source)
    return y, jnp.zeros(q.shape[:3], jnp.float32)  # it keeps no sums


def _splash_gradients(
    options: Options,
    q: Array,
    segment_ids: Array,
    index: Array,
    source: Keys,
    y: Array,
    log_total: Array,
    y_grad: Array,
) -> tuple[Array, Array, Array]:
    """The kernel runs forward again: it takes no results of an earlier run."""

    def attend(q, keys, values):
        return splash(options, q, segment_ids, Keys(keys, values, *source[2:]))

    _, transpose = jax.vjp(attend, q, *source[:2])
    return transpose(y_grad)


def splash(
    options: Options,
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    source: Keys,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """`attention.attend` to the tokens themselves, by JAX's splash attention for TPUs.

    Scores, softmax and sums are in float32. Queries are multiplied by the scale before,
    in their own type: exact where it is a power of two, as for widths 64 and 256.

    Args:
      options: see `Options`.
      q: the queries.
      segment_ids: 0 at padding; equal positive ids are one sequence.
      source: the same tokens' keys and values; they must suit `splash_fits`.
      interpret: on any platform, slowly: for tests.
    """
    attend = functools.partial(_attend_here, options, interpret)
    heads = q, source.keys, source.values
    if options.places is None:
        return attend(*heads, segment_ids)
    by_head, by_row = options.places, PartitionSpec(*options.places[:2])
    on_mesh = jax.shard_map(
        attend,
        in_specs=(by_head, by_head, by_head, by_row),
        out_specs=by_head,
        check_vma=False,
    )
    return on_mesh(*heads, segment_ids)


def _attend_here(
    options: Options,
    interpret: bool,
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B T K H"],
    values: Float[Array, "B T K Hv"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T N Hv"]:
    from jax.experimental.pallas.ops.tpu import splash_attention

    _, length, heads, _ = q.shape
    width = max(a.shape[-1] * a.dtype.itemsize for a in (q, values))
    mask = _mask(length, options.window)
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([mask] * heads),
        block_sizes=_block_sizes(length, width),
        interpret=interpret,
    )

    def attend_row(q, keys, values, ids):
        return kernel(q, keys, values, splash_attention.SegmentIds(ids, ids))

    scaled = q * jnp.asarray(options.scale, q.dtype)
    heads_first = [jnp.swapaxes(a, 1, 2) for a in (scaled, keys, values)]
    rows: Callable[..., Array] = jax.vmap(attend_row)
    y = jnp.swapaxes(rows(*heads_first, segment_ids), 1, 2)
    # Padding has seen padding.
    return jnp.where((segment_ids > 0)[..., None, None], y, 0)


@functools.lru_cache(maxsize=64)
def _mask(length: int, window: int | None) -> Any:
    """The same object for the same mask, or JAX would trace the kernel again."""
    from jax.experimental.pallas.ops.tpu import splash_attention

    if window is None:
        return splash_attention.CausalMask((length, length))
    return splash_attention.LocalMask((length, length), (window - 1, 0), offset=0)


def _block_sizes(length: int, width: int) -> Any:
    """One size for all blocks, of heads of so many bytes.

    Queries and keys have kernels of their own for the gradient: a fused one computes
    less, but keeps a gradient of the queries for each block of keys.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention

    most = max(LANES, min(LONGEST_BLOCK, MOST_BLOCK_BYTES // width))
    size = max(s for s in range(LANES, most + 1, LANES) if length % s == 0)
    return splash_attention.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )


def dot_product_fits(q: Array, source: Keys) -> bool:
    """Whether `dot_product` takes arrays of these shapes and types."""
    arrays = q, source.keys, source.values
    return len({(a.shape[-1], a.dtype) for a in arrays}) == 1


def dot_product(
    options: Options,
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    source: Keys,
    *,
    cudnn: bool = False,
) -> Float[Array, "B T N H"]:
    """`attention.attend` to the tokens themselves, by `jax.nn.dot_product_attention`.

    It holds a mask [B, T, T], and, but for cuDNN, all scores. The compiler divides it
    on a mesh.

    Args:
      options: see `Options`.
      q: the queries.
      segment_ids: 0 at padding; equal positive ids are one sequence.
      source: the same tokens' keys and values; they must suit `dot_product_fits`.
      cudnn: by cuDNN, which needs a GPU and refuses widths and types that it does not
        have; else as JAX chooses.
    """
    window = options.window
    seen = segment_ids[:, :, None] == segment_ids[:, None, :]
    y = jax.nn.dot_product_attention(
        q,
        source.keys,
        source.values,
        mask=seen[:, None],
        scale=options.scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if cudnn else None,
    )
    # Padding has seen padding.
    return jnp.where((segment_ids > 0)[..., None, None], y, 0)
