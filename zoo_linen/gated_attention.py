"""Grouped-query attention with a gated output, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.cache import KVCache
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers import gated_attention
from zoo_linen.parameters import declare


class GatedAttention(nn.Module):
    """Causal attention with partial rotary embedding and a sigmoid output gate.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> from shared.layers import gated_attention
      >>> config = shared.preset("qwen3-next-tiny").attention
      >>> layer = zoo_linen.GatedAttention(config)
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> context = shared.Context.create((1, 3))
      >>> cache = gated_attention.init_cache(config, 1, 0, x.dtype)
      >>> (y, _), _ = layer.init_with_output(jax.random.key(0), x, context, cache)
      >>> y.shape == x.shape
      True

    Attributes:
      config: sizes.
      param_dtype: dtype of new parameters.
    """

    config: AttentionConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        specs = gated_attention.param_specs(self.config)
        self.weights = declare(self, specs, self.param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Attends to cached and given tokens; returns output and the longer cache."""
        return gated_attention.apply(
            self.weights, x, context, cache, config=self.config
        )
