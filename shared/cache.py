"""What layers carry from call to call: named tuples in, named tuples out.

B batch, S cached positions, K key/value heads, H head width, W convolution width,
C convolution channels, Hv value heads, Dk and Dv widths of key and value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shared.ops.attention import Keys


class KVCache(NamedTuple):
    """Keys (normalised and rotated) and values of the tokens seen, in order.

    Attributes:
      keys: [B, S, K, H].
      values: [B, S, K, H].
      segment_ids: [B, S]; 0 marks an empty slot.
      position: [B]; how many tokens each row has seen.
    """

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K H"]
    segment_ids: Int[Array, "B S"]
    position: Int[Array, " B"]

    def slots(self, segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """The slot of each new token: real tokens follow on, padding takes none."""
        real = (segment_ids > 0).astype(jnp.int32)
        return self.position[:, None] + jnp.cumsum(real, axis=1) - 1

    def as_keys(self) -> Keys:
        """What is held, as a source of keys for attention."""
        capacity = self.segment_ids.shape[1]
        index = jnp.arange(capacity, dtype=jnp.int32)[None]
        index = jnp.broadcast_to(index, self.segment_ids.shape)
        return Keys(self.keys, self.values, self.segment_ids, index)

    def extend(self, keys: Array, values: Array, segment_ids: Array) -> KVCache:
        """The cache with the real ones of the given tokens put in.

        A row that is full keeps what it has; room for all tokens is the caller's to
        provide.

        Raises:
          ValueError: one call has more tokens than the cache has room for.
        """
        capacity, time = self.segment_ids.shape[1], segment_ids.shape[1]
        if capacity == 0:
            return self
        if time > capacity:
            raise ValueError(
                f"{time} tokens do not fit into a cache of {capacity} positions: make "
                "it with a larger max_length."
            )
        real = segment_ids > 0
        slots = jnp.where(real, self.slots(segment_ids), capacity)
        rows = jnp.arange(slots.shape[0])[:, None]
        at = rows, slots
        return KVCache(
            keys=self.keys.at[at].set(keys.astype(self.keys.dtype), mode="drop"),
            values=self.values.at[at].set(
                values.astype(self.values.dtype), mode="drop"
            ),
            segment_ids=self.segment_ids.at[at].set(segment_ids, mode="drop"),
            position=self.position + jnp.sum(real, axis=1, dtype=jnp.int32),
        )


class GatedDeltaNetCache(NamedTuple):
    """The end of the convolution's input and the recurrent state.

    Attributes:
      conv_tail: [B, W-1, C]; the last inputs of the convolution.
      state: [B, Hv, Dk, Dv]; at least float32.
      segment_id: [B]; the sequence that the two belong to, 0 before the first token.
      position: [B]; how many tokens each row has seen.
    """

    conv_tail: Float[Array, "B W C"]
    state: Float[Array, "B Hv Dk Dv"]
    segment_id: Int[Array, " B"]
    position: Int[Array, " B"]
