"""Linear attention with a gated delta rule (Yang et al., arXiv:2412.06464).

The layer of Qwen3-Next and Qwen3.5: short convolution over queries, keys and values,
gated delta rule, gated norm. B batch, T time, D model width, Hk and Hv key and value
heads, Dk and Dv their widths, W convolution width, C convolution channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from shared.cache import GatedDeltaNetCache, put, take
from shared.config import GatedDeltaNetConfig
from shared.context import Context, number_segments
from shared.layers.linear import project
from shared.ops.cast import cast_weight
from shared.ops.conv import causal_conv1d
from shared.ops.delta_rule_chunked import gated_delta_rule
from shared.ops.norm import gated_rms_norm, l2_norm
from shared.params import ParamSpec, constant, log_uniform, normal


def param_specs(config: GatedDeltaNetConfig) -> dict[str, ParamSpec]:
    """The layer's parameters; grouped input projections are so by key head."""
    c, dense = config, normal(config.initializer_range)
    heads = (c.num_value_heads,)
    if c.grouped_projections:
        inputs = {
            "in_proj_qkvz": c.conv_dim + c.value_dim,
            "in_proj_ba": 2 * c.num_value_heads,
        }
    else:
        inputs = {
            "in_proj_qkv": c.conv_dim,
            "in_proj_z": c.value_dim,
            "in_proj_b": c.num_value_heads,
            "in_proj_a": c.num_value_heads,
        }
    return {
        **{
            name: ParamSpec((c.hidden_size, size), ("embed", "heads"), dense)
            for name, size in inputs.items()
        },
        "conv1d": ParamSpec((c.conv_width, c.conv_dim), (None, "heads"), dense),
        "A_log": ParamSpec(
            heads, ("heads",), log_uniform(0.01, 16.0), at_least_float32=True
        ),
        "dt_bias": ParamSpec(heads, ("heads",), constant(1.0), at_least_float32=True),
        "norm": ParamSpec((c.value_head_dim,), (None,), constant(1.0)),
        "out_proj": ParamSpec((c.value_dim, c.hidden_size), ("heads", "embed"), dense),
    }


def init_cache(
    config: GatedDeltaNetConfig,
    batch_size: int,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype | None = None,
) -> GatedDeltaNetCache:
    """The state before the first token; its size does not grow with the sequence.

    The rule runs in at least float32 whatever the state is stored in; None: that type.
    """
    c = config
    if state_dtype is None:
        state_dtype = np.promote_types(dtype, np.float32)
    state = (batch_size, c.num_value_heads, c.key_head_dim, c.value_head_dim)
    return GatedDeltaNetCache(
        conv_tail=jnp.zeros((batch_size, c.conv_width - 1, c.conv_dim), dtype),
        state=jnp.zeros(state, state_dtype),
        segment_id=jnp.zeros((batch_size,), jnp.int32),
        position=jnp.zeros((batch_size,), jnp.int32),
    )


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    cache: GatedDeltaNetCache,
    *,
    config: GatedDeltaNetConfig,
) -> tuple[Float[Array, "B T D"], GatedDeltaNetCache]:
    """Applies the layer to `x`, continuing from `cache`; segments do not mix."""
    stack, slot = cache, context.cache_slot
    cache = take(stack, slot)
    segments = number_segments(context.segment_ids, cache.segment_id)
    qkv, z, b, a = _project(weights, x, config)

    mixed, conv_tail = causal_conv1d(
        qkv,
        cast_weight(weights["conv1d"], x.dtype),
        cache.conv_tail.astype(x.dtype),
        segments.groups,
        segments.real,
    )
    q, k, v = _split_heads(jax.nn.silu(mixed), config)

    y, state = gated_delta_rule(
        q * jnp.asarray(config.key_head_dim**-0.5, q.dtype),
        k,
        v,
        _log_decay(weights, a),
        jax.nn.sigmoid(b),
        cache.state,
        segments.groups,
        segments.real,
        chunk_size=config.chunk_size,
        span_size=config.span_size,
    )
    y = context.constrain(y, "batch", "length", "heads", None)  # before the gate
    y = gated_rms_norm(y, z, weights["norm"], config.norm_eps)
    y = project(y.reshape(*x.shape[:2], -1).astype(x.dtype), weights, "out_proj")
    cache = GatedDeltaNetCache(
        conv_tail.astype(cache.conv_tail.dtype),
        state.astype(cache.state.dtype),
        segments.last_id,
        cache.position + jnp.sum(segments.real, axis=1, dtype=jnp.int32),
    )
    return y, put(stack, cache, slot)


def _project(
    weights: Mapping[str, Array], x: Array, config: GatedDeltaNetConfig
) -> tuple[Array, Array, Array, Array]:
    """Convolution input, output gate and the two gates of the rule, un-grouped."""
    if config.grouped_projections:
        return _project_grouped(weights, x, config)
    z = project(x, weights, "in_proj_z")
    return (
        project(x, weights, "in_proj_qkv"),
        z.reshape(*x.shape[:2], config.num_value_heads, config.value_head_dim),
        project(x, weights, "in_proj_b"),
        project(x, weights, "in_proj_a"),
    )


def _project_grouped(
    weights: Mapping[str, Array], x: Array, config: GatedDeltaNetConfig
) -> tuple[Array, Array, Array, Array]:
    c, (batch, time, _) = config, x.shape
    keys, values = c.key_head_dim, c.values_per_key * c.value_head_dim
    qkvz = project(x, weights, "in_proj_qkvz").reshape(batch, time, c.num_key_heads, -1)
    q, k, v, z = jnp.split(qkvz, [keys, 2 * keys, 2 * keys + values], axis=-1)
    ba = project(x, weights, "in_proj_ba").reshape(batch, time, c.num_key_heads, -1)
    b, a = jnp.split(ba, 2, axis=-1)
    flat = (part.reshape(batch, time, -1) for part in (q, k, v))
    z = z.reshape(batch, time, c.num_value_heads, c.value_head_dim)
    heads = batch, time, c.num_value_heads
    return jnp.concatenate(list(flat), axis=-1), z, b.reshape(heads), a.reshape(heads)


def _split_heads(
    mixed: Array, config: GatedDeltaNetConfig
) -> tuple[Array, Array, Array]:
    """Queries and keys of unit length, and values, by head."""
    c, (batch, time, _) = config, mixed.shape
    q, k, v = jnp.split(mixed, [c.key_dim, 2 * c.key_dim], axis=-1)
    wide = np.promote_types(mixed.dtype, np.float32)
    keys = batch, time, c.num_key_heads, c.key_head_dim
    q, k = (l2_norm(part.reshape(keys).astype(wide)) for part in (q, k))
    return q, k, v.reshape(batch, time, c.num_value_heads, c.value_head_dim)


def _log_decay(weights: Mapping[str, Array], a: Array) -> Array:
    """-exp(A_log) softplus(a + dt_bias), in at least float32."""
    wide = np.promote_types(a.dtype, np.float32)
    rate = jnp.exp(weights["A_log"].astype(wide))
    step = jax.nn.softplus(a.astype(wide) + weights["dt_bias"].astype(wide)[None, None])
    return -rate[None, None] * step
