"""The gated feed-forward layer, as an NNX module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.config import MLPConfig
from shared.layers import mlp
from zoo_nnx.parameters import declare, params_key, values


class MLP(nnx.Module):
    """down(activation(gate x) * up x).

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> config = shared.MLPConfig(hidden_size=8, intermediate_size=16)
      >>> layer = zoo_nnx.MLP(config, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 3, 8))).shape
      (1, 3, 8)
    """

    def __init__(
        self, config: MLPConfig, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        self.config = config
        declare(self, mlp.param_specs(config), params_key(rngs), param_dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the layer to each token."""
        weights = values(self, mlp.param_specs(self.config))
        return mlp.apply(weights, x, config=self.config)
