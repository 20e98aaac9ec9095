"""First values of two frontends: the same bytes, or at least the same distribution.

Linen derives a key from a parameter's path, NNX counts draws: one seed gives different
numbers in the two unless a model takes care. What can be compared then is what they are
drawn from, leaf by leaf: spread, mean and shape of the distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from parity.pairs import outputs
from parity.reporting.report import Tier
from parity.trees import Comparison, Difference, compare_bytes

# A false alarm in a million leaves, two-sided: of a normal, and of the
# Kolmogorov-Smirnov statistic (sqrt(-ln(1e-6 / 2) / 2)).
NORMAL_QUANTILE = 4.9
KOLMOGOROV_QUANTILE = 2.7
MANY = 256  # entries from which mean and spread are distributed normally (measured)


def check_first_values(linen: Mapping[str, Any], nnx: Mapping[str, Any]) -> Tier:
    """Compares first values by path: bytes, and the distribution where these differ."""
    values = [outputs.as_numpy(tree) for tree in (linen, nnx)]
    bytes_equal = compare_bytes(*values)
    if bytes_equal.equal:
        return Tier("init", bytes_equal, note="first values, to the bit")
    common = [path for path in values[0] if path in values[1]]
    found = [
        (path, other_distribution(values[0][path], values[1][path])) for path in common
    ]
    odd = tuple(Difference(path, "distribution", text) for path, text in found if text)
    unequal = [difference.path for difference in bytes_equal.differences]
    named = ", ".join(unequal[:3]) + (", …" if len(unequal) > 3 else "")
    text = f"{len(unequal)} of {len(common)} leaves have other bytes: {named}"
    summary = Difference("(first values)", "value", text)
    if odd:
        note = f"other bytes and, in {len(odd)} leaves, another distribution"
    else:
        note = "other bytes, as far as told the same distributions (one draw a leaf)"
    compared = Comparison(len(common), bytes_equal.elements, (summary, *odd))
    return Tier("init", compared, note=note)


def other_distribution(a: np.ndarray, b: np.ndarray) -> str | None:
    """Why two arrays cannot be draws from one distribution; None if they can.

    Constants must be equal. Otherwise the distributions, and those of the distances
    from the common median, are compared (two-sample Kolmogorov-Smirnov: right for any
    distribution and size), and of large leaves mean and spread; each at one false
    alarm in a million. Less than 15 entries tell nothing.
    """
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    if a.size != b.size or a.size == 0:
        return None  # for the tree tier to say
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return "NaN or infinity among first values"
    spread_a, spread_b = float(np.std(a)), float(np.std(b))
    if spread_a == 0.0 or spread_b == 0.0:
        return _compare_constants(a, b, spread_a, spread_b)
    median = np.median(np.concatenate([a, b]))
    furthest = max(
        _kolmogorov_smirnov(a, b),
        _kolmogorov_smirnov(np.abs(a - median), np.abs(b - median)),
    )
    mean, ratio = _standardised(a, b)
    alike = furthest <= KOLMOGOROV_QUANTILE * np.sqrt(2.0 / a.size)
    if alike and (a.size < MANY or max(mean, ratio) <= NORMAL_QUANTILE):
        return None
    # What stands out most is said.
    if max(mean, ratio) <= NORMAL_QUANTILE:
        return f"another shape at standard deviation {spread_a:.3g}"
    if mean > ratio:
        return f"mean {np.mean(a):.3g} in linen, {np.mean(b):.3g} in nnx"
    return f"standard deviation {spread_a:.3g} in linen, {spread_b:.3g} in nnx"


def _standardised(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Differences of the means, and of the logarithms of spread, by their errors."""
    spreads = np.std(a), np.std(b)
    mean = abs(np.mean(a) - np.mean(b)) / np.sqrt(sum(s**2 for s in spreads) / a.size)
    kurtosis = max(_kurtosis(a), _kurtosis(b))
    error = np.sqrt((kurtosis - 1.0) / (2.0 * a.size))
    return float(mean), float(abs(np.log(spreads[0] / spreads[1])) / error)


def _compare_constants(
    a: np.ndarray, b: np.ndarray, spread_a: float, spread_b: float
) -> str | None:
    if a.size > 1 and (spread_a == 0.0) != (spread_b == 0.0):
        constant = "linen" if spread_a == 0.0 else "nnx"
        return f"constant in {constant} only"
    if spread_a == 0.0 and spread_b == 0.0 and a[0] != b[0] and a.size > 1:
        return f"{a[0]:.3g} in linen, {b[0]:.3g} in nnx"
    return None


def _kurtosis(x: np.ndarray) -> float:
    """At least 1, of which equality is two values equally often."""
    centred = x - np.mean(x)
    # Of a few entries it is estimated too low: at least a uniform distribution's.
    return max(1.8, float(np.mean(centred**4) / np.mean(centred**2) ** 2))


def _kolmogorov_smirnov(a: np.ndarray, b: np.ndarray) -> float:
    """Largest distance of the two empirical distribution functions."""
    a, b = np.sort(a), np.sort(b)
    both = np.concatenate([a, b])
    below_a = np.searchsorted(a, both, side="right") / a.size
    below_b = np.searchsorted(b, both, side="right") / b.size
    return float(np.max(np.abs(below_a - below_b)))
