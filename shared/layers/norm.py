"""The norm of a model: its weight, and how it is applied.

D the normalised width.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from shared.ops.norm import rms_norm, zero_centered_rms_norm
from shared.params import ParamSpec, constant


def norm_spec(width: int, axis: str | None, *, zero_centered: bool) -> ParamSpec:
    """The weight of a norm, which does nothing at first."""
    return ParamSpec((width,), (axis,), constant(0.0 if zero_centered else 1.0))


def normalize(
    x: Float[Array, "*S D"],
    weight: Float[Array, " D"],
    eps: float,
    *,
    zero_centered: bool,
) -> Float[Array, "*S D"]:
    """`x` at unit root mean square, times 1 + w or times w."""
    norm = zero_centered_rms_norm if zero_centered else rms_norm
    return norm(x, weight, eps)
