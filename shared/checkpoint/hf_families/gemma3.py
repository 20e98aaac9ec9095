"""Gemma 3, text: a window in most layers, norms around both residual branches."""

from __future__ import annotations

import math
from typing import Any

from shared.checkpoint.hf_families import rows
from shared.checkpoint.hf_families.fields import (
    ConfigTable,
    Values,
    everywhere,
    field,
    read_mixers,
    write_mixers,
)
from shared.checkpoint.hf_families.rope import Rope
from shared.checkpoint.hf_families.source import Source
from shared.config import AttentionConfig, DecoderConfig, LayerKind, MLPConfig

ATTENTIONS = {"attention": AttentionConfig, "sliding_attention": AttentionConfig}
_PARTS = {**ATTENTIONS, "mlp": MLPConfig}
FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_dropout": 0.0,
}
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
CONSTANTS = {
    "attention.gated": False,
    "sliding_attention.gated": False,
    "mlp.activation": "gelu_tanh",
    "output_norms": True,
    "scale_embeddings": True,
    "router_aux_loss_coef": 0.0,
}
FIELDS = (
    field("vocab_size", 262208, "vocab_size"),
    field("hidden_size", 2304, *everywhere("hidden_size", _PARTS)),
    field("initializer_range", 0.02, *everywhere("initializer_range", _PARTS)),
    field("rms_norm_eps", 1e-6, *everywhere("norm_eps", ATTENTIONS)),
    field("max_position_embeddings", 131072, "max_position_embeddings"),
    field("tie_word_embeddings", True, "tie_word_embeddings"),
    field("intermediate_size", 9216, "mlp.intermediate_size"),
    field("num_attention_heads", 8, *(f"{p}.num_heads" for p in ATTENTIONS)),
    field("num_key_value_heads", 4, *(f"{p}.num_kv_heads" for p in ATTENTIONS)),
    field("head_dim", 256, *(f"{p}.head_dim" for p in ATTENTIONS)),
    field("attention_bias", False, *(f"{p}.use_bias" for p in ATTENTIONS)),
    field("sliding_window", 4096, "sliding_attention.window"),
    field("final_logit_softcapping", None, "logit_softcap", type_=float, nullable=True),
)


def _read_layers(source: Source, values: Values) -> tuple[LayerKind, ...]:
    scalar = source.get("query_pre_attn_scalar", 256, int, float)
    if scalar <= 0:
        raise source.error(f"query_pre_attn_scalar must be positive. Got {scalar}.")
    is_usual = scalar == values["attention"]["head_dim"]
    for part in ATTENTIONS:
        values[part]["scale"] = None if is_usual else scalar**-0.5
    length = source.size("num_hidden_layers", 26)
    # What an explicit `layer_types` is said to have been made from changes nothing.
    interval = source.size("_sliding_window_pattern", 6)
    interval = source.size("sliding_window_pattern", interval)
    mixers = read_mixers(source, length, interval, "sliding_attention")
    return tuple(LayerKind(mixer, "dense") for mixer in mixers)


def _write_layers(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    scalars = {
        _scalar(part)
        for part in (config.attention, config.sliding_attention)
        if isinstance(part, AttentionConfig)
    }
    return {
        **write_mixers(config, "sliding_window_pattern" if hub_style else None),
        # Where layers differ, reading it back shows it.
        "query_pre_attn_scalar": max(scalars, default=256),
    }


def _scalar(part: AttentionConfig) -> int | float:
    """The number whose square root divides the scores, an integer if there is one."""
    if part.scale is None:
        return part.head_dim
    exact = part.scale**-2.0
    near = (round(exact), exact, math.nextafter(exact, 0), math.nextafter(exact, 9e99))
    return next((n for n in near if n and n**-0.5 == part.scale), exact)


CONFIG = ConfigTable(
    architecture="Gemma3ForCausalLM",
    parts=_PARTS,
    fields=FIELDS,
    ropes=(
        Rope(kind="full_attention", theta=1e6, types=("default", "linear")),
        Rope(
            "sliding_attention",
            kind="sliding_attention",
            types=("default", "linear"),
            flat_theta="rope_local_base_freq",
            flat_scaling=False,
        ),
    ),
    read_layers=_read_layers,
    write_layers=_write_layers,
    constants=CONSTANTS,
    fixed={
        **FIXED,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    tolerated={"use_bidirectional_attention": (None,)},
    tokens=TOKENS,
)

HEADS = "num_attention_heads, num_key_value_heads, head_dim, hidden_size"
NOT_THE_DECODER = {
    f"{above}{tower}.": reason
    for above in ("model.", "")
    for tower, reason in (
        ("vision_tower", "the vision tower of a multimodal repository"),
        ("multi_modal_projector", "from the vision tower to the decoder"),
    )
}

NAMES = rows.NameTable(
    rows=(*rows.OUTER, *rows.FOUR_NORMS, *rows.attention(HEADS), *rows.DENSE),
    ignored=NOT_THE_DECODER,
    kinds="layer_types or sliding_window_pattern",
)
