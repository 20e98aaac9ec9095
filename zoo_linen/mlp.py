"""The gated feed-forward layer, as a Linen module."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.config import MLPConfig
from shared.layers import mlp
from zoo_linen.parameters import declare


class MLP(nn.Module):
    """down(activation(gate x) * up x).

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> layer = zoo_linen.MLP(shared.MLPConfig(hidden_size=8, intermediate_size=16))
      >>> variables = layer.init(jax.random.key(0), jnp.ones((1, 3, 8)))
      >>> sorted(variables["params"])
      ['down_proj', 'gate_proj', 'up_proj']

    Attributes:
      config: sizes and activation.
      param_dtype: dtype of new parameters.
    """

    config: MLPConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        self.weights = declare(self, mlp.param_specs(self.config), self.param_dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the layer to each token."""
        return mlp.apply(self.weights, x, config=self.config)
