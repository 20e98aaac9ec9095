"""Attention to a compressed latent of each token, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.cache import KVCache
from shared.config import LatentAttentionConfig
from shared.context import Context
from shared.layers import latent_attention
from zoo_linen.parameters import declare


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are made of a latent, the one thing kept.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared
      >>> from shared.layers import latent_attention
      >>> from zoo_linen.latent_attention import LatentAttention
      >>> config = shared.LatentAttentionConfig(
      ...     hidden_size=16,
      ...     num_heads=2,
      ...     q_lora_rank=8,
      ...     kv_lora_rank=6,
      ...     nope_head_dim=4,
      ...     value_head_dim=5,
      ...     rope=shared.RopeConfig(theta=1e4, rotary_dim=2, interleaved=True),
      ... )
      >>> layer = LatentAttention(config)
      >>> x = jnp.ones((1, 3, 16))
      >>> context = shared.Context.create((1, 3))
      >>> cache = latent_attention.init_cache(config, 1, 10, x.dtype)
      >>> (y, cache), _ = layer.init_with_output(jax.random.key(0), x, context, cache)
      >>> y.shape, cache.keys.shape
      ((1, 3, 16), (1, 10, 1, 8))

    Attributes:
      config: sizes.
      param_dtype: dtype of new parameters.
    """

    config: LatentAttentionConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        specs = latent_attention.param_specs(self.config)
        self.weights = declare(self, specs, self.param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Attends to cached and given tokens; returns output and the longer cache."""
        return latent_attention.apply(
            self.weights, x, context, cache, config=self.config
        )
