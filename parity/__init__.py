"""What makes the claim checkable: are a Linen and an NNX model the same model?"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.decoders import Example, Pair, abstract_pair, make_pair
    from parity.mapping.rules import RuleError, Rules
    from parity.pairs.calls import Args, Call, CheckError, Integers, Steps
    from parity.pairs.checking import assert_parity, check
    from parity.pairs.reference import Oracle
    from parity.reporting.report import Report, Tier
    from parity.trees import (
        Comparison,
        Difference,
        compare_bytes,
        compare_structure,
        ulps,
    )
    from parity.zoo import TIERS, check_pair, check_target

__all__ = [
    "TIERS",
    "Args",
    "Call",
    "CheckError",
    "Comparison",
    "Difference",
    "Example",
    "Integers",
    "Oracle",
    "Pair",
    "Report",
    "RuleError",
    "Rules",
    "Steps",
    "Tier",
    "abstract_pair",
    "assert_parity",
    "check",
    "check_pair",
    "check_target",
    "compare_bytes",
    "compare_structure",
    "make_pair",
    "ulps",
]

# Imported when first asked for: pytest loads this package's plugin in every environment
# where it is installed, and suites without a model must not pay for JAX and Flax.
_HOMES = {
    "parity.pairs.calls": ("Args", "Call", "CheckError", "Integers", "Steps"),
    "parity.pairs.checking": ("assert_parity", "check"),
    "parity.pairs.reference": ("Oracle",),
    "parity.decoders": ("Example", "Pair", "abstract_pair", "make_pair"),
    "parity.reporting.report": ("Report", "Tier"),
    "parity.mapping.rules": ("RuleError", "Rules"),
    "parity.trees": (
        "Comparison",
        "Difference",
        "compare_bytes",
        "compare_structure",
        "ulps",
    ),
    "parity.zoo": ("TIERS", "check_pair", "check_target"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
