"""Parameters of a Linen module from their specs, with the zoo's own keys.

Linen folds a path and a running count into the key of each parameter. The zoo's keys
depend on names alone (`shared.params`), so that NNX, and any stacking, agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, PRNGKeyArray

from shared.layers.linear import ADAPTER
from shared.params import ParamSpec, child_key


def declare(
    module: nn.Module, specs: Mapping[str, ParamSpec], param_dtype: Any
) -> dict[str, Array]:
    """Registers a parameter of `module` for each spec; returns their values by name.

    Adapters of these parameters are returned, too, where there are some.
    """
    weights = {
        name: module.param(name, _initializer(module, name, spec, param_dtype))
        for name, spec in specs.items()
    }
    adapted = (n for n in specs if module.has_variable("params", f"{n}_lora_scale"))
    for name, part in itertools.product(adapted, ADAPTER):
        own = f"{name}_{part}"
        weights[own] = nn.unbox(module.get_variable("params", own))
    return weights


def stream_key(module: nn.Module, stream: str) -> PRNGKeyArray:
    """The key of `module` in a stream: the seed with the module's path folded in.

    For the outermost module it is the seed itself, as NNX's streams hold it.
    """
    assert module.scope is not None
    lazy = module.scope.rngs[stream]
    key = lazy.rng
    for token in lazy.suffix:
        if isinstance(token, str):
            key = child_key(key, token)
        else:
            key = jax.random.fold_in(key, token)
    return key


def _initializer(
    module: nn.Module, name: str, spec: ParamSpec, param_dtype: Any
) -> Callable[[PRNGKeyArray], Array]:
    def init(linen_key: PRNGKeyArray) -> Array:
        # Without a stream Linen only asks for the shape, to check a given value.
        if not module.has_rng("params"):
            return spec.draw(linen_key, param_dtype)
        return spec.draw(child_key(stream_key(module, "params"), name), param_dtype)

    return init
