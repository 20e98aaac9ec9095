import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.ops.cast import cast_weight

VALUES = np.array([1.0, -0.0, 1.00390625, np.inf, -np.nan, 1e-40, 6e4], np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_it_is_the_plain_conversion_to_the_bit(dtype):
    expected = VALUES.astype(jnp.dtype(dtype)).tobytes()
    for convert in (cast_weight, jax.jit(cast_weight, static_argnums=1)):
        assert np.asarray(convert(jnp.asarray(VALUES), dtype)).tobytes() == expected


def test_its_gradient_is_that_of_the_plain_conversion_in_both_modes():
    weight = jnp.asarray([1.0, 1.00390625, -2.5])

    def loss(weight):
        return jnp.sum(jnp.sin(cast_weight(weight, jnp.bfloat16)))

    expected = np.cos(np.asarray(weight.astype(jnp.bfloat16)).astype(np.float32))
    expected = expected.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(jax.grad(loss)(weight), expected, rtol=2**-7)
    np.testing.assert_array_equal(jax.jacfwd(loss)(weight), jax.grad(loss)(weight))


def test_nothing_is_done_where_no_bit_is_lost():
    def operations(weight, dtype):
        jaxpr = jax.make_jaxpr(lambda w: cast_weight(w, dtype))(weight)
        return [equation.primitive.name for equation in jaxpr.eqns]

    wide, narrow = jnp.ones(3), jnp.ones(3, jnp.bfloat16)
    assert operations(wide, jnp.float32) == []
    assert operations(narrow, jnp.float32) == ["convert_element_type"]
