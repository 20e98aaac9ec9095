"""Normalisations over the last axis.

Statistics and products are in at least float32, whatever the inputs are; the result has
the dtype of `x`. Letters: D the normalised width.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*S D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*S D"]:
    """Scales `x` to unit root mean square, times `weight`.

    `y = x * rsqrt(mean(x^2) + eps) * w` (Zhang and Sennrich, arXiv:1910.07467).
    """
    y = _normalise(x, eps)
    return (y * _row(weight, y).astype(y.dtype)).astype(x.dtype)


def zero_centered_rms_norm(
    x: Float[Array, "*S D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*S D"]:
    """Scales `x` to unit root mean square, times one plus `weight`.

    `y = x * rsqrt(mean(x^2) + eps) * (1 + w)`: weights start at zero, so weight decay
    pulls the scale to one. The norms of Qwen3-Next around its layers, of queries and
    keys and before the head are of this form.
    """
    y = _normalise(x, eps)
    return (y * (1.0 + _row(weight, y).astype(y.dtype))).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*S D"],
    gate: Float[Array, "*S D"],
    weight: Float[Array, " D"],
    eps: float,
) -> Float[Array, "*S D"]:
    """Scales `x` to unit root mean square, then times `weight`, then times the gate.

    `y = w * (x * rsqrt(mean(x^2) + eps)) * silu(gate)`: plain `w`, norm before gate.

    In low precision the roundings stand where `Qwen3NextRMSNormGated` in transformers
    has them: the normalised value, its product with `weight`, the result.
    """
    y = _normalise(x, eps).astype(x.dtype)
    product = np.promote_types(x.dtype, weight.dtype)
    y = y.astype(product) * _row(weight, y).astype(product)
    y = _widen(y)
    return (y * jax.nn.silu(gate.astype(y.dtype))).astype(x.dtype)


def l2_norm(x: Float[Array, "*S D"], eps: float = 1e-6) -> Float[Array, "*S D"]:
    """Scales `x` to unit length.

    `y = x * rsqrt(sum(x^2) + eps)`. At `x = 0` the value is 0 but the derivative is
    `eps ** -0.5` (1000): whoever zeroes padding before it must mask what follows, too.
    """
    y = _widen(x)
    y = y * lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype)


def unit_rms_norm(x: Float[Array, "*S D"], eps: float) -> Float[Array, "*S D"]:
    """Scales `x` to unit root mean square: `y = x * rsqrt(mean(x^2) + eps)`."""
    return _normalise(x, eps).astype(x.dtype)


def _normalise(x: Array, eps: float) -> Array:
    x = _widen(x)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def _widen(x: Array) -> Array:
    return x.astype(np.promote_types(x.dtype, np.float32))


def _row(weight: Array, like: Array) -> Array:
    """`weight` [D] with the rank of `like`."""
    return jnp.expand_dims(weight, range(like.ndim - 1))
