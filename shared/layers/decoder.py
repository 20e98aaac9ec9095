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
from shared.ops.norm import zero_centered_rms_norm
from shared.ops.routing import load_balance_loss
from shared.params import (
    ParamSpec,
    constant,
    draw_tree,
    layer_key,
    map_specs,
    normal,
    shapes,
)
from shared.plan import insert, node_at, run_path, stack_sizes
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
      logits: [B, T, V], at least float32.
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
    specs = {
        "embed_tokens": ParamSpec(
            (c.vocab_size, c.hidden_size), ("vocab", "embed"), dense
        ),
        "norm": ParamSpec((c.hidden_size,), ("embed",), constant(0.0)),
    }
    if not c.tie_word_embeddings:
        specs["lm_head"] = ParamSpec(
            (c.hidden_size, c.vocab_size), ("embed", "vocab"), dense
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


def init_cache(
    config: DecoderConfig,
    batch_size: int,
    max_length: int,
    dtype: Any = None,
) -> dict[str, Any]:
    """An empty cache for `batch_size` rows of at most `max_length` tokens.

    Args:
      config: of the model.
      batch_size: rows.
      max_length: positions that full-attention layers can hold.
      dtype: of keys, values and convolution tails; None: the model's activations.

    Returns:
      Layer caches in the layout of the plan, stack axes first.
    """
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)
    return config.plan.stack(
        [
            decoder_layer.init_cache(config, kind, batch_size, max_length, dtype)
            for kind in config.layers
        ]
    )


def embed(
    weights: Mapping[str, Array],
    tokens: Int[Array, "B T"],
    context: Context,
    config: DecoderConfig,
) -> Float[Array, "B T D"]:
    """The tokens' rows of the embedding, in the dtype of activations; 0 at padding.

    A token id outside the vocabulary gives NaN, not somebody else's row: negative ones
    are moved out of reach of Python's counting from the end.
    """
    ids = jnp.where(tokens < 0, config.vocab_size, tokens)
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
      ValueError: the cache is of another layout or batch size.
    """
    if cache is None:
        return Context.create(tokens.shape, **given)
    first = config.plan.places()[0]
    try:
        start = node_at(cache, first.path).position[first.slot]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"The cache does not have the layout of the config's plan: there is no "
            f"layer cache at {'/'.join(first.path)}. Make it with "
            "shared.init_cache and the same config."
        ) from error
    if start.shape != tokens.shape[:1]:
        raise ValueError(
            f"The cache has {start.shape[0]} rows, the tokens {tokens.shape[0]}: make "
            "a cache of the same batch size."
        )
    return Context.create(tokens.shape, start=start, **given)


def head(
    weights: Mapping[str, Array], x: Float[Array, "B T D"], config: DecoderConfig
) -> tuple[Float[Array, "B T D"], Float[Array, "B T V"]]:
    """Final norm and logits, these in at least float32."""
    x = zero_centered_rms_norm(x, weights["norm"], config.norm_eps)
    wide = np.promote_types(x.dtype, np.float32)
    if config.tie_word_embeddings:
        equation, weight = "btd,vd->btv", weights["embed_tokens"]
    else:
        equation, weight = "btd,dv->btv", weights["lm_head"]
    logits = jnp.einsum(
        equation, x, weight.astype(x.dtype), preferred_element_type=wide
    )
    return x, logits


def output(
    weights: Mapping[str, Array],
    embedding: Array,
    x: Array,
    cache: Any,
    aux: Mapping[str, Any],
    config: DecoderConfig,
) -> DecoderOutput:
    """Logits from the last layer's output, with what the layers said on the way.

    Args:
      weights: of `outer_specs`.
      embedding: the first layer's input.
      x: the last layer's output.
      cache: layer caches, in the layout of the plan.
      aux: `LayerAux` of the layers, in the layout of the plan, stack axes first.
      config: of the model.
    """
    normed, logits = head(weights, x, config)
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
