"""Routing of tokens to experts, and the loss that balances it.

Letters: n tokens, E experts, A experts per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Routing(NamedTuple):
    """The experts each token goes to, most probable first, and their weights."""

    experts: Int[Array, "n A"]
    weights: Float[Array, "n A"]


class RouterStats(NamedTuple):
    """Sums over the real tokens of a layer, enough for the balance loss of a model.

    Attributes:
        counts: Tokens that chose each expert.
        probabilities: Sum of each expert's probability.
        tokens: Number of tokens.
    """

    counts: Float[Array, "*layers E"]
    probabilities: Float[Array, "*layers E"]
    tokens: Float[Array, "*layers"]


def route(logits: Float[Array, "n E"], k: int, *, normalize: bool) -> Routing:
    """The `k` most probable experts of each token, with their probabilities as weights.

    The softmax runs over all experts in at least float32, whatever the type of
    `logits`, since bfloat16 makes ties of near values. Ties go to the lowest index.

    Args:
        logits: Router logits, before any softmax.
        k: Experts per token.
        normalize: Whether the weights of a token are divided by their sum.
    """
    weights, experts = jax.lax.top_k(_probabilities(logits), k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(experts, weights)


def router_stats(
    logits: Float[Array, "n E"], k: int, real: Bool[Array, " n"]
) -> RouterStats:
    """What one layer's router did with the real tokens; counts carry no gradient."""
    probabilities = _probabilities(jnp.where(real[:, None], logits, 0))
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(probabilities), k)
    chosen = jnp.broadcast_to(real[:, None], experts.shape)
    counts = jnp.zeros(logits.shape[1], probabilities.dtype)
    return RouterStats(
        counts=counts.at[experts].add(chosen.astype(counts.dtype)),
        probabilities=jnp.sum(jnp.where(real[:, None], probabilities, 0), axis=0),
        tokens=jnp.sum(real, dtype=counts.dtype),
    )


def load_balance_loss(stats: RouterStats) -> Float[Array, ""]:
    """E times the sum over experts of f_e P_e; A when routing is balanced.

    f_e is the share of tokens that chose expert e, P_e its mean probability. Both are
    taken over the tokens of all layers together: one loss for the model, not one for
    each layer. Without any token it is 0.

    Source: Fedus, Zoph, Shazeer, "Switch Transformers" (arXiv 2101.03961), the
    auxiliary loss, as the Hugging Face models apply it to several experts per token.

    Args:
        stats: Statistics of one layer, or of several along leading axes.
    """
    experts = stats.counts.shape[-1]
    tokens = jnp.sum(stats.tokens)
    share = 1 / jnp.where(tokens > 0, tokens, 1)
    frequency = jnp.sum(stats.counts.reshape(-1, experts), axis=0) * share
    probability = jnp.sum(stats.probabilities.reshape(-1, experts), axis=0) * share
    return experts * jnp.sum(frequency * probability)


def _probabilities(logits: Float[Array, "n E"]) -> Float[Array, "n E"]:
    dtype = np.promote_types(logits.dtype, np.float32)
    return jax.nn.softmax(logits.astype(dtype), axis=-1)
