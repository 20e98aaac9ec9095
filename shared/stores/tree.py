"""A tree in memory as a store."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shared.stores.store import (
    Leaf,
    Part,
    Path,
    Read,
    Store,
    collect,
    constant,
    split_name,
    take,
)


def from_tree(tree: Any, name: str = "tree") -> Store:
    """A store of any pytree: Linen variables, boxed or not, `nnx.State`, dicts."""
    found, _ = named_nodes(tree)
    empty = {path: _kind(value) for path, value in found if is_empty(value)}
    leaves = _leaves([(path, value) for path, value in found if not is_empty(value)])
    return collect(Store(name, "tree", {}, boxes=True, empty=empty), leaves)


def named_nodes(tree: Any) -> tuple[list[tuple[Path, Any]], Any]:
    """Leaves and nodes without leaves, by path, and the structure that has them all."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    named = [
        (tuple(part for key in keys for part in _key(key)), value)
        for keys, value in found
    ]
    return named, structure


def is_empty(node: Any) -> bool:
    """Whether a node has no leaves: None, optax's EmptyState, an empty dict."""
    children = jax.tree_util.tree_leaves(node, is_leaf=lambda child: child is not node)
    return not children


def _kind(node: Any) -> str:
    return "None" if node is None else type(node).__name__


def _leaves(found: Iterable[tuple[Path, Any]]) -> Iterator[tuple[Path, Leaf | str]]:
    for path, value in found:
        if isinstance(value, jax.Array) and jnp.issubdtype(
            value.dtype, jax.dtypes.prng_key
        ):
            data = constant(jax.random.key_data(value))
            yield path, data._replace(kind=key_kind(str(jax.random.key_impl(value))))
            continue
        leaf = constant(value)
        if leaf.dtype.hasobject:
            yield path, f"{type(value).__name__} is no array: leave it out"
        else:
            yield path, leaf


def array_leaf(array: np.ndarray | jax.Array) -> Leaf:
    """An array in memory or on devices as a leaf; parts of it are moved to the host."""
    return Leaf(array.shape, np.dtype(array.dtype), _Array(array).open)


class _Array(NamedTuple):
    array: np.ndarray | jax.Array

    @contextlib.contextmanager
    def open(self) -> Iterator[Read]:
        yield functools.partial(_on_host, self.array)


def _on_host(array: np.ndarray | jax.Array, part: Part) -> np.ndarray:
    if isinstance(array, jax.Array):
        on_host = {device.platform for device in array.devices()} == {"cpu"}
        if not on_host or len(array.devices()) > 1:
            return np.asarray(array[part])
    return take(np.asarray(array), part)  # no copy: NumPy sees the memory of JAX


def key_kind(implementation: str) -> str:
    """What to call the data of typed PRNG keys."""
    return f"key<{implementation}>"


def _key(key: Any) -> Path:
    if isinstance(key, jax.tree_util.SequenceKey):
        return (key.idx,)
    if isinstance(key, jax.tree_util.GetAttrKey):
        return (key.name,)
    name = key.key if hasattr(key, "key") else key
    if isinstance(name, int | np.integer):
        return (int(name),)
    return split_name(str(name))
