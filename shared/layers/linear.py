"""Linear projections of the last axis, in the dtype of the input."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from shared.ops.matmul import matmul
from shared.params import ParamSpec, constant


def project(
    x: Float[Array, "*B D"], weights: Mapping[str, Array], name: str
) -> Float[Array, "*B F"]:
    """X W (+ b): the weight `name` [D, F] and, where there is one, `name_bias` [F]."""
    y = matmul(x, weights[name].astype(x.dtype))
    bias = weights.get(f"{name}_bias")
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


def bias_spec(size: int, axis: str | None) -> ParamSpec:
    """A bias starts at zero."""
    return ParamSpec((size,), (axis,), constant(0.0))
