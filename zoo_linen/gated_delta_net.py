"""Linear attention with a gated delta rule, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.cache import GatedDeltaNetCache
from shared.config import GatedDeltaNetConfig
from shared.context import Context
from shared.layers import gated_delta_net
from zoo_linen.parameters import declare


class GatedDeltaNet(nn.Module):
    """Linear attention with a gated delta rule.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> from shared.layers import gated_delta_net
      >>> config = shared.preset("qwen3-next-tiny").delta_net
      >>> layer = zoo_linen.GatedDeltaNet(config)
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> context = shared.Context.create((1, 3))
      >>> cache = gated_delta_net.init_cache(config, 1, x.dtype)
      >>> (y, _), _ = layer.init_with_output(jax.random.key(0), x, context, cache)
      >>> y.shape == x.shape
      True

    Attributes:
      config: sizes.
      param_dtype: dtype of new parameters; A_log and dt_bias stay at least float32.
    """

    config: GatedDeltaNetConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        specs = gated_delta_net.param_specs(self.config)
        self.weights = declare(self, specs, self.param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: GatedDeltaNetCache
    ) -> tuple[Float[Array, "B T D"], GatedDeltaNetCache]:
        """Continues from `cache`; returns output and the cache after the last token."""
        return gated_delta_net.apply(
            self.weights, x, context, cache, config=self.config
        )
