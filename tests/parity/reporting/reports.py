"""Reports to be written and read back."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from parity import Comparison, Difference, Report, Tier, compare_bytes

ONES = np.ones(3, np.float32)
EQUAL = compare_bytes({"a": ONES}, {"a": ONES})
# One entry that is the next number.
NEAR = compare_bytes(
    {"a": {"b": ONES}}, {"a": {"b": np.nextafter(ONES, np.float32([1, 1, 2]))}}
)
UNEQUAL = compare_bytes({"a": ONES}, {"a": -ONES})
MISSING = compare_bytes({"a": ONES, "b": ONES}, {"a": ONES})
NASTY = "a|b`c``d\x1b[2J\x00\ud800]]> & <b> -->@you\n*x* ½"


def tier(name, status="proved", compared=None, **fields):
    if compared is None:
        compared = UNEQUAL if status == "failed" else EQUAL
    return Tier(name, compared, status=status, **fields)


def report(required=("tree", "bits"), /, **statuses):
    """A report whose tiers have these statuses."""
    tiers = tuple(tier(name, status) for name, status in statuses.items())
    return Report("linen = nnx", tiers, required)


def nasty():
    """Everything at once, with texts and numbers that formats stumble over."""
    differences = (
        Difference(NASTY, "value", NASTY, float("inf"), float("nan")),
        *(Difference(f"layer_{i}", "missing", "only in linen") for i in range(30)),
    )
    bits = Tier("bits", Comparison(31, 100, differences), 2, NASTY, details=(NASTY,))
    made = report(
        ("tree", "bits", "oracle"), tree="proved", init="failed", tolerance="skipped"
    )
    return dataclasses.replace(made, target=NASTY, tiers=(*made.tiers, bits))


STATUSES = st.sampled_from(["proved", "accepted", "failed", "inconclusive", "skipped"])
NAMES = ("tree", "init", "program", "bits", "decode", "tolerance", "oracle")


@st.composite
def drawn(draw):
    """Any report."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    difference = st.builds(
        Difference,
        st.text(),
        st.sampled_from(["value", "missing"]),
        st.text(),
        st.none() | st.floats(min_value=0),
        st.none() | st.floats(min_value=0),
    )
    tiers = tuple(
        Tier(
            name,
            Comparison(
                draw(st.integers(0, 9)),
                draw(st.integers(0, 9)),
                tuple(draw(st.lists(difference, max_size=3))),
            ),
            draw(st.integers(0, 9)),
            draw(st.text()),
            draw(STATUSES),
            tuple(draw(st.lists(st.text(), max_size=2))),
            draw(st.sampled_from([None, False, True])),
        )
        for name in names
    )
    required = st.none() | st.lists(st.sampled_from(NAMES), unique=True).map(tuple)
    return Report(draw(st.text(min_size=1)), tiers, draw(required))
