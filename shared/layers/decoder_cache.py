"""The cache of a whole decoder: made, checked, cut into rows and into layers.

It is a nested dict in the layout of the config's plan whose leaves are the caches of
single layers, or of all layers of a run with stack axes in front.

B batch, S cached positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import Array

from shared import sharding
from shared.cache import AXES, GatedDeltaNetCache, KVCache, LayerCache, take
from shared.config import DecoderConfig, LayerKind
from shared.layers import decoder_layer
from shared.plan import (
    insert,
    layer_slots,
    node_at,
    run_path,
    stack_axes,
    stack_sizes,
)
from shared.sharding import AXIS_RULES, AxisRules, Names

Cache = dict[str, Any]


def init_cache(
    config: DecoderConfig,
    batch_size: int,
    max_length: int,
    dtype: Any = None,
    *,
    state_dtype: Any = None,
) -> Cache:
    """An empty cache for `batch_size` rows of at most `max_length` tokens.

    On a mesh (`jax.set_mesh`) it stands where `constrain_cache` has it, from the start.

    Args:
      config: of the model.
      batch_size: rows.
      max_length: positions that full-attention layers can hold. Sliding layers hold at
        most their window, and the state of linear layers does not grow.
      dtype: of keys, values and convolution tails; None: the model's activations.
      state_dtype: what recurrent states are stored in; None: at least float32, in
        which the rule always runs.

    Returns:
      Layer caches in the layout of the plan, stack axes first.

    Raises:
      ValueError: a size is not positive.
    """
    for name, size in (("batch_size", batch_size), ("max_length", max_length)):
        if size < 1:
            raise ValueError(f"{name} of a cache must be at least 1. Got {size}.")
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)
    state_dtype = None if state_dtype is None else jnp.dtype(state_dtype)

    def shapes(kind: LayerKind) -> LayerCache:
        return decoder_layer.init_cache(
            config, kind, batch_size, max_length, dtype, state_dtype
        )

    tree: Cache = {}
    for group, run in config.plan.runs():
        sizes = stack_sizes(group, run)
        layer = jax.eval_shape(lambda kind=run.kind: shapes(kind))
        stacked = jax.tree.map(
            lambda leaf, sizes=sizes: jax.ShapeDtypeStruct(
                sizes + leaf.shape, leaf.dtype
            ),
            layer,
        )
        insert(tree, run_path(group, run), stacked)
    rules = sharding.decode_rules(config.axis_rules)
    return map_named(
        config,
        lambda leaf, names: sharding.zeros(leaf.shape, leaf.dtype, names, rules),
        tree,
    )


# Places on a mesh.


def map_named(
    config: DecoderConfig, change: Callable[[Any, Names], Any], cache: Cache
) -> Cache:
    """`change` of every array of a cache and the axis names of its dimensions."""
    tree: Cache = {}
    for group, run in config.plan.runs():
        held, stack = node_at(cache, run_path(group, run)), stack_axes(group, run)
        changed = {
            field: change(getattr(held, field), (*stack, *names))
            for field, names in AXES[type(held)].items()
        }
        insert(tree, run_path(group, run), type(held)(**changed))
    return tree


def cache_shardings(
    config: DecoderConfig,
    cache: Cache,
    mesh: Mesh | AbstractMesh,
    rules: AxisRules = AXIS_RULES,
) -> Cache:
    """Where every array of a cache stands: where steps want it, in prefill, too.

    Rows are spread by `sharding.decode_rules`, heads as those of the weights; a latent
    is one head. Of the mesh axes that do not divide a dimension, such as those of the
    rows of one prompt, nothing is said.

    Example usage::

      >>> import functools, jax, shared
      >>> from jax.sharding import AbstractMesh
      >>> config = shared.preset("gemma-3-tiny")
      >>> cache = jax.eval_shape(functools.partial(shared.init_cache, config, 8, 64))
      >>> mesh = AbstractMesh((4, 2), ("data", "context"))
      >>> places = shared.cache_shardings(config, cache, mesh)
      >>> tuple(places["layers"]["local_layers"].position.spec)
      (None, None, ('data', 'context'))

    Args:
      config: of the model.
      cache: of `init_cache`, or its shapes.
      mesh: of devices.
      rules: as they are for `config.axis_rules`.

    Raises:
      ShardingError: a name has no rule.
    """
    rules = sharding.decode_rules(rules)

    def place(leaf: Any, names: Names) -> NamedSharding:
        spec = sharding.dividing_spec(leaf.shape, names, mesh, rules)
        return NamedSharding(mesh, spec)

    return map_named(config, place, cache)


def constrain_cache(config: DecoderConfig, cache: Cache) -> Cache:
    """Says where a cache stands on the mesh at hand, as `cache_shardings` has it."""
    rules = sharding.decode_rules(config.axis_rules)
    return map_named(
        config, lambda leaf, names: sharding.constrain(leaf, names, rules), cache
    )


def check_cache(config: DecoderConfig, cache: Any, batch_size: int) -> None:
    """Compares structure and shapes of a cache with the config's.

    Raises:
      ValueError: the cache is one of another config or batch size; says where.
    """
    if isinstance(cache, (list, tuple)):
        raise ValueError(
            f"The cache is a list of {len(cache)}: turn it into the layout of the plan "
            "with shared.from_layer_list, or give it to generation.prefill or decode."
        )
    lines: list[str] = []
    for group, run in config.plan.runs():
        path = run_path(group, run)
        try:
            held = node_at(cache, path)
        except (KeyError, TypeError):
            held = None
        lines += _differences(
            config, run.kind, held, "/".join(path), stack_sizes(group, run), batch_size
        )
    if lines:
        raise ValueError(
            "The cache does not have the layout of this config and batch size. Make "
            "it with shared.init_cache, this config and batch_size:\n  "
            + "\n  ".join(lines)
        )


def _differences(
    config: DecoderConfig,
    kind: LayerKind,
    held: Any,
    where: str,
    sizes: tuple[int, ...],
    batch_size: int,
) -> list[str]:
    """What of a run's cache does not fit, a line each; lengths are free."""
    length = held.capacity if isinstance(held, KVCache) else 1
    want = jax.eval_shape(
        lambda: decoder_layer.init_cache(
            config, kind, batch_size, length, jnp.dtype(config.dtype)
        )
    )
    if type(held) is not type(want):
        names = type(want).__name__, "nothing" if held is None else type(held).__name__
        return [f"{where} must hold a {names[0]} ({kind}), got {names[1]}"]
    rows = jnp.shape(held.position)[-1:]
    if rows != (batch_size,):
        given = f"{rows[0]} rows" if rows else "no rows"
        return [f"{where} has {given}, the tokens have {batch_size}"]
    shapes = {
        name: (sizes + leaf.shape, jnp.shape(getattr(held, name)))
        for name, leaf in want._asdict().items()
    }
    return [
        f"{where}/{name} must have the shape {wanted}, got {given}"
        for name, (wanted, given) in shapes.items()
        if wanted != given
    ]


def first_layer(config: DecoderConfig, cache: Cache) -> KVCache | GatedDeltaNetCache:
    """The cache of the first layer: all layers agree on positions and segments."""
    place = config.plan.places()[0]  # which borrows no keys: there is none before it
    return take(node_at(cache, place.path), tuple(map(jnp.int32, place.slot)))


def position(config: DecoderConfig, cache: Cache) -> Array:
    """How many tokens each row has seen, [B]."""
    return first_layer(config, cache).position


def capacity(config: DecoderConfig, cache: Cache) -> int | None:
    """How many tokens a row can hold; None where each layer holds all that it sees."""
    sizes = []
    for place in config.plan.places():
        part = decoder_layer.mixer_part(config, place.kind)
        held = node_at(cache, place.path)
        if isinstance(held, KVCache) and held.capacity < (part.window or math.inf):
            sizes.append(held.capacity)
    return min(sizes, default=None)


def check_room(
    config: DecoderConfig, cache: Cache, segment_ids: Array, *, no_padding: bool = False
) -> None:
    """Whether all real tokens fit, as far as that is known.

    Inside `jit` it is not: there rows that overflow get NaN, and their `position` says
    how many tokens came.

    Args:
      config: of the model.
      cache: in the layout of the plan.
      segment_ids: [B, T], of the tokens that come.
      no_padding: whether every token is known to be real.

    Raises:
      ValueError: they do not fit; names the row and the numbers.
    """
    room, time = capacity(config, cache), segment_ids.shape[1]
    if room is None:
        return
    seen = position(config, cache)
    if isinstance(seen, jax.core.Tracer) or isinstance(segment_ids, jax.core.Tracer):
        if no_padding and time > room:
            raise ValueError(
                f"{time} tokens a row do not fit into a cache of {room} positions: "
                "make it with a larger max_length."
            )
        return
    new = np.sum(np.asarray(segment_ids) > 0, axis=1)
    total = np.where(new > 0, np.asarray(seen) + new, 0)
    row = int(np.argmax(total))
    if total[row] > room:
        raise ValueError(
            f"The cache has {room} positions; row {row} has {int(seen[row])} tokens in "
            f"it and gets {int(new[row])} more, {int(total[row])} in all: make the "
            "cache with a larger max_length."
        )


# Rows: the slots of a serving engine.


def map_rows(
    config: DecoderConfig, change: Callable[..., Array], *caches: Cache
) -> Cache:
    """`change` applied to every array, with the batch axis in front.

    Args:
      config: of the model.
      change: from arrays [B, ...], one of each cache, to an array.
      *caches: in the layout of the plan.
    """
    tree: Cache = {}
    for group, run in config.plan.runs():
        path, depth = run_path(group, run), len(stack_sizes(group, run))
        mapped = change
        for _ in range(depth):
            mapped = jax.vmap(mapped)
        insert(tree, path, jax.tree.map(mapped, *(node_at(c, path) for c in caches)))
    return tree


def reset_rows(config: DecoderConfig, cache: Cache, rows: ArrayLike) -> Cache:
    """The cache with some rows as they were before the first token.

    Args:
      config: of the model.
      cache: in the layout of the plan.
      rows: bool [B], True for those to empty.

    Raises:
      ValueError: `rows` is not one bool a row, or the cache is one of another config.
    """
    rows, count = jnp.asarray(rows), _count_rows(cache)
    check_cache(config, cache, count)
    if rows.dtype != bool or rows.shape != (count,):
        raise ValueError(
            f"rows must be bool [{count}], one a row of the cache. Got {rows.dtype} "
            f"{list(rows.shape)}."
        )
    changed = map_rows(
        config,
        lambda leaf: jnp.where(_along(rows, leaf), jnp.zeros_like(leaf), leaf),
        cache,
    )
    return constrain_cache(config, changed)


def insert_row(
    config: DecoderConfig, cache: Cache, row: Cache, slot: ArrayLike, source: int = 0
) -> Cache:
    """The cache with one row replaced by a row of another cache.

    Args:
      config: of the model.
      cache: of B rows.
      row: a cache for the same lengths, of any number of rows.
      slot: which row to replace, int scalar; may be traced.
      source: which row of `row` to put there.

    Raises:
      ValueError: a cache is of another config, they hold another number of positions
        or other dtypes, or there is no such row.
    """
    for given in (cache, row):
        check_cache(config, given, _count_rows(given))
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(row), strict=True):
        if a.dtype != b.dtype:
            raise ValueError(
                f"The row is held in {b.dtype}, the cache in {a.dtype}: make both with "
                "the same dtype and state_dtype."
            )
    for held, new in zip(_key_caches(cache), _key_caches(row), strict=True):
        if held.capacity != new.capacity:
            raise ValueError(
                f"The row holds {new.capacity} positions, the cache {held.capacity}: "
                "make both with the same max_length."
            )
    for name, index, given in (("slot", slot, cache), ("source", source, row)):
        known = not isinstance(index, jax.core.Tracer)
        if known and not 0 <= int(np.asarray(index)) < _count_rows(given):
            raise ValueError(
                f"{name} must be one of the {_count_rows(given)} rows. Got {index}."
            )
    changed = map_rows(
        config,
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(
            leaf, new[source], jnp.asarray(slot, jnp.int32), axis=0
        ),
        cache,
        row,
    )
    return constrain_cache(config, changed)


def _layer_caches(cache: Any) -> list[LayerCache]:
    """The layer caches of a cache in any layout; stacked ones count once."""
    leaves = jax.tree.leaves(cache, is_leaf=is_layer_cache)
    return [leaf for leaf in leaves if is_layer_cache(leaf)]


def _key_caches(cache: Any) -> list[KVCache]:
    return [held for held in _layer_caches(cache) if isinstance(held, KVCache)]


def _count_rows(cache: Any) -> int:
    """Rows of a cache in any layout; 0 where there is no layer cache."""
    return next((held.position.shape[-1] for held in _layer_caches(cache)), 0)


def _along(rows: Array, leaf: Array) -> Array:
    return rows.reshape(-1, *(1,) * (leaf.ndim - 1))


# Layers: the flat list that serving engines hold.


def to_layer_list(config: DecoderConfig, cache: Cache) -> list[LayerCache]:
    """The layers' caches in order; those of unscanned layers are not copied."""
    return [
        jax.tree.map(lambda leaf, at=place.slot: leaf[at] if at else leaf, node)
        for place in config.plan.places()
        for node in [node_at(cache, place.path)]
    ]


def from_layer_list(config: DecoderConfig, layers: Sequence[Any]) -> Cache:
    """The inverse of `to_layer_list`.

    Raises:
      ValueError: the list has another length or order than the config's layers, or
        layers that are stacked differ in length or dtype.
    """
    if len(layers) != config.num_layers:
        raise ValueError(
            f"The list has {len(layers)} layer caches, the config {config.num_layers} "
            "layers: give one entry a layer, in order."
        )
    lines: list[str] = []
    batch_size = _count_rows(list(layers)) or 1
    for index, (kind, held) in enumerate(zip(config.layers, layers, strict=True)):
        lines += _differences(config, kind, held, f"entry {index}", (), batch_size)
    if lines:
        raise ValueError(
            "The list of layer caches does not fit the config's layers, which are "
            "counted in order:\n  " + "\n  ".join(lines)
        )
    for group, run in config.plan.runs():
        alike = [jax.tree.map(_form, layers[i]) for i, _ in layer_slots(group, run)]
        for (i, _), form in zip(layer_slots(group, run), alike, strict=True):
            if form != alike[0]:
                first = next(layer_slots(group, run))[0]
                raise ValueError(
                    f"Entries {first} and {i} of the list are stacked in one run, but "
                    "differ in length or dtype: make all with the same max_length and "
                    "dtypes."
                )
    return config.plan.stack(list(layers))


def _form(leaf: Any) -> str:
    return f"{leaf.dtype}{leaf.shape}"


def is_layer_cache(cache: Any) -> bool:
    """Whether this is the cache of a layer."""
    return isinstance(cache, LayerCache)
