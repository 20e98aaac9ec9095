"""The routed experts of a mixture: gated feed-forward layers side by side.

B batch, T time, A experts a token, E experts, D model width, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jaxtyping import Array, Float

from shared import sharding
from shared.config import MoEConfig
from shared.context import Context
from shared.layers.linear import adapted
from shared.layers.sharded_experts import sharded_expert_mlp
from shared.ops.cast import cast_weight
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
    x: Float[Array, "B T D"],
    routing: Routing,
    context: Context,
    *,
    config: MoEConfig,
) -> Float[Array, "B T D"]:
    """The weighted sum of each token's experts; padding gets zeros, no work is done.

    Args:
      weights: of `param_specs`.
      x: the normalised residual stream.
      routing: of the tokens in order, [B T, A].
      context: says what is padding, and where the arrays stand on a mesh.
      config: of the layer.
    """
    names = "gate_proj", "up_proj", "down_proj"
    gate, up, down = (adapted(weights, name) for name in names)
    real = context.segment_ids > 0
    spec = context.activation_spec(x, "batch", "length", "embed")
    if spec is not None:
        specs, rules = param_specs(config), context.axis_rules
        shape = *x.shape[:2], routing.experts.shape[1]
        return sharded_expert_mlp(
            x,
            routing.experts.reshape(shape),
            routing.weights.reshape(shape),
            real,
            (gate, up, down),
            tokens_at=spec,
            inward_at=sharding.partition_spec_here(specs["gate_proj"].axes, rules),
            outward_at=sharding.partition_spec_here(specs["down_proj"].axes, rules),
            chunks=context.expert_chunks,
            activation=config.activation,
            kernel=context.expert_kernel,
        )
    gate, up, down = (cast_weight(matrix, x.dtype) for matrix in (gate, up, down))
    y = expert_mlp(
        x.reshape(-1, x.shape[-1]),
        routing.experts,
        routing.weights,
        gate,
        up,
        down,
        real.reshape(-1),
        activation=config.activation,
        kernel=_kernel_here(context),
    )
    return y.reshape(x.shape)


def _kernel_here(context: Context) -> str:
    """Not one that the compiler would have to divide, on a mesh without rules."""
    mesh = jax.sharding.get_abstract_mesh()
    alone = mesh.empty or mesh.size == 1
    return context.expert_kernel if alone else "reference"
