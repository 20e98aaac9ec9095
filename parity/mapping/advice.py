"""What to say of leaves that do not correspond, and the rule to write."""

from __future__ import annotations

import collections
import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from parity.mapping.known import ONLY_IN_LINEN
from parity.mapping.layout import Shape
from parity.mapping.leaves import Leaf
from parity.mapping.rules import escaped, quoted, rule_line


def facts(leaves: Sequence[Leaf]) -> str:
    """Texts, shapes and dtypes."""
    return ", ".join(f"{leaf.text} {leaf.shape} {leaf.dtype}" for leaf in leaves)


class Likely(NamedTuple):
    """Leaves that are left on either side and fit nothing else, by each other's text.

    Attributes:
      of_linen: the only leaf of NNX's that one of Linen's may be.
      of_nnx: the reverse.
      counts: by side and shape, how many leaves are left.
    """

    of_linen: Mapping[str, Leaf]
    of_nnx: Mapping[str, Leaf]
    counts: Mapping[tuple[str, Shape], int]


def likely(linen: Sequence[Leaf], nnx: Sequence[Leaf]) -> Likely:
    """Pairs whose last name and shape, else whose sizes, no other leaf has.

    Where several leaves may be meant, none is: a wrong pair of equal shapes would be
    copied into a rule and pass for right.
    """
    found: tuple[dict[str, Leaf], dict[str, Leaf]] = {}, {}
    for key in (_named, _sized):
        groups: dict[Any, tuple[list[Leaf], list[Leaf]]] = {}
        for side, leaves in enumerate((linen, nnx)):
            for leaf in leaves:
                if leaf.text not in found[side]:
                    groups.setdefault(key(leaf), ([], []))[side].append(leaf)
        for ones, others in groups.values():
            if len(ones) == len(others) == 1:
                found[0][ones[0].text], found[1][others[0].text] = others[0], ones[0]
    counts = collections.Counter(
        (side, leaf.shape)
        for side, leaves in (("linen", linen), ("nnx", nnx))
        for leaf in leaves
    )
    return Likely(*found, counts)


def _named(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.collection, leaf.text.rpartition("/")[2], leaf.shape


def _sized(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.collection, tuple(sorted(leaf.shape))


def closest(pattern: str, texts: Iterable[str]) -> str:
    """The texts that a pattern without a match is closest to, as half a sentence."""
    plain = pattern.replace("\\", "")
    found = difflib.get_close_matches(plain, list(texts)[:1000], 3, 0.3)
    return f"near: {', '.join(found)}." if found else "nothing is near it."


def only_in(side: str, leaf: Leaf, left: Likely, went: str = "") -> str:
    """Of a leaf without counterpart.

    Args:
      side: "linen" or "nnx".
      leaf: which.
      left: what is left on both sides.
      went: where a rule sent it, with a semicolon before.
    """
    text = f"only in {side}, {leaf.shape} {leaf.dtype}{went}. "
    for pattern, why in ONLY_IN_LINEN:
        if side == "linen" and pattern.fullmatch(leaf.text):
            text += f"Known: {why}. "
    other = "nnx" if side == "linen" else "linen"
    ignore = f"[[ignore]] with {side} = {quoted(escaped(leaf.text))} and a reason"
    match = (left.of_linen if side == "linen" else left.of_nnx).get(leaf.text)
    if match is not None:
        pair = (leaf, match) if side == "linen" else (match, leaf)
        rule = rule_line(pair[0].text, pair[1].text)
        return (
            f"{text}In {other} only {facts([match])} is left that it may be. A rule: "
            f"{rule}; to leave it out: {ignore}"
        )
    count = left.counts.get((other, leaf.shape), 0)
    if count:
        return (
            f"{text}In {other} {count} leaves of its shape are left: say which it is "
            "by a [[rule]]"
        )
    return f"{text}Nothing in {other} is like it. To leave it out: {ignore}"


def shapes(
    have: Sequence[Shape],
    want: Sequence[Shape],
    linen: Sequence[Leaf],
    nnx: Sequence[Leaf],
    after: str = "",
) -> str:
    """Of leaves whose shapes differ.

    Args:
      have: Linen's shapes in NNX's layout.
      want: NNX's.
      linen: Linen's leaves.
      nnx: NNX's leaves.
      after: what rule the shapes are the result of; then there is nothing to advise.
    """
    text = f"linen {', '.join(map(str, have))}, nnx {', '.join(map(str, want))}"
    if after:
        return text + after
    if len(linen) > 1 or len(nnx) > 1:
        return f"{text}."
    rule = rule_line(linen[0].text, nnx[0].text)
    orders = _orders(have[0], want[0])
    if orders:
        choices = " or ".join(f"transpose = {order}" for order in orders[:3])
        return f"{text}. If only the layout differs: {rule}, {choices}"
    if math.prod(have[0]) == math.prod(want[0]):
        return f"{text}. If only the shape differs: {rule}, reshape = {list(want[0])}"
    return f"{text}. The sizes differ: no rule can help."


def unclear_stack(
    pairs: Sequence[tuple[Leaf, Leaf]], choices: Sequence[str]
) -> tuple[str, str]:
    """Of a stack whose axis may have moved in several ways: its place, and advice."""
    linen, nnx = (_common_text(pair[side].text for pair in pairs) for side in (0, 1))
    target = f"{nnx}\\1"
    return linen, (
        f"the stack axis of {len(pairs)} leaves such as {facts(pairs[0][:1])}, in nnx "
        f"{facts(pairs[0][1:])}, may move {' or '.join(choices)}. Say it: [[rule]] "
        f"linen = {quoted(escaped(linen) + '(.*)')}, nnx = {quoted(target)}, "
        "moveaxis = [from, to]"
    )


def _orders(have: Shape, want: Shape) -> list[list[int]]:
    # More axes than this have too many orders to name one.
    if len(have) != len(want) or len(have) > 6:
        return []
    return [
        list(order)
        for order in itertools.permutations(range(len(have)))
        if tuple(have[i] for i in order) == want
    ]


def _common_text(texts: Iterable[str]) -> str:
    """The part of their paths that texts share, with its last slash."""
    columns = zip(*(text.split("/")[:-1] for text in texts), strict=False)
    same = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, columns)
    return "".join(f"{tokens[0]}/" for tokens in same)
