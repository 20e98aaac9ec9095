"""Parameters of an NNX module from their specs, with the zoo's own keys.

An NNX stream counts its draws. The zoo's keys depend on names alone (`shared.params`),
so that Linen, and any stacking, agree: a module takes the base key of its `params`
stream and folds names into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, PRNGKeyArray

from shared.layers.linear import ADAPTER
from shared.params import ParamSpec, child_key, layer_key


def stream_key(rngs: nnx.Rngs, stream: str) -> PRNGKeyArray:
    """The base key of a stream, or of the default stream where there is none."""
    return rngs[stream].key.get_value()


def params_key(rngs: nnx.Rngs) -> PRNGKeyArray:
    """The base key of the `params` stream; counts as one draw from it."""
    rngs.params()
    return stream_key(rngs, "params")


def child_rngs(key: PRNGKeyArray, name: str) -> nnx.Rngs:
    """Streams for the submodule `name` of a module whose own key is `key`."""
    return nnx.Rngs(params=child_key(key, name))


def layer_rngs(rngs: nnx.Rngs, index: int | Array) -> nnx.Rngs:
    """The streams of `rngs` for the layer with absolute index `index`."""
    keys = {name: layer_key(stream_key(rngs, name), index) for name in rngs}
    keys.setdefault("params", layer_key(stream_key(rngs, "params"), index))
    return nnx.Rngs(**keys)


def declare(
    module: nnx.Module,
    specs: Mapping[str, ParamSpec],
    key: PRNGKeyArray,
    param_dtype: Any,
) -> None:
    """Gives `module` a parameter for each spec.

    `eager_sharding=False` keeps the axis names as metadata, so that a model builds
    without a mesh.
    """
    for name, spec in specs.items():
        value = spec.draw(child_key(key, name), param_dtype)
        param = nnx.Param(value, out_sharding=spec.axes, eager_sharding=False)
        setattr(module, name, param)


def values(module: nnx.Module, names: Iterable[str]) -> dict[str, Array]:
    """The arrays of the parameters `names` of `module`, and of their adapters."""
    names = list(names)
    names += [
        f"{name}_{part}"
        for name in names
        if hasattr(module, f"{name}_lora_scale")
        for part in ADAPTER
    ]
    return {name: getattr(module, name).get_value() for name in names}
