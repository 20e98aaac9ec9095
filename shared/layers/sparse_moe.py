"""A mixture of experts beside one shared expert behind a sigmoid gate.

B batch, T time, D model width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from shared.config import MoEConfig
from shared.context import Context
from shared.layers.linear import project
from shared.ops.routing import RouterStats, Routing, route, router_stats
from shared.params import ParamSpec, normal

Experts = Callable[[Array, Routing, Bool[Array, " n"]], Array]


class RouterAux(NamedTuple):
    """What the router of one layer did.

    Attributes:
      stats: sums for the load-balance loss.
      logits: [B, T, E], at least float32.
    """

    stats: RouterStats
    logits: Float[Array, "B T E"]


def param_specs(config: MoEConfig) -> dict[str, ParamSpec]:
    """The parameters besides those of the experts: router and shared expert's gate."""
    dense = normal(config.initializer_range)
    return {
        "gate": ParamSpec(
            (config.hidden_size, config.num_experts), ("embed", "expert"), dense
        ),
        "shared_expert_gate": ParamSpec(
            (config.hidden_size, 1), ("embed", None), dense
        ),
    }


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    *,
    experts: Experts,
    shared_expert: Callable[[Array], Array],
    config: MoEConfig,
) -> tuple[Float[Array, "B T D"], RouterAux]:
    """Routed experts plus sigmoid(gate x) times the shared expert.

    Args:
      weights: of `param_specs`.
      x: the normalised residual stream.
      context: padding takes no part in routing.
      experts: the routed experts (see `shared.layers.experts.apply`).
      shared_expert: the shared expert (see `shared.layers.mlp.apply`).
      config: the layer's config.
    """
    tokens = x.reshape(-1, x.shape[-1])
    real = context.segment_ids.reshape(-1) > 0
    wide = np.promote_types(x.dtype, np.float32)
    logits = project(tokens.astype(wide), weights, "gate")
    routing = route(
        logits, config.experts_per_token, normalize=config.normalize_weights
    )
    routed = experts(tokens, routing, real).reshape(x.shape)
    gate = jax.nn.sigmoid(project(x, weights, "shared_expert_gate"))
    shared = jnp.broadcast_to(gate, x.shape) * shared_expert(x)
    aux = RouterAux(
        router_stats(logits, config.experts_per_token, real),
        logits.reshape(*x.shape[:2], -1),
    )
    return routed + shared, aux
