"""The whole decoder: its parameter tree, and what stands before and after the layers.

B batch, T time, D model width, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import decoder_layer
from shared.layers.decoder_cache import check_cache, check_room, first_layer
from shared.ops.matmul import matmul
from shared.ops.norm import zero_centered_rms_norm
from shared.ops.routing import load_balance_loss
from shared.params import (
    ParamSpec,
    constant,
    draw_tree,
    layer_key,
    map_specs,
    normal,
    padded,
    shapes,
)
from shared.plan import insert, run_path, stack_sizes
from shared.trees import flatten

STACK_AXES = ("blocks", "layers")


class HiddenStates(NamedTuple):
    """The residual stream on its way.

    Attributes:
      embedding: [B, T, D], before the first layer.
      layers: [L, B, T, D], after each layer, in order.
      final_norm: [B, T, D], what the head sees.
    """

    embedding: Float[Array, "B T D"]
    layers: Float[Array, "L B T D"]
    final_norm: Float[Array, "B T D"]


class DecoderOutput(NamedTuple):
    """What a decoder gives.

    Attributes:
      logits: [B, T, V], at least float32; [B, N, V] at the places asked for.
      cache: the cache given, continued; None if none was given.
      aux_loss: load-balance loss of all mixture layers together, not yet weighted;
        None for a model without experts.
      router_logits: [L', B, T, E] of the L' mixture layers in order; None likewise.
      hidden_states: None unless asked for.
    """

    logits: Float[Array, "B T V"]
    cache: Any
    aux_loss: Float[Array, ""] | None
    router_logits: Float[Array, "L B T E"] | None
    hidden_states: HiddenStates | None


def outer_specs(config: DecoderConfig) -> dict[str, ParamSpec]:
    """The parameters outside the layers: embedding, final norm, head unless tied."""
    c, dense = config, normal(config.initializer_range)
    rows = c.vocab_size + c.vocab_padding
    specs = {
        "embed_tokens": ParamSpec(
            (rows, c.hidden_size),
            ("vocab", "embed"),
            padded(dense, 0, c.vocab_padding),
        ),
        "norm": ParamSpec((c.hidden_size,), ("embed",), constant(0.0)),
    }
    if not c.tie_word_embeddings:
        specs["lm_head"] = ParamSpec(
            (c.hidden_size, rows),
            ("embed", "vocab"),
            padded(dense, 1, c.vocab_padding),
        )
    return specs


def param_specs(config: DecoderConfig) -> dict[str, Any]:
    """Every parameter of the model in the layout of its plan, stack axes included."""
    tree: dict[str, Any] = {**outer_specs(config)}
    for group, run in config.plan.runs():
        sizes = stack_sizes(group, run)
        names = STACK_AXES[:1] * (group.repeats is not None)
        names += STACK_AXES[1:] * run.stacked
        specs = map_specs(
            functools.partial(
                ParamSpec.stacked,
                sizes=sizes,
                names=names,
                axis=config.param_scan_axis,
            ),
            decoder_layer.param_specs(config, run.kind),
        )
        insert(tree, run_path(group, run), specs)
    return tree


def abstract_params(config: DecoderConfig) -> dict[str, Any]:
    """Shape and dtype (`jax.ShapeDtypeStruct`) of every parameter."""
    return shapes(param_specs(config), config.param_dtype)


def active_parameters(config: DecoderConfig) -> int:
    """Parameters that one token meets: all but the experts it does not choose."""
    total = 0
    for path, leaf in flatten(abstract_params(config)):
        share = 1.0
        if config.moe is not None and "experts" in path:
            share = config.moe.experts_per_token / config.moe.num_experts
        total += round(leaf.size * share)
    return total


def init_outer(key: PRNGKeyArray, config: DecoderConfig) -> dict[str, Any]:
    """First values of the parameters outside the layers."""
    return draw_tree(outer_specs(config), key, config.param_dtype)


def init_params(key: PRNGKeyArray, config: DecoderConfig) -> dict[str, Any]:
    """First values of the whole tree: equal bytes in every layout and frontend."""

    def init_layer(index: Array, kind: LayerKind) -> dict[str, Any]:
        specs = decoder_layer.param_specs(config, kind)
        return draw_tree(specs, layer_key(key, index), config.param_dtype)

    return {
        **init_outer(key, config),
        **config.plan.build(
            init_layer,
            config.param_scan_axis,
            traced=isinstance(key, jax.core.Tracer),
        ),
    }


def relayout(
    config: DecoderConfig, params: Mapping[str, Any], **layout: Any
) -> tuple[DecoderConfig, dict[str, Any]]:
    """The same model with its layers stacked in another way.

    Args:
      config: of the model.
      params: in the layout of the config's plan.
      **layout: `scan_layers`, `scan_period` or `param_scan_axis`, as in the config.

    Returns:
      The config with the new layout, and the parameters in it.

    Raises:
      ConfigError: the layers do not fit the new layout.
    """
    new = config.replace(**layout)
    groups = {group.name for group in config.plan.groups}
    outer = {name: node for name, node in params.items() if name not in groups}
    layers = config.plan.unstack(dict(params), config.param_scan_axis)
    return new, {**outer, **new.plan.stack(layers, new.param_scan_axis)}


def embed(
    weights: Mapping[str, Array],
    tokens: Int[Array, "B T"],
    context: Context,
    config: DecoderConfig,
) -> Float[Array, "B T D"]:
    """The tokens' rows of the embedding, in the dtype of activations; 0 at padding.

    A token id outside the vocabulary gives NaN, not somebody else's row: negative ones
    are moved out of reach of Python's counting from the end, as are those of padding.
    """
    outside = tokens < 0
    if config.vocab_padding:
        outside |= tokens >= config.vocab_size
    ids = jnp.where(outside, config.vocab_size + config.vocab_padding, tokens)
    rows = jnp.take(weights["embed_tokens"], ids, axis=0, mode="fill")
    real = (context.segment_ids > 0)[..., None]
    return jnp.where(real, rows, jnp.zeros_like(rows)).astype(config.dtype)


def create_context(
    tokens: Array, cache: Any, config: DecoderConfig, **given: Any
) -> Context:
    """The context of a call; positions go on from where the cache's rows are.

    Args:
      tokens: the call's tokens.
      cache: in the layout of the plan, or None.
      config: of the model.
      **given: arguments of `Context.create`.

    Raises:
      ValueError: the cache is of another config or batch size, or has no room for the
        tokens (see `decoder_cache.check_room`).
    """
    if cache is None:
        return Context.create(tokens.shape, **given)
    check_cache(config, cache, *tokens.shape[:1])
    first = first_layer(config, cache)
    context = Context.create(
        tokens.shape, start=first.position, segment=first.last_segment(), **given
    )
    check_room(
        config, cache, context.segment_ids, no_padding=given.get("segment_ids") is None
    )
    return context


def select(x: Float[Array, "B T D"], at: Int[Array, "B N"] | None) -> Array:
    """The places `at` of each row, [B, N, D]; None: all of them."""
    return x if at is None else jnp.take_along_axis(x, at[..., None], axis=1)


def head(
    weights: Mapping[str, Array], x: Float[Array, "B T D"], config: DecoderConfig
) -> tuple[Float[Array, "B T D"], Float[Array, "B T V"]]:
    """Final norm and logits, these in at least float32."""
    x = zero_centered_rms_norm(x, weights["norm"], config.norm_eps)
    wide = np.promote_types(x.dtype, np.float32)
    if not config.tie_word_embeddings:
        weight = weights["lm_head"]
        if config.vocab_padding:
            weight = weight[:, : config.vocab_size]
        return x, matmul(x, weight.astype(x.dtype), wide)
    weight = weights["embed_tokens"]
    if config.vocab_padding:
        weight = weight[: config.vocab_size]
    weight = weight.astype(x.dtype)
    logits = jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=wide)
    return x, logits


def output(
    weights: Mapping[str, Array],
    embedding: Array,
    x: Array,
    cache: Any,
    aux: Mapping[str, Any],
    config: DecoderConfig,
    logits_at: Array | None = None,
) -> DecoderOutput:
    """Logits from the last layer's output, with what the layers said on the way.

    Args:
      weights: of `outer_specs`.
      embedding: the first layer's input.
      x: the last layer's output.
      cache: layer caches, in the layout of the plan.
      aux: `LayerAux` of the layers, in the layout of the plan, stack axes first.
      config: of the model.
      logits_at: [B, N], the places in each row whose logits are wanted; None: all.
    """
    normed, logits = head(weights, select(x, logits_at), config)
    router = config.plan.gather(aux, lambda layer: layer.router)
    hidden = config.plan.gather(aux, lambda layer: layer.hidden)
    states = None if hidden is None else HiddenStates(embedding, hidden, normed)
    if router is None:
        return DecoderOutput(logits, cache, None, None, states)
    return DecoderOutput(
        logits=logits,
        cache=cache,
        aux_loss=load_balance_loss(router.stats),
        router_logits=router.logits,
        hidden_states=states,
    )


def logical_axes(config: DecoderConfig) -> dict[str, Any]:
    """The logical axis names of every parameter, one a dimension."""
    return map_specs(lambda spec: spec.axes, param_specs(config))
