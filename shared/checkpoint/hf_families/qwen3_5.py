"""Qwen3.5, dense and with routed experts: Qwen3-Next with four linear projections."""

from __future__ import annotations

import functools
from typing import Any

from shared.checkpoint.hf_families import qwen3_next, rows
from shared.checkpoint.hf_families.fields import (
    ConfigTable,
    Values,
    adapted,
    read_mixers,
    write_mixers,
)
from shared.checkpoint.hf_families.rope import Rope
from shared.checkpoint.hf_families.source import Source
from shared.config import DecoderConfig, FeedForward, LayerKind

_MTP = "of multi-token prediction, which is no part of the decoder"
_ROPE = Rope(partial=0.25, flat_hub=False, sections=(11, 11, 10))
_TOLERATED = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),  # of the recurrent state
    "mlp_only_layers": ([],),
    "norm_topk_prob": (True,),
}
_IGNORED = {"mtp_num_hidden_layers": _MTP, "mtp_use_dedicated_embeddings": _MTP}


def _read_layers(
    source: Source, values: Values, *, length: int, feed_forward: FeedForward
) -> tuple[LayerKind, ...]:
    length = source.size("num_hidden_layers", length)
    interval = source.size("full_attention_interval", qwen3_next.INTERVAL)
    mixers = read_mixers(source, length, interval, "linear_attention")
    return tuple(LayerKind(mixer, feed_forward) for mixer in mixers)


def _write_layers(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    return write_mixers(config, "full_attention_interval" if hub_style else None)


def _parts(*names: str) -> dict[str, Any]:
    return {name: qwen3_next.PARTS[name] for name in names}


_DENSE_PARTS = _parts("attention", "delta_net", "mlp")
_MOE_PARTS = _parts("attention", "delta_net", "moe")

DENSE_CONFIG = ConfigTable(
    architecture="Qwen3_5ForCausalLM",
    parts=_DENSE_PARTS,
    fields=adapted(
        qwen3_next.FIELDS,
        _DENSE_PARTS,
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_key_value_heads": 4,
        },
        without=("router_aux_loss_coef",),
    ),
    ropes=(_ROPE,),
    read_layers=functools.partial(_read_layers, length=32, feed_forward="dense"),
    write_layers=_write_layers,
    constants={"delta_net.grouped_projections": False, "router_aux_loss_coef": 0.0},
    fixed=qwen3_next.FIXED,
    tolerated=_TOLERATED,
    ignored=_IGNORED,
    hub_dtype="dtype",
    hub_marks=("full_attention_interval",),
)

MOE_CONFIG = ConfigTable(
    architecture="Qwen3_5MoeForCausalLM",
    parts=_MOE_PARTS,
    fields=adapted(
        qwen3_next.FIELDS,
        _MOE_PARTS,
        {"vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8},
        without=("norm_topk_prob",),
    ),
    ropes=(_ROPE,),
    read_layers=functools.partial(_read_layers, length=40, feed_forward="moe"),
    write_layers=_write_layers,
    constants={"delta_net.grouped_projections": False},
    fixed=qwen3_next.FIXED,
    written={"output_router_logits": False},
    tolerated=_TOLERATED,
    ignored=_IGNORED,
    hub_dtype="dtype",
    hub_marks=("full_attention_interval",),
)

_ROWS = (
    *rows.OUTER,
    *rows.TWO_NORMS,
    *rows.attention(qwen3_next.HEADS),
    *rows.delta_net(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
)

DENSE_NAMES = rows.NameTable(
    rows=(*_ROWS, *rows.DENSE),
    ignored=qwen3_next.NOT_THE_DECODER,
    kinds=qwen3_next.INTERVALS,
)

MOE_NAMES = rows.NameTable(
    rows=(*_ROWS, *qwen3_next.MIXTURE),
    experts=qwen3_next.NAMES.experts,
    fused_experts=qwen3_next.NAMES.fused_experts,
    ignored=qwen3_next.NOT_THE_DECODER,
    kinds=qwen3_next.INTERVALS,
)
