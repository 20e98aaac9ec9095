"""Qwen3-Next: a gated delta net in most layers, routed experts in all but a few."""

from __future__ import annotations

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
from shared.config import (
    AttentionConfig,
    DecoderConfig,
    GatedDeltaNetConfig,
    LayerKind,
    MLPConfig,
    MoEConfig,
)

PARTS = {
    "attention": AttentionConfig,
    "delta_net": GatedDeltaNetConfig,
    "mlp": MLPConfig,
    "moe": MoEConfig,
}
INTERVAL = 4

FIELDS = (
    field("vocab_size", 151936, "vocab_size"),
    field("hidden_size", 2048, *everywhere("hidden_size", PARTS)),
    field("initializer_range", 0.02, *everywhere("initializer_range", PARTS)),
    field("rms_norm_eps", 1e-6, *everywhere("norm_eps", ("attention", "delta_net"))),
    field("max_position_embeddings", 32768, "max_position_embeddings"),
    field("tie_word_embeddings", False, "tie_word_embeddings"),
    field("router_aux_loss_coef", 0.001, "router_aux_loss_coef"),
    field("num_attention_heads", 16, "attention.num_heads"),
    field("num_key_value_heads", 2, "attention.num_kv_heads"),
    field("head_dim", 256, "attention.head_dim"),
    field("attention_bias", False, "attention.use_bias"),
    field("linear_num_key_heads", 16, "delta_net.num_key_heads"),
    field("linear_num_value_heads", 32, "delta_net.num_value_heads"),
    field("linear_key_head_dim", 128, "delta_net.key_head_dim"),
    field("linear_value_head_dim", 128, "delta_net.value_head_dim"),
    field("linear_conv_kernel_dim", 4, "delta_net.conv_width"),
    field("intermediate_size", 5632, "mlp.intermediate_size"),
    field("num_experts", 512, "moe.num_experts"),
    field("num_experts_per_tok", 10, "moe.experts_per_token"),
    field("moe_intermediate_size", 512, "moe.expert_size"),
    field("shared_expert_intermediate_size", 512, "moe.shared_expert_size"),
    field("norm_topk_prob", True, "moe.normalize_weights"),
)
FIXED = {"hidden_act": "silu", "attention_dropout": 0.0}


def _read_layers(source: Source, values: Values) -> tuple[LayerKind, ...]:
    length = source.size("num_hidden_layers", 48)
    interval = source.size("full_attention_interval", INTERVAL)
    mixers = read_mixers(source, length, interval, "linear_attention")
    dense = source.get("mlp_only_layers", [], list)
    outside = [i for i in dense if type(i) is not int or not 0 <= i < length]
    if outside:
        raise source.error(
            f"mlp_only_layers must be numbers of layers, 0 to {length - 1}. "
            f"Got {outside}."
        )
    step = source.size("decoder_sparse_step", 1)
    experts = values["moe"]["num_experts"]
    if experts == 0:
        del values["moe"]
    sparse = [
        i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(length)
    ]
    return tuple(
        LayerKind(mixer, "moe" if is_sparse else "dense")
        for mixer, is_sparse in zip(mixers, sparse, strict=True)
    )


def _write_layers(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    data = {
        **write_mixers(config, "full_attention_interval" if hub_style else None),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, kind in enumerate(config.layers) if kind.feed_forward == "dense"
        ],
    }
    return data if config.moe is not None else {**data, "num_experts": 0}


CONFIG = ConfigTable(
    architecture="Qwen3NextForCausalLM",
    parts=PARTS,
    fields=FIELDS,
    ropes=(Rope(partial=0.25),),
    read_layers=_read_layers,
    write_layers=_write_layers,
    fixed=FIXED,
    written={"output_router_logits": False},
    tolerated={"use_sliding_window": (False,), "sliding_window": (None,)},
)

HEADS = "num_attention_heads, num_key_value_heads, head_dim, hidden_size"
EXPERTS = "num_experts, moe_intermediate_size, hidden_size"
SHARED = "shared_expert_intermediate_size, hidden_size"
INTERVALS = "layer_types or full_attention_interval"
NOT_THE_DECODER = {
    "mtp.": "multi-token prediction, a draft model for speculative decoding",
    "model.visual.": "the vision tower of a multimodal repository",
    "visual.": "the vision tower of a multimodal repository",
}
MIXTURE = (
    *rows.linear("mlp", EXPERTS, ("gate",)),
    *rows.linear("mlp.shared_expert", SHARED, rows.PROJECTIONS),
    *rows.linear("mlp", "hidden_size", ("shared_expert_gate",)),
)

NAMES = rows.NameTable(
    rows=(
        *rows.OUTER,
        *rows.TWO_NORMS,
        *rows.attention(HEADS),
        *rows.delta_net(("in_proj_qkvz", "in_proj_ba")),  # grouped by key head
        *rows.DENSE,
        *MIXTURE,
    ),
    experts=rows.each_expert(EXPERTS),
    fused_experts=rows.fused_experts("mlp.experts", EXPERTS, "mlp/experts"),
    ignored=NOT_THE_DECODER,
    kinds=f"{INTERVALS}, mlp_only_layers or decoder_sparse_step",
)
