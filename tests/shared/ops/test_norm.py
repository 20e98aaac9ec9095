"""The normalisations against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.ops import norm
from tests.references import norm as reference

EPS = 1e-6
SHAPE = 2, 5, 3, 7

# Seven squares, a sum, a root and three products: a dozen roundings of 2**-24.
FLOAT32 = dict(rtol=1e-6, atol=1e-30)
FLOAT64 = dict(rtol=1e-14, atol=1e-300)

# Each as a function of x, gate and weight.
OPS = {
    "rms": (
        lambda x, gate, weight: norm.rms_norm(x, weight, EPS),
        lambda x, gate, weight: reference.rms_norm(x, weight, EPS),
    ),
    "zero_centered": (
        lambda x, gate, weight: norm.zero_centered_rms_norm(x, weight, EPS),
        lambda x, gate, weight: reference.zero_centered_rms_norm(x, weight, EPS),
    ),
    "gated": (
        lambda x, gate, weight: norm.gated_rms_norm(x, gate, weight, EPS),
        lambda x, gate, weight: reference.gated_rms_norm(x, gate, weight, EPS),
    ),
    "l2": (
        lambda x, gate, weight: norm.l2_norm(x),
        lambda x, gate, weight: reference.l2_norm(x, 1e-6),
    ),
}
each_op = pytest.mark.parametrize("op, expected", OPS.values(), ids=OPS)
each_dtype = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])


def draw(seed, dtype=np.float32, shape=SHAPE):
    rng = np.random.default_rng(seed)
    x, gate = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    return x, gate, rng.normal(size=shape[-1:]).astype(dtype)


@each_op
def test_matches_the_loop_in_float64(op, expected):
    with jax.enable_x64(True):
        x, gate, weight = draw(0, np.float64)
        y = op(*map(jnp.asarray, (x, gate, weight)))
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, expected(x, gate, weight), **FLOAT64)


@each_op
@given(
    x=hnp.arrays(
        np.float32,
        (3, 7),
        # Up to where the sum of squares still is a float32.
        elements=st.floats(-(2.0**60), 2.0**60, width=32),
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_matches_the_loop_in_float32_from_subnormal_to_large(op, expected, x, seed):
    _, gate, weight = draw(seed, shape=(3, 7))
    y = op(*map(jnp.asarray, (x, gate, weight)))
    np.testing.assert_allclose(y, expected(x, gate, weight), **FLOAT32)


@each_op
@each_dtype
def test_the_result_has_the_dtype_of_x_and_one_rounding_more(op, expected, dtype):
    x, gate, weight = draw(1, dtype)
    y = op(*map(jnp.asarray, (x, gate, weight)))
    assert y.dtype == dtype
    # Three roundings at most: the normalised value, times the weight, times the gate.
    eps = float(jnp.finfo(dtype).eps)
    exact = expected(*(np.asarray(a, np.float64) for a in (x, gate, weight)))
    np.testing.assert_allclose(
        np.asarray(y, np.float64), exact, rtol=1.6 * eps + 1e-6, atol=1e-6
    )


@each_op
def test_the_weight_may_have_another_dtype_than_x(op, expected):
    x, gate, weight = draw(2)
    for x_dtype, weight_dtype in [
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
    ]:
        args = x.astype(x_dtype), gate.astype(x_dtype), weight.astype(weight_dtype)
        y = op(*map(jnp.asarray, args))
        assert y.dtype == x_dtype
        exact = expected(*(np.asarray(a, np.float64) for a in args))
        eps = float(jnp.finfo(x_dtype).eps)
        np.testing.assert_allclose(
            np.asarray(y, np.float64), exact, rtol=1.6 * eps + 1e-6, atol=1e-6
        )


@each_op
def test_compiled_equals_the_loop_too(op, expected):
    x, gate, weight = draw(3)
    y = jax.jit(op)(*map(jnp.asarray, (x, gate, weight)))
    np.testing.assert_allclose(y, expected(x, gate, weight), **FLOAT32)


def test_zero_weights_scale_by_one_only_where_they_are_centered_there():
    x, gate, _ = map(jnp.asarray, draw(4))
    zeros = jnp.zeros(SHAPE[-1])
    unit = norm.zero_centered_rms_norm(x, zeros, 0.0)
    np.testing.assert_allclose(jnp.square(unit).mean(-1), 1, rtol=1e-6)
    assert not norm.rms_norm(x, zeros, EPS).any()
    assert not norm.gated_rms_norm(x, gate, zeros, EPS).any()
    twice = norm.zero_centered_rms_norm(x, zeros + 1, 0.0)
    np.testing.assert_array_equal(twice, 2 * unit)


def test_the_gate_comes_after_the_norm():
    # Otherwise the norm would undo a gate that is the same for the whole row.
    x, _, weight = map(jnp.asarray, draw(5))
    small, large = (
        norm.gated_rms_norm(x, jnp.full(SHAPE, z), weight, EPS) for z in (-3.0, 3.0)
    )
    # silu(-3) / silu(3) = -exp(-3)
    np.testing.assert_allclose(small, -np.exp(-3) * large, rtol=1e-6)


def test_gated_norm_rounds_where_the_published_model_does():
    bfloat16 = jnp.bfloat16
    x, gate, weight = draw(6, bfloat16, shape=(64, 32))
    wide = lambda a: np.asarray(a, np.float64)
    row = reference.rms_norm(wide(x), np.ones(32), EPS)
    silu = reference.gated_rms_norm(np.ones((64, 32)), wide(gate), np.ones(32), 0.0)
    row = wide(wide(row.astype(bfloat16)) * wide(weight)).astype(bfloat16)
    expected = (wide(row) * silu).astype(bfloat16)
    once = reference.gated_rms_norm(wide(x), wide(gate), wide(weight), EPS)

    y = norm.gated_rms_norm(*map(jnp.asarray, (x, gate, weight)), EPS)
    # Where float32 and float64 fall on two sides of a tie, one of two thousand differs.
    assert np.mean(np.asarray(y) != expected) < 0.002
    assert np.mean(once.astype(bfloat16) != expected) > 0.1  # the order is visible


@each_dtype
def test_statistics_of_a_wide_row_are_summed_in_float32(dtype):
    # A sum of ones in bfloat16 stops growing at 256.
    x = jnp.ones((1, 4096), dtype)
    unit = norm.rms_norm(x, jnp.ones(4096, dtype), EPS)
    np.testing.assert_allclose(np.asarray(unit, np.float64), 1, rtol=1e-6)
    length = norm.l2_norm(x)
    np.testing.assert_allclose(np.asarray(length, np.float64), 1 / 64, rtol=1e-6)


def test_a_row_of_zeros_stays_zero_with_a_finite_gradient():
    zeros = jnp.asarray([[0.0, -0.0, 0.0]])
    weight = jnp.ones(3)
    for f in (lambda x: norm.rms_norm(x, weight, EPS), norm.l2_norm):
        assert not f(zeros).any()
        # Large, as the docstring warns, not NaN: eps ** -0.5.
        grad = jax.grad(lambda x, f=f: f(x).sum())(zeros)
        np.testing.assert_allclose(grad, 1000, rtol=1e-5)


def test_l2_norm_gives_unit_length():
    y = norm.l2_norm(jnp.asarray(draw(7)[0]), eps=0.0)
    np.testing.assert_allclose(jnp.square(y).sum(-1), 1, rtol=1e-6)
