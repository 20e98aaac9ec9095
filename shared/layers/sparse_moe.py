"""A mixture of experts, and beside it an expert that all tokens go to.

B batch, T time, D model width, E experts, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from shared.config import MoEConfig
from shared.context import Context
from shared.layers.linear import project
from shared.ops.norm import rms_norm
from shared.ops.routing import RouterStats, Routing, route, router_stats
from shared.params import ParamSpec, constant, normal

Experts = Callable[[Array, Routing, Context], Array]


class RouterAux(NamedTuple):
    """What the router of one layer did.

    Attributes:
      stats: sums for the load-balance loss.
      logits: [B, T, E], at least float32.
    """

    stats: RouterStats
    logits: Float[Array, "B T E"]


def param_specs(config: MoEConfig) -> dict[str, ParamSpec]:
    """The parameters besides those of the experts; each only where it is used.

    The router `gate`, the gate of the shared expert, and what the options ask for.
    """
    c, dense = config, normal(config.initializer_range)
    width, experts = c.hidden_size, c.num_experts
    specs = {"gate": ParamSpec((width, experts), ("embed", "expert"), dense)}
    if c.shared_expert is not None and c.shared_expert_gated:
        specs["shared_expert_gate"] = ParamSpec((width, 1), ("embed", None), dense)
    if c.correction_bias:
        specs["e_score_correction_bias"] = ParamSpec(
            (experts,), ("expert",), constant(0.0), at_least_float32=True
        )
    if c.norm_router_input:
        specs["router_scale"] = ParamSpec((width,), ("embed",), constant(1.0))
    if c.per_expert_scale:
        specs["per_expert_scale"] = ParamSpec((experts,), ("expert",), constant(1.0))
    return specs


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "B T D"],
    context: Context,
    *,
    router_input: Float[Array, "B T D"] | None = None,
    experts: Experts,
    shared_expert: Callable[[Array], Array] | None,
    config: MoEConfig,
) -> tuple[Float[Array, "B T D"], RouterAux]:
    """Routed experts plus the shared expert, times sigmoid(gate x) if it is gated.

    Args:
      weights: of `param_specs`.
      x: the normalised residual stream.
      context: padding takes no part in routing.
      router_input: what the router sees instead of `x`; None: `x`.
      experts: the routed experts (see `shared.layers.experts.apply`).
      shared_expert: the shared expert (see `shared.layers.mlp.apply`); None: there is
        none.
      config: the layer's config.
    """
    tokens = x.reshape(-1, x.shape[-1])
    real = context.segment_ids.reshape(-1) > 0
    seen = tokens if router_input is None else router_input.reshape(tokens.shape)
    logits = _router_logits(weights, seen, config)
    routing = route(
        logits,
        config.experts_per_token,
        normalize=config.normalize_weights,
        scores=config.scores,
        correction_bias=weights.get("e_score_correction_bias"),
        num_groups=config.num_groups,
        groups_per_token=config.groups_per_token,
        scaling_factor=config.scaling_factor,
        per_expert_scale=weights.get("per_expert_scale"),
    )
    y = experts(x, routing, context)
    if shared_expert is not None:
        y = y + _shared(weights, x, shared_expert)
    aux = RouterAux(
        router_stats(logits, routing.experts, real, scores=config.scores),
        logits.reshape(*x.shape[:2], -1),
    )
    return y, aux


def _router_logits(
    weights: Mapping[str, Array], x: Float[Array, "n D"], config: MoEConfig
) -> Float[Array, "n E"]:
    """In at least float32, from the norm on."""
    x = x.astype(np.promote_types(x.dtype, np.float32))
    if config.norm_router_input:
        x = rms_norm(x, weights["router_scale"], config.router_norm_eps)
        x = x * config.hidden_size**-0.5
    return project(x, weights, "gate")


def _shared(
    weights: Mapping[str, Array], x: Array, expert: Callable[[Array], Array]
) -> Array:
    if "shared_expert_gate" not in weights:
        return expert(x)
    gate = jax.nn.sigmoid(project(x, weights, "shared_expert_gate"))
    return jnp.broadcast_to(gate, x.shape) * expert(x)
