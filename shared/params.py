"""Parameters declared before they exist, and their first values.

A `ParamSpec` says a parameter's shape, axis names, initialiser and dtype, once. The key
of a parameter depends on the seed, the layer's absolute index and the names that lead
to it inside the layer, one `fold_in` a name, and on nothing else: not on Linen or NNX,
not on how layers are stacked.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

Initializer = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
SpecTree = Mapping[str, Any]  # nested: str -> ParamSpec or SpecTree


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical axis names, initialiser and least precision of a parameter.

    Attributes:
      shape: without stack axes, unless `stacked` added them.
      axes: one logical name (or None) a dimension.
      init: gives the first value from key, shape and dtype.
      at_least_float32: the parameter does not follow a lower `param_dtype`.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Initializer
    at_least_float32: bool = False

    def dtype(self, param_dtype: Any) -> jnp.dtype:
        """The dtype of the parameter in a model whose parameters are `param_dtype`."""
        dtype = jnp.dtype(param_dtype)
        return np.promote_types(dtype, np.float32) if self.at_least_float32 else dtype

    def draw(self, key: PRNGKeyArray, param_dtype: Any) -> Array:
        """The first value of the parameter whose own key is `key`.

        Raises:
          ValueError: float64 is asked for, but JAX would make it float32.
        """
        dtype = self.dtype(param_dtype)
        if dtype == np.float64 and not jax.config.read("jax_enable_x64"):
            raise ValueError(
                f"param_dtype={dtype} needs jax_enable_x64=True, which is off: set it, "
                "or use float32."
            )
        return self.init(key, self.shape, dtype)

    def stacked(
        self, sizes: tuple[int, ...], names: tuple[str, ...], axis: int
    ) -> ParamSpec:
        """The spec with stack axes put in at `axis` (see `LayerPlan.stack`)."""
        return dataclasses.replace(
            self,
            shape=self.shape[:axis] + sizes + self.shape[axis:],
            axes=self.axes[:axis] + names + self.axes[axis:],
        )


def normal(stddev: float) -> Initializer:
    """Normal values, drawn in float32 (float64 for float64) and then rounded."""

    def init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        return _normal(key, shape, jnp.dtype(dtype), stddev)

    return init


# One compiled function a shape, so that drawing inside and outside `jit` gives the same
# bytes: operation by operation, XLA could not fold the two constant factors into one.
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, stddev: float
) -> Array:
    wide = np.promote_types(dtype, np.float32)
    return (jax.random.normal(key, shape, wide) * stddev).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _log_uniform(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, low: float, high: float
) -> Array:
    wide = np.promote_types(dtype, np.float32)
    return jnp.log(jax.random.uniform(key, shape, wide, low, high)).astype(dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _uniform(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: jnp.dtype, low: float, high: float
) -> Array:
    wide = np.promote_types(dtype, np.float32)
    return jax.random.uniform(key, shape, wide, low, high).astype(dtype)


def constant(value: float) -> Initializer:
    """The same value everywhere."""

    def init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        del key
        return jnp.full(shape, value, dtype)

    return init


def log_uniform(low: float, high: float) -> Initializer:
    """log(u) with u uniform in [low, high)."""

    def init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        return _log_uniform(key, shape, jnp.dtype(dtype), low, high)

    return init


def uniform(low: float, high: float) -> Initializer:
    """Uniform in [low, high), drawn in float32 (float64 for float64) and rounded."""

    def init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        return _uniform(key, shape, jnp.dtype(dtype), low, high)

    return init


def padded(init: Initializer, axis: int, count: int) -> Initializer:
    """As `init`, with `count` zeros behind its values in one axis of the shape."""
    if not count:
        return init

    def init_padded(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any) -> Array:
        widths = [(0, count if i == axis else 0) for i in range(len(shape))]
        own = tuple(n - more for n, (_, more) in zip(shape, widths, strict=True))
        return jnp.pad(init(key, own, dtype), widths)

    return init_padded


def child_key(key: PRNGKeyArray, *names: str) -> PRNGKeyArray:
    """The key of what stands below `names`: one fold a name."""
    for name in names:
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return key


def layer_key(key: PRNGKeyArray, index: int | Array) -> PRNGKeyArray:
    """The key of the layer with absolute index `index` in a model seeded with `key`."""
    return jax.random.fold_in(child_key(key, "layers"), index)


def draw_tree(specs: SpecTree, key: PRNGKeyArray, param_dtype: Any) -> dict[str, Any]:
    """First values of a tree of specs whose root has the key `key`."""
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        own = child_key(key, name)
        if isinstance(spec, ParamSpec):
            values[name] = spec.draw(own, param_dtype)
        else:
            values[name] = draw_tree(spec, own, param_dtype)
    return values


def map_specs(function: Callable[[ParamSpec], Any], specs: SpecTree) -> dict[str, Any]:
    """Applies `function` to every spec of a tree."""
    return {
        name: function(spec)
        if isinstance(spec, ParamSpec)
        else map_specs(function, spec)
        for name, spec in specs.items()
    }


def shapes(specs: SpecTree, param_dtype: Any) -> dict[str, Any]:
    """The abstract arrays (`jax.ShapeDtypeStruct`) of a tree of specs."""
    return map_specs(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype(param_dtype)), specs
    )
