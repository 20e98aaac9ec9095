"""The routed experts of a mixture: gated feed-forward layers side by side.

n tokens, A experts a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array, Bool, Float

from shared.config import MoEConfig
from shared.ops.experts import expert_mlp
from shared.ops.routing import Routing
from shared.params import ParamSpec, normal


def param_specs(config: MoEConfig) -> dict[str, ParamSpec]:
    """Gate, up and down projection of every expert, experts first."""
    c, dense = config, normal(config.initializer_range)
    inward = (c.num_experts, c.hidden_size, c.expert_size)
    outward = (c.num_experts, c.expert_size, c.hidden_size)
    return {
        "gate_proj": ParamSpec(inward, ("expert", "embed", "mlp"), dense),
        "up_proj": ParamSpec(inward, ("expert", "embed", "mlp"), dense),
        "down_proj": ParamSpec(outward, ("expert", "mlp", "embed"), dense),
    }


def apply(
    weights: Mapping[str, Array],
    x: Float[Array, "n D"],
    routing: Routing,
    real: Bool[Array, " n"],
    *,
    config: MoEConfig,
) -> Float[Array, "n D"]:
    """The weighted sum of each token's experts; padding gets zeros, no work is done."""
    return expert_mlp(
        x,
        routing.experts,
        routing.weights,
        weights["gate_proj"].astype(x.dtype),
        weights["up_proj"].astype(x.dtype),
        weights["down_proj"].astype(x.dtype),
        real,
        activation=config.activation,
    )
