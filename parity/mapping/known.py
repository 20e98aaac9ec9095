r"""What is known to differ between Flax's two APIs, as rules.

They are tried on leaves that have no counterpart by name, after the user's own rules,
and only where they fit: all parts there, the target free. Seen in Flax 0.12.8 and
0.12.12.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from parity.mapping.rules import Rules


class Known(NamedTuple):
    """A known difference: what to call it, and the rules that bridge it."""

    name: str
    rules: Rules


def _fused(fused: str, gates: list[str], leaf: str) -> dict[str, object]:
    return {
        "linen": [rf"(.*)/{gate}/{leaf}" for gate in gates],
        "nnx": rf"\1/{fused}/{leaf}",
        "axis": -1,
    }


_LSTM_INPUT, _LSTM_HIDDEN = ["ii", "if", "ig", "io"], ["hi", "hf", "hg", "ho"]
_GRU_INPUT, _GRU_HIDDEN = ["ir", "iz", "in"], ["hr", "hz", "hn"]

KNOWN = (
    Known(
        "gates of an LSTM cell, fused in NNX",
        Rules.of(
            [
                _fused("dense_i", _LSTM_INPUT, "kernel"),
                _fused("dense_h", _LSTM_HIDDEN, "kernel"),
                _fused("dense_h", _LSTM_HIDDEN, "bias"),
            ]
        ),
    ),
    Known(
        "gates of a GRU cell, fused in NNX",
        Rules.of(
            [
                _fused("dense_i", _GRU_INPUT, "kernel"),
                _fused("dense_i", _GRU_INPUT, "bias"),
                _fused("dense_h", _GRU_HIDDEN, "kernel"),
            ]
        ),
    ),
    Known(
        "names in a simple cell",
        Rules.of(
            [
                {"linen": r"(.*)/(i|h)/(kernel|bias)", "nnx": r"\1/dense_\2/\3"},
            ]
        ),
    ),
    # Linen keeps 'layer/kernel/scale' in the wrapper, NNX (kernel,) under `scales`.
    Known(
        "WeightNorm's scales",
        Rules.of(
            [{"linen": r"(.*)/'[^/']+/(.+)/scale'", "nnx": r"\1/scales/\2"}],
        ),
    ),
    Known(
        "SpectralNorm's statistics",
        Rules.of(
            [
                {
                    "linen": r"(.*)/'[^/']+/(.+)/(u|sigma)'",
                    "nnx": r"\1/batch_stats/\2/\3",
                }
            ],
        ),
    ),
)

# Leaves one API has and the other cannot have, and what that means.
ONLY_IN_LINEN = (
    (
        re.compile(r".*/hn/bias"),
        "nnx.GRUCell has no bias on its new gate's hidden part, nn.GRUCell has: the "
        "two are equal only while it is zero",
    ),
)


def normal(text: str) -> str:
    """A text under which names that both APIs give one thing are equal.

    `layers_0` and `layers/0`, `d_a` and `d/a`, `if` and `if_`, a key with slashes and
    a tuple: tokens are joined by underscores and lose trailing ones. The collection
    stays apart.
    """
    collection, _, path = text.partition("/")
    tokens = [t.rstrip("_") for t in re.split(r"[/,]", re.sub(r"['\"()]", "", path))]
    return f"{collection}/{'_'.join(tokens)}"


def naming(linen: str, nnx: str) -> str:
    """Which known difference lets two texts have one normal form."""
    left, right = linen.split("/"), nnx.split("/")
    if "'" in linen or "(" in nnx:
        return "a key of several tokens"
    if any(token.endswith("_") for token in right + left) and len(left) == len(right):
        return "trailing underscore"
    if any(token.isdigit() for token in right) or any(t.isdigit() for t in left):
        return "index in the name"
    return "nested names"
