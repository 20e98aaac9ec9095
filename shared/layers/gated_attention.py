"""Grouped-query attention whose output is gated by the input, as in Qwen3-Next.

B batch, T time, S cached positions, D model width, N query heads, K key/value heads,
H head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from shared.cache import KVCache
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers.linear import bias_spec, project
from shared.ops import attention
from shared.ops.norm import zero_centered_rms_norm
from shared.ops.rope import apply_rope
from shared.params import ParamSpec, constant, normal


def param_specs(config: AttentionConfig) -> dict[str, ParamSpec]:
    """The layer's parameters; `q_proj` holds query and gate, interleaved per head."""
    c, dense = config, normal(config.initializer_range)
    outputs = {
        "q_proj": 2 * c.num_heads * c.head_dim,
        "k_proj": c.num_kv_heads * c.head_dim,
        "v_proj": c.num_kv_heads * c.head_dim,
    }
    specs = {
        name: ParamSpec((c.hidden_size, size), ("embed", "heads"), dense)
        for name, size in outputs.items()
    }
    specs["o_proj"] = ParamSpec(
        (c.num_heads * c.head_dim, c.hidden_size), ("heads", "embed"), dense
    )
    specs["q_norm"] = ParamSpec((c.head_dim,), (None,), constant(0.0))
    specs["k_norm"] = ParamSpec((c.head_dim,), (None,), constant(0.0))
    if c.use_bias:
        specs |= {f"{name}_bias": bias_spec(n, "heads") for name, n in outputs.items()}
        specs["o_proj_bias"] = bias_spec(c.hidden_size, "embed")
    return specs


def init_cache(
    config: AttentionConfig, batch_size: int, max_length: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache of `max_length` positions; 0 holds nothing between calls.

    With a window it is a ring of at most that many positions.
    """
    if config.window is not None:
        max_length = min(max_length, config.window)
    shape = (batch_size, max_length, config.num_kv_heads, config.head_dim)
    return KVCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        segment_ids=jnp.zeros((batch_size, max_length), jnp.int32),
        position=jnp.zeros((batch_size,), jnp.int32),
    )


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    cache: KVCache,
    *,
    config: AttentionConfig,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Attends to the cached and to the given tokens, causally, within each segment.

    A row that gets more tokens than its cache has room for gives NaN.
    """
    q, gate, k, v = _project(weights, x, config)
    q = zero_centered_rms_norm(q, weights["q_norm"], config.norm_eps)
    k = zero_centered_rms_norm(k, weights["k_norm"], config.norm_eps)
    q, k = (_rotate(heads, context, config) for heads in (q, k))

    # A window that does not fit is no ring: what it should see would be overwritten.
    ring = config.window is not None and cache.capacity >= config.window
    ids, slot = context.segment_ids, context.cache_slot
    order = cache.order(ids, slot)
    extended = cache.extend(k, v, ids, slot, ring=ring)
    if cache.capacity and x.shape[1] == 1 and cache.keys.dtype == k.dtype:
        # Read after it is written, or the compiler would write into a copy of it all.
        sources = [extended.as_keys(slot)]
    else:  # in a ring, the newest tokens may replace what the first of them see
        sources = [cache.as_keys(slot), attention.Keys(k, v, ids, order)]
    y = attention.attend(
        q,
        ids,
        order,
        sources,
        scale=config.head_dim**-0.5,
        window=config.window,
    )
    if cache.capacity and not ring:
        full = cache.overflows(ids, slot)[:, None, None, None]
        y = jnp.where(full, jnp.asarray(jnp.nan, y.dtype), y)
    y = y * jax.nn.sigmoid(gate)
    y = project(y.reshape(*x.shape[:2], -1), weights, "o_proj")
    return y, extended


def _project(
    weights: Mapping[str, Array], x: Array, config: AttentionConfig
) -> tuple[Array, Array, Array, Array]:
    batch, time, _ = x.shape
    query_and_gate = project(x, weights, "q_proj").reshape(
        batch, time, config.num_heads, 2 * config.head_dim
    )
    q, gate = jnp.split(query_and_gate, 2, axis=-1)
    kv_shape = batch, time, config.num_kv_heads, config.head_dim
    k = project(x, weights, "k_proj").reshape(kv_shape)
    v = project(x, weights, "v_proj").reshape(kv_shape)
    return q, gate, k, v


def _rotate(heads: Array, context: Context, config: AttentionConfig) -> Array:
    return apply_rope(
        heads,
        context.positions,
        rotary_dim=config.rope.rotary_dim,
        theta=config.rope.theta,
    )
