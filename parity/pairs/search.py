"""Drawn examples, and the smallest one on which two frontends differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
from hypothesis import strategies as st

from parity.trees import Comparison


class Found(NamedTuple):
    """What drawing came to.

    Attributes:
      compared: all examples together; where some differ, the smallest that does.
      examples: how many were drawn and equal, or 1.
      smallest: the smallest example that differs, None if none does.
      last: the last example that was run.
    """

    compared: Comparison
    examples: int
    smallest: Any
    last: Any

    def lines(self, again: str, prefix: str = "") -> tuple[str, ...]:
        """What to show of the example that differs, if one does.

        Args:
          again: how to draw it once more; "" if that is not known.
          prefix: of the call's paths in reports.
        """
        if self.smallest is None:
            return ()
        shown = f"{prefix}smallest example that differs: {self.smallest!r}"
        return (" ".join(shown.split()), *([again] if again else []))


class _Unequal(Exception):
    def __init__(self, example: Any, compared: Comparison):
        super().__init__("differs")
        self.example = example
        self.compared = compared


def search(
    strategy: st.SearchStrategy[Any],
    compare: Callable[[Any], Comparison],
    *,
    seed: int,
    count: int,
) -> Found:
    """Draws examples, the same for the same seed, until one differs.

    Args:
      strategy: of the examples.
      compare: both frontends on one example.
      seed: of the draws.
      count: how many at most.
    """
    total, examples, last = Comparison(), 0, None

    def run(example: Any) -> None:
        nonlocal total, examples, last
        compared = compare(example)
        if compared.differences:
            raise _Unequal(example, compared)
        total, examples, last = total + compared, examples + 1, example

    try:
        draw(strategy, run, seed=seed, count=count)
    except _Unequal as unequal:
        return Found(unequal.compared, 1, unequal.example, unequal.example)
    return Found(total, examples, None, last)


def draw(
    strategy: st.SearchStrategy[Any],
    run: Callable[[Any], None],
    *,
    seed: int,
    count: int,
) -> None:
    """Runs `run` on drawn examples, the same for the same seed.

    Where it raises, Hypothesis looks for the smallest example that does; the exception
    of that one comes out.
    """
    settings = hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
        report_multiple_bugs=False,
    )

    def test(example: Any) -> None:
        run(example)

    hypothesis.seed(seed)(settings(hypothesis.given(strategy)(test)))()
