"""Products of few rows, in blocks, one by one or at once, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.ops.matmul import (
    BLOCKS,
    LEAST_WEIGHTS,
    LEAST_WIDTH,
    MOST_ROWS,
    MOST_SUMS,
    matmul,
    matmul_at_once,
    matmul_by_row,
    matmul_in_blocks,
)

D, F = 384, 700  # more than LEAST_WEIGHTS, less than LEAST_WIDTH

in_blocks = functools.partial(matmul_in_blocks, block=BLOCKS[0])
FORMS = [matmul, matmul_at_once, in_blocks, matmul_by_row]


def draw(rows, dtype=np.float32):
    random = np.random.default_rng(rows)
    x, weight = random.normal(size=(rows, D)), random.normal(size=(D, F))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("form", FORMS)
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


def form_of(rows, width, columns, platform="cpu"):
    """Which form is chosen: a loop over rows, or a matrix cut into blocks of a size."""
    few = [
        jax.ShapeDtypeStruct(s, np.float32) for s in ((rows, width), (width, columns))
    ]
    lowered = (
        jax.jit(matmul).trace(*few).lower(lowering_platforms=(platform,)).as_text()
    )
    if "while" in lowered:
        return "by row"
    for block in BLOCKS:
        if f"tensor<{width // block}x{block}x{columns}xf32>" in lowered:
            return block
    return "at once"


def test_few_rows_meet_a_large_matrix_one_by_one():
    for rows in range(1, MOST_ROWS + 2):
        expected = "by row" if 1 < rows <= MOST_ROWS else "at once"
        assert form_of(rows, D, F) == expected
    assert form_of(2, D, LEAST_WEIGHTS // D) == "at once"


def test_few_rows_meet_a_wide_matrix_in_blocks_whose_sums_fit():
    least, most, coarse = BLOCKS[0], BLOCKS[-1], BLOCKS[1]
    assert form_of(4, D, LEAST_WIDTH - 1) == "by row"
    assert form_of(4, D, LEAST_WIDTH) == least
    fits = MOST_SUMS // (D // least) // 4
    assert form_of(4, D, fits) == least
    assert form_of(4, D, fits + 1) == coarse
    assert form_of(2, D, fits + 1) == least
    assert form_of(4, D + 1, LEAST_WIDTH) == "by row"
    fits = MOST_SUMS // (D // most) // 4
    assert form_of(4, D, fits) == most
    assert form_of(4, D, fits + 1) == "by row"


def test_other_platforms_multiply_at_once():
    assert form_of(4, D, F, platform="tpu") == "at once"


def test_leading_axes_stay():
    x, weight = draw(4)
    y = matmul(x.reshape(2, 1, 2, D), weight)
    np.testing.assert_array_equal(y.reshape(4, F), matmul(x, weight))


@pytest.mark.parametrize("form", [in_blocks, matmul_by_row])
def test_a_row_does_not_depend_on_its_neighbours(form):
    x, weight = draw(MOST_ROWS)
    product = jax.jit(form)
    for row in range(MOST_ROWS):
        others = jnp.full_like(x, 1e9).at[row].set(x[row])
        np.testing.assert_array_equal(
            product(x, weight)[row], product(others, weight)[row]
        )


def test_a_row_has_the_same_bits_among_up_to_four():
    x, weight = draw(MOST_ROWS)  # of a matrix that is not wide: one by one
    product = jax.jit(matmul)
    alone = np.concatenate([product(x[i : i + 1], weight) for i in range(MOST_ROWS)])
    for rows in range(2, MOST_ROWS + 1):
        np.testing.assert_array_equal(product(x[:rows], weight), alone[:rows])


def test_sums_are_kept_in_the_dtype_asked_for():
    x, weight = draw(3, jnp.bfloat16)
    expected = np.float64(x) @ np.float64(weight)
    for form in FORMS:
        y = form(x, weight, jnp.float32)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
        narrow = form(x, weight)
        assert narrow.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float64(narrow), expected, rtol=2**-8, atol=1e-4)
