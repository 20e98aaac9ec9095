"""Grouped-query attention with a gated output, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.cache import KVCache
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers import gated_attention
from zoo_nnx.parameters import declare, params_key, values


class GatedAttention(nnx.Module):
    """Causal attention with partial rotary embedding and a sigmoid output gate.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> from shared.layers import gated_attention
      >>> config = shared.preset("qwen3-next-tiny").attention
      >>> layer = zoo_nnx.GatedAttention(config, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> cache = gated_attention.init_cache(config, 1, 0, x.dtype)
      >>> y, cache = layer(x, shared.Context.create((1, 3)), cache)
      >>> y.shape == x.shape
      True
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        specs = gated_attention.param_specs(config)
        declare(self, specs, params_key(rngs), param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Attends to cached and given tokens; returns output and the longer cache."""
        weights = values(self, gated_attention.param_specs(self.config))
        return gated_attention.apply(weights, x, context, cache, config=self.config)
