"""The whole decoder: its parameter tree, and what stands before and after the layers.

B batch, T time, D model width, V vocabulary, L layers, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import decoder_layer, grouped_query_attention
from shared.layers.decoder_cache import check_cache, check_room, first_layer
from shared.layers.grouped_query_attention import HeadKeys
from shared.layers.linear import project
from shared.layers.norm import norm_spec, normalize
from shared.ops.matmul import matmul
from shared.ops.routing import load_balance_loss
from shared.params import (
    ParamSpec,
    SpecTree,
    draw_tree,
    layer_key,
    map_specs,
    normal,
    padded,
    shapes,
)
from shared.plan import (
    Group,
    Run,
    insert,
    node_at,
    run_path,
    stack_axes,
    stack_sizes,
)
from shared.sharding import AxisRules
from shared.trees import flatten


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
      logits: [B, T, V], at least float32; [B, N, V] at the places asked for; None if
        not wanted.
      cache: the cache given, continued; None if none was given.
      aux_loss: load-balance loss of all mixture layers together, not yet weighted;
        None for a model without experts.
      router_logits: [L', B, T, E] of the L' mixture layers in order; None likewise.
      hidden_states: None unless asked for.
      features: [B, T, D], what the head makes logits of (`logits_of`); None if it did.
    """

    logits: Float[Array, "B T V"] | None
    cache: Any
    aux_loss: Float[Array, ""] | None
    router_logits: Float[Array, "L B T E"] | None
    hidden_states: HiddenStates | None
    features: Float[Array, "B T D"] | None = None


def outer_specs(config: DecoderConfig) -> dict[str, ParamSpec]:
    """The parameters outside the layers: embeddings, final norm, head unless tied."""
    c, dense = config, normal(config.initializer_range)
    rows = c.vocab_size + c.vocab_padding
    specs = {
        "embed_tokens": ParamSpec(
            (rows, c.hidden_size),
            ("vocab", "embed"),
            padded(dense, 0, c.vocab_padding),
        ),
        "norm": norm_spec(c.hidden_size, "embed", zero_centered=c.zero_centered_norms),
    }
    if not c.tie_word_embeddings:
        specs["lm_head"] = ParamSpec(
            (c.hidden_size, rows),
            ("embed", "vocab"),
            padded(dense, 1, c.vocab_padding),
        )
    if c.layer_inputs is not None:
        size = c.layer_inputs.size
        width = c.num_layers * size
        specs["embed_tokens_per_layer"] = ParamSpec(
            (c.layer_inputs.vocab_size, width), ("vocab", None), dense
        )
        specs["per_layer_model_projection"] = ParamSpec(
            (c.hidden_size, width), ("embed", None), dense
        )
        specs["per_layer_projection_norm"] = norm_spec(
            size, None, zero_centered=c.zero_centered_norms
        )
    return specs


def param_specs(config: DecoderConfig) -> dict[str, Any]:
    """Every parameter of the model in the layout of its plan, stack axes included."""

    def of_layer(group: Group, run: Run) -> SpecTree:
        return decoder_layer.param_specs(config, run.kind)

    return {**outer_specs(config), **stack_specs(config, of_layer)}


def stack_specs(
    config: DecoderConfig, of_layer: Callable[[Group, Run], SpecTree]
) -> dict[str, Any]:
    """Specs of a single layer of each run, in the layout of the plan."""
    tree: dict[str, Any] = {}
    for group, run in config.plan.runs():
        sizes, names = stack_sizes(group, run), stack_axes(group, run)
        specs = map_specs(
            functools.partial(
                ParamSpec.stacked,
                sizes=sizes,
                names=names,
                axis=config.param_scan_axis,
            ),
            of_layer(group, run),
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
    scale = config.hidden_size**0.5 if config.scale_embeddings else None
    x = _rows(weights["embed_tokens"], tokens, context, config, scale)
    return context.constrain(x, "batch", "length", "embed")


def _rows(
    table: Array,
    tokens: Array,
    context: Context,
    config: DecoderConfig,
    scale: float | None,
) -> Array:
    outside = tokens < 0
    if config.vocab_padding:
        outside |= tokens >= config.vocab_size
    beyond = max(table.shape[0], config.vocab_size + config.vocab_padding)
    rows = jnp.take(table, jnp.where(outside, beyond, tokens), axis=0, mode="fill")
    if scale is not None:  # rounded to the dtype of the table, as the reference has it
        rows = rows * jnp.asarray(scale, rows.dtype)
    real = (context.segment_ids > 0)[..., None]
    return jnp.where(real, rows, jnp.zeros_like(rows)).astype(config.dtype)


class PerLayer(NamedTuple):
    """What a layer is told that others are not; stacked, what a run of them is.

    Attributes:
      layer: absolute index of the layer, int32.
      input: [B, T, P], its part of the tokens' second embedding; None: there is none.
    """

    layer: ArrayLike
    input: Array | None


def per_layer(
    weights: Mapping[str, Array],
    tokens: Int[Array, "B T"],
    embedding: Float[Array, "B T D"],
    context: Context,
    config: DecoderConfig,
) -> dict[str, Any]:
    """`PerLayer` of every run, in the layout of the plan, stack axes first.

    Args:
      weights: of `outer_specs`.
      tokens: of the call.
      embedding: the first layer's input.
      context: padding has no input.
      config: of the model.
    """
    inputs = None
    if config.layer_inputs is not None:
        inputs = _layer_inputs(weights, tokens, embedding, context, config)
    return jax.tree.map(
        lambda layers: PerLayer(layers, None if inputs is None else inputs[layers]),
        config.plan.indices(),
    )


def _layer_inputs(
    weights: Mapping[str, Array],
    tokens: Array,
    embedding: Array,
    context: Context,
    config: DecoderConfig,
) -> Float[Array, "L B T P"]:
    """Half from a second embedding, half from the first; each at unit scale."""
    assert config.layer_inputs is not None
    size = config.layer_inputs.size
    table = weights["embed_tokens_per_layer"]
    rows = _rows(table, tokens, context, config, size**0.5)
    seen = project(embedding, weights, "per_layer_model_projection")
    seen = seen * jnp.asarray(config.hidden_size**-0.5, seen.dtype)
    shape = *tokens.shape, config.num_layers, size
    seen = normalize(
        seen.reshape(shape),
        weights["per_layer_projection_norm"],
        config.norm_eps,
        zero_centered=config.zero_centered_norms,
    )
    both = (seen + rows.reshape(shape)) * jnp.asarray(2**-0.5, seen.dtype)
    return jnp.moveaxis(both, 2, 0)


def init_lent(config: DecoderConfig, x: Float[Array, "B T D"]) -> dict[str, HeadKeys]:
    """Room for the keys that layers lend, by mixer; empty where none do."""
    lent: dict[str, HeadKeys] = {}
    for mixer, index in config.lenders.items():
        part = decoder_layer.mixer_part(config, config.layers[index])
        zeros = jnp.zeros((*x.shape[:2], part.num_kv_heads, part.head_dim), x.dtype)
        lent[mixer] = HeadKeys(zeros, zeros)
    return lent


def lend(
    config: DecoderConfig,
    group: Group,
    context: Context,
    lent: Mapping[str, HeadKeys],
    before: Any,
    after: Any,
) -> Context:
    """The context of a group of layers, with the keys that those borrow, if any.

    Args:
      config: of the model.
      group: of the plan.
      context: of the call.
      lent: what the lending layers gave; the last one of a mixer counts.
      before: the cache before the call; None: there is none.
      after: the same with the groups that have run.
    """
    mixers = {run.kind.mixer for run in group.runs if run.kind.borrows_keys}
    if not mixers:
        return context
    sources = {}
    for mixer in sorted(mixers):
        place = config.plan.places()[config.lenders[mixer]]
        held = (None if c is None else node_at(c, place.path) for c in (before, after))
        old, new = held
        sources[mixer] = grouped_query_attention.lend(
            decoder_layer.mixer_part(config, place.kind),
            lent[mixer],
            context.segment_ids,
            old,
            new,
            tuple(map(jnp.int32, place.slot)),
        )
    return dataclasses.replace(context, lent=sources)


def create_context(
    tokens: Array,
    cache: Any,
    config: DecoderConfig,
    *,
    axis_rules: AxisRules | None = None,
    **given: Any,
) -> Context:
    """The context of a call; positions go on from where the cache's rows are.

    Args:
      tokens: the call's tokens.
      cache: in the layout of the plan, or None.
      config: of the model.
      axis_rules: where activations stand; None: as the config has it.
      **given: arguments of `Context.create`.

    Raises:
      ValueError: the cache is of another config or batch size, or has no room for the
        tokens (see `decoder_cache.check_room`).
    """
    names = "expert_chunks", "attention_kernel", "expert_kernel"
    given |= {name: getattr(config, name) for name in names}
    given["axis_rules"] = config.axis_rules if axis_rules is None else axis_rules
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
    x = final_norm(weights, x, config)
    return x, logits_of(weights, x, config)


def final_norm(
    weights: Mapping[str, Array], x: Float[Array, "B T D"], config: DecoderConfig
) -> Float[Array, "B T D"]:
    """The norm before the head."""
    zero_centered = config.zero_centered_norms
    return normalize(x, weights["norm"], config.norm_eps, zero_centered=zero_centered)


def logits_of(
    weights: Mapping[str, Array], features: Float[Array, "B T D"], config: DecoderConfig
) -> Float[Array, "B T V"]:
    """Logits of what `final_norm` gave, in at least float32."""
    return _cap(_logits(weights, features, config), config.logit_softcap)


def _cap(logits: Array, cap: float | None) -> Array:
    if cap is None:
        return logits
    return jnp.asarray(cap, logits.dtype) * jnp.tanh(logits / cap)


def _logits(weights: Mapping[str, Array], x: Array, config: DecoderConfig) -> Array:
    wide = np.promote_types(x.dtype, np.float32)
    if not config.tie_word_embeddings:
        weight = weights["lm_head"]
        if config.vocab_padding:
            weight = weight[:, : config.vocab_size]
        return matmul(x, weight.astype(x.dtype), wide)
    weight = weights["embed_tokens"]
    if config.vocab_padding:
        weight = weight[: config.vocab_size]
    weight = weight.astype(x.dtype)
    return jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=wide)


def output(
    weights: Mapping[str, Array],
    embedding: Array,
    x: Array,
    cache: Any,
    aux: Mapping[str, Any],
    config: DecoderConfig,
    logits_at: Array | None = None,
    *,
    output_logits: bool = True,
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
      output_logits: False gives what they are made of instead.
    """
    normed = final_norm(weights, select(x, logits_at), config)
    logits = logits_of(weights, normed, config) if output_logits else None
    features = None if output_logits else normed
    router = config.plan.gather(aux, lambda layer: layer.router)
    hidden = config.plan.gather(aux, lambda layer: layer.hidden)
    states = None if hidden is None else HiddenStates(embedding, hidden, normed)
    if router is None:
        return DecoderOutput(logits, cache, None, None, states, features)
    return DecoderOutput(
        logits=logits,
        cache=cache,
        aux_loss=load_balance_loss(router.stats),
        router_logits=router.logits,
        hidden_states=states,
        features=features,
    )


def logical_axes(config: DecoderConfig) -> dict[str, Any]:
    """The logical axis names of every parameter, one a dimension."""
    return map_specs(lambda spec: spec.axes, param_specs(config))
