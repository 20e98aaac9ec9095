"""What a call gives: arrays by path, containers, and a loss that sees all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from parity.mapping.leaves import Token, path_text, token
from parity.trees import Difference


def plain(outputs: Any) -> Any:
    """Outputs with arrays for numbers and for NNX Variables."""

    def array(leaf: Any) -> Any:
        leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)

    is_variable = lambda node: isinstance(node, nnx.Variable)
    return jax.tree.map(array, outputs, is_leaf=is_variable)


def flat(tree: Any, prefix: str) -> dict[str, Any]:
    """Leaves of a pytree by path, as `outputs/0/logits`; no two share a path."""
    return {
        path_text((prefix, *map(token, path))): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def compare_containers(linen: Any, nnx: Any, path: str) -> tuple[Difference, ...]:
    """Where the containers of two outputs differ, whatever the arrays in them are.

    A list may stand for a tuple, any mapping for a dict, and any class with fields for
    another with the same. What a class holds besides arrays counts where both are of
    one class.
    """
    here, there = (
        dict(_places(tree, (), jax.tree_util.default_registry)) for tree in (linen, nnx)
    )
    return tuple(
        Difference(
            path_text((path, *place)),
            "structure",
            f"linen {here.get(place, 'nothing')}, nnx {there.get(place, 'nothing')}",
        )
        for place in dict.fromkeys([*here, *there])
        if here.get(place) != there.get(place)
    )


def _places(tree: Any, path: tuple[Token, ...], registry: Any) -> Iterator[Any]:
    """Each container and leaf by path, with a word for what it is."""
    if tree is None:
        yield path, "None"
        return
    children = registry.flatten_one_level_with_keys(tree)
    if children is None:
        yield path, "an array"
        return
    entries, static = children
    yield path, _kind(tree, static)
    for key, child in entries:
        yield from _places(child, (*path, token(key)), registry)


def _kind(node: Any, static: Any) -> str:
    if isinstance(node, tuple | list) and not hasattr(node, "_fields"):
        return f"a sequence of {len(node)}"
    if isinstance(node, Mapping):
        return f"a mapping with {', '.join(sorted(map(repr, node)))}"
    if hasattr(node, "_fields"):
        return f"fields {', '.join(node._fields)}"
    return f"fields, and besides arrays {static!r}"


def default_loss(outputs: Any) -> Array:
    """The sum of all floats, each with its own weight: cos(0), cos(1) and so on."""
    total, count = jnp.zeros((), jnp.float32), 0
    for leaf in jax.tree.leaves(outputs):
        if not is_float(leaf):
            continue
        real = leaf.ravel()
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            real = jnp.concatenate([jnp.real(real), jnp.imag(real)])
        # Not `promote_types`, which refuses to mix widths under strict promotion.
        dtype = real.dtype if real.dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
        # Counted on from leaf to leaf: p and 1 - p must not cancel.
        weights = jnp.cos(jnp.arange(count, count + real.size, dtype=dtype))
        part = jnp.sum(real.astype(dtype) * weights)
        widest = max(total.dtype, part.dtype, key=lambda dtype: dtype.itemsize)
        total = total.astype(widest) + part.astype(widest)
        count += real.size
    return total


def is_float(leaf: Any) -> bool:
    """Whether there is a gradient by it."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def as_numpy(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Results as numpy arrays; typed keys as their data."""
    return {path: _numpy(x) for path, x in results.items()}


def move(values: Mapping[str, Any], fixed: Iterable[str]) -> dict[str, Any]:
    """Values in which nothing is zero or one any more: floats plus 0.05 to 0.15.

    First values hide whole terms: a bias that is zero, a scale that is one.

    Args:
      values: by path.
      fixed: paths to leave as they are.
    """
    random, kept = np.random.default_rng(0), set(fixed)

    def moved(x: Any) -> Any:
        shift = 0.05 + 0.1 * random.random(x.shape)
        return jnp.asarray((np.asarray(x, np.float64) + shift).astype(x.dtype))

    return {
        path: x
        if path in kept or not jnp.issubdtype(x.dtype, jnp.floating)
        else moved(x)
        for path, x in values.items()
    }


def _numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)
