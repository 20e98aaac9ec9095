"""MaxText's trees of Qwen3-Next: one table of rows, read both ways.

Names are those of MaxText 0.2.5 below `params/params`. What its layers hold never
changes; how they are grouped does, which is the `MaxTextLayout`:

    scanned     decoder/layers/local_layers              stack axes: block, local layer
                decoder/layers/global_layer              block
                decoder/layers_remainder/local_layers    local layer
    flat        decoder/layers/layer_{place in block}    block; before local_layers came
    unscanned   decoder/layers_{layer}                   none

A block is one period: linear-attention layers, then a full-attention one. Layers after
the last whole period are the remainder; a model shorter than a period is nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from shared.checkpoint.scheme import (
    AS_IS,
    Layout,
    Scheme,
    Shape,
    Spot,
    Unit,
    units,
)
from shared.config import DecoderConfig, LayerKind
from shared.stores import CheckpointError, Store
from shared.stores.store import some

logger = logging.getLogger(__name__)

Name = Literal["scanned", "unscanned", "flat"]


@dataclasses.dataclass(frozen=True)
class MaxTextLayout:
    """How a tree groups its layers.

    Attributes:
      name: "scanned", "unscanned" or "flat".
      param_scan_axis: MaxText's setting of that name, 0 or 1: where the stack axes
        stand, block before local layer. A vector has its stack axes last with 1.
    """

    name: Name
    param_scan_axis: int = 1

    def __post_init__(self):
        if self.name not in get_args(Name):
            raise CheckpointError(
                f"A MaxText layout is one of {get_args(Name)}. Got {self.name!r}."
            )
        if self.param_scan_axis not in (0, 1):
            raise CheckpointError(
                f"param_scan_axis must be 0 or 1. Got {self.param_scan_axis}."
            )


class Row(NamedTuple):
    """One tensor, or one for each layer.

    Attributes:
      tensor: its name, with {layer} for the path of its layer.
      leaf: path in the tree of a layer, or of the model for a tensor without {layer}.
      layout: the orientation.
      heads: the field of the attention's config that says how many heads the last axis
        is split into; empty: it is not split.
    """

    tensor: str
    leaf: str
    layout: Layout = AS_IS
    heads: str = ""

    def orientation(self, config: DecoderConfig) -> Layout:
        """The layout in the tree of some model."""
        if not self.heads:
            return self.layout
        heads = getattr(config.attention, self.heads)
        return Layout(shape=functools.partial(_split_heads, heads))


def _split_heads(heads: int, shape: Shape) -> Shape:
    return (shape[0], heads, shape[1] // heads)


def _with_one_input(shape: Shape) -> Shape:
    """Of a depthwise convolution, [W, C], whose kernel flax keeps as [W, 1, C]."""
    return (shape[0], 1, shape[1])


# Dense kernels are [in, out] and experts [E, in, out], as ours are. Query and gate stay
# interleaved per head, in_proj_qkvz and in_proj_ba grouped by key head, as ours are.
ROWS = (
    Row("token_embedder/embedding", "embed_tokens"),
    Row("decoder/decoder_norm/scale", "norm"),
    Row("decoder/logits_dense/kernel", "lm_head"),
    *(
        Row(f"{{layer}}/{norm}/scale", norm)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ),
    *(
        Row(f"{{layer}}/attention/attention/{theirs}", f"self_attn/{ours}", heads=heads)
        for theirs, ours, heads in (
            ("query/kernel", "q_proj", "num_heads"),
            ("key/kernel", "k_proj", "num_kv_heads"),
            ("value/kernel", "v_proj", "num_kv_heads"),
            ("out/kernel", "o_proj", ""),
            ("query_norm/scale", "q_norm", ""),
            ("key_norm/scale", "k_norm", ""),
        )
    ),
    *(
        Row(f"{{layer}}/attention/{theirs}", f"linear_attn/{ours}")
        for theirs, ours in (
            ("in_proj_qkvz/kernel", "in_proj_qkvz"),
            ("in_proj_ba/kernel", "in_proj_ba"),
            ("A_log", "A_log"),
            ("dt_bias", "dt_bias"),
            ("norm/rms_norm/scale", "norm"),
            ("out_proj/kernel", "out_proj"),
        )
    ),
    Row(
        "{layer}/attention/conv1d/kernel",
        "linear_attn/conv1d",
        Layout(shape=_with_one_input),
    ),
    *(
        Row(f"{{layer}}/mlp/{theirs}", f"mlp/{ours}")
        for theirs, ours in (
            ("routed_experts/gate/kernel", "gate"),
            ("routed_experts/wi_0", "experts/gate_proj"),
            ("routed_experts/wi_1", "experts/up_proj"),
            ("routed_experts/wo", "experts/down_proj"),
            ("shared_expert/wi_0/kernel", "shared_expert/gate_proj"),
            ("shared_expert/wi_1/kernel", "shared_expert/up_proj"),
            ("shared_expert/wo/kernel", "shared_expert/down_proj"),
            ("shared_expert_gate/kernel", "shared_expert_gate"),
        )
    ),
)


class _Periods(NamedTuple):
    """How many layers a period has, whole periods, and layers after them."""

    length: int
    blocks: int
    rest: int

    def __str__(self) -> str:
        if not self.blocks:
            return f"{self.rest} layers, less than a period"
        return f"{self.blocks} x {self.length} layers and {self.rest} more"


def _periods(kinds: Sequence[LayerKind]) -> _Periods:
    """Without a full-attention layer the period is longer than the model."""
    full = (i for i, kind in enumerate(kinds) if kind.mixer == "full_attention")
    length = next(full, len(kinds)) + 1
    return _Periods(length, *divmod(len(kinds), length))


class _Place(NamedTuple):
    """Where a layer stands: below `path`, at `slot` of stack axes of these sizes."""

    path: str
    slot: tuple[int, ...]
    sizes: tuple[int, ...]


_OUTSIDE = _Place("", (), ())


def _place(layer: int, periods: _Periods, name: Name) -> _Place:
    if name == "unscanned":
        return _Place(f"decoder/layers_{layer}", (), ())
    length, blocks, rest = periods
    block, local = divmod(layer, length)
    if name == "flat":
        return _Place(f"decoder/layers/layer_{local}", (block,), (blocks,))
    if block == blocks:
        return _Place("decoder/layers_remainder/local_layers", (local,), (rest,))
    if local == length - 1:
        return _Place("decoder/layers/global_layer", (block,), (blocks,))
    sizes = (blocks, length - 1)
    return _Place("decoder/layers/local_layers", (block, local), sizes)


def maxtext_scheme(config: DecoderConfig, layout: MaxTextLayout) -> Scheme:
    """As `tree_scheme`, for a tree that MaxText is to load: warns where it will not."""
    moe = config.moe
    if moe is not None and moe.shared_expert_size != moe.expert_size:
        logger.warning(
            "MaxText 0.2.5 makes the shared expert as wide as the others, %d. Here it "
            "has %d: MaxText will not load this model.",
            moe.expert_size,
            moe.shared_expert_size,
        )
    return tree_scheme(config, layout)


def tree_scheme(config: DecoderConfig, layout: MaxTextLayout) -> Scheme:
    """Where MaxText's tree, from below `params/params`, has each unit.

    Args:
      config: of the model; its own plan and param_scan_axis do not matter.
      layout: of the tree.

    Raises:
      CheckpointError: MaxText's Qwen3-Next has no such layers, or not in this layout;
        lists all that does not fit.
    """
    periods = _periods(config.layers)
    _check_config(config, layout, periods)
    rows = {row.leaf: row for row in ROWS}
    shapes: dict[str, Shape] = {}
    spots: dict[Unit, tuple[Spot, ...]] = {}
    for unit, shape in units(config).items():
        place = _OUTSIDE
        if unit.layer is not None:
            place = _place(unit.layer, periods, layout.name)
        name = rows[unit.leaf].tensor.format(layer=place.path)
        orientation = rows[unit.leaf].orientation(config)
        own = orientation.tensor_shape(shape)
        at = min(layout.param_scan_axis, len(own))
        shapes[name] = own[:at] + place.sizes + own[at:]
        spots[unit] = (Spot(name, (slice(None),) * at + place.slot, orientation),)
    return Scheme(shapes, spots)


def _check_config(
    config: DecoderConfig, layout: MaxTextLayout, periods: _Periods
) -> None:
    problems = []
    if config.family != "qwen3_next":
        problems.append(f"family={config.family!r}, not 'qwen3_next'")
    if config.attention is not None and config.attention.use_bias:
        problems.append("attention.use_bias=True: MaxText has no biases there")
    for layer, kind in enumerate(config.layers):
        is_full = (layer + 1) % periods.length == 0
        if kind.feed_forward != "moe":
            problems.append(f"layer {layer} is {kind}: MaxText has experts everywhere")
        if kind.mixer == "sliding_attention":
            problems.append(f"layer {layer} is {kind}: MaxText has no such layers")
        elif (kind.mixer == "full_attention") != is_full:
            problems.append(
                f"layer {layer} is {kind}: the first full_attention layer is layer "
                f"{periods.length - 1}, so every {periods.length}th has to be one, and "
                "no other"
            )
    if layout.name == "flat" and periods.rest:
        problems.append(
            f"num_layers={config.num_layers} is {periods}: the layout 'flat' has whole "
            "periods only; choose 'scanned' or 'unscanned'"
        )
    if problems:
        raise CheckpointError(
            "This model has no place in MaxText's tree of Qwen3-Next:", problems
        )


_MARKS: dict[Name, re.Pattern[str]] = {
    "scanned": re.compile(
        r"decoder/(layers/(local_layers|global_layer)|layers_remainder)/"
    ),
    "unscanned": re.compile(r"decoder/layers_\d+/"),
    "flat": re.compile(r"decoder/layers/layer_\d+/"),
}


def detect_layout(
    shapes: Mapping[str, Shape],
    config: DecoderConfig,
    param_scan_axis: int | None = None,
) -> MaxTextLayout:
    """The layout of a tree, by its names and then its shapes.

    Args:
      shapes: by name, from below `params/params`.
      config: of the model.
      param_scan_axis: if it is known; needed where no shape tells.

    Raises:
      CheckpointError: the names are of no layout or of several; the shapes contradict
        the config, each other or the given axis; or they would be the same with either
        axis, and none is given.
    """
    name = detect_name(shapes)
    if name == "unscanned":
        return MaxTextLayout(name)
    layouts = [MaxTextLayout(name, axis) for axis in (0, 1)]
    first, second = (tree_scheme(config, layout).shapes for layout in layouts)
    telling = [n for n in shapes if n in first and first[n] != second[n]]
    if not telling and param_scan_axis is not None:
        return MaxTextLayout(name, param_scan_axis)
    if not telling:
        raise CheckpointError(
            f"The names are of MaxText's layout {name!r}, but no shape tells whether "
            "param_scan_axis is 0 or 1, for both would give the same: give the axis."
        )
    wrong = [
        [n for n in telling if shapes[n] != wanted[n]] for wanted in (first, second)
    ]
    for layout, contradicting in zip(layouts, wrong, strict=True):
        if not contradicting and param_scan_axis in (None, layout.param_scan_axis):
            return layout
        if not contradicting:
            raise CheckpointError(
                f"param_scan_axis={param_scan_axis} is given, but the shapes are those "
                f"of {layout.param_scan_axis}: leave it out."
            )
    raise CheckpointError(
        f"The names are of MaxText's layout {name!r}, but the shapes contradict the "
        f"config, which has {_periods(config.layers)}. Of {len(telling)} tensors "
        f"{len(wrong[0])} contradict it with param_scan_axis=0 and {len(wrong[1])} "
        "with 1:",
        [
            f"{n} must be {first[n]} or {second[n]}. Got {shapes[n]}"
            for n in min(wrong, key=len)
        ],
    )


def detect_name(shapes: Mapping[str, Shape]) -> Name:
    """The name of the layout that the names are of.

    Raises:
      CheckpointError: they are of none, or of several.
    """
    found = {
        name: example
        for name, mark in _MARKS.items()
        if (example := next(filter(mark.match, shapes), None)) is not None
    }
    if not found:
        raise CheckpointError(
            "No name is that of a layer of MaxText's Qwen3-Next, such as "
            "decoder/layers/local_layers/… or decoder/layers_0/…. There are: "
            f"{some(sorted(shapes), 4)}."
        )
    if len(found) > 1:
        raise CheckpointError(
            "The names are of several of MaxText's layouts: keep those of one.",
            [f"{name}: {example}" for name, example in found.items()],
        )
    return next(iter(found))


_PREFIXES = ("params/params", "params", "")


def below(store: Store) -> Store:
    """The subtree that MaxText's names start from.

    MaxText's own checkpoints have it under `params/params`, beside the optimizer's
    state if they are of training; other tools leave out a `params` or both.

    Raises:
      CheckpointError: there is none.
    """
    for prefix in _PREFIXES:
        above = tuple(prefix.split("/")) if prefix else ()
        starts = {(*above, "decoder"), (*above, "token_embedder")}
        paths = itertools.chain(store.leaves, store.refused)
        if any(path[: len(above) + 1] in starts for path in paths):
            return store.under(prefix) if prefix else store
    tops = sorted({str(path[0]) for path in store.leaves if path})
    raise CheckpointError(
        f"{store.path} has no decoder or token_embedder, neither at its top nor under "
        f"params or params/params, so it is no tree of MaxText. It has {some(tops, 8)}."
    )
