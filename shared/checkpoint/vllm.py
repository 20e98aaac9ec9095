"""Flat weights, layer by layer, as vLLM's Qwen3-Next holds them for serving.

Names are Hugging Face's, but for what vLLM computes in one product, which is one
tensor. D model width, F feed-forward width, E experts:

    self_attn.qkv_proj.weight                rows of q_proj (query and gate interleaved
                                             per head), then k_proj, then v_proj
    mlp.gate_up_proj.weight                  [2F, D], of a dense layer
    mlp.shared_expert.gate_up_proj.weight    [2F, D], gate before up
    mlp.experts.w13_weight                   [E, 2F, D], gate before up
    mlp.experts.w2_weight                    [E, D, F]

All else is as in a Hugging Face checkpoint: in_proj_qkvz and in_proj_ba grouped by key
head, conv1d.weight [C, 1, W], norms zero-centred but for linear_attn.norm.

These are the parameters that vLLM's own loader fills, of a model on one device. Of what
vLLM does with them this says nothing: it cuts them up for tensor parallelism (and
repeats key/value heads where there are more devices than heads), and quantisation and
some kernels reorder or pad the experts after loading. Versions differ in this:

- newer ones call the experts mlp.experts.routed_experts.w13_weight and w2_weight, and
  may hold the shared expert as one more routed one;
- some hold A_log in float32 in a model that is not; here dtypes stay as they are;
- some have a lm_head.weight of their own in a tied model; here there is none.

The vocabulary has no padding, which vLLM adds itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shared.checkpoint import hf_names
from shared.checkpoint.hf_names import Row, Tensor
from shared.checkpoint.scheme import (
    TRANSPOSED,
    Conversion,
    Scheme,
    Shape,
    check_tensors,
    units,
    zoo_scheme,
)
from shared.config import DecoderConfig
from shared.stores import CheckpointError, Leaf
from shared.stores.reading import read_whole
from shared.stores.tree import array_leaf
from shared.trees import flatten, path_text


def _fused(tensor: str, above: str, *leaves: str) -> Row:
    paths = tuple(f"{above}/{leaf}" for leaf in leaves)
    return Row(f"layers.{{layer}}.{tensor}", paths, TRANSPOSED, "")


FAMILY = "qwen3_next"
FUSED = (
    _fused("self_attn.qkv_proj.weight", "self_attn", "q_proj", "k_proj", "v_proj"),
    _fused("mlp.gate_up_proj.weight", "mlp", "gate_proj", "up_proj"),
    _fused(
        "mlp.shared_expert.gate_up_proj.weight",
        "mlp/shared_expert",
        "gate_proj",
        "up_proj",
    ),
    _fused("mlp.experts.w13_weight", "mlp/experts", "gate_proj", "up_proj"),
    _fused("mlp.experts.w2_weight", "mlp/experts", "down_proj"),
)


def vllm_scheme(config: DecoderConfig) -> Scheme:
    """Where vLLM has each unit.

    Raises:
      CheckpointError: vLLM's Qwen3-Next has no such layers.
      ConfigError: the family is not known.
    """
    _check_config(config)
    wanted = units(config.replace(vocab_padding=0))
    shapes: dict[int | None, dict[str, Shape]] = {}
    for unit, shape in wanted.items():
        shapes.setdefault(unit.layer, {})[unit.leaf] = shape
    rows = _rows(config)
    tensors = [
        _tensor(row, leaf_shapes, layer)
        for layer, leaf_shapes in shapes.items()
        for row in rows
        if ("{layer}" in row.tensor) == (layer is not None)
        and leaf_shapes.keys() >= set(row.leaves)
    ]
    scheme = hf_names.scheme(config, tensors)
    unnamed = {unit.leaf for unit in wanted.keys() - scheme.spots.keys()}
    if unnamed:
        raise CheckpointError(f"No vLLM name for {', '.join(sorted(unnamed))}.")
    return scheme


def _rows(config: DecoderConfig) -> list[Row]:
    """Hugging Face's rows, in which those of fused leaves are replaced."""
    fused = {leaf for row in FUSED for leaf in row.leaves}
    rows = hf_names.family(config).rows
    return [*(row for row in rows if not fused & set(row.leaves)), *FUSED]


def _tensor(row: Row, leaf_shapes: Mapping[str, Shape], layer: int | None) -> Tensor:
    shape, parts = hf_names.join(row.part_shapes(leaf_shapes))
    return Tensor(row.name(layer), shape, row, parts, layer, expert=None)


def _check_config(config: DecoderConfig) -> None:
    hf_names.family(config)  # raises for one that nobody knows
    if config.family != FAMILY:
        raise CheckpointError(
            f"family={config.family!r}: how vLLM holds it is not known here, only "
            f"{FAMILY!r}. Convert to Hugging Face, which vLLM reads."
        )
    problems = [
        f"layer {layer} is {kind}: vLLM has linear and full attention there"
        for layer, kind in enumerate(config.layers)
        if kind.mixer == "sliding_attention"
    ]
    if config.attention is not None and config.attention.use_bias:
        problems.append("attention.use_bias=True: vLLM has no bias in o_proj")
    if problems:
        raise CheckpointError("This model has no place in vLLM's Qwen3-Next:", problems)


def vllm_leaves(config: DecoderConfig, params: Mapping[str, Any]) -> dict[str, Leaf]:
    """Every tensor by its name, remainder included; nothing is read until they are.

    Args:
      config: of the model.
      params: in the layout of `config.plan`, arrays or `Leaf`s: nested dicts, or by
        path a/b/c.

    Raises:
      CheckpointError: `params` do not fit `config`; lists all that is wrong.
    """
    source = zoo_scheme(config)
    leaves = {path_text(path): _leaf(node) for path, node in flatten(params)}
    check_tensors({name: leaf.shape for name, leaf in leaves.items()}, source)
    return Conversion(source, vllm_scheme(config), units(config)).leaves(leaves)


def vllm_tensors(
    config: DecoderConfig, params: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor, one at a time; see `vllm_leaves`."""
    for name, leaf in vllm_leaves(config, params).items():
        yield name, read_whole(leaf, name)


def _leaf(node: Any) -> Leaf:
    return node if isinstance(node, Leaf) else array_leaf(node)
