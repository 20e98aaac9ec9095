"""One decoder layer, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import decoder_layer
from shared.layers.decoder_layer import LayerAux
from shared.layers.sparse_moe import RouterAux
from zoo_linen.gated_attention import GatedAttention
from zoo_linen.gated_delta_net import GatedDeltaNet
from zoo_linen.mlp import MLP
from zoo_linen.parameters import declare
from zoo_linen.sparse_moe import SparseMoE


class DecoderLayer(nn.Module):
    """Norm, mixer, norm, feed-forward, each added to the residual stream.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> config = shared.preset("qwen3-next-tiny")
      >>> layer = zoo_linen.DecoderLayer(config, config.layers[0])
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> variables = layer.init(jax.random.key(0), x, shared.Context.create((1, 3)))
      >>> sorted(variables["params"])
      ['input_layernorm', 'linear_attn', 'mlp', 'post_attention_layernorm']

    Attributes:
      config: of the whole model.
      kind: of this layer.
    """

    config: DecoderConfig
    kind: LayerKind

    def setup(self):
        config, dtype = self.config, jnp.dtype(self.config.param_dtype)
        self.weights = declare(self, decoder_layer.norm_specs(config), dtype)
        mixer, feed_forward = decoder_layer.parts(config, self.kind)
        if self.kind.mixer == "linear_attention":
            self.linear_attn = GatedDeltaNet(mixer, dtype)
        else:
            self.self_attn = GatedAttention(mixer, dtype)
        dense = self.kind.feed_forward == "dense"
        self.mlp: Any = (MLP if dense else SparseMoE)(feed_forward, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
        """Returns the residual stream, the cache (None for None) and `LayerAux`."""
        return decoder_layer.apply(
            self.weights,
            x,
            context,
            cache,
            mixer=getattr(self, decoder_layer.mixer_name(self.kind)),
            feed_forward=self._feed_forward,
            config=self.config,
            kind=self.kind,
        )

    def _feed_forward(
        self, x: Array, context: Context
    ) -> tuple[Array, RouterAux | None]:
        if self.kind.feed_forward == "dense":
            return self.mlp(x), None
        return self.mlp(x, context)
