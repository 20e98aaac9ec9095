"""Between an NNX decoder and the plain parameter tree that all formats speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from shared import lora
from shared.config import DecoderConfig
from shared.trees import check_same_paths, flatten
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
      params: nested dict of arrays in the layout of the config's plan; adapters that
        `shared.lora.join` put in become `nnx.LoRAParam`s.
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
    params, adapters = take_adapters(abstract, params)
    check_same_paths(nnx.to_pure_dict(abstract), params)
    nnx.replace_by_pure_dict(abstract, dict(params))
    # Compiled, the parameters are dead code: only the other state is ever computed.
    rest = jax.jit(lambda: nnx.state(build(), nnx.Not(nnx.Param)))()
    model: Decoder = nnx.merge(graphdef, abstract, rest)
    attach_adapters(model, adapters)
    return model


def take_adapters(
    abstract: nnx.State, params: Mapping[str, Any]
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Parameters for a model's own Variables, and adapters that it has none for."""
    if lora.split(nnx.to_pure_dict(abstract))[1]:
        return params, {}
    return lora.split(params)


def attach_adapters(model: Decoder, adapters: Mapping[str, Any]) -> None:
    """Gives a decoder low-rank adapters, beside the parameters that they change.

    What is trained, A and B, are `nnx.LoRAParam`s; the scale is a plain `nnx.Param`.

    Args:
      model: gets them.
      adapters: of `shared.lora.init`.

    Raises:
      ValueError: lists every leaf that does not fit the model's config.
    """
    specs = dict(flatten(lora.check(model.config, adapters)))
    for path, leaf in flatten(adapters):
        module = model
        for name in path[:-1]:
            module = getattr(module, name)
        kind = nnx.Param if path[-1].endswith("_lora_scale") else nnx.LoRAParam
        axes = specs[path].axes
        setattr(module, path[-1], kind(leaf, out_sharding=axes, eager_sharding=False))


def to_params(model: nnx.Module) -> dict[str, Any]:
    """The model's parameters as a nested dict of arrays, keys as text."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))
