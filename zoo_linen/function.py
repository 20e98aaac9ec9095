"""A Linen decoder as a function of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from shared.config import DecoderConfig
from shared.layers.decoder import DecoderOutput
from zoo_linen.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class DecoderFunction:
    """What `shared.generation` and `parity` call; hashable, so `jit` can hold it."""

    model: Decoder

    @property
    def config(self) -> DecoderConfig:
        """Of the model."""
        return self.model.config

    def __call__(
        self,
        params: Mapping[str, Any],
        tokens: ArrayLike,
        *,
        dropout_key: PRNGKeyArray | None = None,
        **options: Any,
    ) -> DecoderOutput:
        """Calls the decoder; `options` are those of its own call.

        With `dropout_key` there is dropout, drawn from it.
        """
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        options.setdefault("deterministic", rngs is None)
        output: Any = self.model.apply({"params": params}, tokens, rngs=rngs, **options)
        return output


def as_function(model: Decoder) -> DecoderFunction:
    """The decoder as a function of parameters, tokens and the options of its call."""
    return DecoderFunction(model)
