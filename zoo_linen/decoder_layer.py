"""One decoder layer, as a Linen module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

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
from shared.layers import decoder_layer
from shared.layers.decoder_layer import LayerAux
from zoo_linen.gated_delta_net import GatedDeltaNet
from zoo_linen.grouped_query_attention import GroupedQueryAttention
from zoo_linen.latent_attention import LatentAttention
from zoo_linen.mlp import MLP
from zoo_linen.parameters import declare
from zoo_linen.sparse_moe import SparseMoE

# The module that goes with a part of the config.
MODULES: dict[type, Callable[..., nn.Module]] = {
    AttentionConfig: GroupedQueryAttention,
    LatentAttentionConfig: LatentAttention,
    GatedDeltaNetConfig: GatedDeltaNet,
    MLPConfig: MLP,
    MoEConfig: SparseMoE,
}


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
        own = decoder_layer.own_specs(config, self.kind)
        self.weights = declare(self, own, dtype)
        for name, part in decoder_layer.modules(config, self.kind).items():
            setattr(self, name, MODULES[type(part)](part, dtype))

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
        """Returns the residual stream, the cache (None for None) and `LayerAux`."""
        return decoder_layer.apply(
            self.weights,
            x,
            context,
            cache,
            modules={
                name: getattr(self, name)
                for name in decoder_layer.modules(self.config, self.kind)
            },
            config=self.config,
            kind=self.kind,
        )
