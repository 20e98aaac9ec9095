"""Rows under way: what is known of each besides its cache, and how all go on a token.

B rows, V vocabulary, K stop tokens, N steps.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shared.config import DecoderConfig
from shared.generation.decoding import DecoderFunction, Params, decode
from shared.generation.prompts import Batch
from shared.generation.sampling import Sampling, mark_seen, sample
from shared.sharding import constrain, decode_rules

Tree = TypeVar("Tree")


class Rows(NamedTuple):
    """What is known of rows besides their caches.

    Attributes:
      token: [B], the last one, which is not in the cache yet.
      generated: [B], how many tokens came so far.
      limit: [B], at most so many.
      active: [B], whether the row goes on.
      seen: [B, V], ids that stand in the prompt or the answer.
      sampling: how tokens are chosen, an entry a row.
    """

    token: Int[Array, " B"]
    generated: Int[Array, " B"]
    limit: Int[Array, " B"]
    active: Bool[Array, " B"]
    seen: Bool[Array, "B V"]
    sampling: Sampling


class Emitted(NamedTuple):
    """The tokens of one step, or of N steps with an axis in front.

    Attributes:
      token: [B].
      log_prob: [B], under the model's own softmax.
      new: [B], whether the row was active and so has a token here.
      last: [B], whether it is the row's last.
    """

    token: Int[Array, "*steps B"]
    log_prob: Float[Array, "*steps B"]
    new: Bool[Array, "*steps B"]
    last: Bool[Array, "*steps B"]


def constrain_rows(config: DecoderConfig, rows: Rows) -> Rows:
    """Says where rows stand on the mesh at hand: spread is only what they have seen."""
    seen = constrain(rows.seen, ("batch", None), decode_rules(config.axis_rules))
    others = {name: leaf for name, leaf in rows._asdict().items() if name != "seen"}
    return Rows(seen=seen, **everywhere(config, others))


def everywhere(config: DecoderConfig, tree: Tree) -> Tree:
    """Says that every device of the mesh at hand has the whole, for hosts to read."""
    rules = config.axis_rules
    return jax.tree.map(lambda leaf: constrain(leaf, (None,) * leaf.ndim, rules), tree)


def start(logits: Float[Array, "B V"], batch: Batch) -> tuple[Rows, Emitted]:
    """Rows at their first token, from the logits after their prompts."""
    place = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]
    real = place < batch.lengths[:, None]
    seen = mark_seen(jnp.zeros(logits.shape, bool), batch.tokens, real)
    zeros = jnp.zeros_like(batch.lengths)
    rows = Rows(zeros, zeros, batch.limits, batch.limits > 0, seen, batch.sampling)
    return choose(logits, rows, batch.stop_tokens)


def choose(
    logits: Float[Array, "B V"], rows: Rows, stop_tokens: Int[Array, " K"]
) -> tuple[Rows, Emitted]:
    """The next token of every active row; the others stay as they are."""
    sampled = sample(logits, rows.sampling, rows.generated, rows.seen)
    token = jnp.where(rows.active, sampled.tokens, rows.token)
    generated = rows.generated + rows.active.astype(jnp.int32)
    stops = (token[:, None] == stop_tokens[None]).any(axis=1)
    active = rows.active & ~stops & (generated < rows.limit)
    seen = mark_seen(rows.seen, token[:, None], rows.active[:, None])
    emitted = Emitted(token, sampled.log_probs, rows.active, rows.active & ~active)
    return Rows(token, generated, rows.limit, active, seen, rows.sampling), emitted


def advance(
    model: DecoderFunction,
    params: Params,
    cache: Any,
    rows: Rows,
    stop_tokens: Int[Array, " K"],
) -> tuple[Any, Rows, Emitted]:
    """One token for every active row: reads the last one, chooses the next."""
    step = decode(model, params, rows.token, cache, active=rows.active)
    rows, emitted = choose(step.logits, rows, stop_tokens)
    return step.cache, rows, emitted


def advance_many(
    model: DecoderFunction,
    params: Params,
    cache: Any,
    rows: Rows,
    stop_tokens: Int[Array, " K"],
    steps: int,
) -> tuple[Any, Rows, Emitted]:
    """Up to `steps` tokens a row, without leaving the device; ends when all rows have.

    Returns:
      Cache, rows, and the tokens with an axis of `steps` in front; `new` is False where
      there are none.
    """
    one = functools.partial(advance, model)
    empty = jax.tree.map(
        lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype),
        jax.eval_shape(one, params, cache, rows, stop_tokens)[2],
    )

    def unfinished(state: Any) -> Array:
        n, _, rows, _ = state
        return (n < steps) & rows.active.any()

    def body(state: Any) -> Any:
        n, cache, rows, emitted = state
        cache, rows, new = one(params, cache, rows, stop_tokens)
        emitted = jax.tree.map(
            lambda held, leaf: jax.lax.dynamic_update_index_in_dim(held, leaf, n, 0),
            emitted,
            new,
        )
        return n + 1, cache, rows, emitted

    state = jnp.int32(0), cache, rows, empty
    _, cache, rows, emitted = jax.lax.while_loop(unfinished, body, state)
    # Where the loop leaves them is not where it found them, unless it is said again.
    rows = constrain_rows(model.config, rows)
    return cache, rows, everywhere(model.config, emitted)
