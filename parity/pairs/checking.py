"""The check of any pair: a Linen module and an NNX module that should be one model."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array

from parity.mapping import suggest as drafts
from parity.mapping.rules import Rules
from parity.pairs import calls
from parity.pairs.calls import Call, CheckError
from parity.pairs.pair import Options, all_leaves, make_sides, prepare
from parity.pairs.reference import Oracle
from parity.pairs.tiers import run_tiers
from parity.reporting import gate
from parity.reporting.gate import PAIR_TIERS as TIERS
from parity.reporting.report import Report


def check(
    linen: Any,
    nnx: Any,
    inputs: Any,
    *,
    rules: Rules | str | pathlib.Path | Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    call: Call | Mapping[str, Any] | Sequence[Call] | None = None,
    methods: Sequence[str] | Mapping[str, Any] | None = None,
    tiers: Sequence[str] = TIERS,
    seed: int = 0,
    examples: int | None = None,
    loss: Callable[[Any], Array] | None = None,
    oracle: Oracle | None = None,
    fail_on: str | Sequence[str] | None = None,
    finite: bool = True,
    platforms: Sequence[str | None] = (None,),
    target: str = "pair",
    replay: str = "",
) -> Report:
    """Checks whether a Linen and an NNX module are the same model.

    The trees are brought into correspondence, Linen's values are put into both, and
    both are called in the same ways with the same inputs and the same random keys.

    Args:
      linen: a module, or (module, variables).
      nnx: a module, or a function that makes one and may take `rngs`.
      inputs: an array; a tuple of positional arguments; `parity.Args`; `parity.Steps`;
        a list of these; or a Hypothesis strategy of these. Arrays may be
        `jax.ShapeDtypeStruct` or `parity.Integers`, to be drawn.
      rules: what corresponds to what where names say too little: a file, or `Rules`.
      variables: Linen's, if not given with the module; else they are initialised.
      call: constant keywords for both, or the calls to compare.
      methods: methods to compare; a mapping gives each its inputs.
      tiers: of `TIERS`. Tolerance is looked at only where bits differ.
      seed: of first values, inputs and random keys.
      examples: how many inputs are drawn.
      loss: of the outputs, for the gradients; by default every output counts.
      oracle: independent reference.
      fail_on: tiers that decide; see `parity.reporting.gate`.
      finite: whether NaN and infinity count as differences, equal or not: two models
        that both break prove nothing.
      platforms: for which the program tier lowers, such as "cpu" and "tpu"; None: this
        machine's.
      target: what to call the pair.
      replay: command that runs this again.

    Raises:
      CheckError: modules, inputs or options that cannot be checked.
      RuleError: a rule file that cannot be read.
    """
    _check_tiers(tiers, oracle)
    wanted = calls.make_calls(call, methods, inputs)
    required = gate.required(fail_on or ())
    with jax.default_matmul_precision("highest"):
        options = Options(seed, examples, replay, finite, tuple(platforms))
        pair = prepare(linen, nnx, wanted, rules, variables, loss, options)
        found = tuple(run_tiers(pair, tiers, oracle))
    return Report(target, found, required=required)


def assert_parity(linen: Any, nnx: Any, inputs: Any, **options: Any) -> Report:
    """As `check`; raises with the report where the verdict is not "proved".

    Raises:
      AssertionError: the two differ.
    """
    report = check(linen, nnx, inputs, **options)
    if not report.ok:
        raise AssertionError(f"{report.verdict}\n{report.to_markdown()}")
    return report


def suggest(
    linen: Any,
    nnx: Any,
    inputs: Any,
    *,
    call: Call | Mapping[str, Any] | Sequence[Call] | None = None,
    variables: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> str:
    """A draft of the rule file that a pair needs, to be reviewed.

    Args:
      linen: as for `check`.
      nnx: as for `check`.
      inputs: as for `check`.
      call: as for `check`.
      variables: as for `check`.
      seed: as for `check`.
    """
    wanted = calls.make_calls(call, None, inputs)
    linen_leaves, nnx_leaves = all_leaves(
        *make_sides(linen, nnx, wanted, variables, seed)
    )
    return drafts.suggest(linen_leaves, nnx_leaves)


def _check_tiers(tiers: Sequence[str], oracle: Oracle | None) -> None:
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers:
        raise CheckError(
            f"tiers must be some of {', '.join(TIERS)}. "
            f"Got {', '.join(tiers) or 'none'}."
        )
    if oracle is None and "oracle" in tiers and tuple(tiers) != TIERS:
        raise CheckError("The oracle tier needs a reference: give parity.Oracle(…).")
