"""What the list of presets knows of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shared.config import DecoderConfig, FeedForward, LayerKind, Mixer


class Entry(NamedTuple):
    """A preset.

    Attributes:
      make: the config.
      not_verified: fields whose published value could not be made certain, by path.
    """

    make: Callable[[], DecoderConfig]
    not_verified: tuple[str, ...] = ()


def layers(
    count: int,
    period: int,
    local: Mixer,
    feed_forward: FeedForward,
    *,
    borrowers: int = 0,
) -> tuple[LayerKind, ...]:
    """Every `period`-th layer with full attention, the others with `local`.

    Args:
      count: how many layers.
      period: n, for every n-th.
      local: mixer of the others.
      feed_forward: of all layers.
      borrowers: so many of the last ones borrow keys.
    """
    return tuple(
        LayerKind(
            local if (i + 1) % period else "full_attention",
            feed_forward,
            borrows_keys=i >= count - borrowers,
        )
        for i in range(count)
    )
