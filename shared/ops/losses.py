"""Next-token losses, of all logits or of what they are made of.

Letters: B batch, T time, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

IGNORED_LABEL = -100


class TokenSums(NamedTuple):
    """Sums over the pairs of tokens that count.

    Attributes:
        surprisal: Of -log softmax(logits)[target].
        squared_totals: Of (log sum of exp(logits)) ** 2, for the z-loss.
        tokens: How many there are.
    """

    surprisal: Float[Array, ""]
    squared_totals: Float[Array, ""]
    tokens: Float[Array, ""]


def next_token_loss(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean of -log softmax(logits[t])[labels[t + 1]], and the number of pairs in it.

    The shift is done here: `labels` are the tokens themselves. A pair counts when its
    label is not -100 and both its tokens lie in one segment other than 0, which is
    padding. Computed in at least float32; 0 when no pair counts.

    A label outside the vocabulary makes the loss NaN.

    Args:
        logits: Scores of the next token.
        labels: Token ids, -100 where a token is not to be predicted.
        segment_ids: Sequence of each token, 0 at padding; None for one sequence a row.
    """
    sums = sum_over_tokens(logits, *next_tokens(labels, segment_ids))
    return sums.surprisal / jnp.maximum(sums.tokens, 1), sums.tokens


def next_tokens(
    labels: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The label after each token, and whether it is to be predicted from that token."""
    # Labels are shifted, not logits: a shorter copy of [B, T, V] is the larger one.
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED_LABEL)
    counted = targets != IGNORED_LABEL
    if segment_ids is not None:
        following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
        counted = counted & (segment_ids == following) & (segment_ids != 0)
    return targets, counted


def sum_over_tokens(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> TokenSums:
    """`TokenSums` of logits; see `next_tokens` for the other two."""
    dtype = np.promote_types(logits.dtype, np.float32)
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # out of reach
    targets = jnp.where(counted, targets, 0)[..., None]
    scores = logits.astype(dtype)
    picked = jnp.take_along_axis(scores, targets, axis=-1, mode="fill")[..., 0]
    totals = jax.nn.logsumexp(scores, axis=-1)
    return TokenSums(
        surprisal=jnp.sum(jnp.where(counted, totals - picked, 0)),
        squared_totals=jnp.sum(jnp.where(counted, jnp.square(totals), 0)),
        tokens=jnp.sum(counted, dtype=dtype),
    )


def sum_in_chunks(
    features: Float[Array, "B T D"],
    logits_of: Callable[[Float[Array, "B c D"]], Float[Array, "B c V"]],
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
    chunk_size: int,
) -> TokenSums:
    """`sum_over_tokens`, of a chunk of the time at once, also in the backward pass.

    Args:
        features: What logits are made of.
        logits_of: Makes them.
        targets: See `next_tokens`.
        counted: See `next_tokens`.
        chunk_size: Tokens of a row whose logits are held at once.
    """
    time = features.shape[1]
    chunks = -(-time // chunk_size)
    if chunks == 1:
        return sum_over_tokens(logits_of(features), targets, counted)
    size = -(-time // chunks)

    def by_chunk(x):
        fill = ((0, 0), (0, chunks * size - time), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, fill).reshape(x.shape[0], chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    @jax.checkpoint
    def add(sums, chunk):
        features, targets, counted = chunk
        more = sum_over_tokens(logits_of(features), targets, counted)
        return TokenSums(*(a + b for a, b in zip(sums, more, strict=True)))

    dtype = np.promote_types(features.dtype, np.float32)
    zero = TokenSums(*(jnp.zeros((), dtype) for _ in TokenSums._fields))
    chunked = tuple(map(by_chunk, (features, targets, counted)))
    sums, _ = jax.lax.scan(lambda sums, chunk: (add(sums, chunk), None), zero, chunked)
    return sums
