"""Text from elsewhere (paths, targets, messages) made fit to be shown."""

from __future__ import annotations

import math
import re
from typing import Any

# Control characters, halves of surrogate pairs, and what XML 1.0 has no place for.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def printable(text: str) -> str:
    r"""Writes control characters as escapes; tab and newline stay.

    >>> printable("layer\x1b[2J/kernel")
    'layer\\x1b[2J/kernel'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


def one_line(text: str) -> str:
    """As `printable`, on one line."""
    return " ".join(printable(text).split())


def json_number(value: float | None) -> float | str | None:
    """A number as JSON can hold it: what is not finite becomes a word.

    >>> json_number(float("inf"))
    'Infinity'
    """
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number(value: Any) -> float | None:
    """The inverse of `json_number`.

    >>> number("-Infinity")
    -inf
    """
    if isinstance(value, str):
        return _NOT_FINITE[value]
    return None if value is None else float(value)
