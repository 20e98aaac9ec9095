"""Next-token loss.

Letters: B batch, T time, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

IGNORED_LABEL = -100


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
    dtype = np.promote_types(logits.dtype, np.float32)
    # Labels are shifted, not logits: a shorter copy of [B, T, V] is the larger one.
    targets = jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED_LABEL)
    counted = targets != IGNORED_LABEL
    if segment_ids is not None:
        following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
        counted = counted & (segment_ids == following) & (segment_ids != 0)

    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # out of reach
    targets = jnp.where(counted, targets, 0)[..., None]
    scores = logits.astype(dtype)
    picked = jnp.take_along_axis(scores, targets, axis=-1, mode="fill")[..., 0]
    surprisal = jax.nn.logsumexp(scores, axis=-1) - picked
    count = jnp.sum(counted, dtype=dtype)
    total = jnp.sum(jnp.where(counted, surprisal, 0))
    return total / jnp.maximum(count, 1), count
