"""Linear projections of the last axis, in the dtype of the input.

Beside a weight W, `name`, there may be a low-rank adapter (arXiv:2106.09685): A [D, R],
`name_lora_a`, B [R, F], `name_lora_b`, and s [1], `name_lora_scale`. Together they are
the weight W + s A B.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from shared.ops.cast import cast_weight
from shared.ops.matmul import matmul
from shared.params import ParamSpec, constant

ADAPTER = ("lora_a", "lora_b", "lora_scale")


def project(
    x: Float[Array, "*B D"], weights: Mapping[str, Array], name: str
) -> Float[Array, "*B F"]:
    """X (W + s A B) (+ b): the weight `name` [D, F], its adapter, `name_bias` [F]."""
    y = matmul(x, cast_weight(weights[name], x.dtype))
    if has_adapter(weights, name):
        a, b, scale = _adapter(weights, name)
        narrow = matmul(x, cast_weight(a, x.dtype))
        narrow = narrow * jnp.broadcast_to(scale.astype(x.dtype), narrow.shape)
        y = y + matmul(narrow, cast_weight(b, x.dtype))
    bias = weights.get(f"{name}_bias")
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


def adapted(weights: Mapping[str, Array], name: str) -> Float[Array, "*E D F"]:
    """W + s A B, in the dtype of W; W itself where it has no adapter."""
    weight = weights[name]
    if not has_adapter(weights, name):
        return weight
    a, b, scale = _adapter(weights, name)
    wide = np.promote_types(weight.dtype, np.float32)
    a, b = a.astype(wide) * scale.astype(wide).reshape((1,) * a.ndim), b.astype(wide)
    change = jnp.einsum("...dr,...rf->...df", a, b)
    return (weight.astype(wide) + change).astype(weight.dtype)


def has_adapter(weights: Mapping[str, Array], name: str) -> bool:
    """Whether a weight has an adapter that is to be added here.

    The scale decides: Qwix's adapters have the same names but no scale, and Qwix adds
    them to the projection itself.
    """
    return f"{name}_lora_scale" in weights


def _adapter(weights: Mapping[str, Array], name: str) -> tuple[Array, Array, Array]:
    a, b, scale = (weights[f"{name}_{part}"] for part in ADAPTER)
    return a, b, jax.lax.stop_gradient(scale)


def bias_spec(size: int, axis: str | None) -> ParamSpec:
    """A bias starts at zero."""
    return ParamSpec((size,), (axis,), constant(0.0))
