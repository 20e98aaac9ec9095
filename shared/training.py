"""The loss that a decoder is trained on. B batch, T time."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from shared.config import DecoderConfig
from shared.layers.decoder import DecoderOutput
from shared.ops.losses import next_token_loss


class Loss(NamedTuple):
    """The loss and its parts.

    Attributes:
      total: cross_entropy + router_aux_loss_coef * router.
      cross_entropy: mean over the predicted tokens.
      router: load-balance loss of all mixture layers; None for a model without.
      tokens: how many tokens the cross-entropy is a mean over.
    """

    total: Float[Array, ""]
    cross_entropy: Float[Array, ""]
    router: Float[Array, ""] | None
    tokens: Float[Array, ""]


def decoder_loss(
    output: DecoderOutput,
    labels: ArrayLike,
    config: DecoderConfig,
    segment_ids: ArrayLike | None = None,
) -> Loss:
    """Next-token cross-entropy plus the weighted load-balance loss.

    Args:
      output: of the decoder, for the same tokens.
      labels: not shifted: the logits at t predict the label at t + 1; -100 is ignored.
      config: of the model.
      segment_ids: as given to the decoder; no token predicts one of another segment.

    Raises:
      ValueError: labels are not of the batch and time of the logits.
    """
    labels, shape = jnp.asarray(labels), output.logits.shape[:2]
    if labels.shape != shape:
        raise ValueError(
            f"labels must have the shape [B, T] = {shape} of the logits. "
            f"Got {labels.shape}."
        )
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
    cross_entropy, tokens = next_token_loss(output.logits, labels, segment_ids)
    router = output.aux_loss
    total = cross_entropy
    if router is not None:
        total = total + config.router_aux_loss_coef * router
    return Loss(total, cross_entropy, router, tokens)
