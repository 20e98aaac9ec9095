"""Routing of tokens to experts, and the loss that balances it.

Letters: n tokens, E experts, A experts per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


class Routing(NamedTuple):
    """The experts each token goes to, the first choice first, and their weights."""

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


def route(
    logits: Float[Array, "n E"],
    k: int,
    *,
    normalize: bool,
    scores: str = "softmax",
    correction_bias: Float[Array, " E"] | None = None,
    num_groups: int = 1,
    groups_per_token: int = 1,
    scaling_factor: float = 1.0,
    per_expert_scale: Float[Array, " E"] | None = None,
) -> Routing:
    """The `k` experts of each token that score highest, with their scores as weights.

    Scores are over all experts and in at least float32, whatever the type of `logits`,
    since bfloat16 makes ties of near values. Ties go to the lowest index.

    Groups and correction bias are those of DeepSeek-V3 (arXiv:2412.19437, 2.1.2).

    Args:
        logits: Router logits, before any softmax.
        k: Experts per token.
        normalize: Whether the weights of a token are divided by their sum.
        scores: "softmax" or "sigmoid" of the logits.
        correction_bias: Added to the scores to choose, not to weigh; no gradient.
        num_groups: Experts, in order, are in so many groups of one size.
        groups_per_token: Of them only so many are chosen from, those whose two best
            experts have the highest sum.
        scaling_factor: All weights are multiplied by it, once normalised.
        per_expert_scale: Then each expert's weight is multiplied by its own.
    """
    score = _scores(logits, scores)
    choice = score
    if correction_bias is not None:
        choice = choice + correction_bias.astype(score.dtype)[None]
    if groups_per_token < num_groups:
        choice = _in_best_groups(choice, num_groups, groups_per_token)
    if choice is score:
        weights, experts = jax.lax.top_k(score, k)
    else:
        _, experts = jax.lax.top_k(jax.lax.stop_gradient(choice), k)
        weights = jnp.take_along_axis(score, experts, axis=-1)
    if normalize:
        weights = weights / _total(weights, scores)
    if scaling_factor != 1.0:
        weights = weights * scaling_factor
    if per_expert_scale is not None:
        weights = weights * per_expert_scale.astype(weights.dtype)[experts]
    return Routing(experts, weights)


def router_stats(
    logits: Float[Array, "n E"],
    experts: Int[Array, "n A"],
    real: Bool[Array, " n"],
    *,
    scores: str = "softmax",
) -> RouterStats:
    """What one layer's router did with the real tokens; counts carry no gradient.

    Args:
        logits: Router logits.
        experts: The experts that each token went to.
        real: False at padding.
        scores: Of the logits; sigmoids are divided by their sum over all experts, to
            be probabilities.
    """
    probabilities = _scores(jnp.where(real[:, None], logits, 0), scores)
    if scores != "softmax":
        probabilities = probabilities / _total(probabilities, scores)
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


def _scores(logits: Float[Array, "n E"], name: str) -> Float[Array, "n E"]:
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    if name == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jax.nn.softmax(logits, axis=-1)


def _total(scores: Float[Array, "n A"], name: str) -> Float[Array, "n 1"]:
    """The sum of a token's scores; all sigmoids of a token may be 0."""
    total = jnp.sum(scores, axis=-1, keepdims=True)
    return total + 1e-20 if name == "sigmoid" else total


def _in_best_groups(
    choice: Float[Array, "n E"], groups: int, kept: int
) -> Float[Array, "n E"]:
    """`choice`, and -inf outside the groups whose two best have the highest sum."""
    grouped = choice.reshape(choice.shape[0], groups, -1)
    best_two, _ = jax.lax.top_k(grouped, 2)
    _, chosen = jax.lax.top_k(jnp.sum(best_two, axis=-1), kept)
    numbers = jnp.arange(groups, dtype=chosen.dtype)[None, None]
    allowed = jnp.any(chosen[:, :, None] == numbers, axis=1)
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
