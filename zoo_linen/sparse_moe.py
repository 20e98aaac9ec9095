"""A mixture of experts, with or without a shared expert, as Linen modules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from shared.config import MoEConfig
from shared.context import Context
from shared.layers import experts, sparse_moe
from shared.layers.sparse_moe import RouterAux
from shared.ops.routing import Routing
from zoo_linen.mlp import MLP
from zoo_linen.parameters import declare


class Experts(nn.Module):
    """The routed experts, side by side.

    Attributes:
      config: sizes.
      param_dtype: dtype of new parameters.
    """

    config: MoEConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        self.weights = declare(self, experts.param_specs(self.config), self.param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, context: Context
    ) -> Float[Array, "B T D"]:
        """The weighted sum of each token's experts."""
        return experts.apply(self.weights, x, routing, context, config=self.config)


class SparseMoE(nn.Module):
    """Routed experts, and a shared expert where the config has one.

    Example usage::

      >>> import jax, jax.numpy as jnp
      >>> import shared, zoo_linen
      >>> config = shared.preset("qwen3-next-tiny").moe
      >>> layer = zoo_linen.SparseMoE(config)
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> context = shared.Context.create((1, 3))
      >>> (y, aux), _ = layer.init_with_output(jax.random.key(0), x, context)
      >>> aux.logits.shape[-1] == config.num_experts
      True

    Attributes:
      config: sizes.
      param_dtype: dtype of new parameters.
    """

    config: MoEConfig
    param_dtype: Any = jnp.float32

    def setup(self):
        specs = sparse_moe.param_specs(self.config)
        self.weights = declare(self, specs, self.param_dtype)
        self.experts = Experts(self.config, self.param_dtype)
        shared, dtype = self.config.shared_expert, self.param_dtype
        self.shared_expert = None if shared is None else MLP(shared, dtype)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        router_input: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], RouterAux]:
        """Routes each real token; returns output and what the router did.

        The router sees `router_input`; None: `x`.
        """
        return sparse_moe.apply(
            self.weights,
            x,
            context,
            router_input=router_input,
            experts=self.experts,
            shared_expert=self.shared_expert,
            config=self.config,
        )
