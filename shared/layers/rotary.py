"""Rotary positions as a `RopeConfig` describes them.

B batch, T time, N heads, H head width, p pairs of components.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from shared.config import LinearScaling, RopeConfig, YarnScaling
from shared.ops.rope import apply_rope, yarn_multipliers


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "*axes B T"], rope: RopeConfig
) -> Float[Array, "B T N H"]:
    """Turns the first `rope.rotary_dim` components of every head by its position.

    Args:
      x: queries or keys.
      positions: of the tokens; or [3, B, T] where `rope` has sections: time, height
        and width.
      rope: which components turn, and how fast.

    Raises:
      ValueError: three axes of positions, but no sections to follow them.
    """
    if positions.ndim == 3 and rope.sections is None:
        raise ValueError(
            f"positions of shape {positions.shape} have axes, but the rotary config "
            "has sections=None: give [B, T], or a model with sections."
        )
    return apply_rope(
        x,
        positions,
        rotary_dim=rope.rotary_dim,
        theta=rope.theta,
        multipliers=_multipliers(rope),
        axes=_axes(rope),
        interleaved=rope.interleaved,
        magnitude=_magnitude(rope),
    )


def _multipliers(rope: RopeConfig) -> Float[np.ndarray, " p"] | None:
    """Of the frequencies; None: they are as they are."""
    scaling, pairs = rope.scaling, rope.rotary_dim // 2
    if scaling is None and rope.turning_pairs is None:
        return None
    multipliers = np.ones(pairs)
    if isinstance(scaling, LinearScaling):
        multipliers /= scaling.factor
    elif isinstance(scaling, YarnScaling):
        multipliers = yarn_multipliers(
            rope.rotary_dim,
            rope.theta,
            factor=scaling.factor,
            original_length=scaling.original_length,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
    if rope.turning_pairs is not None:
        multipliers[rope.turning_pairs :] = 0
    return multipliers


def _axes(rope: RopeConfig) -> tuple[int, ...] | None:
    """The axis of positions that each pair follows: in turn, as far as sections go."""
    sections = rope.sections
    if sections is None:
        return None
    pairs = range(rope.rotary_dim // 2)
    return tuple(j % 3 if j < 3 * sections[j % 3] else 0 for j in pairs)


def _magnitude(rope: RopeConfig) -> float:
    if not isinstance(rope.scaling, YarnScaling):
        return 1.0
    scaling = rope.scaling
    return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)
