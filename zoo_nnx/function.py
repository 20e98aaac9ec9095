"""An NNX decoder as a function of its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from shared.config import DecoderConfig
from shared.layers.decoder import DecoderOutput
from zoo_nnx.state import attach_adapters, take_adapters


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderFunction:
    """What `shared.generation` and `parity` call; hashable, so `jit` can hold it.

    The module is rebuilt in every call, so what a call changes in it is gone after it.
    Two of the same model are different to `jit`: make one and keep it.

    Attributes:
      config: of the model.
      graphdef: its structure.
      abstract: its parameters' Variables, which get the values of a call.
      others: all else that it owns.
    """

    config: DecoderConfig
    graphdef: nnx.GraphDef
    abstract: nnx.State
    others: tuple[nnx.State, ...]

    def __call__(
        self,
        params: Mapping[str, Any],
        tokens: ArrayLike,
        *,
        dropout_key: PRNGKeyArray | None = None,
        **options: Any,
    ) -> DecoderOutput:
        """Calls the decoder; `options` are those of its own call.

        Adapters beside the parameters (`shared.lora.join`) are attached to it first.

        With `dropout_key` there is dropout, drawn from it. As in Linen, there is none
        otherwise, whatever `train()` has set.
        """
        if dropout_key is not None:
            options["rngs"] = nnx.Rngs(dropout=dropout_key)
        options.setdefault("deterministic", dropout_key is None)
        params, adapters = take_adapters(self.abstract, params)
        state = jax.tree.map(lambda leaf: leaf, self.abstract)
        nnx.replace_by_pure_dict(state, dict(params))
        fresh = jax.tree.map(lambda leaf: leaf, self.others)
        model = nnx.merge(self.graphdef, state, *fresh)
        attach_adapters(model, adapters)
        return model(tokens, **options)


def as_function(model: Any) -> DecoderFunction:
    """The decoder as a function of parameters, tokens and the options of its call."""
    graphdef, params, *others = nnx.split(model, nnx.Param, ...)
    abstract = jax.tree.map(_shape, params)
    return DecoderFunction(model.config, graphdef, abstract, tuple(others))


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
