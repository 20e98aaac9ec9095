"""A mixture of experts, with or without a shared expert, as NNX modules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from shared.config import MoEConfig
from shared.context import Context
from shared.layers import experts, sparse_moe
from shared.layers.sparse_moe import RouterAux
from shared.ops.routing import Routing
from zoo_nnx.mlp import MLP
from zoo_nnx.parameters import child_rngs, declare, params_key, values


class Experts(nnx.Module):
    """The routed experts, side by side."""

    def __init__(
        self, config: MoEConfig, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        self.config = config
        declare(self, experts.param_specs(config), params_key(rngs), param_dtype)

    def __call__(
        self, x: Float[Array, "B T D"], routing: Routing, context: Context
    ) -> Float[Array, "B T D"]:
        """The weighted sum of each token's experts."""
        weights = values(self, experts.param_specs(self.config))
        return experts.apply(weights, x, routing, context, config=self.config)


class SparseMoE(nnx.Module):
    """Routed experts, and a shared expert where the config has one.

    Example usage::

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> config = shared.preset("qwen3-next-tiny").moe
      >>> layer = zoo_nnx.SparseMoE(config, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 3, config.hidden_size))
      >>> y, aux = layer(x, shared.Context.create((1, 3)))
      >>> aux.logits.shape[-1] == config.num_experts
      True
    """

    def __init__(
        self, config: MoEConfig, *, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        self.config = config
        key = params_key(rngs)
        declare(self, sparse_moe.param_specs(config), key, param_dtype)
        self.experts = Experts(
            config, param_dtype=param_dtype, rngs=child_rngs(key, "experts")
        )
        own, shared = child_rngs(key, "shared_expert"), config.shared_expert
        self.shared_expert = (
            None if shared is None else MLP(shared, param_dtype=param_dtype, rngs=own)
        )

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
            values(self, sparse_moe.param_specs(self.config)),
            x,
            context,
            router_input=router_input,
            experts=self.experts,
            shared_expert=self.shared_expert,
            config=self.config,
        )
