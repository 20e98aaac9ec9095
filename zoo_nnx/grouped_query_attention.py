"""Grouped-query attention, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.cache import BorrowedCache, KVCache
from shared.config import AttentionConfig
from shared.context import Context
from shared.layers import grouped_query_attention
from shared.layers.grouped_query_attention import HeadKeys, LentKeys
from zoo_nnx.parameters import declare, params_key, values


class GroupedQueryAttention(nnx.Module):
    """Causal attention with rotary positions, of all tokens or of a window.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> from shared.layers import grouped_query_attention
      >>> config = shared.preset("qwen3-next-tiny").attention
      >>> layer = zoo_nnx.GroupedQueryAttention(config, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> cache = grouped_query_attention.init_cache(config, 1, 0, x.dtype)
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
        specs = grouped_query_attention.param_specs(config)
        declare(self, specs, params_key(rngs), param_dtype)

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
            self._weights(), x, context, cache, config=self.config, keys=keys
        )

    def keys_of(self, x: Float[Array, "B T D"], context: Context) -> HeadKeys:
        """The keys and values of the given tokens."""
        return grouped_query_attention.project_keys(
            self._weights(), x, context, self.config
        )

    def _weights(self) -> dict[str, Array]:
        return values(self, grouped_query_attention.param_specs(self.config))
