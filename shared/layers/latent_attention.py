"""Attention to a compressed latent of each token, as in DeepSeek-V2 and -V3.

A token's latent and one rotated key for all heads are all that a cache holds. Without
a cache, the keys and values of each head are made of the latents. With one, queries are
taken to the latents instead ("absorbed", arXiv:2405.04434, 2.1.2): the same scores, and
nothing of heads times cached positions is ever made.

B batch, T time, S cached positions, D model width, N heads, H width of a query, C of
the latent, R of the rotated key, Hv of a value; J = C + R.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from shared.cache import KVCache, attended, nan_where_full
from shared.config import LatentAttentionConfig, YarnScaling
from shared.context import Context
from shared.layers.linear import adapted, bias_spec, project
from shared.layers.rotary import rotate
from shared.layers.self_attention import attend_to_own
from shared.ops import attention
from shared.ops.attention import Keys
from shared.ops.cast import cast_weight
from shared.ops.norm import rms_norm
from shared.params import ParamSpec, constant, normal


def param_specs(config: LatentAttentionConfig) -> dict[str, ParamSpec]:
    """The layer's parameters; queries have a latent of their own, or `q_proj` alone."""
    c = config
    queries = c.num_heads * c.head_dim
    keys_and_values = c.num_heads * (c.nope_head_dim + c.value_head_dim)
    specs = {}
    if c.q_lora_rank is None:
        specs["q_proj"] = _dense(c, c.hidden_size, queries, "embed", "heads")
    else:
        specs["q_a_proj"] = _dense(c, c.hidden_size, c.q_lora_rank, "embed", None)
        specs["q_a_layernorm"] = ParamSpec((c.q_lora_rank,), (None,), constant(1.0))
        specs["q_b_proj"] = _dense(c, c.q_lora_rank, queries, None, "heads")
    specs |= {
        "kv_a_proj_with_mqa": _dense(c, c.hidden_size, c.cached_width, "embed", None),
        "kv_a_layernorm": ParamSpec((c.kv_lora_rank,), (None,), constant(1.0)),
        "kv_b_proj": _dense(c, c.kv_lora_rank, keys_and_values, None, "heads"),
        "o_proj": _dense(
            c, c.num_heads * c.value_head_dim, c.hidden_size, "heads", "embed"
        ),
    }
    if c.use_bias:
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            if name in specs:
                spec = specs[name]
                specs[f"{name}_bias"] = bias_spec(spec.shape[1], spec.axes[1])
    return specs


def init_cache(
    config: LatentAttentionConfig, batch_size: int, max_length: int, dtype: jnp.dtype
) -> KVCache:
    """An empty cache of `max_length` positions; 0 holds nothing between calls.

    Its keys [B, S, 1, J] are a token's normalised latent and its rotated key; values
    are made of them, and have width 0.
    """
    rows = batch_size, max_length
    return KVCache(
        keys=jnp.zeros((*rows, 1, config.cached_width), dtype),
        values=jnp.zeros((*rows, 1, 0), dtype),
        segment_ids=jnp.zeros(rows, jnp.int32),
        position=jnp.zeros((batch_size,), jnp.int32),
    )


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    cache: KVCache,
    *,
    config: LatentAttentionConfig,
) -> tuple[Float[Array, "B T D"], KVCache]:
    """Attends to the cached and to the given tokens, causally, within each segment.

    A row that gets more tokens than its cache has room for gives NaN.
    """
    q = _queries(weights, x, context, config)
    joint = _latents(weights, x, context, config)
    extended = cache.extend(
        joint, joint[..., :0], context.segment_ids, context.cache_slot
    )
    if cache.capacity:
        y = _attend_to_latents(weights, q, joint, context, cache, extended, config)
    else:
        y = _attend_to_heads(weights, q, joint, context, cache, config)
    y = context.constrain(y, "batch", "length", "heads", None)
    y = project(y.reshape(*x.shape[:2], -1), weights, "o_proj")
    return y, extended


def _dense(
    config: LatentAttentionConfig,
    inputs: int,
    outputs: int,
    input_axis: str | None,
    output_axis: str | None,
) -> ParamSpec:
    init = normal(config.initializer_range)
    return ParamSpec((inputs, outputs), (input_axis, output_axis), init)


def _queries(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    config: LatentAttentionConfig,
) -> Float[Array, "B T N H"]:
    """Of each head, the components without positions before the rotated ones."""
    if config.q_lora_rank is None:
        q = project(x, weights, "q_proj")
    else:
        latent = project(x, weights, "q_a_proj")
        latent = rms_norm(latent, weights["q_a_layernorm"], config.latent_norm_eps)
        q = project(latent, weights, "q_b_proj")
    q = q.reshape(*x.shape[:2], config.num_heads, config.head_dim)
    plain, turning = jnp.split(q, [config.nope_head_dim], axis=-1)
    turned = rotate(turning, context.positions, config.rope)
    return jnp.concatenate([plain, turned], axis=-1)


def _latents(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    config: LatentAttentionConfig,
) -> Float[Array, "B T 1 J"]:
    """What a token is known by: normalised latent, then the rotated key."""
    latent = project(x, weights, "kv_a_proj_with_mqa")[:, :, None]
    latent, turning = jnp.split(latent, [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, weights["kv_a_layernorm"], config.latent_norm_eps)
    turned = rotate(turning, context.positions, config.rope)
    return jnp.concatenate([latent, turned], axis=-1)


def _attend_to_heads(
    weights: Mapping[str, Array],
    q: Float[Array, "B T N H"],
    joint: Float[Array, "B T 1 J"],
    context: Context,
    cache: KVCache,
    config: LatentAttentionConfig,
) -> Float[Array, "B T N Hv"]:
    """Each head has keys and values of its own, made of the latents."""
    latent, turned = jnp.split(joint, [config.kv_lora_rank], axis=-1)
    both = project(latent[:, :, 0], weights, "kv_b_proj")
    both = both.reshape(*q.shape[:3], -1)
    k, v = jnp.split(both, [config.nope_head_dim], axis=-1)
    turned = jnp.broadcast_to(turned, (*q.shape[:3], turned.shape[-1]))
    k = jnp.concatenate([k, turned], axis=-1)

    ids = context.segment_ids
    order = cache.order(ids, context.cache_slot)
    own = Keys(k, v, ids, order)
    return attend_to_own(q, context, own, scale=_scale(config))


def _attend_to_latents(
    weights: Mapping[str, Array],
    q: Float[Array, "B T N H"],
    joint: Float[Array, "B T 1 J"],
    context: Context,
    cache: KVCache,
    extended: KVCache,
    config: LatentAttentionConfig,
) -> Float[Array, "B T N Hv"]:
    """All heads have the latents as keys and values, seen through `kv_b_proj`."""
    kv_b = cast_weight(adapted(weights, "kv_b_proj"), q.dtype)
    kv_b = kv_b.reshape(config.kv_lora_rank, config.num_heads, -1)
    to_keys, to_values = jnp.split(kv_b, [config.nope_head_dim], axis=-1)
    plain, turned = jnp.split(q, [config.nope_head_dim], axis=-1)
    plain = jnp.einsum("btnh,cnh->btnc", plain, to_keys)
    q = jnp.concatenate([plain, turned], axis=-1)

    ids, slot = context.segment_ids, context.cache_slot
    order = cache.order(ids, slot)
    new = Keys(joint, joint[..., :0], ids, order)
    sources = attended(cache, extended, new, slot)
    # One array twice, of which the rotated part is no value: cut off after the sum.
    sources = [source._replace(values=source.keys) for source in sources]
    y = attention.attend(q, ids, order, sources, scale=_scale(config))
    y = y[..., : config.kv_lora_rank]

    y = nan_where_full(y, cache, ids, slot)
    return jnp.einsum("btnc,cnv->btnv", y, to_values)


def _scale(config: LatentAttentionConfig) -> float:
    """Of the scores; YaRN sharpens them (arXiv:2309.00071, 3.4)."""
    scale, scaling = config.head_dim**-0.5, config.rope.scaling
    if isinstance(scaling, YarnScaling):
        scale *= scaling.magnitude(scaling.mscale_all_dim) ** 2
    return scale
