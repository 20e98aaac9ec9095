"""Axis names on the leaves themselves, for those who shard Linen's own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from shared.config import DecoderConfig
from shared.layers import decoder


def box(params: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Every parameter as a `LogicallyPartitioned` with its axis names.

    `Decoder.apply` takes the boxed tree as well as the plain one;
    `nn.get_partition_spec` and `nn.logical_to_mesh` read the names.

    Args:
      params: nested dict of arrays in the layout of the config's plan.
      config: of the model.
    """
    axes = decoder.logical_axes(config)
    return jax.tree.map(
        lambda names, leaf: nn.LogicallyPartitioned(leaf, names=names),
        axes,
        dict(params),
        is_leaf=lambda node: isinstance(node, tuple),
    )


def unbox(params: Mapping[str, Any]) -> dict[str, Any]:
    """The plain arrays of a boxed tree."""
    return nn.unbox(dict(params))
