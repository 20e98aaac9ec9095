"""Qwen3-Next: the published size, and tiny ones of the same shape for tests."""

from __future__ import annotations

import functools

from shared.config import (
    AttentionConfig,
    DecoderConfig,
    GatedDeltaNetConfig,
    LayerKind,
    MLPConfig,
    MoEConfig,
    RopeConfig,
)
from shared.presets.entry import Entry, layers


def qwen3_next_80b_a3b() -> DecoderConfig:
    """Qwen/Qwen3-Next-80B-A3B, as published: 79.7 billion parameters, 3 active."""
    return DecoderConfig(
        family="qwen3_next",
        vocab_size=151936,
        hidden_size=2048,
        layers=hybrid_layers(48),
        attention=AttentionConfig(
            hidden_size=2048,
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            rope=RopeConfig(theta=1e7, rotary_dim=64),
        ),
        delta_net=GatedDeltaNetConfig(
            hidden_size=2048,
            num_key_heads=16,
            num_value_heads=32,
            key_head_dim=128,
            value_head_dim=128,
        ),
        mlp=MLPConfig(hidden_size=2048, intermediate_size=5120),
        moe=MoEConfig(
            hidden_size=2048,
            num_experts=512,
            experts_per_token=10,
            expert_size=512,
            shared_expert_size=512,
        ),
        max_position_embeddings=262144,
        bos_token_id=151643,
        eos_token_id=151645,
    )


def qwen3_next_tiny(
    num_layers: int = 6,
    *,
    key_heads: int = 2,
    value_heads: int = 4,
    dense_layers: tuple[int, ...] = (),
    tie_word_embeddings: bool = False,
) -> DecoderConfig:
    """Qwen3-Next with every size small and, where it can be, unlike the others."""
    hidden = 32
    return DecoderConfig(
        family="qwen3_next",
        vocab_size=96,
        hidden_size=hidden,
        layers=hybrid_layers(num_layers, dense_layers=dense_layers),
        attention=AttentionConfig(
            hidden_size=hidden,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(theta=1e4, rotary_dim=4),
        ),
        delta_net=GatedDeltaNetConfig(
            hidden_size=hidden,
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=8,
            value_head_dim=12,
            chunk_size=16,
        ),
        mlp=MLPConfig(hidden_size=hidden, intermediate_size=40),
        moe=MoEConfig(
            hidden_size=hidden,
            num_experts=8,
            experts_per_token=2,
            expert_size=16,
            shared_expert_size=24,
        ),
        tie_word_embeddings=tie_word_embeddings,
        max_position_embeddings=512,
    )


def hybrid_layers(
    num_layers: int, *, period: int = 4, dense_layers: tuple[int, ...] = ()
) -> tuple[LayerKind, ...]:
    """Linear attention with every `period`-th layer full, all but a few sparse."""
    kinds = layers(num_layers, period, "linear_attention", "moe")
    return tuple(
        LayerKind(kind.mixer, "dense") if i in dense_layers else kind
        for i, kind in enumerate(kinds)
    )


PRESETS = {
    "qwen3-next-80b-a3b": Entry(qwen3_next_80b_a3b),
    "qwen3-next-tiny": Entry(qwen3_next_tiny),
    "qwen3-next-8l-tiny": Entry(functools.partial(qwen3_next_tiny, 8)),
    "qwen3-next-dense-mix-tiny": Entry(
        functools.partial(qwen3_next_tiny, 8, dense_layers=(0, 5))
    ),
    "qwen3-next-dense-prefix-tiny": Entry(
        functools.partial(qwen3_next_tiny, 10, dense_layers=(0,))
    ),
    "qwen3-next-equal-heads-tiny": Entry(
        functools.partial(qwen3_next_tiny, key_heads=3, value_heads=3)
    ),
    "qwen3-next-many-values-tiny": Entry(
        functools.partial(
            qwen3_next_tiny, key_heads=1, value_heads=4, tie_word_embeddings=True
        )
    ),
}
