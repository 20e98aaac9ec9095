"""What every layer is told besides its input, and how sequences share a row.

B batch, T time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int

from shared.sharding import AxisRules, activation_spec, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a layer is told: the same for all layers but for what `at_layer` sets.

    Attributes:
      positions: [B, T] for rotary embedding, or [3, B, T] (time, height, width).
      segment_ids: [B, T]; 0 is padding, equal positive ids are one sequence.
      layer_index: absolute index of the layer, int32 scalar.
      cache_slot: where the layer's cache stands in the cache that it is given, which
        holds all layers of its run; () where it holds this layer alone.
      layer_input: [B, T, P], the layer's part of the tokens' second embedding; None
        in a model without.
      lent: the keys that layers of a mixer borrow (`LentKeys`), by mixer.
      dropout_key: key of the whole model for this call; None: no dropout.
      want_hidden: whether layers return their output in `LayerAux.hidden`.
      axis_rules: where activations stand on the mesh at hand (`shared.sharding`).
      expert_chunks: in how many parts a device gathers the weights of experts.
      attention_kernel: what computes attention (`DecoderConfig.attention_kernel`).
      expert_kernel: what multiplies rows by their expert's matrices.
    """

    positions: Array
    segment_ids: Array
    layer_index: Array
    cache_slot: tuple[Array, ...] = ()
    layer_input: Array | None = None
    lent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dropout_key: Array | None = None
    want_hidden: bool = dataclasses.field(default=False, metadata={"static": True})
    axis_rules: AxisRules = dataclasses.field(default=(), metadata={"static": True})
    expert_chunks: int = dataclasses.field(default=1, metadata={"static": True})
    attention_kernel: str = dataclasses.field(default="auto", metadata={"static": True})
    expert_kernel: str = dataclasses.field(default="auto", metadata={"static": True})

    @property
    def deterministic(self) -> bool:
        """Whether dropout is off."""
        return self.dropout_key is None

    def at_layer(
        self,
        index: ArrayLike,
        cache_slot: tuple[Array, ...] = (),
        layer_input: Array | None = None,
    ) -> Context:
        """The context of the layer with absolute index `index`."""
        return dataclasses.replace(
            self,
            layer_index=jnp.asarray(index),
            cache_slot=cache_slot,
            layer_input=layer_input,
        )

    def constrain(self, x: Array, *names: str | None) -> Array:
        """Says where an activation stands, by the names of its dimensions."""
        return constrain(x, names, self.axis_rules)

    def activation_spec(self, x: Array, *names: str | None) -> PartitionSpec | None:
        """Where an activation stands; None: there are no rules or no mesh."""
        return activation_spec(x.shape, names, self.axis_rules)

    def layer_dropout_key(self) -> Array:
        """The dropout key of this layer: equal in every layout and frontend."""
        if self.dropout_key is None:
            raise ValueError("The context has no dropout key: the call has no dropout.")
        return jax.random.fold_in(self.dropout_key, self.layer_index)

    @staticmethod
    def create(
        shape: tuple[int, ...],
        *,
        positions: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        start: Array | None = None,
        segment: Array | None = None,
        dropout_key: Array | None = None,
        want_hidden: bool = False,
        axis_rules: AxisRules = (),
        expert_chunks: int = 1,
        attention_kernel: str = "auto",
        expert_kernel: str = "auto",
    ) -> Context:
        """A context for inputs of `shape`, with what is not given filled in.

        Positions default to 0, 1, 2 … within each row; rotary embedding only sees
        differences, so padding at the ends and packed sequences need no others. With
        `start` [B], the number of tokens a cache has seen, the real tokens of a row
        count on.
        Positions [3, B, T] are those of images and video; text has three equal ones.
        Segment ids default to 1, or to `segment` [B], the sequence that a row is in,
        where that is not 0.

        Raises:
          ValueError: shapes differ, or there are no tokens.
        """
        if len(shape) != 2 or 0 in shape:
            raise ValueError(
                f"tokens must be [batch, time] with at least one of each. Got {shape}."
            )
        if segment_ids is None and segment is not None:
            segment_ids = jnp.broadcast_to(jnp.maximum(segment, 1)[:, None], shape)
        elif segment_ids is None:
            segment_ids = jnp.ones(shape, jnp.int32)
        segment_ids = jnp.asarray(segment_ids)
        if positions is None and start is not None:
            real = (segment_ids > 0).astype(jnp.int32)
            positions = start[:, None] + jnp.cumsum(real, axis=1) - 1
        elif positions is None:
            positions = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        positions = jnp.asarray(positions)
        by_axis = positions[0] if positions.ndim == 3 else positions
        if positions.ndim == 3 and positions.shape[0] != 3:
            raise ValueError(
                "positions must be [batch, time], or [3, batch, time] for time, height "
                f"and width. Got {positions.shape}."
            )
        for name, value in (("segment_ids", segment_ids), ("positions", by_axis)):
            if value.shape != shape:
                raise ValueError(
                    f"{name} must have the shape of the tokens. Got {value.shape} "
                    f"for tokens of {shape}."
                )
        return Context(
            positions=positions.astype(jnp.int32),
            segment_ids=segment_ids.astype(jnp.int32),
            layer_index=jnp.int32(0),
            dropout_key=dropout_key,
            want_hidden=want_hidden,
            axis_rules=axis_rules,
            expert_chunks=expert_chunks,
            attention_kernel=attention_kernel,
            expert_kernel=expert_kernel,
        )


class Segments(NamedTuple):
    """The sequences of a row, numbered in order.

    Attributes:
      groups: [B, T]; 0 continues what came before the row, later sequences count up;
        padding has the number of the last real token before it.
      real: [B, T]; False is padding.
      last_id: [B]; segment id of the last real token, or what was carried in.
    """

    groups: Int[Array, "B T"]
    real: Bool[Array, "B T"]
    last_id: Int[Array, " B"]


def number_segments(
    segment_ids: Int[Array, "B T"], carried: Int[Array, " B"]
) -> Segments:
    """Numbers the sequences of each row, continuing the sequence `carried`.

    Args:
      segment_ids: 0 is padding; equal neighbours, padding apart, are one sequence.
      carried: id of the sequence that the state carried in belongs to; 0: none.
    """
    real = segment_ids > 0
    at = jnp.where(real, jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None], -1)
    last_real = jax.lax.cummax(at, axis=1)
    seen = jnp.take_along_axis(segment_ids, jnp.maximum(last_real, 0), axis=1)
    filled = jnp.where(last_real >= 0, seen, carried[:, None])
    before = jnp.concatenate([carried[:, None], filled[:, :-1]], axis=1)
    starts = real & (before > 0) & (filled != before)
    groups = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    return Segments(groups, real, filled[:, -1])
