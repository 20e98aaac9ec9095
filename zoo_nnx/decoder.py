"""The decoder, as an NNX module: the layers of the plan by `zoo_nnx.stack`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from shared.config import DecoderConfig
from shared.layers import decoder
from shared.layers.decoder import DecoderOutput
from shared.sharding import AxisRules
from zoo_nnx.decoder_layer import DecoderLayer
from zoo_nnx.parameters import declare, layer_rngs, params_key, stream_key, values
from zoo_nnx.stack import Block, make_run, run_plan


class Decoder(nnx.Module):
    """A hybrid decoder: embedding, layers in the order of their plan, head.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> config = shared.preset("qwen3-next-tiny")
      >>> model = zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
      >>> model(jnp.array([[1, 2, 3]])).logits.shape == (1, 3, config.vocab_size)
      True

    Args:
      config: of the model.
      layer: makes the layers, called as `layer(config, kind, rngs=rngs)`. A class of
        your own takes (x, context, cache) and gives (x, cache, aux) as `DecoderLayer`
        does; its Variables are stacked and scanned like ours.
      rngs: the `params` stream, and `dropout` if the config has dropout.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        layer: Callable[..., nnx.Module] = DecoderLayer,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.deterministic = True  # set by train() and eval(); a call can override it
        key = params_key(rngs)
        declare(self, decoder.outer_specs(config), key, config.param_dtype)
        if config.dropout_rate > 0.0 and ("dropout" in rngs or "default" in rngs):
            self.rngs = nnx.Rngs(dropout=stream_key(rngs, "dropout"))

        def make_layer(index: Array, kind: Any) -> nnx.Module:
            return layer(config, kind, rngs=layer_rngs(rngs, index))

        axis, traced = config.param_scan_axis, isinstance(key, jax.core.Tracer)
        for group in config.plan.groups:
            (first, *_) = group.runs
            if first.name is None:
                module = make_run(group, first, make_layer, axis, traced)
            else:
                module = Block(group, make_layer, axis, traced)
            setattr(self, group.name, module)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Array | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Any = None,
        logits_at: Int[Array, "B N"] | None = None,
        deterministic: bool | None = None,
        output_hidden_states: bool = False,
        output_logits: bool = True,
        axis_rules: AxisRules | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> DecoderOutput:
        """Logits and what the layers say on the way.

        Args:
          tokens: token ids.
          positions: for rotary embedding; None counts in each row, from 0 or from
            where the cache is.
          segment_ids: 0 is padding, equal positive ids are one sequence; None: one
            sequence a row, with a cache the one that the row is in.
          cache: from `shared.init_cache` or an earlier call, to continue from. A row
            goes on with the sequence it was last in; another one needs an id that the
            row has not had. Too many tokens for it are an error; inside `jit` the row's
            logits are NaN.
          logits_at: places in each row whose logits are wanted, such as the last;
            None: all.
          deterministic: whether dropout is off; None: as set by `train()` and `eval()`.
          output_hidden_states: whether to return the residual stream after each layer.
          output_logits: False gives what the head makes logits of instead, for losses
            that never hold them all.
          axis_rules: where activations of this call stand on the mesh at hand; None: as
            the config has it.
          rngs: a `dropout` stream to use instead of the model's own.
        """
        config, tokens = self.config, jnp.asarray(tokens)
        if deterministic is None:
            deterministic = self.deterministic
        context = decoder.create_context(
            tokens,
            cache,
            config,
            positions=positions,
            segment_ids=segment_ids,
            dropout_key=self._dropout_key(deterministic, rngs),
            want_hidden=output_hidden_states,
            axis_rules=axis_rules,
        )
        weights = values(self, decoder.outer_specs(config))
        embedding = decoder.embed(weights, tokens, context, config)
        told = decoder.per_layer(weights, tokens, embedding, context, config)
        x, cache, aux = run_plan(self, config, embedding, context, cache, told)
        return decoder.output(
            weights,
            embedding,
            x,
            cache,
            aux,
            config,
            logits_at,
            output_logits=output_logits,
        )

    def logical_axes(self) -> dict[str, Any]:
        """The logical axis names of every parameter of the zoo's own layers."""
        return decoder.logical_axes(self.config)

    def _dropout_key(self, deterministic: bool, rngs: nnx.Rngs | None) -> Array | None:
        if deterministic or self.config.dropout_rate == 0.0:
            return None
        streams = getattr(self, "rngs", None) if rngs is None else rngs
        if streams is None:
            raise ValueError(
                f"dropout_rate={self.config.dropout_rate} and deterministic=False "
                "need a key: build or call the model with "
                "rngs=nnx.Rngs(dropout=seed)."
            )
        return streams.dropout()
