r"""The other side's tree where no module tells it: what rules say, else the same names.

To NNX, rules are read as they are. To Linen they are read backwards: a template's
groups become those of the pattern, `params/convs/\1/kernel` finds
`params/convs/3/kernel`, and the pattern `params/Conv_(\d+)/kernel` gives
`params/Conv_3/kernel`. What cannot be known this way is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from parity.mapping.correspondence import Entry
from parity.mapping.known import normal
from parity.mapping.layout import (
    Concatenate,
    Reshape,
    Shape,
    Split,
    Transpose,
    moved,
    reshaped,
)
from parity.mapping.leaves import Leaf
from parity.mapping.rules import Rule, Rules, escaped
from parity.migration.trees import text_of, with_text
from parity.trees import Difference


class Guess(NamedTuple):
    """A tree made of what rules say, and what they cannot say."""

    leaves: tuple[Leaf, ...]
    differences: tuple[Difference, ...]


def nnx_from_linen(linen: Sequence[Leaf], rules: Rules) -> Guess:
    """The NNX leaves that Linen's become by rules, else the same."""
    made: dict[str, Leaf] = {}
    wrong: list[Difference] = []
    for rule in rules.rules:
        for names, parts in _groups(rule, linen).items():
            if len(rule.nnx) > 1:
                wrong.append(_unknown_sizes(rule, "nnx", "--nnx"))
                break
            shape = _shape(rule, [leaf.shape for leaf in parts])
            leaf = with_text(names[0], shape, parts[0].dtype)
            made.setdefault(leaf.text, leaf)
    for leaf in linen:
        if not any(_is_for(rule, leaf) for rule in rules.rules):
            made.setdefault(leaf.text, leaf)
    return Guess(tuple(made.values()), tuple(wrong))


def _is_for(rule: Rule, leaf: Leaf) -> bool:
    return any(pattern.fullmatch(leaf.text) for pattern in rule.linen)


def _groups(
    rule: Rule, leaves: Sequence[Leaf]
) -> dict[tuple[str, ...], tuple[Leaf, ...]]:
    """By the names that a rule gives, the leaves that it takes."""
    found: dict[tuple[str, ...], list[Leaf]] = {}
    for part in range(len(rule.linen)):
        for leaf in leaves:
            names = rule.targets(leaf.text, part)
            if names is not None:
                found.setdefault(names, []).append(leaf)
    return {names: tuple(parts) for names, parts in found.items()}


def _shape(rule: Rule, shapes: Sequence[Shape]) -> Shape:
    """The shape after a rule that does not split; where it does not fit, the first."""
    shape = list(shapes[0])
    try:
        if len(rule.linen) > 1:
            axis = (rule.axis or 0) % len(shape)
            shape[axis] = sum(other[axis] for other in shapes)
        if rule.transpose is not None:
            shape = [shape[i] for i in rule.transpose]
        if rule.moveaxis is not None:
            order = moved(*rule.moveaxis, len(shape)).axes
            shape = [shape[i] for i in order]
        if rule.reshape is not None:
            shape = list(reshaped(tuple(shape), rule.reshape).after)
    except (ValueError, IndexError, ZeroDivisionError):
        return shapes[0]  # the matching says what does not fit
    return tuple(shape)


# Backwards.


class Backwards(NamedTuple):
    """What NNX's leaves were in Linen.

    Attributes:
      nnx: the leaves, with the collections that they have there.
      linen: Linen's tree.
      rules: that lead from Linen's to NNX's: the user's, and those that are known.
      differences: what cannot be known.
    """

    nnx: tuple[Leaf, ...]
    linen: tuple[Leaf, ...]
    rules: Rules
    differences: tuple[Difference, ...]


class Known(NamedTuple):
    """A rule for single leaves that an earlier migration went by.

    Attributes:
      linen: texts.
      nnx: texts.
      shapes: of Linen's leaves.
      layout: `transpose`, `reshape` and `axis`, as a rule has them.
    """

    linen: tuple[str, ...]
    nnx: tuple[str, ...]
    shapes: tuple[Shape, ...]
    layout: Mapping[str, Any]

    def rule(self) -> Rule:
        """As a rule."""
        linen = [escaped(text) for text in self.linen]
        table = {"linen": linen, "nnx": list(self.nnx), **self.layout}
        [rule] = Rules.of([table]).rules
        return dataclasses.replace(rule, name="the manifest")


def linen_from_nnx(
    nnx: Sequence[Leaf],
    rules: Rules,
    collections: Mapping[str, str],
    known: Sequence[Known] = (),
) -> Backwards:
    """The Linen leaves that NNX's come from by rules, else the same.

    Args:
      nnx: leaves; of some the collection may be unknown: then it is "".
      rules: to read backwards.
      collections: by an NNX leaf's path as text, Linen's collection, where it is known.
      known: what NNX's leaves were made of, for those that no rule is for.
    """
    have = {_pathless(leaf.text) for leaf in nnx}
    recorded = {
        _pathless(text): entry
        for entry in known
        for text in entry.nnx
        if have >= {*map(_pathless, entry.nnx)}
    }
    used: list[Known] = []
    wrong: list[Difference] = []
    inverses = [inverse for rule in rules.rules for inverse in _inverses(rule, wrong)]
    named: list[Leaf] = []
    parts: dict[tuple[str, str], dict[int, Leaf]] = {}
    linen: dict[str, Leaf] = {}
    for leaf in nnx:
        hits = [
            (inverse, found)
            for inverse in inverses
            if (found := inverse.read(leaf)) is not None
        ]
        entry = recorded.get(_pathless(leaf.text))
        name = "/".join(map(str, leaf.path))
        own = leaf.collection or collections.get(name, "")
        if entry is not None:
            text = next(x for x in entry.nnx if _pathless(x) == _pathless(leaf.text))
            own = text.partition("/")[0]
        own = own or ("params" if collections or known else "")
        hits = [hit for hit in hits if own in ("", hit[1].collection)] or hits
        if not hits and entry is not None:
            used += [] if entry in used else [entry]
            named.append(leaf._replace(collection=own))
            for text, shape in zip(entry.linen, entry.shapes, strict=True):
                linen.setdefault(text, with_text(text, shape, leaf.dtype))
            continue
        if not hits:
            mine = leaf._replace(collection=own or "params")
            named.append(mine)
            linen.setdefault(mine.text, mine)
            continue
        if len({inverse.rule.name for inverse, _ in hits}) > 1:
            names = " and ".join(inverse.rule.name for inverse, _ in hits)
            named.append(leaf._replace(collection=leaf.collection or "params"))
            wrong.append(
                Difference(
                    text_of(leaf.collection or "params", leaf.path),
                    "rule",
                    f"{names} are for it, read backwards; make the templates narrower "
                    "so that one is.",
                )
            )
            continue
        may_be = {found.collection for _, found in hits}
        if len(may_be) > 1:
            named.append(leaf._replace(collection="params"))
            wrong.append(
                Difference(
                    text_of("params", leaf.path),
                    "rule",
                    f"{hits[0][0].rule.name} may put it in any of "
                    f"{', '.join(sorted(may_be))}: write a rule for each collection, "
                    "or give the module (--nnx, or --linen and --inputs).",
                )
            )
            continue
        inverse, found = hits[0]
        named.append(leaf._replace(collection=found.collection))
        key = (inverse.rule.name, found.linen)
        parts.setdefault(key, {})[inverse.part] = leaf
    by_name = {rule.name: rule for rule in rules.rules}
    for (name, text), pieces in parts.items():
        rule = by_name[name]
        ordered = [pieces[i] for i in sorted(pieces)]
        before = _shape_before(rule, [leaf.shape for leaf in ordered])
        if before is None:
            wrong.append(_unknown_sizes(rule, "linen", "--linen and --inputs"))
            continue
        made = with_text(text, before, ordered[0].dtype)
        linen.setdefault(made.text, made)
    every = (*rules.rules, *(entry.rule() for entry in used))
    return Backwards(
        tuple(named),
        tuple(linen.values()),
        dataclasses.replace(rules, rules=every),
        tuple(dict.fromkeys(wrong)),
    )


def _pathless(text: str) -> str:
    return text.partition("/")[2]


def known_from(entry: Entry, shapes: Sequence[Shape]) -> Known | None:
    """An entry as a rule; None: it is none, or more than one rule.

    Args:
      entry: of a correspondence.
      shapes: of Linen's leaves.
    """
    if entry.linen == entry.nnx and not entry.steps:
        return None
    layout: dict[str, Any] = {}
    for step in entry.steps:
        match step:
            case Concatenate(axis, _) | Split(axis, _):
                layout["axis"] = axis
            case Transpose(axes) if "reshape" not in layout:
                before = layout.get("transpose", range(len(axes)))
                layout["transpose"] = [int(before[i]) for i in axes]
            case Reshape(_, after):
                layout["reshape"] = list(after)
            case _:
                return None
    return Known(entry.linen, entry.nnx, tuple(shapes), layout)


def collections_from(linen: Sequence[Leaf], rules: Rules) -> dict[str, str]:
    """By the normal form of an NNX leaf's path, the collection that Linen has it in.

    Args:
      linen: leaves of the Linen module.
      rules: from Linen's names to NNX's.
    """
    found: dict[str, set[str]] = {}
    for leaf in linen:
        ruled = [rule for rule in rules.rules if _is_for(rule, leaf)]
        names = [
            name
            for rule in ruled
            for part in range(len(rule.linen))
            for name in rule.targets(leaf.text, part) or ()
        ]
        for name in names or [leaf.text]:
            collection, _, path = normal(name).partition("/")
            found.setdefault(path, set()).add(collection)
    return {path: next(iter(c)) for path, c in found.items() if len(c) == 1}


class _Found(NamedTuple):
    collection: str
    linen: str


@dataclasses.dataclass(frozen=True)
class _Inverse:
    """One template of a rule, as a pattern, and its pattern, as a template.

    Attributes:
      rule: which.
      part: number of the template.
      pattern: of an NNX leaf's text without its collection.
      collection: template of the collection.
      linen: pieces of the Linen text: texts, and numbers of groups.
    """

    rule: Rule
    part: int
    pattern: re.Pattern[str]
    collection: str
    linen: tuple[str | int, ...]

    def read(self, leaf: Leaf) -> _Found | None:
        """Collection and Linen text for an NNX leaf that the template can give."""
        if leaf.collection not in ("", self.collection):
            return None
        text = text_of("", leaf.path).partition("/")[2]
        found = self.pattern.fullmatch(text)
        if found is None:
            return None
        pieces = [p if isinstance(p, str) else found[f"g{p}"] for p in self.linen]
        return _Found(self.collection, "".join(pieces))


def _inverses(rule: Rule, wrong: list[Difference]) -> Iterator[_Inverse]:
    if len(rule.linen) > 1:
        wrong.append(_unknown_sizes(rule, "linen", "--linen and --inputs"))
        return
    pieces = _pieces(rule.linen[0].pattern)
    for part, template in enumerate(rule.nnx):
        inverses = pieces and _each_collection(rule, part, template, pieces)
        if not inverses:
            wrong.append(
                Difference(
                    str(rule),
                    "rule",
                    "it cannot be read backwards: give the Linen module (--linen and "
                    "--inputs), or write the pattern as plain text and groups, each of "
                    "which stands in the template.",
                )
            )
            return
        yield from inverses


class _Group(NamedTuple):
    number: int
    name: str | None
    inside: str


def _each_collection(
    rule: Rule, part: int, template: str, pieces: Sequence[str | _Group]
) -> list[_Inverse]:
    """A template backwards, once for each collection that it may name; none: it cannot.

    The collection is plain text, or a group of names, (params|batch_stats).
    """
    groups = [piece for piece in pieces if isinstance(piece, _Group)]
    collection, slash, _ = template.partition("/")
    reference = _REFERENCE.fullmatch(collection)
    if not slash or ("\\" in collection and not reference):
        return []
    names: list[tuple[_Group | None, str]] = [(None, collection)]
    if reference:
        key = reference["name"] or reference["number"]
        [group] = [x for x in groups if key in (x.name, str(x.number))]
        names = [(group, name) for name in group.inside.split("|")]
    if not all(name.isidentifier() for _, name in names):
        return []
    found = [_inverse(rule, part, template, pieces, *each) for each in names]
    return [inverse for inverse in found if inverse is not None]


def _inverse(
    rule: Rule,
    part: int,
    template: str,
    pieces: Sequence[str | _Group],
    fixed: _Group | None,
    collection: str,
) -> _Inverse | None:
    """A template backwards; None: it says too little.

    Args:
      rule: which.
      part: number of the template.
      template: of an NNX leaf's text.
      pieces: of the pattern.
      fixed: the group that stands for the collection, if one does.
      collection: its name.
    """
    groups = {piece.number: piece for piece in pieces if isinstance(piece, _Group)}
    numbers = {piece.name: piece.number for piece in groups.values() if piece.name}
    rest = template.partition("/")[2]
    pattern, end = "", 0
    seen = set[int]() if fixed is None else {fixed.number}
    for found in _REFERENCE.finditer(rest):
        name = found["name"] or found["number"]
        number = int(name) if name.isdigit() else numbers[name]
        pattern += re.escape(rest[end : found.start()])
        again = f"(?P=g{number})"
        first = f"(?P<g{number}>{groups[number].inside})"
        if fixed is not None and number == fixed.number:
            pattern += re.escape(collection)
        else:
            pattern += again if number in seen else first
        seen.add(number)
        end = found.end()
    pattern += re.escape(rest[end:])
    if seen != set(groups):
        return None
    named = [collection if piece == fixed else piece for piece in pieces]
    linen = tuple(p if isinstance(p, str) else p.number for p in named)
    return _Inverse(rule, part, re.compile(pattern), collection, linen)


_REFERENCE = re.compile(r"\\(?:g<(?P<name>[^>]+)>|(?P<number>\d+))")
_SPECIAL = set(".^$*+?{}[]|")


def _pieces(pattern: str) -> list[str | _Group] | None:
    """A pattern as plain texts and groups; None: it has anything else."""
    pieces: list[str | _Group] = []
    text, i, number = "", 0, 0
    while i < len(pattern):
        char = pattern[i]
        if char == "\\" and i + 1 < len(pattern) and not pattern[i + 1].isalnum():
            text += pattern[i + 1]
            i += 2
        elif char == "(":
            group = _group(pattern, i, number + 1)
            if group is None:
                return None
            number += 1
            pieces += [text, group[0]]
            text, i = "", group[1]
        elif char == "\\" or char in _SPECIAL:
            return None
        else:
            text += char
            i += 1
    return [piece for piece in (*pieces, text) if piece != ""]


def _group(pattern: str, start: int, number: int) -> tuple[_Group, int] | None:
    """The group that starts there, and where it ends."""
    depth, i, in_set = 0, start, False
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif in_set:
            in_set = char != "]"
        elif char == "[":
            in_set = True
            i += pattern[i + 1 : i + 2] == "]"  # which stands for itself there
        elif char in "()":
            depth += 1 if char == "(" else -1
            if not depth:
                break
        i += 1
    inside = pattern[start + 1 : i]
    name = re.match(r"\?P<(\w+)>", inside)
    if name is not None:
        inside = inside[name.end() :]
    elif inside.startswith("?"):
        return None
    # A group in it would change the numbers, and what follows may repeat it.
    if re.compile(inside).groups or pattern[i + 1 : i + 2] in {*"*+?{"}:
        return None
    return _Group(number, name and name[1], inside), i + 1


def _shape_before(rule: Rule, shapes: Sequence[Shape]) -> Shape | None:
    """The shape that a rule was applied to; None: it may have been several."""
    shape = list(shapes[0])
    if rule.reshape is not None:
        return None
    try:
        if len(rule.nnx) > 1:
            axis = (rule.axis or 0) % len(shape)
            shape[axis] = sum(other[axis] for other in shapes)
        order = rule.transpose
        if rule.moveaxis is not None:
            order = moved(*rule.moveaxis, len(shape)).axes
        if order is not None:
            before = list(shape)
            for to, source in enumerate(order):
                before[source] = shape[to]
            shape = before
    except (ValueError, IndexError, ZeroDivisionError):
        return shapes[0]
    return tuple(shape)


def _unknown_sizes(rule: Rule, side: str, flags: str) -> Difference:
    return Difference(
        str(rule),
        "rule",
        f"the shapes of what it makes in {side} are known by the module only: give "
        f"{flags}.",
    )
