"""Rotary position embedding: over part of a head, in any form of pairs and positions.

Letters: B batch, T time, N heads, H head width, R the rotary width (`rotary_dim`,
even), p its R / 2 pairs of components.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int


def rotary_frequencies(
    rotary_dim: int,
    theta: float,
    dtype: DTypeLike = jnp.float32,
    multipliers: Float[np.ndarray, " p"] | None = None,
) -> Float[Array, " {rotary_dim//2}"]:
    """The angle each pair of components turns by from one position to the next.

    `theta ** (-2 j / R)` for `j = 0 .. R/2 - 1`, times `multipliers` where given. The
    exponent counts the rotary width, not the width of the head. Computed in float64 and
    rounded once.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies = theta**-exponent
    if multipliers is not None:
        frequencies = frequencies * multipliers
    return jnp.asarray(frequencies, dtype=dtype)


def yarn_multipliers(
    rotary_dim: int,
    theta: float,
    *,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
) -> Float[np.ndarray, " {rotary_dim//2}"]:
    """What YaRN multiplies the frequency of each pair by: 1 to `1 / factor`.

    Pairs that turn more than `beta_fast` times in `original_length` tokens keep their
    frequency, those that turn less than `beta_slow` times have it divided by `factor`;
    between them it goes linearly with the number of the pair (Peng et al.,
    arXiv:2309.00071; the ends are rounded outwards, as in DeepSeek and transformers).
    """

    def pair_that_turns(times: float) -> float:
        length = original_length / (2 * math.pi * times)
        return rotary_dim * math.log(length) / (2 * math.log(theta))

    low = float(max(math.floor(pair_that_turns(beta_fast)), 0))
    high = float(min(math.ceil(pair_that_turns(beta_slow)), rotary_dim - 1))
    if low == high:
        high += 0.001  # a step; the published formula
    pair = np.arange(rotary_dim // 2, dtype=np.float64)
    slow = np.clip((pair - low) / (high - low), 0, 1)
    return 1 - slow + slow / factor


def apply_rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "*axes B T"],
    *,
    rotary_dim: int,
    theta: float,
    multipliers: Float[np.ndarray, " p"] | None = None,
    axes: tuple[int, ...] | None = None,
    interleaved: bool = False,
    magnitude: float = 1.0,
) -> Float[Array, "B T N H"]:
    """Turns the first `rotary_dim` components of every head by its position.

    Component `j` pairs with `j + rotary_dim / 2` (half-split, as in GPT-NeoX and the
    Hugging Face models); with the angle `a = position * frequency_j` the pair `(u, v)`
    becomes `(u cos a - v sin a, v cos a + u sin a)` (Su et al., arXiv:2104.09864).
    Components from `rotary_dim` on pass through untouched. Angles and products are in
    at least float32.

    Args:
        x: Queries or keys.
        positions: Of the tokens; or [3, B, T], one along each axis of an image.
        rotary_dim: R.
        theta: Base of the frequencies.
        multipliers: Of the frequencies.
        axes: The axis of [3, B, T] positions that each pair follows.
        interleaved: Component `2 j` pairs with `2 j + 1` instead. All first components
            come out before all second ones, as they do for half-split pairs.
        magnitude: What the turned components are multiplied by.
    """
    dtype = np.promote_types(x.dtype, np.float32)
    half = rotary_dim // 2
    frequencies = rotary_frequencies(rotary_dim, theta, dtype, multipliers)
    steps = _steps(positions, axes).astype(dtype)
    angles = steps * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude

    if interleaved:
        u, v = (
            x[..., 0:rotary_dim:2].astype(dtype),
            x[..., 1:rotary_dim:2].astype(dtype),
        )
    else:
        u, v = x[..., :half].astype(dtype), x[..., half:rotary_dim].astype(dtype)
    turned = jnp.concatenate([u * cos - v * sin, v * cos + u * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., rotary_dim:]], axis=-1)


def _steps(
    positions: Int[Array, "*axes B T"], axes: tuple[int, ...] | None
) -> Int[Array, "B T 1 _"]:
    """The position that each pair is turned by; one for all pairs where all are one."""
    if positions.ndim == 2:
        return positions[:, :, None, None]
    by_pair = positions[np.array(axes, np.int32)]
    return jnp.moveaxis(by_pair, 0, -1)[:, :, None]
