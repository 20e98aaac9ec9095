"""One layer: norm, mixer, norm, feed-forward, each added to the residual stream.

B batch, T time, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shared.cache import LayerCache
from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import (
    experts,
    gated_attention,
    gated_delta_net,
    mlp,
    sparse_moe,
)
from shared.layers.sparse_moe import RouterAux
from shared.ops.dropout import dropout
from shared.ops.norm import zero_centered_rms_norm
from shared.params import ParamSpec, SpecTree, constant

# A scan of length one keeps its loop with this mark, so that XLA does not merge the
# single full-attention layer into the block around it.
KEEP_SINGLE_TRIP = {"skip-simplify-while-loops_trip-count-one": "true"}

Mixed = Callable[[Array, Context, Any], tuple[Array, Any]]
Fed = Callable[[Array, Context], tuple[Array, RouterAux | None]]


class LayerAux(NamedTuple):
    """What a layer gives besides its output; None where it has none.

    Attributes:
      router: of a mixture layer.
      hidden: [B, T, D], the layer's output, when the context asks for it.
    """

    router: RouterAux | None
    hidden: Array | None


def mixer_name(kind: LayerKind) -> str:
    """Key of the mixer's parameters: the published name."""
    return "linear_attn" if kind.mixer == "linear_attention" else "self_attn"


def parts(config: DecoderConfig, kind: LayerKind) -> tuple[Any, Any]:
    """The parts of the config that a layer's mixer and feed-forward take."""
    mixer = {
        "full_attention": config.attention,
        "sliding_attention": config.sliding_attention,
        "linear_attention": config.delta_net,
    }[kind.mixer]
    feed_forward = config.mlp if kind.feed_forward == "dense" else config.moe
    return mixer, feed_forward


def norm_specs(config: DecoderConfig) -> dict[str, ParamSpec]:
    """The two norms, zero-centred."""
    norm = ParamSpec((config.hidden_size,), ("embed",), constant(0.0))
    return {"input_layernorm": norm, "post_attention_layernorm": norm}


def param_specs(config: DecoderConfig, kind: LayerKind) -> SpecTree:
    """All parameters of a layer of `kind`, without stack axes."""
    mixer, feed_forward = parts(config, kind)
    specs: dict[str, Any] = {**norm_specs(config)}
    if kind.mixer == "linear_attention":
        specs["linear_attn"] = gated_delta_net.param_specs(mixer)
    else:
        specs["self_attn"] = gated_attention.param_specs(mixer)
    if kind.feed_forward == "dense":
        specs["mlp"] = mlp.param_specs(feed_forward)
    else:
        specs["mlp"] = {
            **sparse_moe.param_specs(feed_forward),
            "experts": experts.param_specs(feed_forward),
            "shared_expert": mlp.param_specs(feed_forward.shared_expert),
        }
    return specs


def init_cache(
    config: DecoderConfig,
    kind: LayerKind,
    batch_size: int,
    max_length: int,
    dtype: jnp.dtype,
    state_dtype: jnp.dtype | None = None,
) -> LayerCache:
    """The empty cache of a layer of `kind`."""
    mixer, _ = parts(config, kind)
    if kind.mixer == "linear_attention":
        return gated_delta_net.init_cache(mixer, batch_size, dtype, state_dtype)
    return gated_attention.init_cache(mixer, batch_size, max_length, dtype)


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    cache: Any,
    *,
    mixer: Mixed,
    feed_forward: Fed,
    config: DecoderConfig,
    kind: LayerKind,
) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
    """H + mixer(norm(h)), then h + feed_forward(norm(h)).

    Args:
      weights: of `norm_specs`.
      x: the residual stream.
      context: positions, segments, dropout.
      cache: of the mixer, at `context.cache_slot`; None runs on an empty one and gives
        None back.
      mixer: (x, context, cache) -> (y, cache).
      feed_forward: (x, context) -> (y, router aux or None).
      config: of the model.
      kind: of this layer.
    """
    state = cache
    if cache is None:
        state = init_cache(config, kind, x.shape[0], 0, x.dtype)
    y = zero_centered_rms_norm(x, weights["input_layernorm"], config.norm_eps)
    y, state = mixer(y, context, state)
    y = checkpoint_name(y, "mixer_output")
    x = x + _drop(y, context, config, 0)

    y = zero_centered_rms_norm(x, weights["post_attention_layernorm"], config.norm_eps)
    y, router = feed_forward(y, context)
    y = checkpoint_name(y, "feed_forward_output")
    x = x + _drop(y, context, config, 1)
    hidden = x if context.want_hidden else None
    return x, None if cache is None else state, LayerAux(router, hidden)


def _drop(y: Array, context: Context, config: DecoderConfig, branch: int) -> Array:
    if context.deterministic or config.dropout_rate == 0.0:
        return y
    key = jax.random.fold_in(context.layer_dropout_key(), branch)
    return dropout(y, key, config.dropout_rate)
