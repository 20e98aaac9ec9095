"""Activations against their definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.ops.activation import activate
from tests.references import experts as reference

X = np.linspace(-8, 8, 1001)
each = pytest.mark.parametrize("name", reference.ACTIVATIONS)


def slopes(x, name):
    return jax.vmap(jax.grad(lambda x: activate(x, name)))(x)


@each
def test_values_and_slopes_in_float64(name):
    value, slope = reference.ACTIVATIONS[name](X)
    with jax.enable_x64(True):
        x = jnp.asarray(X)  # up to 8 times the 2e-16 that 1 + tanh is off by
        np.testing.assert_allclose(activate(x, name), value, rtol=1e-14, atol=4e-15)
        np.testing.assert_allclose(slopes(x, name), slope, rtol=1e-14, atol=4e-14)


def test_gelu_is_near_the_one_with_the_error_function():
    """x * Phi(x) at 1 and -1, from a table of the normal distribution."""
    y = activate(jnp.array([0.0, 1.0, -1.0, 10.0]), "gelu_tanh")
    np.testing.assert_allclose(y, [0, 0.8413447, -0.1586553, 10], atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gelu_of_low_precision_is_rounded_once(dtype):
    x = jnp.asarray(X, dtype)
    y = activate(x, "gelu_tanh")
    assert y.dtype == dtype
    exact, _ = reference.ACTIVATIONS["gelu_tanh"](np.asarray(x, np.float64))
    half = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=half, atol=1e-6)
