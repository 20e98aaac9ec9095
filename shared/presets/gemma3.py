"""Gemma 3, text models: the published sizes and a tiny one."""

from __future__ import annotations

import functools

from shared.config import (
    AttentionConfig,
    DecoderConfig,
    LinearScaling,
    MLPConfig,
    RopeConfig,
)
from shared.presets.entry import Entry, layers


def _gemma_3(
    num_layers: int,
    hidden_size: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    vocab_size: int,
    window: int,
    max_position_embeddings: int,
    head_dim: int = 256,
    scale: float | None = None,
    scaling: LinearScaling | None = None,
) -> DecoderConfig:
    attention = functools.partial(
        AttentionConfig,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        gated=False,
    )
    return DecoderConfig(
        family="gemma3_text",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers(num_layers, 6, "sliding_attention", "dense"),
        attention=attention(
            rope=RopeConfig(theta=1e6, rotary_dim=head_dim, scaling=scaling)
        ),
        sliding_attention=attention(
            rope=RopeConfig(theta=1e4, rotary_dim=head_dim), window=window
        ),
        mlp=MLPConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation="gelu_tanh",
        ),
        output_norms=True,
        scale_embeddings=True,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.0,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )


# What the text-only sizes have in common, and the text models of multimodal ones.
_small = functools.partial(
    _gemma_3, vocab_size=262144, window=512, max_position_embeddings=32768
)
_large = functools.partial(
    _gemma_3,
    vocab_size=262208,
    window=1024,
    max_position_embeddings=131072,
    scaling=LinearScaling(8.0),
)


def gemma_3_270m() -> DecoderConfig:
    """google/gemma-3-270m: 268 million parameters."""
    return _small(18, 640, num_heads=4, num_kv_heads=1, intermediate_size=2048)


def gemma_3_1b() -> DecoderConfig:
    """google/gemma-3-1b: 1 billion parameters."""
    return _small(26, 1152, num_heads=4, num_kv_heads=1, intermediate_size=6912)


def gemma_3_4b() -> DecoderConfig:
    """google/gemma-3-4b without its vision tower: 3.9 billion parameters."""
    return _large(34, 2560, num_heads=8, num_kv_heads=4, intermediate_size=10240)


def gemma_3_12b() -> DecoderConfig:
    """google/gemma-3-12b without its vision tower: 11.8 billion parameters."""
    return _large(48, 3840, num_heads=16, num_kv_heads=8, intermediate_size=15360)


def gemma_3_27b() -> DecoderConfig:
    """google/gemma-3-27b without its vision tower: 27.0 billion parameters.

    Its scores are divided by the root of the width per query head, not of `head_dim`.
    """
    return _large(
        62,
        5376,
        num_heads=32,
        num_kv_heads=16,
        intermediate_size=21504,
        head_dim=128,
        scale=168**-0.5,
    )


def gemma_3_tiny() -> DecoderConfig:
    """Gemma 3 with every size small and, where it can be, unlike the others."""
    return _gemma_3(
        8,
        32,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=40,
        vocab_size=96,
        window=7,
        max_position_embeddings=512,
        head_dim=12,
        scale=9**-0.5,
        scaling=LinearScaling(4.0),
    )


PRESETS = {
    "gemma-3-270m": Entry(gemma_3_270m),
    "gemma-3-1b": Entry(gemma_3_1b),
    "gemma-3-4b": Entry(gemma_3_4b),
    "gemma-3-12b": Entry(gemma_3_12b),
    "gemma-3-27b": Entry(gemma_3_27b),
    "gemma-3-tiny": Entry(gemma_3_tiny),
}
