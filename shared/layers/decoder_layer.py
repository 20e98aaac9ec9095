"""One layer: norm, mixer, norm, feed-forward, each added to the residual stream.

B batch, T time, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from shared.cache import LayerCache
from shared.config import (
    AttentionConfig,
    DecoderConfig,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LayerKind,
    MLPConfig,
    MoEConfig,
)
from shared.context import Context
from shared.layers import (
    experts,
    gated_delta_net,
    grouped_query_attention,
    latent_attention,
    mlp,
    sparse_moe,
)
from shared.layers.grouped_query_attention import HeadKeys
from shared.layers.linear import project
from shared.layers.norm import norm_spec, normalize
from shared.layers.sparse_moe import RouterAux
from shared.ops.activation import activate
from shared.ops.dropout import dropout
from shared.params import ParamSpec, SpecTree, constant, normal

# A scan of length one keeps its loop with this mark, so that XLA does not merge the
# single full-attention layer into the block around it.
KEEP_SINGLE_TRIP = {"skip-simplify-while-loops_trip-count-one": "true"}

Modules = Mapping[str, Callable[..., Any]]


class LayerAux(NamedTuple):
    """What a layer gives besides its output; None where it has none.

    Attributes:
      router: of a mixture layer.
      hidden: [B, T, D], the layer's output, when the context asks for it.
      lent: `HeadKeys` of a layer whose mixer has borrowers. They go on to those, and
        are no part of what the decoder gives.
    """

    router: RouterAux | None
    hidden: Array | None
    lent: HeadKeys | None = None


# What computes a part of the config.
_MATHS: dict[type, ModuleType] = {
    AttentionConfig: grouped_query_attention,
    LatentAttentionConfig: latent_attention,
    GatedDeltaNetConfig: gated_delta_net,
    MLPConfig: mlp,
}


def mixer_name(kind: LayerKind) -> str:
    """Key of the mixer's parameters: the published name."""
    return "linear_attn" if kind.mixer == "linear_attention" else "self_attn"


def mixer_part(config: DecoderConfig, kind: LayerKind) -> Any:
    """The part of the config that a layer's mixer takes."""
    part = {
        "full_attention": config.attention,
        "sliding_attention": config.sliding_attention,
        "linear_attention": config.delta_net,
    }[kind.mixer]
    if not kind.borrows_keys:
        return part
    assert isinstance(part, AttentionConfig)
    return dataclasses.replace(part, borrows_keys=True)


def modules(config: DecoderConfig, kind: LayerKind) -> dict[str, Any]:
    """The modules of a layer by name, each as the part of the config that it takes.

    Which module it is follows from the type of the part.
    """
    dense = config.mlp
    if kind.borrows_keys and config.borrower_mlp is not None:
        dense = config.borrower_mlp
    feed_forwards: dict[str, dict[str, Any]] = {
        "dense": {"mlp": dense},
        "moe": {"mlp": config.moe},
        "dense_and_moe": {"mlp": dense, "moe": config.moe},
    }
    mixer = {mixer_name(kind): mixer_part(config, kind)}
    return mixer | feed_forwards[kind.feed_forward]


def own_specs(config: DecoderConfig, kind: LayerKind) -> dict[str, ParamSpec]:
    """The parameters of a layer that are in none of its modules: mostly norms."""
    names = ["input_layernorm", "post_attention_layernorm"]
    if config.output_norms:
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if kind.feed_forward == "dense_and_moe":
        names += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        names += ["pre_feedforward_layernorm_2"]
    if config.layer_inputs is not None:
        names.append("post_per_layer_input_norm")
    width, zero_centered = config.hidden_size, config.zero_centered_norms
    norm = norm_spec(width, "embed", zero_centered=zero_centered)
    specs = dict.fromkeys(names, norm)
    if config.layer_inputs is not None:
        dense, size = normal(config.initializer_range), config.layer_inputs.size
        specs["per_layer_input_gate"] = ParamSpec((width, size), ("embed", None), dense)
        specs["per_layer_projection"] = ParamSpec((size, width), (None, "embed"), dense)
    if config.layer_scalar:
        specs["layer_scalar"] = ParamSpec((1,), (None,), constant(1.0))
    return specs


def param_specs(config: DecoderConfig, kind: LayerKind) -> SpecTree:
    """All parameters of a layer of `kind`, without stack axes."""
    parts = modules(config, kind)
    specs: dict[str, Any] = dict(own_specs(config, kind))
    return specs | {name: _part_specs(part) for name, part in parts.items()}


def _part_specs(part: Any) -> SpecTree:
    if not isinstance(part, MoEConfig):
        return _MATHS[type(part)].param_specs(part)
    specs: dict[str, Any] = {**sparse_moe.param_specs(part)}
    specs["experts"] = experts.param_specs(part)
    if part.shared_expert is not None:
        specs["shared_expert"] = mlp.param_specs(part.shared_expert)
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
    part = mixer_part(config, kind)
    if isinstance(part, GatedDeltaNetConfig):
        return gated_delta_net.init_cache(part, batch_size, dtype, state_dtype)
    return _MATHS[type(part)].init_cache(part, batch_size, max_length, dtype)


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    cache: Any,
    *,
    modules: Modules,
    config: DecoderConfig,
    kind: LayerKind,
) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
    """H + mixer(norm(h)), then h + feed_forward(norm(h)).

    With `config.output_norms` each of the two is normalised before it is added. What
    `config.layer_inputs` and `config.layer_scalar` ask for comes last.

    Args:
      weights: of `own_specs`.
      x: the residual stream.
      context: positions, segments, dropout, the layer's own input.
      cache: of the mixer, at `context.cache_slot`; None runs on an empty one and gives
        None back.
      modules: of `modules`, by name. A mixer maps (x, context, cache) to (y, cache), a
        dense feed-forward x to y, a mixture (x, context) to (y, aux), where its router
        has an input of its own also given that.
      config: of the model.
      kind: of this layer.
    """
    state = cache
    if cache is None:
        state = init_cache(config, kind, x.shape[0], 0, x.dtype)
    y = _norm(x, weights, "input_layernorm", config)
    y, state, lent = _mix(y, context, state, modules[mixer_name(kind)], config, kind)
    y = checkpoint_name(y, "mixer_output")
    if config.output_norms:
        y = _norm(y, weights, "post_attention_layernorm", config)
    x = x + _drop(y, context, config, 0)

    y, router = _feed_forward(weights, x, context, modules, config, kind)
    y = checkpoint_name(y, "feed_forward_output")
    if config.output_norms:
        y = _norm(y, weights, "post_feedforward_layernorm", config)
    x = x + _drop(y, context, config, 1)
    x = context.constrain(x, "batch", "length", "embed")

    if config.layer_inputs is not None:
        x = x + _layer_input(weights, x, context, config)
    if config.layer_scalar:
        scalar = jax.lax.stop_gradient(weights["layer_scalar"]).astype(x.dtype)
        x = x * jnp.broadcast_to(scalar, x.shape)
    hidden = x if context.want_hidden else None
    return x, None if cache is None else state, LayerAux(router, hidden, lent)


def _mix(
    y: Array,
    context: Context,
    state: Any,
    mixer: Any,
    config: DecoderConfig,
    kind: LayerKind,
) -> tuple[Array, Any, HeadKeys | None]:
    """The mixer's output, its cache, and its keys where there are borrowers."""
    if kind.borrows_keys:
        return *mixer(y, context, state, context.lent[kind.mixer]), None
    if kind.mixer not in config.lenders:
        return *mixer(y, context, state), None
    keys = mixer.keys_of(y, context)
    return *mixer(y, context, state, keys), keys


def _feed_forward(
    weights: Mapping[str, Array],
    x: Array,
    context: Context,
    modules: Modules,
    config: DecoderConfig,
    kind: LayerKind,
) -> tuple[Array, RouterAux | None]:
    name = "pre_feedforward_layernorm"
    if not config.output_norms:
        name = "post_attention_layernorm"
    y = _norm(x, weights, name, config)
    if kind.feed_forward == "dense":
        return modules["mlp"](y), None
    assert config.moe is not None
    raw = (x,) if config.moe.norm_router_input else ()
    if kind.feed_forward == "moe":
        return modules["mlp"](y, context, *raw)
    dense = _norm(modules["mlp"](y), weights, "post_feedforward_layernorm_1", config)
    y = _norm(x, weights, "pre_feedforward_layernorm_2", config)
    routed, router = modules["moe"](y, context, *raw)
    routed = _norm(routed, weights, "post_feedforward_layernorm_2", config)
    return dense + routed, router


def _layer_input(
    weights: Mapping[str, Array], x: Array, context: Context, config: DecoderConfig
) -> Array:
    """The layer's own input, gated by the residual stream."""
    assert config.layer_inputs is not None and context.layer_input is not None
    gate = project(x, weights, "per_layer_input_gate")
    gate = activate(gate, config.layer_inputs.activation)
    y = project(gate * context.layer_input, weights, "per_layer_projection")
    return _norm(y, weights, "post_per_layer_input_norm", config)


def _norm(
    x: Array, weights: Mapping[str, Array], name: str, config: DecoderConfig
) -> Array:
    zero_centered = config.zero_centered_norms
    return normalize(x, weights[name], config.norm_eps, zero_centered=zero_centered)


def pass_keys_on(
    lent: Mapping[str, HeadKeys], aux: Any, kind: LayerKind
) -> tuple[dict[str, HeadKeys], Any]:
    """The keys to lend after a layer, by mixer, and what else it gave."""
    if not isinstance(aux, LayerAux) or aux.lent is None:
        return dict(lent), aux
    return {**lent, kind.mixer: aux.lent}, aux._replace(lent=None)


def _drop(y: Array, context: Context, config: DecoderConfig, branch: int) -> Array:
    if context.deterministic or config.dropout_rate == 0.0:
        return y
    key = jax.random.fold_in(context.layer_dropout_key(), branch)
    return dropout(y, key, config.dropout_rate)
