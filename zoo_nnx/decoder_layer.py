"""One decoder layer, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.config import DecoderConfig, LayerKind
from shared.context import Context
from shared.layers import decoder_layer
from shared.layers.decoder_layer import LayerAux
from shared.layers.sparse_moe import RouterAux
from zoo_nnx.gated_attention import GatedAttention
from zoo_nnx.gated_delta_net import GatedDeltaNet
from zoo_nnx.mlp import MLP
from zoo_nnx.parameters import child_rngs, declare, params_key, values
from zoo_nnx.sparse_moe import SparseMoE


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
        declare(self, decoder_layer.norm_specs(config), key, dtype)

        mixer, feed_forward = decoder_layer.parts(config, kind)
        own = child_rngs(key, decoder_layer.mixer_name(kind))
        if kind.mixer == "linear_attention":
            self.linear_attn = GatedDeltaNet(mixer, param_dtype=dtype, rngs=own)
        else:
            self.self_attn = GatedAttention(mixer, param_dtype=dtype, rngs=own)
        make: Any = MLP if kind.feed_forward == "dense" else SparseMoE
        own = child_rngs(key, "mlp")
        self.mlp = make(feed_forward, param_dtype=dtype, rngs=own)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: Any = None
    ) -> tuple[Float[Array, "B T D"], Any, LayerAux]:
        """Returns the residual stream, the cache (None for None) and `LayerAux`."""
        return decoder_layer.apply(
            values(self, decoder_layer.norm_specs(self.config)),
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
