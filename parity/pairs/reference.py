"""A pair against an independent reference of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from parity.pairs.outputs import as_numpy, flat
from parity.pairs.pair import Pair, Results
from parity.reporting.report import Tier
from parity.trees import Comparison, Difference


class Oracle(NamedTuple):
    """An independent reference for the outputs, such as a numpy function.

    Attributes:
      function: called as `function(values, *args, **keywords)` with numpy arrays,
        `values` by Linen's paths (`params/Dense_0/kernel`); gives the outputs.
      rtol: relative tolerance.
      atol: absolute tolerance.
    """

    function: Callable[..., Any]
    rtol: float = 1e-5
    atol: float = 1e-6


def check_oracle(pair: Pair, oracle: Oracle) -> Tier:
    """Linen's outputs of every call against the reference's."""
    values = as_numpy(pair.linen.values)
    total, count, worst = Comparison(), 0, 0.0
    for subject in pair.subjects:
        for steps in pair.inputs(subject):
            args = jax.tree.map(np.asarray, steps[0])
            outputs = oracle.function(values, *args.positional, **args.keywords)
            expected = flat(outputs, "outputs")
            mine = subject.runs[0](pair.linen.values, steps[:1])
            mine = {k: v for k, v in mine.items() if k.startswith("outputs")}
            compared, error = _near(mine, expected, oracle, subject.prefix)
            total, worst, count = total + compared, max(worst, error), count + 1
    note = f"outputs against the reference: worst {worst:.2f} of the tolerance"
    return Tier("oracle", total, count, note)


def _near(
    mine: Results, expected: Mapping[str, Any], oracle: Oracle, prefix: str
) -> tuple[Comparison, float]:
    differences: list[Difference] = []
    elements, worst = 0, 0.0
    for path in sorted(mine.keys() | expected.keys()):
        if path not in mine or path not in expected:
            where = "the reference" if path in expected else "the models"
            differences.append(Difference(prefix + path, "missing", f"only in {where}"))
            continue
        a, b = (np.asarray(x, np.float64) for x in (mine[path], expected[path]))
        if a.shape != b.shape:
            detail = f"models {a.shape}, reference {b.shape}"
            differences.append(Difference(prefix + path, "shape", detail))
            continue
        elements += a.size
        allowed = oracle.atol + oracle.rtol * np.abs(b)
        share = float(np.max(np.abs(a - b) / allowed, initial=0.0))
        worst = max(worst, share)
        if not share <= 1.0:
            off = float(np.max(np.abs(a - b)))
            detail = f"off by {off:.3g}, {share:.3g} of the tolerance"
            differences.append(Difference(prefix + path, "value", detail))
    return Comparison(len(mine), elements, tuple(differences)), worst
