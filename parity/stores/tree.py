"""A tree in memory as a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parity.stores.store import Leaf, Path, Store, collect, constant, split_name


def from_tree(tree: Any, name: str = "tree") -> Store:
    """A store of any pytree: Linen variables, boxed or not, `nnx.State`, dicts."""
    return collect(Store(name, "tree", {}, boxes=True), _leaves(tree))


def _leaves(tree: Any) -> Iterator[tuple[Path, Leaf | str]]:
    for keys, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = tuple(part for key in keys for part in _key(key))
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
