"""DeepSeek-V3: attention to a compressed latent, experts chosen by groups."""

from __future__ import annotations

from typing import Any

from shared.checkpoint.hf_families import rows
from shared.checkpoint.hf_families.fields import (
    ConfigTable,
    Values,
    everywhere,
    field,
)
from shared.checkpoint.hf_families.rope import Rope
from shared.checkpoint.hf_families.source import Source
from shared.checkpoint.scheme import AS_IS
from shared.config import (
    DecoderConfig,
    LatentAttentionConfig,
    LayerKind,
    MLPConfig,
    MoEConfig,
)

_PARTS = {"attention": LatentAttentionConfig, "mlp": MLPConfig, "moe": MoEConfig}
_LAYER_TYPES = ("dense", "sparse")


def _read_layers(source: Source, values: Values) -> tuple[LayerKind, ...]:
    attention, moe = values["attention"], values["moe"]
    heads, rotary = attention["num_heads"], attention["rope"]["rotary_dim"]
    if source.any("num_key_value_heads", None) is not None:
        source.check("num_key_value_heads", heads, "every query head has its own keys")
    source.check("head_dim", rotary, "it is another name of qk_rope_head_dim")
    width = attention["nope_head_dim"] + rotary
    source.check("qk_head_dim", width, "it is qk_nope_head_dim + qk_rope_head_dim")
    shared = source.get("n_shared_experts", 1, int, type(None)) or 0
    moe["shared_expert_size"] = shared * moe["expert_size"]
    length = source.size("num_hidden_layers", 61)
    dense = _read_dense(source, length)
    return tuple(
        LayerKind("full_attention", "dense" if index < dense else "moe")
        for index in range(length)
    )


def _read_dense(source: Source, length: int) -> int:
    """How many layers, the first ones, are dense."""
    dense = min(source.get("first_k_dense_replace", 3, int), length)
    types = source.get("mlp_layer_types", None, list, type(None))
    if types is None:
        return max(dense, 0)
    count = types.count("dense")
    expected = ["dense"] * count + ["sparse"] * (length - count)
    if types != expected:
        raise source.error(
            f"mlp_layer_types must be {length} of {_LAYER_TYPES}, the dense layers "
            f"first: no other order is implemented. Got {types}."
        )
    if "first_k_dense_replace" in source:
        source.check("first_k_dense_replace", count, "so many mlp_layer_types say")
    return count


def _write_layers(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    kinds = [kind.feed_forward for kind in config.layers]
    data = {
        "num_hidden_layers": len(kinds),
        "first_k_dense_replace": [*kinds, "moe"].index("moe"),
    }
    moe, attention = config.moe, config.attention
    if moe is not None:
        data["n_shared_experts"] = moe.shared_expert_size // moe.expert_size
    if isinstance(attention, LatentAttentionConfig):
        data["num_key_value_heads"] = attention.num_heads
        if not hub_style:
            data["head_dim"] = attention.rope.rotary_dim
            data["qk_head_dim"] = attention.head_dim
    return data


CONFIG = ConfigTable(
    architecture="DeepseekV3ForCausalLM",
    parts=_PARTS,
    fields=(
        field("vocab_size", 129280, "vocab_size"),
        field("hidden_size", 7168, *everywhere("hidden_size", _PARTS)),
        field("initializer_range", 0.02, *everywhere("initializer_range", _PARTS)),
        field("rms_norm_eps", 1e-6, "norm_eps"),  # those of latents have their own
        field("max_position_embeddings", 4096, "max_position_embeddings"),
        field("tie_word_embeddings", False, "tie_word_embeddings"),
        field("num_attention_heads", 128, "attention.num_heads"),
        field("q_lora_rank", 1536, "attention.q_lora_rank", nullable=True),
        field("kv_lora_rank", 512, "attention.kv_lora_rank"),
        field("qk_nope_head_dim", 128, "attention.nope_head_dim"),
        field("qk_rope_head_dim", 64, "attention.rope.rotary_dim"),
        field("v_head_dim", 128, "attention.value_head_dim"),
        field("rope_interleave", True, "attention.rope.interleaved"),
        field("attention_bias", False, "attention.use_bias"),
        field("intermediate_size", 18432, "mlp.intermediate_size"),
        field("n_routed_experts", 256, "moe.num_experts"),
        field("num_experts_per_tok", 8, "moe.experts_per_token"),
        field("moe_intermediate_size", 2048, "moe.expert_size"),
        field("n_group", 8, "moe.num_groups"),
        field("topk_group", 4, "moe.groups_per_token"),
        field("norm_topk_prob", True, "moe.normalize_weights"),
        field("routed_scaling_factor", 2.5, "moe.scaling_factor"),
    ),
    ropes=(Rope(types=("default", "yarn")),),
    read_layers=_read_layers,
    write_layers=_write_layers,
    constants={
        "zero_centered_norms": False,
        "router_aux_loss_coef": 0.0,
        "moe.scores": "sigmoid",
        "moe.correction_bias": True,
        "moe.shared_expert_gated": False,
    },
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    hub_fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    written={
        "output_router_logits": False,
        "pretraining_tp": 1,
        "num_nextn_predict_layers": 0,
    },
    tolerated={"moe_layer_freq": (1,)},
    ignored={
        "num_nextn_predict_layers": "layers behind the decoder, found by their names",
        "pretraining_tp": "how the reference was trained",
        "ep_size": "over how many devices the reference spreads its experts",
        "aux_loss_alpha": "of a loss of the reference's training",
        "seq_aux": "of a loss of the reference's training",
    },
    tokens={"bos_token_id": 0, "eos_token_id": 1},
)

_HEADS = "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim"
_QUERIES = f"{_HEADS}, q_lora_rank, hidden_size"
_KEYS = f"{_HEADS}, kv_lora_rank, hidden_size"
_EXPERTS = "n_routed_experts, moe_intermediate_size, hidden_size"
_INTO_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")

NAMES = rows.NameTable(
    rows=(
        *rows.OUTER,
        *rows.TWO_NORMS,
        *rows.linear("self_attn", _QUERIES, ("q_proj", "q_a_proj", "q_b_proj")),
        *rows.linear("self_attn", _KEYS, ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        *rows.biases("self_attn", f"{_QUERIES}, kv_lora_rank", _INTO_LATENTS),
        *rows.norms("self_attn", "q_lora_rank", ("q_a_layernorm",)),
        *rows.norms("self_attn", "kv_lora_rank", ("kv_a_layernorm",)),
        *rows.DENSE,
        *rows.linear("mlp", _EXPERTS, ("gate",)),
        rows.row(
            "layers.{layer}.mlp.gate.e_score_correction_bias",
            "mlp/e_score_correction_bias",
            AS_IS,
            "n_routed_experts",
        ),
        *rows.linear(
            "mlp.shared_experts",
            "n_shared_experts, moe_intermediate_size, hidden_size",
            rows.PROJECTIONS,
            leaf="mlp/shared_expert",
        ),
    ),
    experts=rows.each_expert(_EXPERTS),
    fused_experts=rows.fused_experts("mlp.experts", _EXPERTS, "mlp/experts"),
    ignored_layers={
        ".eh_proj.weight": "multi-token prediction, a draft for speculative decoding"
    },
    kinds="first_k_dense_replace",
)
