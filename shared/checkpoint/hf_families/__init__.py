"""Hugging Face model types: one file a family, with what its files say and are called.

A new family is one file with its two tables, and a line here.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.checkpoint.hf_families import (
    deepseek_v3,
    gemma3,
    gemma4,
    qwen3_5,
    qwen3_next,
)
from shared.checkpoint.hf_families.fields import ConfigTable
from shared.checkpoint.hf_families.rows import NameTable


class Family(NamedTuple):
    """A model type: its config.json and its tensors."""

    config: ConfigTable
    names: NameTable


FAMILIES = {
    "qwen3_next": Family(qwen3_next.CONFIG, qwen3_next.NAMES),
    "qwen3_5_text": Family(qwen3_5.DENSE_CONFIG, qwen3_5.DENSE_NAMES),
    "qwen3_5_moe_text": Family(qwen3_5.MOE_CONFIG, qwen3_5.MOE_NAMES),
    "gemma3_text": Family(gemma3.CONFIG, gemma3.NAMES),
    "gemma4_text": Family(gemma4.CONFIG, gemma4.NAMES),
    "deepseek_v3": Family(deepseek_v3.CONFIG, deepseek_v3.NAMES),
}

# Multimodal model types, and the model type of their text model.
WRAPPERS = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
}
