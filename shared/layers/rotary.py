"""Rotary positions of a layer's heads, as its config has them."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from shared.config import RopeConfig
from shared.ops.rope import apply_rope


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], rope: RopeConfig
) -> Float[Array, "B T N H"]:
    """Turns every head by its position (`shared.ops.rope.apply_rope`)."""
    return apply_rope(x, positions, rotary_dim=rope.rotary_dim, theta=rope.theta)
