"""Attention to a compressed latent of each token, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.cache import KVCache
from shared.config import LatentAttentionConfig
from shared.context import Context
from shared.layers import latent_attention
from zoo_nnx.parameters import declare, params_key, values


class LatentAttention(nnx.Module):
    """Causal attention whose keys and values are made of a latent, the one thing kept.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared
      >>> from shared.layers import latent_attention
      >>> from zoo_nnx.latent_attention import LatentAttention
      >>> config = shared.LatentAttentionConfig(
      ...     hidden_size=16,
      ...     num_heads=2,
      ...     q_lora_rank=8,
      ...     kv_lora_rank=6,
      ...     nope_head_dim=4,
      ...     value_head_dim=5,
      ...     rope=shared.RopeConfig(theta=1e4, rotary_dim=2, interleaved=True),
      ... )
      >>> layer = LatentAttention(config, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, 16))
      >>> cache = latent_attention.init_cache(config, 1, 10, x.dtype)
      >>> y, cache = layer(x, shared.Context.create((1, 3)), cache)
      >>> y.shape, cache.keys.shape
      ((1, 3, 16), (1, 10, 1, 8))
    """

    def __init__(
        self,
        config: LatentAttentionConfig,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        specs = latent_attention.param_specs(config)
        declare(self, specs, params_key(rngs), param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Attends to cached and given tokens; returns output and the longer cache."""
        weights = values(self, latent_attention.param_specs(self.config))
        return latent_attention.apply(weights, x, context, cache, config=self.config)
