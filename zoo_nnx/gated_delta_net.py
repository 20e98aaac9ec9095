"""Linear attention with a gated delta rule, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.cache import GatedDeltaNetCache
from shared.config import GatedDeltaNetConfig
from shared.context import Context
from shared.layers import gated_delta_net
from zoo_nnx.parameters import declare, params_key, values


class GatedDeltaNet(nnx.Module):
    """Linear attention with a gated delta rule.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> from shared.layers import gated_delta_net
      >>> config = shared.preset("qwen3-next-tiny").delta_net
      >>> layer = zoo_nnx.GatedDeltaNet(config, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> cache = gated_delta_net.init_cache(config, 1, x.dtype)
      >>> y, cache = layer(x, shared.Context.create((1, 3)), cache)
      >>> y.shape == x.shape
      True
    """

    def __init__(
        self,
        config: GatedDeltaNetConfig,
        *,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.config = config
        specs = gated_delta_net.param_specs(config)
        declare(self, specs, params_key(rngs), param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: GatedDeltaNetCache
    ) -> tuple[Float[Array, "B T D"], GatedDeltaNetCache]:
        """Continues from `cache`; returns output and the cache after the last token."""
        weights = values(self, gated_delta_net.param_specs(self.config))
        return gated_delta_net.apply(weights, x, context, cache, config=self.config)
