"""Every option of a `RopeConfig` against a loop in float64 and published numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.config import LinearScaling, RopeConfig, YarnScaling
from shared.layers import rotary
from shared.ops.rope import rotary_frequencies, yarn_multipliers
from tests.references import rope as reference

B, T, N, H, R, THETA = 2, 5, 3, 18, 16, 1e4
YARN = YarnScaling(
    8.0, 64, beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.3
)
# 0.1 m ln(8) + 1 for m = 0.7 and 0.3; transformers gives 1.0782934613857693, too.
YARN_MAGNITUDE = (0.07 * np.log(8) + 1) / (0.03 * np.log(8) + 1)

CONFIGS = {
    "plain": RopeConfig(THETA, R),
    "proportional": RopeConfig(THETA, R, turning_pairs=3),
    "proportional, scaled": RopeConfig(
        THETA, R, turning_pairs=3, scaling=LinearScaling(2.0)
    ),
    "sections": RopeConfig(THETA, R, sections=(3, 3, 2)),
    "short sections": RopeConfig(THETA, R, sections=(6, 1, 1)),
    "interleaved pairs": RopeConfig(THETA, R, interleaved=True),
    "linear": RopeConfig(THETA, R, scaling=LinearScaling(8.0)),
    "yarn": RopeConfig(THETA, R, scaling=YARN),
    "deepseek": RopeConfig(THETA, R, interleaved=True, scaling=YARN),
    "nothing": RopeConfig(THETA, 0),
}
each = pytest.mark.parametrize("rope", CONFIGS.values(), ids=CONFIGS)


def frequencies_by_hand(rope):
    pairs = range(rope.rotary_dim // 2)
    plain = [reference.frequency(j, rope.rotary_dim, rope.theta) for j in pairs]
    if isinstance(rope.scaling, LinearScaling):
        plain = [frequency / rope.scaling.factor for frequency in plain]
    if rope.scaling is YARN:
        plain = [reference.yarn_frequency(j, R, THETA, 8.0, 64, 8, 2) for j in pairs]
    turning = len(pairs) if rope.turning_pairs is None else rope.turning_pairs
    return plain[:turning] + [0.0] * (len(pairs) - turning)


def rotate_by_hand(x, positions, rope):
    pairs = range(rope.rotary_dim // 2)
    by_pair = [positions for _ in pairs]
    if positions.ndim == 3:
        by_pair = [positions[reference.mrope_axis(j, rope.sections)] for j in pairs]
    magnitude = YARN_MAGNITUDE if rope.scaling is YARN else 1.0
    return reference.rotate(
        x, by_pair, frequencies_by_hand(rope), rope.interleaved, magnitude
    )


def draw(seed, axes=()):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, N, H)).astype(np.float32)
    return x, rng.integers(0, 300, (*axes, B, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="rope")
def rotate(x, positions, rope):
    return rotary.rotate(x, positions, rope)


@each
@pytest.mark.parametrize("seed", [0, 1])
def test_matches_the_loop(rope, seed):
    x, positions = draw(seed, (3,) * (rope.sections is not None))
    expected = rotate_by_hand(x, positions, rope)
    # An angle of 300 in float32 is known to 300 * 2**-24, and turns values up to 5.
    np.testing.assert_allclose(rotate(x, positions, rope), expected, atol=2e-4)
    with jax.enable_x64(True):
        y = np.asarray(rotate(np.float64(x), positions, rope))
    np.testing.assert_allclose(y, expected, atol=1e-12)


@each
def test_what_does_not_turn_passes_bit_for_bit(rope):
    x, positions = draw(2)
    y = np.asarray(rotate(x, positions, rope))
    np.testing.assert_array_equal(y[..., rope.rotary_dim :], x[..., rope.rotary_dim :])
    if rope.turning_pairs is not None:
        half = R // 2
        for first in (rope.turning_pairs, half + rope.turning_pairs):
            rest = slice(first, first + half - rope.turning_pairs)
            np.testing.assert_array_equal(y[..., rest], x[..., rest])


@pytest.mark.parametrize("sections", [(3, 3, 2), (8, 0, 0)])
def test_equal_axes_are_one_axis_bit_for_bit(sections):
    x, positions = draw(3)
    plain = rotate(x, positions, RopeConfig(THETA, R))
    rope = RopeConfig(THETA, R, sections=sections)
    for same in (positions, np.stack([positions] * 3)):
        np.testing.assert_array_equal(rotate(x, same, rope), plain)


def test_axes_without_sections_are_refused():
    x, positions = draw(4, (3,))
    with pytest.raises(ValueError, match=r"\(3, 2, 5\) have axes.*sections=None"):
        rotate(x, positions, RopeConfig(THETA, R))


def test_low_precision_is_rounded_once():
    x, positions = draw(5)
    x = jnp.asarray(x, jnp.bfloat16)
    rope = CONFIGS["deepseek"]
    y = rotate(x, positions, rope)
    assert y.dtype == jnp.bfloat16
    expected = rotate_by_hand(np.asarray(x, np.float64), positions, rope)
    y = np.asarray(y, np.float64)
    np.testing.assert_allclose(y, expected, rtol=2.0**-8, atol=2e-4)


def test_yarn_of_deepseek_v3_has_the_published_frequencies():
    """`ROPE_INIT_FUNCTIONS["yarn"]` of transformers 5.24 for DeepSeek-V3's config."""
    multipliers = yarn_multipliers(
        64, 1e4, factor=40.0, original_length=4096, beta_fast=32.0, beta_slow=1.0
    )
    frequencies = rotary_frequencies(64, 1e4, np.float32, multipliers)
    published = {
        0: 1.0,
        10: 0.05623413,  # the last that is kept
        11: 0.039006926,
        16: 0.0055000004,
        22: 0.00017782794,
        23: 3.3338034e-05,  # the first that is divided by 40
        31: 3.3338035e-06,
    }
    at = np.array(list(published))
    np.testing.assert_allclose(frequencies[at], list(published.values()), rtol=3e-7)


def test_a_ramp_without_width_is_a_step():
    # No pair turns once in 4 tokens: all are slow but the first, where the ramp is.
    multipliers = yarn_multipliers(
        16, 1e4, factor=8.0, original_length=4, beta_fast=32.0, beta_slow=1.0
    )
    np.testing.assert_array_equal(multipliers, [1.0] + [1 / 8] * 7)
