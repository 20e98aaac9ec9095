"""The gated feed-forward layer.

B batch, T time, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Array, Float

from shared.config import MLPConfig
from shared.layers.linear import project
from shared.ops.activation import activate
from shared.params import ParamSpec, normal


def param_specs(config: MLPConfig) -> dict[str, ParamSpec]:
    """Gate, up and down projection."""
    dense = normal(config.initializer_range)
    inward = (config.hidden_size, config.intermediate_size)
    return {
        "gate_proj": ParamSpec(inward, ("embed", "mlp"), dense),
        "up_proj": ParamSpec(inward, ("embed", "mlp"), dense),
        "down_proj": ParamSpec(inward[::-1], ("mlp", "embed"), dense),
    }


def apply(
    weights: Mapping[str, Array], x: Float[Array, "B T D"], *, config: MLPConfig
) -> Float[Array, "B T D"]:
    """down(activation(gate x) * up x)."""
    gate = activate(project(x, weights, "gate_proj"), config.activation)
    return project(gate * project(x, weights, "up_proj"), weights, "down_proj")
