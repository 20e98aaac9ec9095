"""Are two results that differ the same up to rounding? Measured, not wished.

Two questions are asked of each path that differs:

1. Is the distance within the noise floor? The floor is how far either frontend's own
   result moves when every floating-point input is moved by at most one unit in the last
   place, and how far it moves when nothing changes. The last place is that of the
   lowest precision in which both frontends compute something.
2. Does the distance shrink with the precision? In float64 the same computation has to
   agree about 2^29 times better. A real difference, however small, stays what it is: a
   wrong epsilon that moves float32 results by one rounding is found here. Where a
   module fixes a lower precision somewhere inside, the question cannot be asked, and
   the note says so.

An integer, such as the index of the largest score, has no distance. Where it differs
and rounding alone makes either frontend change its own mind, the result is
inconclusive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from parity.programs import cost
from parity.reporting.report import Status, Tier
from parity.trees import Comparison, Difference

Results = Mapping[str, np.ndarray]
Values = Mapping[str, Array]

TRIALS = 8  # runs with moved inputs
# The floor is the largest of a few random moves, and the two frontends add up in orders
# of their own; measured on Flax's layers the distance stays under twice the floor.
FLOORS = 8.0
# As above, and rounding in float64 has other luck than in float32.
FLOORS_FLOAT64 = 64.0


class Frontend(NamedTuple):
    """One side: everything it computes, as a function of values and inputs.

    Attributes:
      run: results by path.
      coarsest: the unit in the last place (of 1.0) of the lowest precision in which a
        run with these inputs computes anything.
    """

    run: Callable[[Values, Any], Results]
    coarsest: Callable[[Values, Any], float]


class Case(NamedTuple):
    """One example for both frontends.

    Attributes:
      prefix: of its paths in reports.
      frontends: Linen and NNX.
      example: a pytree of inputs.
      values: parameters and other state, in Linen's naming.
    """

    prefix: str
    frontends: tuple[Frontend, Frontend]
    example: Any
    values: Values


class _Verdict(NamedTuple):
    path: str
    status: Status
    detail: str
    elements: int
    absolute: float | None = None


def check_tolerance(cases: Sequence[Case], seed: int = 0) -> Tier:
    """Judges every path of both frontends' results.

    Args:
      cases: examples on which they differ.
      seed: of the moves.
    """
    verdicts: list[_Verdict] = []
    methods: set[str] = set()
    for i, case in enumerate(cases):
        found, method = _judge_example(
            case.frontends, case.values, case.example, seed + i
        )
        verdicts += [v._replace(path=case.prefix + v.path) for v in found]
        methods.add(method)
    elements = sum(verdict.elements for verdict in verdicts)
    bad = tuple(
        Difference(v.path, "value", v.detail, absolute=v.absolute)
        for v in verdicts
        if v.status != "proved"
    )
    statuses = {verdict.status for verdict in verdicts}
    status: Status = "proved" if verdicts and elements else "failed"
    for worse in ("inconclusive", "failed"):
        status = worse if worse in statuses else status
    compared = Comparison(len(verdicts), elements, bad)
    note = f"noise floor measured in this run; {' or '.join(sorted(methods))}"
    return Tier("tolerance", compared, len(cases), note, status=status)


def coarsest_eps(function: Callable[..., Any], *args: Any) -> float:
    """The largest machine epsilon among the floats that `function` computes."""
    equations = cost.equations(jax.make_jaxpr(function)(*args))
    return max((_eps(eqn) for eqn in equations), default=0.0)


def move(tree: Any, random: np.random.Generator, coarsest: float = 0.0) -> Any:
    """Every float times 1, 1 + eps or 1 - eps, drawn for each entry.

    Args:
      tree: arrays.
      random: what draws.
      coarsest: the least eps.
    """

    def moved(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        eps = max(float(jnp.finfo(leaf.dtype).eps), coarsest)
        factor = 1.0 + eps * random.integers(-1, 2, leaf.shape)
        # In float64, where the product is exact enough to round to a neighbour.
        return jnp.asarray((np.asarray(leaf, np.float64) * factor).astype(leaf.dtype))

    return jax.tree.map(moved, tree)


def _judge_example(
    frontends: tuple[Frontend, Frontend], values: Values, example: Any, seed: int
) -> tuple[list[_Verdict], str]:
    base = [side.run(values, example) for side in frontends]
    # What only one of them lowers is no excuse.
    coarsest = min(side.coarsest(values, example) for side in frontends)
    trials = [_moved(side, values, example, seed, coarsest) for side in frontends]
    exact = _in_float64(frontends, values, example)
    paths = [path for path in base[0] if path in base[1]]
    verdicts = [
        _judge(
            path,
            [results[path] for results in base],
            [[trial[path] for trial in side] for side in trials],
            None if exact is None else [results[path] for results in exact],
            coarsest,
        )
        for path in paths
        if base[0][path].shape == base[1][path].shape
    ]
    method = "confirmed in float64"
    if exact is None:
        method = "float64 is not carried through, so not confirmed in it"
    return verdicts, method


def _moved(
    side: Frontend, values: Values, example: Any, seed: int, coarsest: float
) -> list[Results]:
    """Results with inputs moved, and once more with the same."""
    random = np.random.default_rng(seed)
    given = dict(values), example
    trials = [side.run(*move(given, random, coarsest)) for _ in range(TRIALS)]
    return [*trials, side.run(values, example)]


def _in_float64(
    frontends: Sequence[Frontend], values: Values, example: Any
) -> list[Results] | None:
    with jax.enable_x64(True):
        wide = _widened((dict(values), example))
        try:
            eps = float(np.finfo(np.float64).eps)
            if any(side.coarsest(*wide) > eps for side in frontends):
                return None
            return [side.run(*wide) for side in frontends]
        except (TypeError, ValueError):  # a dtype is fixed somewhere inside
            return None


def _widened(tree: Any) -> Any:
    def wide(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.asarray(np.asarray(leaf, np.float64))

    return jax.tree.map(wide, tree)


def _judge(
    path: str,
    pair: list[np.ndarray],
    trials: list[list[np.ndarray]],
    exact: list[np.ndarray] | None,
    coarsest: float,
) -> _Verdict:
    left, right = pair
    if left.dtype == right.dtype and left.tobytes() == right.tobytes():
        return _Verdict(path, "proved", "", left.size)
    if left.dtype != right.dtype:
        detail = f"linen {left.dtype}, nnx {right.dtype}"
        return _Verdict(path, "failed", detail, left.size)
    if not jnp.issubdtype(left.dtype, jnp.inexact):
        return _judge_choice(path, pair, trials)
    return _judge_numbers(path, pair, trials, exact, coarsest)


def _judge_choice(
    path: str, pair: list[np.ndarray], trials: list[list[np.ndarray]]
) -> _Verdict:
    left, right = pair
    flips = np.zeros(left.shape, bool)
    for own, side in zip(pair, trials, strict=True):
        for trial in side:
            flips |= trial != own
    firm = (left != right) & ~flips
    unequal = int(np.sum(left != right))
    if firm.any():
        detail = f"{int(firm.sum())} of {left.size} entries differ, whatever is rounded"
        return _Verdict(path, "failed", detail, left.size)
    detail = (
        f"{unequal} of {left.size} entries differ, and each also changes within one "
        "frontend when inputs move by a rounding: a near-tie"
    )
    return _Verdict(path, "inconclusive", detail, left.size)


def _judge_numbers(
    path: str,
    pair: list[np.ndarray],
    trials: list[list[np.ndarray]],
    exact: list[np.ndarray] | None,
    coarsest: float,
) -> _Verdict:
    distance = _distance(*pair)
    eps = max(float(jnp.finfo(pair[0].dtype).eps), coarsest)
    floor = max(
        eps * max(_largest(x) for x in pair),
        *(
            _distance(own, trial)
            for own, side in zip(pair, trials, strict=True)
            for trial in side
        ),
    )
    detail = f"off by {distance:.3g}, noise floor {floor:.3g}"
    if not distance <= FLOORS * floor:
        return _Verdict(path, "failed", detail, pair[0].size, distance)
    if exact is None:
        # Nothing else would see small entries that are wrong beside large ones.
        share = np.max(_distances(*pair) / _floors(pair, trials, eps), initial=0.0)
        if not share <= FLOORS:
            detail += f"; an entry is off by {share:.3g} times its own"
            return _Verdict(path, "failed", detail, pair[0].size, distance)
    else:
        rest = _distance(*exact)
        gain = float(np.finfo(np.float64).eps) / eps
        allowed = FLOORS_FLOAT64 * floor * gain
        if not rest <= allowed:
            detail += (
                f"; in float64 still {rest:.3g} where rounding explains "
                f"{allowed:.3g}: another function"
            )
            return _Verdict(path, "failed", detail, pair[0].size, distance)
    return _Verdict(path, "proved", detail, pair[0].size)


def _floors(
    pair: list[np.ndarray], trials: list[list[np.ndarray]], eps: float
) -> np.ndarray:
    """The noise floor of each entry, above zero."""
    floors = eps * np.maximum(*(np.abs(_as_wide(x)) for x in pair))
    for own, side in zip(pair, trials, strict=True):
        for trial in side:
            floors = np.maximum(floors, _distances(own, trial))
    return np.maximum(np.nan_to_num(floors), np.finfo(np.float64).tiny)


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    """Largest absolute difference; infinite where only one is a number."""
    return float(np.max(_distances(left, right), initial=0))


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    a, b = (_as_wide(x) for x in (left, right))
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, difference)
    return np.where(np.isnan(difference), np.inf, difference)


def _largest(x: np.ndarray) -> float:
    wide = np.abs(_as_wide(x))
    return float(np.max(wide, initial=0.0, where=np.isfinite(wide)))


def _as_wide(x: np.ndarray) -> np.ndarray:
    kind = np.complex128 if np.issubdtype(x.dtype, np.complexfloating) else np.float64
    return x.astype(kind)


def _eps(eqn: Any) -> float:
    """The largest machine epsilon among the floats of its results, 0 without any."""
    dtypes = [getattr(var.aval, "dtype", None) for var in eqn.outvars]
    return max(
        (
            float(jnp.finfo(dtype).eps)
            for dtype in dtypes
            if dtype is not None
            and not jnp.issubdtype(dtype, jax.dtypes.extended)
            and jnp.issubdtype(dtype, jnp.floating)
        ),
        default=0.0,
    )
