"""From tokens and a cache to the next token's logits: prefill, and one step.

Every way of getting to token t means the same: in one call or in chunks of any size,
padded left or right, packed, alone or in a batch. Which way it is stands in the
arguments of a call, never in the model.

B batch, T time, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from shared.cache import LayerCache
from shared.config import DecoderConfig
from shared.layers import decoder_cache
from shared.layers.decoder import DecoderOutput
from shared.sharding import AxisRules, decode_rules

Params = Mapping[str, Any]
Cache = dict[str, Any] | Sequence[LayerCache]


@runtime_checkable
class DecoderFunction(Protocol):
    """A decoder as a function of its parameters, in either frontend.

    `zoo_linen.as_function` and `zoo_nnx.as_function` make one.
    """

    @property
    def config(self) -> DecoderConfig:
        """Of the model."""
        ...

    def __call__(
        self, params: Params, tokens: ArrayLike, **options: Any
    ) -> DecoderOutput:
        """Calls the decoder; `options` are those of its own call."""
        ...


class Step(NamedTuple):
    """What a call gives.

    Attributes:
      logits: [B, V] after each row's last token, at least float32. A row that got no
        token has zeros.
      cache: continued, in the form in which it was given.
    """

    logits: Float[Array, "B V"]
    cache: Any


def prefill(
    model: DecoderFunction,
    params: Params,
    tokens: ArrayLike,
    cache: Cache,
    *,
    lengths: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    chunk_size: int | None = None,
    axis_rules: AxisRules | None = None,
) -> Step:
    """Reads tokens into a cache, empty or not.

    On a mesh (`jax.set_mesh`) the cache stands where steps want it, before and after.

    Args:
      model: the decoder.
      params: its parameters.
      tokens: int [B, T].
      cache: from `shared.init_cache` or an earlier call, or one entry a layer as
        `shared.to_layer_list` gives.
      lengths: int [B]; how many tokens of each row, from its start, are real. Rows
        padded on the left or packed are told by `segment_ids` instead.
      segment_ids: int [B, T]; 0 is padding, wherever it stands. None: every token
        belongs to the sequence that its row is in.
      positions: int [B, T], for rotary embedding; None: counted on.
      chunk_size: at most so many tokens at a time; bounds memory, and is one program
        whatever the length. None: all at once.
      axis_rules: where activations stand on a mesh; None: as the config has it.

    Raises:
      ValueError: shapes or caches do not fit, there is no room for the tokens (known
        outside `jit` only: inside, the row's logits are NaN), or both `lengths` and
        `segment_ids` are given.
    """
    config, ids = model.config, jnp.asarray(tokens, jnp.int32)
    held = _layout(config, cache, ids)
    segments = _segment_ids(config, held, ids, lengths, segment_ids)
    no_padding = lengths is None and segment_ids is None
    decoder_cache.check_room(config, held, segments, no_padding=no_padding)
    places = None if positions is None else jnp.asarray(positions, jnp.int32)
    if places is not None and places.shape != ids.shape:
        raise ValueError(
            f"positions must have the shape {ids.shape} of the tokens. Got "
            f"{places.shape}."
        )
    if segment_ids is not None:
        ids, segments, places = _close_up(ids, segments, places)
    size = ids.shape[1] if chunk_size is None else chunk_size
    if size < 1:
        raise ValueError(f"chunk_size must be at least 1. Got {chunk_size}.")

    def read(cache: Any, chunk: tuple[Any, Any, Any]) -> tuple[Any, tuple[Any, Any]]:
        tokens, segment_ids, positions = chunk
        real = segment_ids > 0
        last = tokens.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
        cache = decoder_cache.constrain_cache(config, cache)
        output = model(
            params,
            tokens,
            positions=positions,
            segment_ids=segment_ids,
            cache=cache,
            logits_at=last[:, None],
            axis_rules=axis_rules,
        )
        assert output.logits is not None
        cache = decoder_cache.constrain_cache(config, output.cache)
        return cache, (output.logits[:, 0], real.any(axis=1))

    whole = ids, segments, places
    if size >= ids.shape[1]:
        held, (logits, some) = read(held, whole)
        return _step(jnp.where(some[:, None], logits, 0), held, config, cache)

    def read_on(carry: Any, chunk: Any) -> tuple[Any, None]:
        held, logits = carry
        held, (new, some) = read(held, chunk)
        return (held, jnp.where(some[:, None], new, logits)), None

    wide = np.promote_types(config.dtype, np.float32)
    nothing = jnp.zeros((ids.shape[0], config.vocab_size), wide)
    chunks = jax.tree.map(lambda x: _in_chunks(x, size), whole)
    (held, logits), _ = jax.lax.scan(read_on, (held, nothing), chunks)
    return _step(logits, held, config, cache)


def decode(
    model: DecoderFunction,
    params: Params,
    tokens: ArrayLike,
    cache: Cache,
    *,
    active: ArrayLike | None = None,
    positions: ArrayLike | None = None,
) -> Step:
    """Reads one token a row.

    On a mesh rows are spread over the axes of the length, too: one token has none
    (`shared.sharding.decode_rules`).

    Args:
      model: the decoder.
      params: its parameters.
      tokens: int [B], the last token of each row.
      cache: as `prefill` takes it.
      active: bool [B]; rows where it is False are left as they are, to the bit, and
        their logits are zeros. None: all.
      positions: int [B], for rotary embedding; None: as many as the row has tokens. Who
        gave others to `prefill` gives them here.

    Raises:
      ValueError: as `prefill`.
    """
    lengths = None if active is None else jnp.asarray(active).astype(jnp.int32)
    tokens = jnp.asarray(tokens, jnp.int32)
    if tokens.ndim != 1:
        raise ValueError(
            f"decode takes one token a row, int [batch]. Got {list(tokens.shape)}: "
            "prefill takes several."
        )
    column = tokens[:, None]
    if positions is not None:
        positions = jnp.asarray(positions, jnp.int32)[:, None]
    return prefill(
        model,
        params,
        column,
        cache,
        lengths=lengths,
        positions=positions,
        axis_rules=decode_rules(model.config.axis_rules),
    )


def _layout(config: DecoderConfig, cache: Cache, tokens: Array) -> Any:
    """The cache in the layout of the plan, checked."""
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(
            f"tokens must be [batch, time] with at least one of each. Got "
            f"{tokens.shape}."
        )
    held = cache
    if not isinstance(cache, Mapping):
        held = decoder_cache.from_layer_list(config, cache)
    decoder_cache.check_cache(config, held, tokens.shape[0])
    return held


def _step(logits: Array, held: Any, config: DecoderConfig, given: Cache) -> Step:
    if isinstance(given, Mapping):
        return Step(logits, held)
    return Step(logits, decoder_cache.to_layer_list(config, held))


def _segment_ids(
    config: DecoderConfig,
    cache: Any,
    tokens: Array,
    lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
) -> Array:
    """Of the tokens, from what was given."""
    batch, time = tokens.shape
    if segment_ids is not None:
        if lengths is not None:
            raise ValueError(
                "Give lengths or segment_ids, not both: segment_ids say where padding "
                "is."
            )
        segment_ids = jnp.asarray(segment_ids, jnp.int32)
        if segment_ids.shape != tokens.shape:
            raise ValueError(
                f"segment_ids must have the shape {tokens.shape} of the tokens. Got "
                f"{segment_ids.shape}."
            )
        return segment_ids
    current = decoder_cache.first_layer(config, cache).last_segment()
    segment_ids = jnp.broadcast_to(jnp.maximum(current, 1)[:, None], tokens.shape)
    if lengths is None:
        return segment_ids
    lengths = jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths must have one entry a row, ({batch},). Got {lengths.shape}."
        )
    if not isinstance(lengths, jax.core.Tracer) and (
        (lengths < 0).any() or (lengths > time).any()
    ):
        raise ValueError(
            f"lengths must be between 0 and the {time} tokens of a row. Got {lengths}."
        )
    real = jnp.arange(time, dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(real, segment_ids, 0)


def _close_up(tokens: Array, segment_ids: Array, positions: Any) -> tuple[Any, ...]:
    """Each row's real tokens together at its start, padding behind.

    Padding between tokens of a sequence then is none, wherever chunks are cut.
    """
    order = jnp.argsort(segment_ids <= 0, axis=1, stable=True)
    rows = tokens, segment_ids, positions
    return jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), rows)


def _in_chunks(x: Array, size: int) -> Array:
    """[B, T] as [chunks, B, C], filled up with padding."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size), 1, 0)
