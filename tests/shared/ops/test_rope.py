"""The rotary embedding against a loop in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ops import rope
from tests.references import rope as reference

B, T, N, H, R = 2, 5, 3, 10, 6
THETA = 1e4


def draw(seed, dtype=np.float32, furthest=300):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(B, T, N, H)).astype(dtype)
    return x, rng.integers(0, furthest, (B, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="rotary_dim")
def apply(x, positions, rotary_dim=R):
    return rope.apply_rope(x, positions, rotary_dim=rotary_dim, theta=THETA)


@given(st.integers(0, 2**32 - 1), st.sampled_from([2, R, H]))
def test_matches_the_loop(seed, rotary_dim):
    x, positions = draw(seed)
    expected = reference.apply_rope(x, positions, rotary_dim, THETA)
    # An angle of 300 in float32 is known to 300 * 2**-24, and turns values up to 5.
    y = apply(x, positions, rotary_dim)
    np.testing.assert_allclose(y, expected, atol=2e-4, rtol=0)
    with jax.enable_x64(True):
        y = apply(x.astype(np.float64), positions, rotary_dim)
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_costs_one_rounding_even_far_out(dtype):
    # An angle in bfloat16 would be off by whole turns at this distance.
    x, positions = draw(0, dtype, furthest=100_000)
    expected = reference.apply_rope(np.asarray(x, np.float64), positions, R, THETA)
    y = apply(x, positions)
    assert y.dtype == dtype
    # Half a unit in the last place; 1e5 * 2**-24 = 0.006 for the float32 angle.
    half = float(jnp.finfo(dtype).eps) / 2
    y = np.asarray(y, np.float64)
    np.testing.assert_allclose(y, expected, rtol=half, atol=0.04)


def test_what_lies_behind_the_rotary_width_passes_bit_for_bit():
    x, positions = draw(1)
    x[0, 0, 0, R:] = [-0.0, 1e-42, np.inf, np.nan]
    y = np.asarray(apply(x, positions))
    assert y[..., R:].tobytes() == x[..., R:].tobytes()
    assert (y[..., :R] != x[..., :R]).any()


def test_position_zero_turns_nothing():
    x, _ = draw(2)
    np.testing.assert_array_equal(apply(x, np.zeros((B, T), np.int32)), x)


def test_scores_depend_on_the_distance_only():
    q, positions = draw(3)
    k, others = draw(4)
    with jax.enable_x64(True):
        score = lambda shift: jnp.einsum(
            "btnh,btnh->btn",
            apply(q.astype(np.float64), positions + shift),
            apply(k.astype(np.float64), others + shift),
        )
        np.testing.assert_allclose(score(0), score(1000), atol=1e-11)


def test_each_head_and_row_has_the_position_of_its_token():
    x, positions = draw(5)
    y = np.asarray(apply(x, positions))
    for b, t in np.ndindex(B, T):
        alone = apply(x[b : b + 1, t : t + 1], positions[b : b + 1, t : t + 1])
        np.testing.assert_allclose(alone[0, 0], y[b, t], atol=1e-6)


def test_frequencies_fall_from_one_by_the_rotary_width():
    frequencies = rope.rotary_frequencies(R, THETA)
    assert frequencies.dtype == np.float32
    expected = [reference.frequency(j, R, THETA) for j in range(R // 2)]
    np.testing.assert_array_equal(frequencies, np.float32(expected))
    assert frequencies[0] == 1
    with jax.enable_x64(True):
        frequencies = rope.rotary_frequencies(R, THETA, np.float64)
        assert frequencies.dtype == np.float64
        np.testing.assert_allclose(frequencies, expected, rtol=1e-15)


def test_the_gradient_is_turned_back():
    x, positions = draw(6)
    with jax.enable_x64(True):
        x = jnp.asarray(x, np.float64)
        y, back = jax.vjp(lambda x: apply(x, positions), x)
        np.testing.assert_allclose(back(y)[0], x, atol=1e-12)
