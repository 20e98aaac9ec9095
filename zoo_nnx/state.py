"""Between an NNX decoder and the plain parameter tree that all formats speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from shared.config import DecoderConfig
from shared.trees import check_same_paths
from zoo_nnx.decoder import Decoder


def from_params(
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    rngs: nnx.Rngs | None = None,
    **options: Any,
) -> Decoder:
    """A decoder that holds exactly the given arrays; no value is drawn or copied.

    Args:
      config: of the model.
      params: nested dict of arrays in the layout of the config's plan.
      rngs: streams the model keeps, such as `dropout`.
      **options: passed to `Decoder`.

    Raises:
      ValueError: leaves are missing, unexpected or of the wrong shape; all are listed.
    """
    streams: dict[str, Any] = dict(rngs.items()) if rngs is not None else {}
    streams.setdefault("params", nnx.Rngs(0).default)

    def build() -> Decoder:
        return Decoder(config, rngs=nnx.Rngs(**streams), **options)

    # Without updates of the graph, for with them names are looked up on a mesh at hand.
    outline = nnx.eval_shape(build, graph_updates=False)
    graphdef, abstract, *_ = nnx.split(outline, nnx.Param, ...)
    check_same_paths(nnx.to_pure_dict(abstract), params)
    nnx.replace_by_pure_dict(abstract, dict(params))
    # Compiled, the parameters are dead code: only the other state is ever computed.
    rest = jax.jit(lambda: nnx.state(build(), nnx.Not(nnx.Param)))()
    return nnx.merge(graphdef, abstract, rest)


def to_params(model: nnx.Module) -> dict[str, Any]:
    """The model's parameters as a nested dict of arrays, keys as text."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
