"""The loss that a decoder is trained on. B batch, T time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from shared import sharding
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.layers.decoder import DecoderOutput
from shared.ops import losses

# Tokens of a row whose logits are held at once, where they are not all there already.
CHUNK_SIZE = 512


class Loss(NamedTuple):
    """The loss and its parts.

    Attributes:
      total: cross_entropy + router_aux_loss_coef * router + z_loss_coef * z_loss.
      cross_entropy: mean over the predicted tokens.
      router: load-balance loss of all mixture layers; None for a model without.
      tokens: how many tokens the cross-entropy is a mean over.
      z_loss: mean over the same tokens of (log sum of exp(logits)) ** 2 (Chowdhery et
        al., arXiv:2204.02311).
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    router: Float[Array, ""] | None
    tokens: Float[Array, ""]
    z_loss: Float[Array, ""]


def decoder_loss(
    output: DecoderOutput,
    labels: ArrayLike,
    config: DecoderConfig,
    segment_ids: ArrayLike | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    z_loss_coef: float = 0.0,
    chunk_size: int = CHUNK_SIZE,
) -> Loss:
    """Next-token cross-entropy plus the weighted load-balance loss.

    Args:
      output: of the decoder, for the same tokens; with `features` for logits the loss
        makes these chunk by chunk, and never holds all of them.
      labels: not shifted: the logits at t predict the label at t + 1; -100 is ignored.
      config: of the model.
      segment_ids: as given to the decoder; no token predicts one of another segment.
      params: of the model, for an output with features.
      z_loss_coef: weight of the z-loss.
      chunk_size: tokens of a row in a chunk.

    Raises:
      ValueError: labels are not of the batch and time of the output, or params are
        missing.
    """
    features, logits = output.features, output.logits
    labels = jnp.asarray(labels)
    scored = logits if features is None else features
    assert scored is not None
    shape = scored.shape[:2]
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the shape [B, T] = {shape} of the logits. "
            f"Got {labels.shape}."
        )
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
    pairs = losses.next_tokens(labels, segment_ids)
    if features is None:
        assert logits is not None
        sums = losses.sum_over_tokens(logits, *pairs)
    else:
        logits_of = _head(params, config)
        sums = losses.sum_in_chunks(features, logits_of, *pairs, chunk_size)

    count = jnp.maximum(sums.tokens, 1)
    cross_entropy, z_loss = sums.surprisal / count, sums.squared_totals / count
    total, router = cross_entropy, output.aux_loss
    if router is not None:
        total = total + config.router_aux_loss_coef * router
    if z_loss_coef:
        total = total + z_loss_coef * z_loss
    return Loss(total, cross_entropy, router, sums.tokens, z_loss)


def _head(params: Mapping[str, Any] | None, config: DecoderConfig) -> Any:
    """Logits of features. The head's gradient is summed over chunks in float32."""
    if params is None:
        raise ValueError(
            "The output has features instead of logits: give the loss the model's "
            "parameters, params=…, or call the model with output_logits=True."
        )
    name = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    axes = decoder.outer_specs(config)[name].axes
    weight = params[name].astype(np.promote_types(params[name].dtype, np.float32))

    def logits_of(features: Array) -> Array:
        # Said in each chunk, so that its gradient is not gathered either.
        own = sharding.constrain(weight, axes, config.axis_rules)
        return decoder.logits_of({name: own}, features, config)

    return logits_of
