"""DeepSeek-V3: the published size and a tiny one."""

from __future__ import annotations

from shared.config import (
    DecoderConfig,
    LatentAttentionConfig,
    LayerKind,
    MLPConfig,
    MoEConfig,
    RopeConfig,
    YarnScaling,
)
from shared.presets.entry import Entry


def deepseek_v3() -> DecoderConfig:
    """deepseek-ai/DeepSeek-V3: 671 billion parameters, 37 active.

    Without the layer of multi-token prediction. The published weights are quantised.
    """
    hidden = 7168
    return DecoderConfig(
        family="deepseek_v3",
        vocab_size=129280,
        hidden_size=hidden,
        layers=_layers(3, 58),
        attention=LatentAttentionConfig(
            hidden_size=hidden,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            nope_head_dim=128,
            value_head_dim=128,
            rope=RopeConfig(
                theta=1e4,
                rotary_dim=64,
                interleaved=True,
                scaling=YarnScaling(
                    factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0
                ),
            ),
        ),
        mlp=MLPConfig(hidden_size=hidden, intermediate_size=18432),
        moe=_moe(
            hidden,
            num_experts=256,
            experts_per_token=8,
            expert_size=2048,
            num_groups=8,
            groups_per_token=4,
        ),
        zero_centered_norms=False,
        router_aux_loss_coef=0.0,
        max_position_embeddings=163840,
        bos_token_id=0,
        eos_token_id=1,
    )


def deepseek_v3_tiny() -> DecoderConfig:
    """DeepSeek-V3 with every size small and, where it can be, unlike the others."""
    hidden = 32
    return DecoderConfig(
        family="deepseek_v3",
        vocab_size=96,
        hidden_size=hidden,
        layers=_layers(1, 3),
        attention=LatentAttentionConfig(
            hidden_size=hidden,
            num_heads=4,
            q_lora_rank=24,
            kv_lora_rank=20,
            nope_head_dim=8,
            value_head_dim=12,
            rope=RopeConfig(
                theta=1e4,
                rotary_dim=6,
                interleaved=True,
                scaling=YarnScaling(
                    factor=4.0, original_length=64, mscale=1.0, mscale_all_dim=0.7
                ),
            ),
        ),
        mlp=MLPConfig(hidden_size=hidden, intermediate_size=40),
        moe=_moe(
            hidden,
            num_experts=8,
            experts_per_token=3,
            expert_size=16,
            num_groups=4,
            groups_per_token=2,
        ),
        zero_centered_norms=False,
        router_aux_loss_coef=0.0,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
    )


def _layers(dense: int, sparse: int) -> tuple[LayerKind, ...]:
    return (
        *(LayerKind("full_attention", "dense") for _ in range(dense)),
        *(LayerKind("full_attention", "moe") for _ in range(sparse)),
    )


def _moe(
    hidden: int,
    *,
    num_experts: int,
    experts_per_token: int,
    expert_size: int,
    num_groups: int,
    groups_per_token: int,
) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_size=expert_size,
        shared_expert_size=expert_size,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        shared_expert_gated=False,
        scores="sigmoid",
        correction_bias=True,
        scaling_factor=2.5,
    )


PRESETS = {
    "deepseek-v3": Entry(deepseek_v3),
    "deepseek-v3-tiny": Entry(deepseek_v3_tiny),
}
