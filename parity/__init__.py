"""What makes the claim checkable: are a Linen and an NNX model the same model?"""

from parity.decoders import Example, Pair, abstract_pair, make_pair
from parity.report import Report, Tier
from parity.trees import Comparison, Difference, compare_bytes, compare_structure, ulps
from parity.zoo import TIERS, check_pair, check_target

__all__ = [
    "TIERS",
    "Comparison",
    "Difference",
    "Example",
    "Pair",
    "Report",
    "Tier",
    "abstract_pair",
    "check_pair",
    "check_target",
    "compare_bytes",
    "compare_structure",
    "make_pair",
    "ulps",
]
