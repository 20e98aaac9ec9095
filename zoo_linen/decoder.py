"""The decoder, as a Linen module: the layers of the plan by `nn.scan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Int

from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import decoder
from shared.layers.decoder import DecoderOutput
from shared.params import layer_key
from shared.plan import Group, LayerPlan, node_at, run_path
from shared.sharding import AxisRules
from zoo_linen.decoder_layer import DecoderLayer
from zoo_linen.parameters import declare, stream_key
from zoo_linen.stack import Block, Carry, run_group, run_layers


class Decoder(nn.Module):
    """A hybrid decoder: embedding, layers in the order of their plan, head.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> config = shared.preset("qwen3-next-tiny")
      >>> model = zoo_linen.Decoder(config)
      >>> tokens = jnp.array([[1, 2, 3]])
      >>> variables = model.init(jax.random.key(0), tokens)
      >>> model.apply(variables, tokens).logits.shape == (1, 3, config.vocab_size)
      True

    Attributes:
      config: of the model.
      layer: class of the layers, called as `layer(config, kind)`. A class of your own
        takes (x, context, cache) and gives (x, cache, aux) as `DecoderLayer` does; its
        parameters and other variables are stacked and scanned like ours.
    """

    config: DecoderConfig
    layer: type[nn.Module] = DecoderLayer

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Array | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        cache: Any = None,
        logits_at: Int[Array, "B N"] | None = None,
        deterministic: bool = True,
        output_hidden_states: bool = False,
        output_logits: bool = True,
        axis_rules: AxisRules | None = None,
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
          deterministic: False draws dropout from the `dropout` stream.
          output_hidden_states: whether to return the residual stream after each layer.
          output_logits: False gives what the head makes logits of instead, for losses
            that never hold them all.
          axis_rules: where activations of this call stand on the mesh at hand; None: as
            the config has it.
        """
        config, tokens = self.config, jnp.asarray(tokens)
        context = decoder.create_context(
            tokens,
            cache,
            config,
            positions=positions,
            segment_ids=segment_ids,
            dropout_key=self._dropout_key(deterministic),
            want_hidden=output_hidden_states,
            axis_rules=axis_rules,
        )
        if self.is_initializing() and not self.has_variable("params", "norm"):
            self._place_first_values(tokens, context)
        weights = declare(self, decoder.outer_specs(config), config.param_dtype)
        x = embedding = decoder.embed(weights, tokens, context, config)

        told = decoder.per_layer(weights, tokens, embedding, context, config)
        lent = decoder.init_lent(config, x)
        new_cache: dict[str, Any] = {}
        aux: dict[str, Any] = {}
        for group in config.plan.groups:
            own = None if cache is None else cache[group.name]
            after = None if cache is None else new_cache
            lending = decoder.lend(config, group, context, lent, cache, after)
            carry, aux[group.name] = self._run(
                group, (x, own, lent), lending, told[group.name]
            )
            x, new_cache[group.name], lent = carry
        held = None if cache is None else new_cache
        return decoder.output(
            weights,
            embedding,
            x,
            held,
            aux,
            config,
            logits_at,
            output_logits=output_logits,
        )

    def logical_axes(self) -> dict[str, Any]:
        """The logical axis names of every parameter of the zoo's own layers."""
        return decoder.logical_axes(self.config)

    def _run(
        self, group: Group, carry: Carry, context: Context, told: Any
    ) -> tuple[Carry, Any]:
        """One group of the plan; caches and aux are by run."""
        (first, *_) = group.runs
        if first.name is None:
            layer = self.layer(self.config, first.kind, name=group.name)
            return run_layers(layer, group, first, carry, context, told, self.config)
        block = Block(self.config, group, self.layer, name=group.name)
        return run_group(block, group, carry, context, told)

    def _dropout_key(self, deterministic: bool) -> Array | None:
        if deterministic or self.config.dropout_rate == 0.0:
            return None
        if not self.has_rng("dropout"):
            raise ValueError(
                f"dropout_rate={self.config.dropout_rate} and deterministic=False "
                "need a key: pass rngs={'dropout': key}."
            )
        # The first key that an NNX stream seeded with the same key gives.
        return jax.random.fold_in(stream_key(self, "dropout"), jnp.uint32(0))

    def _place_first_values(self, tokens: Array, context: Context) -> None:
        """Puts every variable in place before the layers are called.

        Linen's own keys depend on how layers are lifted; ours do not. Done here, and
        not in an overridden `init`, it also holds for `init_with_output`, `tabulate`,
        `eval_shape` and a decoder nested in another module.
        """
        key = stream_key(self, "params")
        if self.layer is DecoderLayer:
            values = decoder.init_params(key, self.config)
            collections: Mapping[str, Any] = {"params": values}
        else:
            collections = self._init_own_layers(key, tokens, context)
        for collection, values in collections.items():
            for name, value in values.items():
                self.put_variable(collection, name, value)

    def _init_own_layers(
        self, key: Array, tokens: Array, context: Context
    ) -> dict[str, dict[str, Any]]:
        """Variables of a user's own layers, by collection, in the plan's layout."""
        x = jnp.zeros((*tokens.shape, self.config.hidden_size), self.config.dtype)

        def init_layer(index: Array, kind: LayerKind) -> Any:
            layer = self.layer(self.config, kind, parent=None)
            own = layer_key(key, index)
            rngs = {"params": own, "dropout": own}
            return layer.init(rngs, x, context.at_layer(index), None)

        plan, traced = self.config.plan, isinstance(key, jax.core.Tracer)
        abstract = jax.eval_shape(lambda: plan.build(init_layer))
        collections: dict[str, dict[str, Any]] = {
            "params": decoder.init_outer(key, self.config)
        }
        for name in _collections(abstract, plan):

            def init_collection(index: Array, kind: LayerKind, name: str = name) -> Any:
                return init_layer(index, kind).get(name, {})

            axis = self.config.param_scan_axis if name == "params" else 0
            layers = plan.build(init_collection, axis, traced=traced)
            collections[name] = {**collections.get(name, {}), **layers}
        return collections


def _collections(variables: Mapping[str, Any], plan: LayerPlan) -> set[str]:
    """The collections that any layer has, from variables in the layout of `plan`."""
    return {
        name
        for group, run in plan.runs()
        for name in node_at(variables, run_path(group, run))
    }
