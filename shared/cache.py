"""What layers carry from call to call: named tuples in, named tuples out.

An empty cache is the initial one. The caches of a run of equal layers may be stacked:
leaves then have stack axes in front, and every method takes the `slot` of one layer in
them. What a layer changes is written there, and nothing else is copied.

B batch, T time, S cached positions, K key/value heads, H head width, W convolution
width, C convolution channels, Hv value heads, Dk and Dv widths of key and value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from shared.ops.attention import Keys

Slot = tuple[Array, ...]
Tree = TypeVar("Tree")


class KVCache(NamedTuple):
    """Keys (normalised and rotated) and values of the tokens seen.

    Token `n` of a row stands at place `n`. A ring (a sliding layer's cache) holds only
    the newest: token `n` stands at `n` modulo its size.

    Attributes:
      keys: [..., B, S, K, H].
      values: [..., B, S, K, H].
      segment_ids: [..., B, S]; 0 marks an empty place.
      position: [..., B]; how many tokens each row has seen.
    """

    keys: Float[Array, "*stack B S K H"]
    values: Float[Array, "*stack B S K H"]
    segment_ids: Int[Array, "*stack B S"]
    position: Int[Array, "*stack B"]

    @property
    def capacity(self) -> int:
        """How many tokens of a row fit in."""
        return self.segment_ids.shape[-1]

    def order(self, segment_ids: Int[Array, "B T"], slot: Slot = ()) -> Array:
        """The number [B, T] of each new token in its row; padding has the last one's.

        Real tokens follow on to what the row has seen; padding counts for nothing.
        """
        real = (segment_ids > 0).astype(jnp.int32)
        return take(self.position, slot)[:, None] + jnp.cumsum(real, axis=1) - 1

    def as_keys(self, slot: Slot = ()) -> Keys:
        """What is held, as a source of keys for attention."""
        keys, values, segment_ids, position = take(self, slot)
        place = jnp.arange(self.capacity, dtype=jnp.int32)[None]
        last = position[:, None] - 1
        if self.capacity:  # the newest token of those that stand at this place
            place = last - (last - place) % self.capacity
        return Keys(keys, values, segment_ids, place)

    def extend(
        self,
        keys: Array,
        values: Array,
        segment_ids: Array,
        slot: Slot = (),
        *,
        ring: bool = False,
    ) -> KVCache:
        """The cache with the real ones of the given tokens put in.

        Tokens that do not fit are not written but counted: `position` then exceeds the
        capacity (see `overflows`).

        Args:
          keys: [B, T, K, H].
          values: [B, T, K, H].
          segment_ids: [B, T].
          slot: of the layer, in a stacked cache.
          ring: whether new tokens replace the oldest, instead of not fitting.
        """
        if self.capacity == 0:
            return self
        real = segment_ids > 0
        place = self.order(segment_ids, slot)
        position = take(self.position, slot) + jnp.sum(real, axis=1, dtype=jnp.int32)
        if ring:
            real &= place >= position[:, None] - self.capacity
            place = place % self.capacity
        place = jnp.where(real, place, self.capacity)  # out of reach: dropped
        rows = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None]

        def write(held: Array, new: Array) -> Array:
            at = held.at[(*slot, rows, place)]
            return at.set(new.astype(held.dtype), mode="drop")

        return KVCache(
            keys=write(self.keys, keys),
            values=write(self.values, values),
            segment_ids=write(self.segment_ids, segment_ids),
            position=put(self.position, position, slot),
        )

    def overflows(
        self, segment_ids: Int[Array, "B T"], slot: Slot = ()
    ) -> Bool[Array, " B"]:
        """Which rows get real tokens that do not fit."""
        new = jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)
        return (new > 0) & (take(self.position, slot) + new > self.capacity)

    def last_segment(self, slot: Slot = ()) -> Int[Array, " B"]:
        """Segment id of each row's last token, 0 before the first."""
        _, _, segment_ids, position = take(self, slot)
        if self.capacity == 0:
            return jnp.zeros_like(position)
        at = (jnp.maximum(position, 1) - 1) % self.capacity
        return jnp.take_along_axis(segment_ids, at[:, None], axis=1)[:, 0]


def attended(before: KVCache, after: KVCache, new: Keys, slot: Slot) -> list[Keys]:
    """What the given tokens attend to: what was cached, and they themselves.

    Args:
      before: the cache before the call.
      after: the same with the given tokens in it.
      new: their keys and values.
      slot: of the layer, in a stacked cache.
    """
    one = new.keys.shape[1] == 1
    if before.capacity and one and before.keys.dtype == new.keys.dtype:
        # Read after it is written, or the compiler would write into a copy of it all.
        return [after.as_keys(slot)]
    # In a ring, the newest tokens may replace what the first of them see.
    return [before.as_keys(slot), new]


def nan_where_full(
    y: Float[Array, "B T N H"],
    cache: KVCache,
    segment_ids: Int[Array, "B T"],
    slot: Slot,
) -> Float[Array, "B T N H"]:
    """`y`, with NaN in rows that get more tokens than the cache has room for."""
    full = cache.overflows(segment_ids, slot)[:, None, None, None]
    return jnp.where(full, jnp.asarray(jnp.nan, y.dtype), y)


class GatedDeltaNetCache(NamedTuple):
    """The end of the convolution's input and the recurrent state.

    Attributes:
      conv_tail: [..., B, W-1, C]; the last inputs of the convolution.
      state: [..., B, Hv, Dk, Dv].
      segment_id: [..., B]; the sequence the two belong to, 0 before the first token.
      position: [..., B]; how many tokens each row has seen.
    """

    conv_tail: Float[Array, "*stack B W C"]
    state: Float[Array, "*stack B Hv Dk Dv"]
    segment_id: Int[Array, "*stack B"]
    position: Int[Array, "*stack B"]

    def last_segment(self, slot: Slot = ()) -> Int[Array, " B"]:
        """Segment id of each row's last token, 0 before the first."""
        return take(self.segment_id, slot)


class BorrowedCache(NamedTuple):
    """Of a layer that attends to another layer's keys: it only counts.

    Attributes:
      position: [..., B]; how many tokens each row has seen.
    """

    position: Int[Array, "*stack B"]

    def extend(self, segment_ids: Int[Array, "B T"], slot: Slot = ()) -> BorrowedCache:
        """The cache with the real ones of the given tokens counted."""
        new = jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)
        return BorrowedCache(put(self.position, take(self.position, slot) + new, slot))


LayerCache = KVCache | GatedDeltaNetCache | BorrowedCache

# The logical axis names of a layer's cache, without stack axes (see `shared.sharding`).
# A latent stands as one head for all, which no mesh axis divides.
AXES: dict[type, dict[str, tuple[str | None, ...]]] = {
    KVCache: {
        "keys": ("batch", "positions", "heads", None),
        "values": ("batch", "positions", "heads", None),
        "segment_ids": ("batch", "positions"),
        "position": ("batch",),
    },
    GatedDeltaNetCache: {
        "conv_tail": ("batch", None, "heads"),
        "state": ("batch", "heads", None, None),
        "segment_id": ("batch",),
        "position": ("batch",),
    },
    BorrowedCache: {"position": ("batch",)},
}


def take(tree: Tree, slot: Slot) -> Tree:
    """The arrays of one layer, from arrays with stack axes in front."""
    if not slot:
        return tree

    def take_leaf(leaf: Any) -> Any:
        sizes = (1,) * len(slot) + leaf.shape[len(slot) :]
        return lax.dynamic_slice(leaf, _start(leaf, slot), sizes).reshape(
            sizes[len(slot) :]
        )

    return jax.tree.map(take_leaf, tree)


def put(tree: Tree, layer: Tree, slot: Slot) -> Tree:
    """`tree` with the arrays of one layer in their place; the inverse of `take`."""
    if not slot:
        return layer

    def put_leaf(leaf: Any, new: Any) -> Any:
        new = new.reshape((1,) * len(slot) + new.shape)
        return lax.dynamic_update_slice(leaf, new, _start(leaf, slot))

    return jax.tree.map(put_leaf, tree, layer)


def _start(leaf: Array, slot: Slot) -> tuple[Any, ...]:
    return (*slot, *(jnp.int32(0) for _ in leaf.shape[len(slot) :]))
