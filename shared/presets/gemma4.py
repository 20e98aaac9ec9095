"""Gemma 4, text models of the repositories: the published sizes and tiny ones."""

from __future__ import annotations

import functools

from shared.config import (
    AttentionConfig,
    DecoderConfig,
    LayerInputConfig,
    MLPConfig,
    MoEConfig,
    RopeConfig,
)
from shared.presets.entry import Entry, layers


def _gemma_4(
    num_layers: int,
    hidden_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    window: int,
    max_position_embeddings: int,
    period: int = 6,
    head_dim: int = 256,
    full_kv_heads: int | None = None,
    full_head_dim: int = 512,
    keys_are_values: bool = False,
    moe: MoEConfig | None = None,
    layer_inputs: LayerInputConfig | None = None,
    borrowers: int = 0,
    wide_borrowers: bool = False,
    vocab_size: int = 262144,
) -> DecoderConfig:
    """What all published sizes have in common.

    A quarter of the pairs of a full-attention layer's head turn.
    """
    attention = functools.partial(
        AttentionConfig,
        hidden_size=hidden_size,
        num_heads=num_heads,
        gated=False,
        zero_centered_norms=False,
        value_norm=True,
        scale=1.0,
    )
    mlp = MLPConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation="gelu_tanh",
    )
    wide = MLPConfig(
        hidden_size=hidden_size,
        intermediate_size=2 * intermediate_size,
        activation="gelu_tanh",
    )
    return DecoderConfig(
        family="gemma4_text",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers(
            num_layers,
            period,
            "sliding_attention",
            "dense" if moe is None else "dense_and_moe",
            borrowers=borrowers,
        ),
        attention=attention(
            num_kv_heads=full_kv_heads or num_kv_heads,
            head_dim=full_head_dim,
            keys_are_values=keys_are_values,
            rope=RopeConfig(
                theta=1e6, rotary_dim=full_head_dim, turning_pairs=full_head_dim // 8
            ),
        ),
        sliding_attention=attention(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=RopeConfig(theta=1e4, rotary_dim=head_dim),
            window=window,
        ),
        mlp=mlp,
        borrower_mlp=wide if wide_borrowers else None,
        moe=moe,
        layer_inputs=layer_inputs,
        zero_centered_norms=False,
        output_norms=True,
        layer_scalar=True,
        scale_embeddings=True,
        logit_softcap=30.0,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )


def _moe(
    hidden_size: int, num_experts: int, experts_per_token: int, expert_size: int
) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden_size,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_size=expert_size,
        shared_expert_size=0,
        shared_expert_gated=False,
        per_expert_scale=True,
        norm_router_input=True,
        activation="gelu_tanh",
    )


def gemma_4_26b_a4b() -> DecoderConfig:
    """google/gemma-4-26B-A4B: 25.2 billion parameters, 3.8 active.

    Not verified: max_position_embeddings.
    """
    return _gemma_4(
        30,
        2816,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=2112,
        window=1024,
        max_position_embeddings=262144,
        full_kv_heads=2,
        keys_are_values=True,
        moe=_moe(2816, 128, 8, 704),
    )


def gemma_4_31b() -> DecoderConfig:
    """google/gemma-4-31B: 30.7 billion parameters.

    Not verified: max_position_embeddings.
    """
    return _gemma_4(
        60,
        5376,
        num_heads=32,
        num_kv_heads=16,
        intermediate_size=21504,
        window=1024,
        max_position_embeddings=262144,
        full_kv_heads=4,
        keys_are_values=True,
    )


def gemma_4_e2b() -> DecoderConfig:
    """google/gemma-4-E2B: 4.6 billion parameters, half of them of the second embedding.

    The last 20 layers borrow keys and values and are twice as wide.
    """
    return _gemma_4(
        35,
        1536,
        num_heads=8,
        num_kv_heads=1,
        intermediate_size=6144,
        window=512,
        max_position_embeddings=131072,
        period=5,
        layer_inputs=LayerInputConfig(vocab_size=262144, size=256),
        borrowers=20,
        wide_borrowers=True,
    )


def gemma_4_e4b() -> DecoderConfig:
    """google/gemma-4-E4B: 7.5 billion parameters; the last 18 layers borrow keys."""
    return _gemma_4(
        42,
        2560,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=10240,
        window=512,
        max_position_embeddings=131072,
        layer_inputs=LayerInputConfig(vocab_size=262144, size=256),
        borrowers=18,
    )


# Every size small and, where it can be, unlike the others.
_tiny = functools.partial(
    _gemma_4,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=40,
    window=8,
    max_position_embeddings=512,
    head_dim=12,
    full_head_dim=16,
    vocab_size=96,
)


def gemma_4_tiny() -> DecoderConfig:
    """Gemma 4 as 31B is: keys are values where attention is full."""
    return _tiny(12, full_kv_heads=1, keys_are_values=True)


def gemma_4_moe_tiny() -> DecoderConfig:
    """Gemma 4 as 26B-A4B is: routed experts beside every dense feed-forward layer."""
    return _tiny(12, full_kv_heads=1, keys_are_values=True, moe=_moe(32, 8, 2, 20))


def gemma_4_e_tiny() -> DecoderConfig:
    """Gemma 4 as E2B is: a second embedding, and layers that borrow keys."""
    return _tiny(
        10,
        period=5,
        layer_inputs=LayerInputConfig(vocab_size=96, size=6),
        borrowers=4,
        wide_borrowers=True,
    )


# Sources give 131072 and 262144; the model card speaks of a context of "256K".
_LENGTH = ("max_position_embeddings",)

PRESETS = {
    "gemma-4-26b-a4b": Entry(gemma_4_26b_a4b, _LENGTH),
    "gemma-4-31b": Entry(gemma_4_31b, _LENGTH),
    "gemma-4-e2b": Entry(gemma_4_e2b),
    "gemma-4-e4b": Entry(gemma_4_e4b),
    "gemma-4-tiny": Entry(gemma_4_tiny),
    "gemma-4-moe-tiny": Entry(gemma_4_moe_tiny),
    "gemma-4-e-tiny": Entry(gemma_4_e_tiny),
}
