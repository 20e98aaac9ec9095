"""Proves that what a migration gives is the model that its source was of."""

from __future__ import annotations

import os
from typing import Any

from parity.mapping.rules import Rules
from parity.migration.draft import Draft
from parity.migration.loading import load_into, load_variables
from parity.migration.plans import Plan
from parity.migration.sides import left_out
from parity.migration.trees import linen_variables, made_nnx
from parity.pairs import checking
from parity.reporting.report import Report


def prove(
    plan: Plan,
    linen: Any,
    module: Any,
    inputs: Any,
    *,
    target: str | os.PathLike[str] | None = None,
    rules: Rules | None = None,
    call: Any = None,
) -> Report:
    """Checks the pair, each with the values of its own checkpoint.

    That the values are the same bytes in both is the tier init, which here decides.

    Args:
      plan: of the migration.
      linen: a Linen module, or (module, variables).
      module: an NNX module, or what makes it.
      inputs: as for `parity.check`.
      target: what was written; None: what would be.
      rules: as for `parity.check`.
      call: as for `parity.check`.

    Raises:
      CheckpointError: a side's checkpoint is not its model's.
    """
    given = plan.store if target is None else target
    sides = {plan.options.to: given, plan.source.side: plan.source.store}
    like = linen_variables(linen, inputs, call)
    variables = load_variables(sides["linen"], like)
    model = made_nnx(module)
    load_into(model, sides["nnx"])
    ruled, _ = left_out(plan.source, rules or Rules(), Draft())
    first = linen[0] if isinstance(linen, tuple) else linen
    return checking.check(
        first,
        model,
        inputs,
        variables=variables,
        rules=ruled,
        call=call,
        fail_on="init,bits",
        target=f"{plan.source.store.path} as {plan.options.to}",
    )
