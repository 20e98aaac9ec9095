"""Qwen3.5, dense and with routed experts: the published sizes and tiny ones.

The text models of the repositories, without token ids: those stand in each one's
generation_config.json.
"""

from __future__ import annotations

import functools

from shared.config import (
    AttentionConfig,
    DecoderConfig,
    FeedForward,
    GatedDeltaNetConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
)
from shared.presets.entry import Entry, layers


def _published(
    num_layers: int,
    hidden_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    value_heads: int,
    mlp: MLPConfig | None = None,
    moe: MoEConfig | None = None,
    tie_word_embeddings: bool = False,
) -> DecoderConfig:
    """What all published sizes have in common."""
    feed_forward: FeedForward = "dense" if moe is None else "moe"
    return DecoderConfig(
        family="qwen3_5_text" if moe is None else "qwen3_5_moe_text",
        vocab_size=248320,
        hidden_size=hidden_size,
        layers=layers(num_layers, 4, "linear_attention", feed_forward),
        attention=AttentionConfig(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=256,
            rope=RopeConfig(theta=1e7, rotary_dim=64, sections=(11, 11, 10)),
        ),
        delta_net=GatedDeltaNetConfig(
            hidden_size=hidden_size,
            num_key_heads=16,
            num_value_heads=value_heads,
            key_head_dim=128,
            value_head_dim=128,
            grouped_projections=False,
        ),
        mlp=mlp,
        moe=moe,
        tie_word_embeddings=tie_word_embeddings,
        router_aux_loss_coef=0.0 if moe is None else 0.001,
        max_position_embeddings=262144,
    )


def _dense(hidden_size: int, intermediate_size: int) -> MLPConfig:
    return MLPConfig(hidden_size=hidden_size, intermediate_size=intermediate_size)


def _moe(
    hidden_size: int, num_experts: int, experts_per_token: int, expert_size: int
) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden_size,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_size=expert_size,
        shared_expert_size=expert_size,
    )


def qwen3_5_0_8b() -> DecoderConfig:
    """Qwen/Qwen3.5-0.8B."""
    return _published(
        24,
        1024,
        num_heads=8,
        num_kv_heads=2,
        value_heads=16,
        mlp=_dense(1024, 3584),
        tie_word_embeddings=True,
    )


def qwen3_5_2b() -> DecoderConfig:
    """Qwen/Qwen3.5-2B."""
    return _published(
        24,
        2048,
        num_heads=8,
        num_kv_heads=2,
        value_heads=16,
        mlp=_dense(2048, 6144),
        tie_word_embeddings=True,
    )


def qwen3_5_4b() -> DecoderConfig:
    """Qwen/Qwen3.5-4B."""
    return _published(
        32,
        2560,
        num_heads=16,
        num_kv_heads=4,
        value_heads=32,
        mlp=_dense(2560, 9216),
        tie_word_embeddings=True,
    )


def qwen3_5_9b() -> DecoderConfig:
    """Qwen/Qwen3.5-9B."""
    return _published(
        32,
        4096,
        num_heads=16,
        num_kv_heads=4,
        value_heads=32,
        mlp=_dense(4096, 12288),
    )


def qwen3_5_27b() -> DecoderConfig:
    """Qwen/Qwen3.5-27B."""
    return _published(
        64,
        5120,
        num_heads=24,
        num_kv_heads=4,
        value_heads=48,
        mlp=_dense(5120, 17408),
    )


def qwen3_5_35b_a3b() -> DecoderConfig:
    """Qwen/Qwen3.5-35B-A3B."""
    return _published(
        40,
        2048,
        num_heads=16,
        num_kv_heads=2,
        value_heads=32,
        moe=_moe(2048, 256, 8, 512),
    )


def qwen3_5_122b_a10b() -> DecoderConfig:
    """Qwen/Qwen3.5-122B-A10B."""
    return _published(
        48,
        3072,
        num_heads=32,
        num_kv_heads=2,
        value_heads=64,
        moe=_moe(3072, 256, 8, 1024),
    )


def qwen3_5_397b_a17b() -> DecoderConfig:
    """Qwen/Qwen3.5-397B-A17B."""
    return _published(
        60,
        4096,
        num_heads=32,
        num_kv_heads=2,
        value_heads=64,
        moe=_moe(4096, 512, 10, 1024),
    )


def qwen3_5_tiny(num_layers: int = 6, *, moe: bool = False) -> DecoderConfig:
    """Qwen3.5 with every size small and, where it can be, unlike the others."""
    hidden = 32
    return DecoderConfig(
        family="qwen3_5_moe_text" if moe else "qwen3_5_text",
        vocab_size=96,
        hidden_size=hidden,
        layers=layers(num_layers, 4, "linear_attention", "moe" if moe else "dense"),
        attention=AttentionConfig(
            hidden_size=hidden,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(theta=1e4, rotary_dim=8, sections=(2, 1, 1)),
        ),
        delta_net=GatedDeltaNetConfig(
            hidden_size=hidden,
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=8,
            value_head_dim=12,
            chunk_size=16,
            grouped_projections=False,
        ),
        mlp=None if moe else MLPConfig(hidden_size=hidden, intermediate_size=40),
        moe=MoEConfig(
            hidden_size=hidden,
            num_experts=8,
            experts_per_token=2,
            expert_size=20,
            shared_expert_size=24,
        )
        if moe
        else None,
        tie_word_embeddings=not moe,
        router_aux_loss_coef=0.001 if moe else 0.0,
        max_position_embeddings=512,
    )


PRESETS = {
    "qwen3.5-0.8b": Entry(qwen3_5_0_8b),
    "qwen3.5-2b": Entry(qwen3_5_2b),
    "qwen3.5-4b": Entry(qwen3_5_4b),
    "qwen3.5-9b": Entry(qwen3_5_9b),
    "qwen3.5-27b": Entry(qwen3_5_27b),
    "qwen3.5-35b-a3b": Entry(qwen3_5_35b_a3b),
    "qwen3.5-122b-a10b": Entry(qwen3_5_122b_a10b),
    "qwen3.5-397b-a17b": Entry(qwen3_5_397b_a17b),
    "qwen3.5-tiny": Entry(qwen3_5_tiny),
    "qwen3.5-moe-tiny": Entry(functools.partial(qwen3_5_tiny, moe=True)),
}
