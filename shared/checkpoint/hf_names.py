"""Names and layouts of Hugging Face checkpoints, read both ways.

What a family's tensors are called says its table in `hf_families`; here the tables
become the tensors of a config, and where each of our parameters is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shared.checkpoint import hf_families
from shared.checkpoint.hf_families.rows import (
    EMBEDDING,
    HEAD,
    PREFIX,
    PREFIXES,
    NameTable,
    Row,
)
from shared.checkpoint.scheme import (
    AS_IS,
    CONVOLUTION,
    TRANSPOSED,
    Scheme,
    Shape,
    Spot,
    Unit,
    units,
)
from shared.config import ConfigError, DecoderConfig

__all__ = [
    "AS_IS",
    "CONVOLUTION",
    "FAMILIES",
    "PREFIX",
    "PREFIXES",
    "TRANSPOSED",
    "Ignored",
    "NameTable",
    "Row",
    "Tensor",
    "embedding",
    "family",
    "find_prefix",
    "head",
    "ignored",
    "join",
    "scheme",
    "tensors",
]

FAMILIES = {name: both.names for name, both in hf_families.FAMILIES.items()}

# Leaves that stand in one tensor stand one after the other in this axis of it.
JOIN_AXIS = -2
# What a layer that borrows keys and values has no use for; published files have it.
_BORROWED = tuple(
    f"self_attn/{leaf}"
    for leaf in ("k_proj", "v_proj", "k_proj_bias", "v_proj_bias", "k_norm")
)


class Tensor(NamedTuple):
    """A tensor that a checkpoint of some config has.

    Attributes:
      name: in full.
      shape: in the checkpoint.
      row: its row of the table.
      parts: for each leaf of the row, the index that takes it out of the tensor.
      layer: None for a tensor outside the layers.
      expert: None for a tensor that is not of one expert.
    """

    name: str
    shape: Shape
    row: Row
    parts: tuple[Any, ...]
    layer: int | None
    expert: int | None


class Ignored(NamedTuple):
    """Why a tensor is no part of the decoder, and of which sort it is."""

    sort: str
    reason: str


def family(config: DecoderConfig) -> NameTable:
    """The table for `config`.

    Raises:
      ConfigError: there is none.
    """
    if config.family not in FAMILIES:
        raise ConfigError(
            f"family={config.family!r} has no Hugging Face names. There are those of: "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[config.family]


def embedding(prefix: str = PREFIX) -> str:
    """Name of the embedding."""
    return EMBEDDING.name(prefix=prefix)


def head(prefix: str = PREFIX) -> str:
    """Name of the head; in a tied model absent, or a copy of the embedding."""
    return HEAD.name(prefix=prefix)


def find_prefix(names: Iterable[str]) -> str:
    """What the names of the decoder begin with in a checkpoint with these names."""
    have = set(names)
    found = (prefix for prefix in PREFIXES if embedding(prefix) in have)
    return next(found, PREFIX)


def check_prefix(prefix: str) -> str:
    """The prefix, if there is such a one.

    Raises:
      ConfigError: there is not.
    """
    if prefix not in PREFIXES:
        raise ConfigError(f"prefix must be one of {tuple(PREFIXES)}. Got {prefix!r}.")
    return prefix


def tensors(
    config: DecoderConfig, fused: Callable[[str], bool], prefix: str = PREFIX
) -> list[Tensor]:
    """Every tensor of a checkpoint of `config`, layer by layer.

    Args:
      config: of the model.
      fused: whether the checkpoint has a tensor of this name, of fused experts; asked
        for each layer, where the family has both ways.
      prefix: of `PREFIXES`.
    """
    names = family(config)
    config = config.replace(vocab_padding=0)
    shapes: dict[int | None, dict[str, Shape]] = {}
    for unit, shape in units(config).items():
        shapes.setdefault(unit.layer, {})[unit.leaf] = shape
    rows = [row for row in names.rows if "{layer}" not in row.tensor]
    found = _expand(_fitting(rows, shapes[None]), shapes[None], None, prefix)
    rows = [row for row in names.rows if "{layer}" in row.tensor]
    for layer in range(config.num_layers):
        asked = (fused(row.name(layer, prefix=prefix)) for row in names.fused_experts)
        is_fused = not names.experts or any(asked)
        experts = names.fused_experts if is_fused else names.experts
        fitting = _fitting([*rows, *experts], shapes[layer])
        found += _expand(fitting, shapes[layer], layer, prefix)
    return found


def ignored(config: DecoderConfig, names: Iterable[str]) -> dict[str, Ignored]:
    """Which names of tensors of a checkpoint of `config` are none of its decoder's."""
    table, names = family(config), list(names)
    beyond = _layers_beyond(config, table, names)
    borrowed = _borrowed(config, table)
    found = {}
    for name in names:
        beginning = next((b for b in table.ignored if name.startswith(b)), None)
        layer = table.layer_of(name) if beyond else None
        if beginning is not None:
            found[name] = Ignored(f"{beginning}*", table.ignored[beginning])
        elif layer in beyond:
            found[name] = Ignored(f"of layer {layer}", beyond[layer])
        elif name in borrowed:
            reason = "their layers attend to the keys and values of another"
            found[name] = Ignored("of keys and values", reason)
    return found


def _layers_beyond(
    config: DecoderConfig, table: NameTable, names: Iterable[str]
) -> dict[int | None, str]:
    """Layers behind the decoder's that are none of it, and why."""
    found: dict[int | None, str] = {}
    for end, reason in table.ignored_layers.items():
        layers = (table.layer_of(name) for name in names if name.endswith(end))
        found |= {i: reason for i in layers if i is not None and i >= config.num_layers}
    return found


def _borrowed(config: DecoderConfig, table: NameTable) -> set[str]:
    rows = [row for row in table.rows if row.leaves[0] in _BORROWED]
    layers = [i for i, kind in enumerate(config.layers) if kind.borrows_keys]
    return {
        row.name(layer, prefix=prefix)
        for row, layer, prefix in itertools.product(rows, layers, PREFIXES)
    }


def scheme(config: DecoderConfig, tensors: Iterable[Tensor]) -> Scheme:
    """Where these tensors, of a checkpoint of `config`, have each unit."""
    spots: dict[Unit, list[Spot]] = {}
    shapes = {}
    for tensor in tensors:
        shapes[tensor.name] = tensor.shape
        for leaf, part in zip(tensor.row.leaves, tensor.parts, strict=True):
            spot = Spot(tensor.name, part, tensor.row.layout, tensor.expert)
            spots.setdefault(Unit(leaf, tensor.layer), []).append(spot)
    return Scheme(shapes, spots, units(config.replace(vocab_padding=0)))


def _fitting(rows: list[Row], leaf_shapes: Mapping[str, Shape]) -> list[Row]:
    """The rows whose leaves there are; every leaf must have one."""
    fitting = [row for row in rows if leaf_shapes.keys() >= set(row.leaves)]
    unnamed = leaf_shapes.keys() - {leaf for row in fitting for leaf in row.leaves}
    if unnamed:
        raise ConfigError(
            f"No Hugging Face name for {', '.join(sorted(unnamed))}. "
            f"Add rows for them in {hf_families.__name__}."
        )
    return fitting


def _expand(
    rows: list[Row], leaf_shapes: Mapping[str, Shape], layer: int | None, prefix: str
) -> list[Tensor]:
    found = []
    for row in rows:
        shape, parts = join(row.part_shapes(leaf_shapes))
        experts: list[int | None] = [None]
        if "{expert}" in row.tensor:
            experts = [*range(leaf_shapes[row.leaves[0]][0])]
        for expert in experts:
            name = row.name(layer, expert, prefix)
            found.append(Tensor(name, shape, row, parts, layer, expert))
    return found


def join(shapes: list[Shape]) -> tuple[Shape, tuple[Any, ...]]:
    """Shape of arrays of `shapes` one after the other, and the index of each."""
    if len(shapes) == 1:
        return shapes[0], ((),)
    bounds = np.cumsum([0, *(shape[JOIN_AXIS] for shape in shapes)]).tolist()
    first = shapes[0]
    parts = tuple(
        (slice(None),) * (len(first) + JOIN_AXIS) + (slice(start, stop),)
        for start, stop in itertools.pairwise(bounds)
    )
    return (*first[:JOIN_AXIS], bounds[-1], *first[JOIN_AXIS + 1 :]), parts
