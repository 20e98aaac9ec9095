"""Grouped-query attention, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.cache import BorrowedCache, KVCache
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers import grouped_query_attention
from shared.layers.grouped_query_attention import HeadKeys, LentKeys
from zoo_linen.parameters import declare


class GroupedQueryAttention(nn.Module):
    """Causal attention with rotary positions, of all tokens or of a window.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> from shared.layers import grouped_query_attention
      >>> config = shared.preset("qwen3-next-tiny").attention
      >>> layer = zoo_linen.GroupedQueryAttention(config)
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> context = shared.Context.create((1, 3))
      >>> cache = grouped_query_attention.init_cache(config, 1, 0, x.dtype)
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
        specs = grouped_query_attention.param_specs(self.config)
        self.weights = declare(self, specs, self.param_dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: KVCache | BorrowedCache,
        keys: HeadKeys | LentKeys | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | BorrowedCache]:
        """Attends to cached and given tokens; returns output and the longer cache.

        Args:
          x: the normalised residual stream.
          context: positions and segments.
          cache: of the layer.
          keys: from `keys_of`, or None; `LentKeys` where the layer borrows them.
        """
        return grouped_query_attention.apply(
            self.weights, x, context, cache, config=self.config, keys=keys
        )

    def keys_of(self, x: Float[Array, "B T D"], context: Context) -> HeadKeys:
        """The keys and values of the given tokens."""
        return grouped_query_attention.project_keys(
            self.weights, x, context, self.config
        )
