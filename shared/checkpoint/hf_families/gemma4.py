"""Gemma 4, text: as Gemma 3, with heads of their own in full-attention layers.

Some sizes add routed experts to every feed-forward layer; others have a second
embedding that goes into every layer, and layers that borrow keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from shared.checkpoint.hf_families import gemma3, rows
from shared.checkpoint.hf_families.fields import (
    ConfigTable,
    Values,
    adapted,
    everywhere,
    field,
    read_mixers,
    write_mixers,
)
from shared.checkpoint.hf_families.rope import Rope
from shared.checkpoint.hf_families.source import Source
from shared.checkpoint.scheme import AS_IS, TRANSPOSED
from shared.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForward,
    LayerInputConfig,
    LayerKind,
    Mixer,
    MLPConfig,
    MoEConfig,
)

logger = logging.getLogger(__name__)

_PARTS = {
    **gemma3.ATTENTIONS,
    "mlp": MLPConfig,
    "borrower_mlp": MLPConfig,
    "moe": MoEConfig,
    "layer_inputs": LayerInputConfig,
}
_WITH_WIDTH = ("attention", "sliding_attention", "mlp", "borrower_mlp", "moe")
_NORMS = (*everywhere("norm_eps", gemma3.ATTENTIONS), "moe.router_norm_eps")
_HEADS = {"head_dim": 256, "num_key_value_heads": 4}
_OURS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
_GLOBAL_HEAD_DIM = 512


def _optional(name: str, path: str) -> Any:
    return field(name, None, path, type_=int, nullable=True)


_FIELDS = (
    field("hidden_size", 2304, *everywhere("hidden_size", _WITH_WIDTH)),
    field("initializer_range", 0.02, *everywhere("initializer_range", _WITH_WIDTH)),
    field("rms_norm_eps", 1e-6, *_NORMS),
    *adapted(
        gemma3.FIELDS,
        gemma3.ATTENTIONS | {"mlp": MLPConfig},
        {"vocab_size": 262144, "sliding_window": 512},
        without=("hidden_size", "initializer_range", "rms_norm_eps", *_HEADS),
    ),
    field("attention_k_eq_v", False, "attention.keys_are_values"),
    _optional("num_experts", "moe.num_experts"),
    _optional("top_k_experts", "moe.experts_per_token"),
    _optional("moe_intermediate_size", "moe.expert_size"),
)


def _read_layers(source: Source, values: Values) -> tuple[LayerKind, ...]:
    length = source.size("num_hidden_layers", 30)
    mixers = read_mixers(source, length, 6, "sliding_attention")
    if mixers[-1] != "full_attention":
        if "layer_types" in source:
            logger.info(
                "%s: layer_types ends with %s, but the last layer of Gemma 4 always "
                "has full attention.",
                source.where,
                mixers[-1],
            )
        mixers[-1] = "full_attention"
    _read_heads(source, values, mixers)
    _read_layer_inputs(source, values)
    borrowers = source.get("num_kv_shared_layers", 0, int)
    if not 0 <= borrowers < length:
        raise source.error(
            f"num_kv_shared_layers must be 0 to {length - 1}, since some layer must "
            f"have keys of its own. Got {borrowers}."
        )
    wide = source.get("use_double_wide_mlp", False, bool)
    if wide and borrowers:
        width = 2 * values["mlp"]["intermediate_size"]
        values["borrower_mlp"] = {**values["mlp"], "intermediate_size": width}
    else:
        del values["borrower_mlp"]
    mixture = source.get("enable_moe_block", False, bool)
    if not mixture:
        del values["moe"]
    elif None in values["moe"].values():
        raise source.error(
            "num_experts, top_k_experts and moe_intermediate_size must be integers "
            "where enable_moe_block is true."
        )
    feed_forward: FeedForward = "dense_and_moe" if mixture else "dense"
    first = length - borrowers
    return tuple(
        LayerKind(mixer, feed_forward, borrows_keys=index >= first)
        for index, mixer in enumerate(mixers)
    )


def _read_layer_inputs(source: Source, values: Values) -> None:
    size = source.get("hidden_size_per_layer_input", 256, int, type(None))
    vocab_size = source.size("vocab_size_per_layer_input", 262144)
    if size:
        values["layer_inputs"] = {"vocab_size": vocab_size, "size": size}
    else:
        del values["layer_inputs"]


def _read_heads(source: Source, values: Values, mixers: list[Mixer]) -> None:
    """Sliding layers have the plain fields; what full ones have overrides them."""
    plain = {name: source.size(name, default) for name, default in _HEADS.items()}
    own = _flat_heads(source, values["attention"]["keys_are_values"])
    given = source.get("per_layer_config", None, dict, type(None))
    if given is not None:
        nested = _nested_heads(source, given, mixers)
        for name, value in own.items():
            if f"{_GLOBAL[name]}" in source and nested.get(name, plain[name]) != value:
                raise source.error(
                    f"{_GLOBAL[name]} is {value} and in per_layer_config "
                    f"{nested.get(name, plain[name])}: keep one of them."
                )
        own = nested
    for name, ours in _OURS.items():
        values["sliding_attention"][ours] = plain[name]
        values["attention"][ours] = own.get(name, plain[name])


_GLOBAL = {
    "head_dim": "global_head_dim",
    "num_key_value_heads": "num_global_key_value_heads",
}


def _flat_heads(source: Source, keys_are_values: bool) -> dict[str, int]:
    heads = {"head_dim": source.size("global_head_dim", _GLOBAL_HEAD_DIM)}
    kv_heads = source.get("num_global_key_value_heads", None, int, type(None))
    if kv_heads is not None and keys_are_values:  # else the reference has no use for it
        heads["num_key_value_heads"] = kv_heads
    return heads


def _nested_heads(
    source: Source, given: Mapping[str, Any], mixers: list[Mixer]
) -> dict[str, int]:
    """What `per_layer_config` says of full-attention layers, all of them the same."""
    where = f"{source.where}: per_layer_config"
    found: dict[int, dict[str, int]] = {}
    for index in given:
        number = int(index) if index.isdigit() else len(mixers)
        if number >= len(mixers):
            raise source.error(
                f"per_layer_config must be by number of a layer, 0 to "
                f"{len(mixers) - 1}. Got {index!r}."
            )
        layer = Source(Source(given, where).get(index, {}, dict), f"{where}.{index}")
        found[number] = {name: layer.size(name, 1) for name in _HEADS if name in layer}
        if layer.unknown():
            raise layer.error(f"unknown fields {', '.join(layer.unknown())}.")
    own = found.get(mixers.index("full_attention"), {})
    for number, mixer in enumerate(mixers):
        heads = found.get(number, {})
        expected = own if mixer == "full_attention" else {}
        if heads != expected:
            raise source.error(
                f"per_layer_config has {heads} for layer {number}, which is {mixer}, "
                f"but {expected} is what such layers have: all of a kind must be alike."
            )
    return own


def _write_layers(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    inputs, moe = config.layer_inputs, config.moe
    data = {
        **write_mixers(config),
        **_write_heads(config, hub_style),
        "num_kv_shared_layers": sum(kind.borrows_keys for kind in config.layers),
        "use_double_wide_mlp": config.borrower_mlp is not None,
        "enable_moe_block": moe is not None,
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "vocab_size_per_layer_input": 262144 if inputs is None else inputs.vocab_size,
    }
    if moe is None:
        names = ("num_experts", "top_k_experts", "moe_intermediate_size")
        data |= dict.fromkeys(names)
    return data


def _write_heads(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    full, sliding = config.attention, config.sliding_attention
    assert isinstance(full, AttentionConfig)  # the last layer has it
    plain = full if sliding is None else sliding
    own = {name: getattr(full, ours) for name, ours in _OURS.items()}
    data: dict[str, Any] = {n: getattr(plain, ours) for n, ours in _OURS.items()}
    if hub_style:
        same = own["num_key_value_heads"] == data["num_key_value_heads"]
        kv_heads = None if same else own["num_key_value_heads"]
        return data | {
            "global_head_dim": own["head_dim"],
            "num_global_key_value_heads": kv_heads,
        }
    other = {name: value for name, value in own.items() if value != data[name]}
    digits = len(str(config.num_layers - 1))
    layers = enumerate(config.layers) if other else ()
    data["per_layer_config"] = {
        f"{index:0{digits}}": other for index, kind in layers if kind.is_global
    }
    return data


CONFIG = ConfigTable(
    architecture="Gemma4ForCausalLM",
    parts=_PARTS,
    fields=_FIELDS,
    ropes=(
        Rope(
            kind="full_attention",
            theta=1e6,
            types=("default", "proportional"),
            absent={"rope_type": "proportional", "partial_rotary_factor": 0.25},
            flat_theta=None,
        ),
        Rope("sliding_attention", kind="sliding_attention", flat_theta=None),
    ),
    read_layers=_read_layers,
    write_layers=_write_layers,
    constants={
        **gemma3.CONSTANTS,
        **{f"{part}.zero_centered_norms": False for part in gemma3.ATTENTIONS},
        **{f"{part}.value_norm": True for part in gemma3.ATTENTIONS},
        **{f"{part}.scale": 1.0 for part in gemma3.ATTENTIONS},
        "zero_centered_norms": False,
        "layer_scalar": True,
        "moe.activation": "gelu_tanh",
        "moe.shared_expert_size": 0,
        "moe.shared_expert_gated": False,
        "moe.per_expert_scale": True,
        "moe.norm_router_input": True,
    },
    fixed={**gemma3.FIXED, "use_bidirectional_attention": None},
    tolerated={"use_bidirectional_attention": ("vision",)},  # text has none of it
    tokens=gemma3.TOKENS,
    hub_dtype="dtype",
    hub_marks=tuple(_GLOBAL.values()),
)

_HEAD_SIZES = (
    f"{gemma3.HEADS}, global_head_dim, num_global_key_value_heads or per_layer_config"
)
_MOE_SIZES = "num_experts, moe_intermediate_size, hidden_size"
_INPUT_SIZES = "hidden_size_per_layer_input, num_hidden_layers, hidden_size"
_LAYER = "layers.{layer}."

NAMES = rows.NameTable(
    rows=(
        *rows.OUTER,
        *rows.FOUR_NORMS,
        *rows.attention(_HEAD_SIZES, "head_dim, global_head_dim or per_layer_config"),
        *rows.DENSE,
        rows.row(f"{_LAYER}layer_scalar", "layer_scalar", AS_IS, "1"),
        *rows.norms(
            "",
            "hidden_size",
            (
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
                "pre_feedforward_layernorm_2",
                "post_per_layer_input_norm",
            ),
        ),
        rows.row(f"{_LAYER}router.proj.weight", "moe/gate", TRANSPOSED, _MOE_SIZES),
        rows.row(f"{_LAYER}router.scale", "moe/router_scale", AS_IS, "hidden_size"),
        rows.row(
            f"{_LAYER}router.per_expert_scale",
            "moe/per_expert_scale",
            AS_IS,
            "num_experts",
        ),
        *(
            rows.row(f"{_LAYER}{name}.weight", name, TRANSPOSED, _INPUT_SIZES)
            for name in ("per_layer_input_gate", "per_layer_projection")
        ),
        rows.row(
            "embed_tokens_per_layer.weight",
            "embed_tokens_per_layer",
            AS_IS,
            f"vocab_size_per_layer_input, {_INPUT_SIZES}",
        ),
        rows.row(
            "per_layer_model_projection.weight",
            "per_layer_model_projection",
            TRANSPOSED,
            _INPUT_SIZES,
        ),
        rows.row(
            "per_layer_projection_norm.weight",
            "per_layer_projection_norm",
            AS_IS,
            "hidden_size_per_layer_input",
        ),
    ),
    fused_experts=rows.fused_experts("experts", _MOE_SIZES, "moe/experts"),
    ignored={
        **gemma3.NOT_THE_DECODER,
        "model.embed_vision.": "from the vision tower to the decoder",
        "model.audio_tower.": "the audio tower of a multimodal repository",
        "model.embed_audio.": "from the audio tower to the decoder",
    },
    kinds="layer_types, num_kv_shared_layers or enable_moe_block",
)
