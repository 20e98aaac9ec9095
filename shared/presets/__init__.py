"""Named configs: the published sizes, and tiny ones of the same shape for tests.

A family is one file, and a line here.
"""

from __future__ import annotations

from shared.config import DecoderConfig
from shared.presets import deepseek_v3, gemma3, gemma4, qwen3_5, qwen3_next
from shared.presets.entry import Entry
from shared.presets.qwen3_next import (
    hybrid_layers,
    qwen3_next_80b_a3b,
    qwen3_next_tiny,
)

__all__ = [
    "hybrid_layers",
    "not_verified",
    "preset",
    "presets",
    "qwen3_next_80b_a3b",
    "qwen3_next_tiny",
]

_PRESETS: dict[str, Entry] = {
    **qwen3_next.PRESETS,
    **qwen3_5.PRESETS,
    **gemma3.PRESETS,
    **gemma4.PRESETS,
    **deepseek_v3.PRESETS,
}


def presets() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(_PRESETS)


def preset(name: str) -> DecoderConfig:
    """The config called `name`.

    Raises:
      KeyError: there is none of that name; the message lists those there are.
    """
    return _entry(name).make()


def not_verified(name: str) -> tuple[str, ...]:
    """Fields of a preset whose published value could not be made certain, by path.

    Raises:
      KeyError: there is none of that name; the message lists those there are.
    """
    return _entry(name).not_verified


def _entry(name: str) -> Entry:
    if name not in _PRESETS:
        raise KeyError(f"No preset {name!r}. There are: {', '.join(_PRESETS)}.")
    return _PRESETS[name]
