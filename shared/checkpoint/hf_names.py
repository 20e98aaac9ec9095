"""Names and layouts of Hugging Face checkpoints: one table a family, read both ways.

A row says what a tensor is called, which leaf of our tree it is, and how the two are
oriented. V vocabulary, D model width, E experts, F feed-forward width, W convolution
width, C convolution channels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from shared.checkpoint.scheme import (
    AS_IS,
    CONVOLUTION,
    TRANSPOSED,
    Layout,
    Scheme,
    Shape,
    Spot,
    Unit,
    units,
)
from shared.config import ConfigError, DecoderConfig

# Leaves that stand in one tensor stand one after the other in this axis of it.
JOIN_AXIS = -2


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor, or one for each layer and expert.

    Attributes:
      tensor: its name, with {layer} and {expert} where it has them.
      leaves: paths in the tree of a layer, or of the model for a tensor without
        {layer}. Several stand one after the other in the tensor's last axis but one.
      layout: the orientation.
      sizes: the fields of config.json that its shape follows from.
    """

    tensor: str
    leaves: tuple[str, ...]
    layout: Layout
    sizes: str

    def name(self, layer: int | None = None, expert: int | None = None) -> str:
        """Name of the tensor of a layer and expert."""
        return self.tensor.format(layer=layer, expert=expert)

    def part_shapes(self, leaf_shapes: Mapping[str, Shape]) -> list[Shape]:
        """Shapes in the tensor of its leaves, whose own are `leaf_shapes`."""
        own = [leaf_shapes[leaf] for leaf in self.leaves]
        if "{expert}" in self.tensor:
            own = [shape[1:] for shape in own]
        return [self.layout.tensor_shape(shape) for shape in own]


def _row(tensor: str, leaf: str, layout: Layout, sizes: str) -> Row:
    return Row(tensor, (leaf,), layout, sizes)


@dataclasses.dataclass(frozen=True)
class Family:
    """The tensors of a family of models.

    Attributes:
      rows: all but the routed experts.
      experts: the routed experts, one tensor each.
      fused_experts: the routed experts, all of a layer in one tensor.
      head: the head's tensor; in a tied model absent, or a copy of `embedding`.
      embedding: the embedding's tensor.
      ignored: beginnings of names of tensors that are no part of the decoder, with
        the reason; they are counted and reported, never read.
    """

    rows: tuple[Row, ...]
    experts: tuple[Row, ...]
    fused_experts: tuple[Row, ...]
    head: str
    embedding: str
    ignored: Mapping[str, str]

    def ignores(self, name: str) -> bool:
        """Whether a tensor is no part of the decoder."""
        return name.startswith(tuple(self.ignored))

    def layer_of(self, name: str) -> int | None:
        """The layer in a tensor's name, if it has one."""
        beginning, _, _ = self.experts[0].tensor.partition("{layer}")
        number = name.removeprefix(beginning).partition(".")[0]
        return int(number) if name.startswith(beginning) and number.isdigit() else None


_LAYER = "model.layers.{layer}."
_HEADS = "num_attention_heads, num_key_value_heads, head_dim, hidden_size"
_LINEAR = (
    "linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, "
    "linear_value_head_dim, hidden_size"
)
_SHARED = "shared_expert_intermediate_size, hidden_size"
_EXPERTS = "num_experts, moe_intermediate_size, hidden_size"

_OUTER = (
    _row("model.embed_tokens.weight", "embed_tokens", AS_IS, "vocab_size, hidden_size"),
    _row("model.norm.weight", "norm", AS_IS, "hidden_size"),
    _row("lm_head.weight", "lm_head", TRANSPOSED, "vocab_size, hidden_size"),
)

_NORMS = tuple(
    _row(f"{_LAYER}{norm}.weight", norm, AS_IS, "hidden_size")
    for norm in ("input_layernorm", "post_attention_layernorm")
)

# q_proj keeps query and gate interleaved per head, in_proj_qkvz and in_proj_ba their
# groups by key head: the layers split them.
_FULL_ATTENTION = (
    *(
        _row(f"{_LAYER}self_attn.{p}.weight", f"self_attn/{p}", TRANSPOSED, _HEADS)
        for p in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    *(
        _row(f"{_LAYER}self_attn.{p}.bias", f"self_attn/{p}_bias", AS_IS, _HEADS)
        for p in ("q_proj", "k_proj", "v_proj", "o_proj")
    ),
    *(
        _row(f"{_LAYER}self_attn.{n}.weight", f"self_attn/{n}", AS_IS, "head_dim")
        for n in ("q_norm", "k_norm")
    ),
)

_LINEAR_ATTENTION = (
    *(
        _row(f"{_LAYER}linear_attn.{p}.weight", f"linear_attn/{p}", TRANSPOSED, _LINEAR)
        for p in ("in_proj_qkvz", "in_proj_ba", "out_proj")
    ),
    _row(
        f"{_LAYER}linear_attn.conv1d.weight",
        "linear_attn/conv1d",
        CONVOLUTION,
        f"{_LINEAR}, linear_conv_kernel_dim",
    ),
    *(
        _row(
            f"{_LAYER}linear_attn.{leaf}",
            f"linear_attn/{leaf}",
            AS_IS,
            "linear_num_value_heads",
        )
        for leaf in ("A_log", "dt_bias")
    ),
    _row(
        f"{_LAYER}linear_attn.norm.weight",
        "linear_attn/norm",
        AS_IS,
        "linear_value_head_dim",
    ),
)

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

_FEED_FORWARD = (
    *(
        _row(
            f"{_LAYER}mlp.{p}.weight",
            f"mlp/{p}",
            TRANSPOSED,
            "intermediate_size, hidden_size",
        )
        for p in _PROJECTIONS
    ),
    _row(f"{_LAYER}mlp.gate.weight", "mlp/gate", TRANSPOSED, _EXPERTS),
    *(
        _row(
            f"{_LAYER}mlp.shared_expert.{p}.weight",
            f"mlp/shared_expert/{p}",
            TRANSPOSED,
            _SHARED,
        )
        for p in _PROJECTIONS
    ),
    _row(
        f"{_LAYER}mlp.shared_expert_gate.weight",
        "mlp/shared_expert_gate",
        TRANSPOSED,
        "hidden_size",
    ),
)

# [F, D], [F, D] and [D, F].
_EACH_EXPERT = tuple(
    _row(
        f"{_LAYER}mlp.experts.{{expert}}.{p}.weight",
        f"mlp/experts/{p}",
        TRANSPOSED,
        _EXPERTS,
    )
    for p in _PROJECTIONS
)

# [E, 2F, D], gate before up, and [E, D, F]; parameters, so without ".weight".
_FUSED_EXPERTS = (
    Row(
        f"{_LAYER}mlp.experts.gate_up_proj",
        ("mlp/experts/gate_proj", "mlp/experts/up_proj"),
        TRANSPOSED,
        _EXPERTS,
    ),
    _row(
        f"{_LAYER}mlp.experts.down_proj", "mlp/experts/down_proj", TRANSPOSED, _EXPERTS
    ),
)

_NOT_THE_DECODER = {
    "mtp.": "multi-token prediction, a draft model for speculative decoding",
    "model.visual.": "the vision tower of a multimodal repository",
    "visual.": "the vision tower of a multimodal repository",
}

FAMILIES = {
    "qwen3_next": Family(
        rows=(*_OUTER, *_NORMS, *_FULL_ATTENTION, *_LINEAR_ATTENTION, *_FEED_FORWARD),
        experts=_EACH_EXPERT,
        fused_experts=_FUSED_EXPERTS,
        head="lm_head.weight",
        embedding="model.embed_tokens.weight",
        ignored=_NOT_THE_DECODER,
    ),
}


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


def family(config: DecoderConfig) -> Family:
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


def tensors(config: DecoderConfig, fused: Callable[[str], bool]) -> list[Tensor]:
    """Every tensor of a checkpoint of `config`, layer by layer.

    Args:
      config: of the model.
      fused: whether the checkpoint has a tensor of this name, of fused experts; asked
        for each layer.
    """
    names = family(config)
    config = config.replace(vocab_padding=0)
    shapes: dict[int | None, dict[str, Shape]] = {}
    for unit, shape in units(config).items():
        shapes.setdefault(unit.layer, {})[unit.leaf] = shape
    rows = [row for row in names.rows if "{layer}" not in row.tensor]
    found = _expand(_fitting(rows, shapes[None]), shapes[None], None)
    rows = [row for row in names.rows if "{layer}" in row.tensor]
    for layer in range(config.num_layers):
        is_fused = any(fused(row.name(layer)) for row in names.fused_experts)
        experts = names.fused_experts if is_fused else names.experts
        fitting = _fitting([*rows, *experts], shapes[layer])
        found += _expand(fitting, shapes[layer], layer)
    return found


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
            f"Add rows for them in {__name__}."
        )
    return fitting


def _expand(
    rows: list[Row], leaf_shapes: Mapping[str, Shape], layer: int | None
) -> list[Tensor]:
    found = []
    for row in rows:
        shape, parts = join(row.part_shapes(leaf_shapes))
        experts: list[int | None] = [None]
        if "{expert}" in row.tensor:
            experts = [*range(leaf_shapes[row.leaves[0]][0])]
        for expert in experts:
            name = row.name(layer, expert)
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
