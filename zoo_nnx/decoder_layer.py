"""One decoder layer, as an NNX module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
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
from zoo_nnx.gated_delta_net import GatedDeltaNet
from zoo_nnx.grouped_query_attention import GroupedQueryAttention
from zoo_nnx.latent_attention import LatentAttention
from zoo_nnx.mlp import MLP
from zoo_nnx.parameters import child_rngs, declare, params_key, values
from zoo_nnx.sparse_moe import SparseMoE

# The module that goes with a part of the config.
MODULES: dict[type, Callable[..., nnx.Module]] = {
    AttentionConfig: GroupedQueryAttention,
    LatentAttentionConfig: LatentAttention,
    GatedDeltaNetConfig: GatedDeltaNet,
    MLPConfig: MLP,
    MoEConfig: SparseMoE,
}


class DecoderLayer(nnx.Module):
    """Norm, mixer, norm, feed-forward, each added to the residual stream.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> config = shared.preset("qwen3-next-tiny")
      >>> layer = zoo_nnx.DecoderLayer(config, config.layers[0], rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> y, cache, aux = layer(x, shared.Context.create((1, 3)))
      >>> y.shape == x.shape, cache
      (True, None)
    """

    def __init__(self, config: DecoderConfig, kind: LayerKind, *, rngs: nnx.Rngs):
        self.config, self.kind = config, kind
        key, dtype = params_key(rngs), jnp.dtype(config.param_dtype)
        declare(self, decoder_layer.own_specs(config, kind), key, dtype)
        for name, part in decoder_layer.modules(config, kind).items():
            own = child_rngs(key, name)
            setattr(self, name, MODULES[type(part)](part, param_dtype=dtype, rngs=own))

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
        """Returns the residual stream, the cache (None for None) and `LayerAux`."""
        return decoder_layer.apply(
            values(self, decoder_layer.own_specs(self.config, self.kind)),
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
