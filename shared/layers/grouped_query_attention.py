"""Grouped-query attention: of all earlier tokens, or of a window of them.

The output may be gated by the input (Qwen3-Next), values may be normalised or be the
keys themselves (Gemma 4), and a layer may attend to the keys of another.

B batch, T time, S cached positions, D model width, N query heads, K key/value heads,
H head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shared.cache import BorrowedCache, KVCache, attended, nan_where_full
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers.linear import bias_spec, project
from shared.layers.norm import norm_spec, normalize
from shared.layers.rotary import rotate
from shared.layers.self_attention import attend_to_own
from shared.ops import attention
from shared.ops.attention import Keys
from shared.ops.norm import unit_rms_norm
from shared.params import ParamSpec, normal


class HeadKeys(NamedTuple):
    """Keys, normalised and rotated, and values of the given tokens.

    Attributes:
      keys: [B, T, K, H].
      values: [B, T, K, H].
    """

    keys: Float[Array, "B T K H"]
    values: Float[Array, "B T K H"]


class LentKeys(NamedTuple):
    """What a layer that borrows keys attends to.

    Attributes:
      order: [B, T], the number of each given token in its row.
      sources: the lending layer's keys, of the cache and of the given tokens.
    """

    order: Int[Array, "B T"]
    sources: tuple[Keys, ...]


def param_specs(config: AttentionConfig) -> dict[str, ParamSpec]:
    """The layer's parameters; a gated `q_proj` has query and gate head by head."""
    c, dense = config, normal(config.initializer_range)
    outputs = {"q_proj": (1 + c.gated) * c.num_heads * c.head_dim}
    norms = ["q_norm"]
    if not c.borrows_keys:
        outputs["k_proj"] = c.num_kv_heads * c.head_dim
        norms.append("k_norm")
    if not c.borrows_keys and not c.keys_are_values:
        outputs["v_proj"] = c.num_kv_heads * c.head_dim
    specs = {
        name: ParamSpec((c.hidden_size, size), ("embed", "heads"), dense)
        for name, size in outputs.items()
    }
    specs["o_proj"] = ParamSpec(
        (c.num_heads * c.head_dim, c.hidden_size), ("heads", "embed"), dense
    )
    for name in norms:
        specs[name] = norm_spec(c.head_dim, None, zero_centered=c.zero_centered_norms)
    if c.use_bias:
        specs |= {f"{name}_bias": bias_spec(n, "heads") for name, n in outputs.items()}
        specs["o_proj_bias"] = bias_spec(c.hidden_size, "embed")
    return specs


def init_cache(
    config: AttentionConfig, batch_size: int, max_length: int, dtype: jnp.dtype
) -> KVCache | BorrowedCache:
    """An empty cache of `max_length` positions; 0 holds nothing between calls.

    With a window it is a ring of at most that many positions.
    """
    if config.borrows_keys:
        return BorrowedCache(jnp.zeros((batch_size,), jnp.int32))
    return _empty(config, batch_size, max_length, dtype)


def _empty(
    config: AttentionConfig, batch_size: int, max_length: int, dtype: jnp.dtype
) -> KVCache:
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
    cache: KVCache | BorrowedCache,
    *,
    config: AttentionConfig,
    keys: HeadKeys | LentKeys | None = None,
) -> tuple[Float[Array, "B T D"], KVCache | BorrowedCache]:
    """Attends to the cached and to the given tokens, causally, within each segment.

    A row that gets more tokens than its cache has room for gives NaN.

    Args:
      weights: of `param_specs`.
      x: the normalised residual stream.
      context: positions and segments.
      cache: of the layer, at `context.cache_slot`.
      config: of the layer.
      keys: from `project_keys`, or None; `LentKeys` of a layer that has no own.
    """
    q, gate = _queries(weights, x, context, config)
    if isinstance(keys, LentKeys):
        y = _attend(q, context, keys.order, keys.sources, config)
        assert isinstance(cache, BorrowedCache)
        counted = cache.extend(context.segment_ids, context.cache_slot)
        return _output(weights, y, gate, context), counted
    assert isinstance(cache, KVCache)
    own = project_keys(weights, x, context, config) if keys is None else keys

    # A window that does not fit is no ring: what it should see would be overwritten.
    ring = is_ring(config, cache)
    ids, slot = context.segment_ids, context.cache_slot
    order = cache.order(ids, slot)
    extended = cache.extend(*own, ids, slot, ring=ring)
    sources = attended(cache, extended, Keys(*own, ids, order), slot)
    y = _attend(q, context, order, sources, config)
    if cache.capacity and not ring:
        y = nan_where_full(y, cache, ids, slot)
    return _output(weights, y, gate, context), extended


def project_keys(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    config: AttentionConfig,
) -> HeadKeys:
    """The keys and values of the given tokens."""
    k, v = _project_keys(weights, x, config)
    k = _normalize(k, weights["k_norm"], config)
    if config.value_norm:
        v = unit_rms_norm(v, config.norm_eps)
    return HeadKeys(rotate(k, context.positions, config.rope), v)


def lend(
    config: AttentionConfig,
    own: HeadKeys,
    segment_ids: Int[Array, "B T"],
    before: KVCache | None,
    after: KVCache | None,
    slot: tuple[Array, ...],
) -> LentKeys:
    """What the layers that borrow from a layer attend to.

    Args:
      config: of the lending layer.
      own: the keys of the given tokens.
      segment_ids: of the given tokens.
      before: the layer's cache before the call, at `slot`; None: there is none.
      after: the same after the call.
      slot: of the layer, in a stacked cache.
    """
    if before is None or after is None:
        before = after = _empty(config, segment_ids.shape[0], 0, own.keys.dtype)
        slot = ()
    order = before.order(segment_ids, slot)
    whole = segment_ids.shape[1] == 1 or not is_ring(config, before)
    if before.capacity and whole and before.keys.dtype == own.keys.dtype:
        return LentKeys(order, (after.as_keys(slot),))
    new = Keys(*own, segment_ids, order)
    return LentKeys(order, (before.as_keys(slot), new))


def is_ring(config: AttentionConfig, cache: KVCache) -> bool:
    """Whether new tokens replace the oldest, which no later token would see."""
    return config.window is not None and cache.capacity >= config.window


def _queries(
    weights: Mapping[str, Array], x: Array, context: Context, config: AttentionConfig
) -> tuple[Array, Array | None]:
    q, gate = _project_queries(weights, x, config)
    q = _normalize(q, weights["q_norm"], config)
    return rotate(q, context.positions, config.rope), gate


def _project_queries(
    weights: Mapping[str, Array], x: Array, config: AttentionConfig
) -> tuple[Array, Array | None]:
    q = project(x, weights, "q_proj").reshape(*x.shape[:2], config.num_heads, -1)
    if not config.gated:
        return q, None
    q, gate = jnp.split(q, 2, axis=-1)
    return q, gate


def _project_keys(
    weights: Mapping[str, Array], x: Array, config: AttentionConfig
) -> tuple[Array, Array]:
    shape = *x.shape[:2], config.num_kv_heads, config.head_dim
    k = project(x, weights, "k_proj").reshape(shape)
    if config.keys_are_values:
        return k, k
    return k, project(x, weights, "v_proj").reshape(shape)


def _normalize(heads: Array, weight: Array, config: AttentionConfig) -> Array:
    zero_centered = config.zero_centered_norms
    return normalize(heads, weight, config.norm_eps, zero_centered=zero_centered)


def _attend(
    q: Array,
    context: Context,
    order: Array,
    sources: Sequence[Keys],
    config: AttentionConfig,
) -> Array:
    scale = config.head_dim**-0.5 if config.scale is None else config.scale
    own, ids = _own_tokens(sources), context.segment_ids
    if own is not None:
        return attend_to_own(q, context, own, scale=scale, window=config.window)
    return attention.attend(q, ids, order, sources, scale=scale, window=config.window)


def _own_tokens(sources: Sequence[Keys]) -> Keys | None:
    """The keys of the given tokens, if there are no others."""
    cached, *new = sources
    return new[0] if new and not cached.keys.shape[1] else None


def _output(
    weights: Mapping[str, Array], y: Array, gate: Array | None, context: Context
) -> Array:
    # Said before the gate, which then is multiplied where the heads are.
    y = context.constrain(y, "batch", "length", "heads", None)
    if gate is not None:
        y = y * jax.nn.sigmoid(gate)
    return project(y.reshape(*y.shape[:2], -1), weights, "o_proj")
