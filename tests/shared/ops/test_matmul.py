"""Products of few rows, one by one or at once, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.ops.matmul import (
    LEAST_WEIGHTS,
    MOST_ROWS,
    matmul,
    matmul_at_once,
    matmul_by_row,
)

D, F = 384, 700  # more than LEAST_WEIGHTS


def draw(rows, dtype=np.float32):
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, D)), random.normal(size=(D, F))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("form", [matmul, matmul_at_once, matmul_by_row])
@pytest.mark.parametrize("rows", [1, 2, MOST_ROWS, MOST_ROWS + 1])
def test_every_form_is_the_product_and_has_its_gradients(form, rows):
    x, weight = draw(rows)
    y, pull_back = jax.vjp(form, x, weight)
    wide_x, wide_weight = np.float64(x), np.float64(weight)
    np.testing.assert_allclose(y, wide_x @ wide_weight, rtol=1e-4, atol=1e-4)

    given = np.random.default_rng(9).normal(size=y.shape)
    x_grad, weight_grad = pull_back(jnp.asarray(given, y.dtype))
    np.testing.assert_allclose(x_grad, given @ wide_weight.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(weight_grad, wide_x.T @ given, rtol=1e-4, atol=1e-4)


def test_small_matrices_are_multiplied_at_once():
    x, weight = draw(MOST_ROWS)
    assert weight.size > LEAST_WEIGHTS
    for columns, loop in ((F, True), (LEAST_WEIGHTS // D, False)):
        lowered = jax.jit(matmul).lower(x, weight[:, :columns]).as_text()
        assert ("while" in lowered) == loop


def test_leading_axes_stay():
    x, weight = draw(4)
    y = matmul(x.reshape(2, 1, 2, D), weight)
    np.testing.assert_array_equal(y.reshape(4, F), matmul(x, weight))


def test_a_row_has_the_same_bits_among_up_to_four():
    x, weight = draw(MOST_ROWS)
    product = jax.jit(matmul)
    alone = np.concatenate([product(x[i : i + 1], weight) for i in range(MOST_ROWS)])
    for rows in range(2, MOST_ROWS + 1):
        np.testing.assert_array_equal(product(x[:rows], weight), alone[:rows])


def test_sums_are_kept_in_the_dtype_asked_for():
    x, weight = draw(3, jnp.bfloat16)
    y = matmul(x, weight, jnp.float32)
    assert y.dtype == np.float32
    expected = np.float64(x) @ np.float64(weight)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_other_platforms_multiply_at_once():
    few = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, D), (D, F))]
    lower = functools.partial(jax.jit(matmul).trace(*few).lower)
    assert "while" in lower(lowering_platforms=("cpu",)).as_text()
    assert "while" not in lower(lowering_platforms=("tpu",)).as_text()
