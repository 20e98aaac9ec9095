"""Which leaf of a Linen tree is which leaf of an NNX module, both ways and strictly.

The order is: a user's rules, equal names, known differences (`known`), the
stack axis. What then is left on either side, fits no shape or fits twice, is a
difference.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtyping import Array

from parity.mapping import advice
from parity.mapping.known import KNOWN, naming, normal
from parity.mapping.layout import (
    Concatenate,
    Reshape,
    Shape,
    Split,
    Step,
    Transpose,
    axis_of,
    describe,
    moved,
    reshaped,
)
from parity.mapping.leaves import RNG_POLICY, Leaf, NNXLeaves
from parity.mapping.rules import Rule, Rules, rule_line
from parity.mapping.stack_axis import Stacked, stack_moves
from parity.trees import Comparison, Difference


@dataclasses.dataclass(frozen=True)
class Entry:
    """Some leaves of Linen's that are some leaves of NNX's; on one side it is one.

    Attributes:
      linen: texts.
      nnx: texts.
      steps: changes of layout from Linen to NNX; none means the same array.
      origin: how it was found: "same", "known: index in the name", "rule 2".
    """

    linen: tuple[str, ...]
    nnx: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    origin: str = "same"

    def __str__(self) -> str:
        how = f" by {describe(self.steps)}" if self.steps else ""
        return f"{', '.join(self.linen)} -> {', '.join(self.nnx)}{how} ({self.origin})"


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """How the leaves of two models correspond, and where they do not.

    Attributes:
      entries: what corresponds.
      differences: what does not: unmapped leaves, shapes, dtypes, axis names, rules.
      ignored: texts of left-out leaves, by side.
      reasons: why they were, one line for each rule that left some out.
      rng: texts of the NNX leaves that are RNG state.
      elements: how many numbers correspond.
    """

    entries: tuple[Entry, ...]
    differences: tuple[Difference, ...] = ()
    ignored: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    rng: tuple[str, ...] = ()
    elements: int = 0

    @property
    def usable(self) -> bool:
        """Whether each side's arrays have a place in the other.

        Dtypes and axis names may still differ.
        """
        soft = ("dtype", "axes")
        return bool(self.entries) and all(d.what in soft for d in self.differences)

    @property
    def comparison(self) -> Comparison:
        """What was compared, for a tier of a report."""
        leaves = sum(max(len(e.linen), len(e.nnx)) for e in self.entries)
        return Comparison(leaves, self.elements, self.differences)

    def to_nnx(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """Linen's leaves in NNX's names and layout; exact, and fit for `jax.jit`.

        Args:
          leaves: arrays by Linen text. Entries of which no leaf is given are left out,
            as are ignored leaves.

        Raises:
          ValueError: a text is unknown, or only a part of an entry's leaves is given.
        """
        return _apply(leaves, self._linen_side(), self.ignored.get("linen", ()))

    def to_linen(self, leaves: Mapping[str, Array]) -> dict[str, Array]:
        """NNX's leaves in Linen's names and layout: the inverse of `to_nnx`."""
        return _apply(leaves, self._nnx_side(), self.ignored.get("nnx", ()))

    def describe(self) -> tuple[str, ...]:
        """Lines for a report: how many leaves were found in which way."""
        counts = collections.Counter(entry.origin for entry in self.entries)
        lines = [f"{count} {origin}" for origin, count in counts.items()]
        lines += [f"ignored: {reason}" for reason in self.reasons]
        if self.rng:
            lines.append(f"{len(self.rng)} RNG leaves set aside: {RNG_POLICY}")
        return tuple(lines)

    def _linen_side(self) -> Iterator[_Move]:
        for entry in self.entries:
            yield _Move(
                entry.linen, entry.nnx, tuple(step.forward for step in entry.steps)
            )

    def _nnx_side(self) -> Iterator[_Move]:
        for entry in self.entries:
            steps = reversed(entry.steps)
            yield _Move(entry.nnx, entry.linen, tuple(step.backward for step in steps))


def match(
    linen: Sequence[Leaf],
    nnx: NNXLeaves,
    rules: Rules | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
) -> Correspondence:
    """Finds which leaves correspond; trees that do not match are no error but data.

    Args:
      linen: from `linen_leaves`.
      nnx: from `nnx_leaves`.
      rules: for what the known differences do not explain; see `Rules.of`.

    Raises:
      RuleError: the rules are wrong whatever the trees are.
    """
    return _Matching(linen, nnx, Rules.of(rules)).run()


@dataclasses.dataclass(frozen=True)
class _Move:
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    steps: tuple[Any, ...]


def _apply(
    leaves: Mapping[str, Array], moves: Iterable[_Move], ignored: Iterable[str]
) -> dict[str, Array]:
    results: dict[str, Array] = {}
    used = set(ignored)
    for move in moves:
        used.update(move.sources)
        missing = [text for text in move.sources if text not in leaves]
        if len(missing) == len(move.sources):
            continue
        if missing:
            raise ValueError(
                f"{', '.join(move.targets)} is made of {', '.join(move.sources)}; "
                f"without {', '.join(missing)} it cannot be."
            )
        arrays = [leaves[text] for text in move.sources]
        for step in move.steps:
            arrays = step(arrays)
        results.update(zip(move.targets, arrays, strict=True))
    unknown = [text for text in leaves if text not in used]
    if unknown:
        raise ValueError(f"No leaf corresponds to {', '.join(unknown)}.")
    return results


@dataclasses.dataclass(frozen=True)
class _Draft:
    """Leaves on their way: where they should go, by what rules, and why."""

    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    rules: tuple[Rule, ...] = ()
    origin: str = "same"
    targets: tuple[Leaf, ...] = ()
    # The user has said what the layout is: nothing more is guessed.
    pinned: bool = False

    @property
    def text(self) -> str:
        return ", ".join(leaf.text for leaf in self.leaves)

    def found(self, targets: Sequence[Leaf], why: str | None) -> _Draft:
        return dataclasses.replace(
            self, targets=tuple(targets), origin=_origin(self.origin, why)
        )


class _Targets:
    """The leaves of the NNX side, by every text that may mean them."""

    def __init__(self, nnx: NNXLeaves, left_out: Iterable[str]) -> None:
        out = set(left_out)
        self.leaves = {x.text: x for x in nnx.leaves if x.text not in out}
        self._texts: dict[str, tuple[Leaf, str | None]] = {}
        self.normals: dict[str, dict[str, str | None]] = {}
        for leaf in self.leaves.values():
            self._add(leaf.text, leaf, None)
        for leaf in self.leaves.values():
            for text, why in _other_texts(leaf, nnx):
                self._add(text, leaf, why)

    def named(self, text: str) -> tuple[Leaf, str | None] | None:
        return self._texts.get(text)

    def alike(self, text: str) -> list[tuple[Leaf, str]]:
        """The leaves whose text has the same normal form, and why that is."""
        return [
            (self.leaves[found], why or naming(text, found))
            for found, why in self.normals.get(normal(text), {}).items()
        ]

    def _add(self, text: str, leaf: Leaf, why: str | None) -> None:
        self._texts.setdefault(text, (leaf, why))
        self.normals.setdefault(normal(text), {}).setdefault(leaf.text, why)


class _Matching:
    """One run of `match`: drafts find their targets, step by step."""

    def __init__(self, linen: Sequence[Leaf], nnx: NNXLeaves, rules: Rules) -> None:
        self.linen, self.nnx, self.rules = linen, nnx, rules
        self.differences: list[Difference] = []
        self.reasons: list[str] = []
        self.ignored = {
            "linen": self._ignored("linen", {leaf.text: () for leaf in linen}),
            "nnx": self._ignored(
                "nnx", {x.text: _all_texts(x, nnx) for x in nnx.leaves}
            ),
        }
        self.targets = _Targets(nnx, self.ignored["nnx"])
        # Leaves that need no second complaint.
        self.spoken_of = {"linen": set[str](), "nnx": set[str]()}
        self.done: list[_Draft] = []
        self.open: list[_Draft] = []

    def run(self) -> Correspondence:
        ruled, rest = self._ruled()
        self.open = ruled
        self._by_name()
        self.open += rest
        self._by_name()
        self._alike()
        for known in KNOWN:
            self._known(known.name, known.rules)
        self._two_sources()
        fitted = self._moved_stacks(self._laid_out())
        entries = tuple(self._entry(*item) for item in fitted)
        self._left_over()
        return Correspondence(
            tuple(entry for entry, _ in entries),
            tuple(self.differences),
            self.ignored,
            tuple(self.reasons),
            tuple(leaf.text for leaf in self.nnx.rng),
            sum(elements for _, elements in entries),
        )

    def _ignored(
        self, side: str, texts: Mapping[str, Sequence[str]]
    ) -> tuple[str, ...]:
        out: list[str] = []
        for rule in self.rules.ignored:
            if rule.side != side:
                continue
            found = [
                text
                for text, others in texts.items()
                if any(map(rule.pattern.fullmatch, (text, *others)))
            ]
            if not found:
                near = advice.closest(rule.pattern.pattern, texts)
                self._differ(str(rule), "rule", f"unused: no leaf matches; {near}")
                continue
            self.reasons.append(f"{len(found)} in {side}, {rule}")
            out += found
        return tuple(dict.fromkeys(out))

    def _ruled(self) -> tuple[list[_Draft], list[_Draft]]:
        """Drafts by the user's rules, and drafts of the leaves that none is for."""
        hits: dict[str, list[Rule]] = {}
        left_out = set(self.ignored["linen"])
        for leaf in self.linen:
            if leaf.text in left_out:
                continue
            hits[leaf.text] = [
                rule
                for rule in self.rules.rules
                if any(pattern.fullmatch(leaf.text) for pattern in rule.linen)
            ]
            names = [rule.name for rule in hits[leaf.text]]
            if len(names) > 1:
                self._differ(
                    leaf.text,
                    "rule",
                    f"{' and '.join(names)} are for it; make the patterns narrower so "
                    "that one is.",
                )
                self.spoken_of["linen"].add(leaf.text)
        for rule in self.rules.rules:
            if not any(rule in found for found in hits.values()):
                near = advice.closest(rule.linen[0].pattern, list(hits))
                self._differ(str(rule), "rule", f"unused: no leaf matches; {near}")
        leaves = [
            leaf
            for leaf in self.linen
            if leaf.text not in left_out and leaf.text not in self.spoken_of["linen"]
        ]
        single = [leaf for leaf in leaves if not hits[leaf.text]]
        drafts: list[_Draft] = []
        for rule in self.rules.rules:
            mine = [leaf for leaf in leaves if hits[leaf.text] == [rule]]
            drafts += self._by_rule(rule, mine)
        return drafts, [_Draft((leaf,), (leaf.text,)) for leaf in single]

    def _by_rule(self, rule: Rule, leaves: Sequence[Leaf]) -> list[_Draft]:
        """Applies a user's rule; parts that do not come together are differences."""
        drafts = [_Draft((leaf,), (leaf.text,)) for leaf in leaves]
        made, gaps = _grouped(rule, drafts)
        for names, parts in gaps:
            lacking = [
                pattern.pattern
                for pattern, found in zip(rule.linen, parts, strict=True)
                if len(found) != 1
            ]
            have = [leaf.text for found in parts for d in found for leaf in d.leaves]
            self.spoken_of["linen"].update(have)
            self._differ(
                names[0],
                "rule",
                f"{rule} makes it of {len(parts)} leaves, one for each pattern. There "
                f"are {', '.join(have)}: not exactly one for {', '.join(lacking)}.",
            )
        return [
            _Draft(
                tuple(leaf for draft in group for leaf in draft.leaves),
                names,
                (rule,),
                rule.name,
                pinned=_changes_layout(rule),
            )
            for group, names in made
        ]

    def _by_name(self) -> None:
        """Drafts whose every name is a leaf's."""
        still = []
        for draft in self.open:
            found = [self.targets.named(name) for name in draft.names]
            if all(found):
                whys = [hit[1] for hit in found if hit]
                targets = [hit[0] for hit in found if hit]
                self.done.append(draft.found(targets, next(filter(None, whys), None)))
            else:
                still.append(draft)
        self.open = still

    def _alike(self) -> None:
        """Drafts whose names have the normal form of exactly one free leaf each."""
        claimed = {leaf.text for draft in self.done for leaf in draft.targets}
        rivals = collections.Counter(
            normal(name) for draft in self.open for name in draft.names
        )
        still = []
        for draft in self.open:
            found = [self._free_alike(name, claimed) for name in draft.names]
            if all(found) and any(len(hits) > 1 for hits in found):
                self._ambiguous(draft, [leaf for hits in found for leaf, _ in hits])
            elif all(found) and any(rivals[normal(name)] > 1 for name in draft.names):
                self._ambiguous(draft, [leaf for hits in found for leaf, _ in hits])
            elif all(found):
                targets = [hits[0][0] for hits in found]
                self.done.append(draft.found(targets, found[0][0][1]))
            else:
                still.append(draft)
        self.open = still

    def _free_alike(self, name: str, claimed: set[str]) -> list[tuple[Leaf, str]]:
        named = self.targets.named(name)
        if named:
            return [(named[0], named[1] or "same")]
        return [hit for hit in self.targets.alike(name) if hit[0].text not in claimed]

    def _ambiguous(self, draft: _Draft, candidates: Sequence[Leaf]) -> None:
        texts = list(dict.fromkeys(leaf.text for leaf in candidates))
        rivals = [
            d.text
            for d in self.open
            if {*map(normal, d.names)} & {*map(normal, draft.names)}
        ]
        self._differ(
            draft.text,
            "ambiguous",
            f"in linen {', '.join(rivals)} may be any of {', '.join(texts)} in nnx. "
            f"Say which: {rule_line(draft.leaves[0].text, texts[0])}",
        )
        self.spoken_of["linen"].update(leaf.text for leaf in draft.leaves)
        self.spoken_of["nnx"].update(texts)

    def _known(self, name: str, rules: Rules) -> None:
        """Drafts that a known difference brings to a free leaf."""
        for rule in rules.rules:
            claimed = {leaf.text for draft in self.done for leaf in draft.targets}
            candidates = [d for d in self.open if len(d.names) == 1 and not d.pinned]
            for group, names in _grouped(rule, candidates)[0]:
                hits = self._free_alike(names[0], claimed)
                if len(hits) != 1 or hits[0][0].text in claimed:
                    continue
                leaves = tuple(leaf for draft in group for leaf in draft.leaves)
                draft = _Draft(leaves, names, (rule,), group[0].origin)
                self.done.append(draft.found([hits[0][0]], name))
                self.open = [d for d in self.open if d not in group]

    def _two_sources(self) -> None:
        sources: dict[str, list[_Draft]] = {}
        for draft in self.done:
            for leaf in draft.targets:
                sources.setdefault(leaf.text, []).append(draft)
        for text, drafts in sources.items():
            if len(drafts) < 2:
                continue
            tied = self.nnx.aliases.get(text)
            hint = f"In nnx it is tied with {', '.join(tied)}. " if tied else ""
            self._differ(
                text,
                "two sources",
                f"in linen {' and '.join(f'{d.text} ({d.origin})' for d in drafts)} "
                f"both become it. {hint}Only one can: change a rule, or ignore the "
                "others with a reason.",
            )
            for draft in drafts:
                self.spoken_of["linen"].update(leaf.text for leaf in draft.leaves)
                self.spoken_of["nnx"].update(leaf.text for leaf in draft.targets)
        double = {text for text, drafts in sources.items() if len(drafts) > 1}
        self.done = [
            d for d in self.done if not double & {leaf.text for leaf in d.targets}
        ]

    def _laid_out(self) -> list[tuple[_Draft, tuple[Step, ...], tuple[Shape, ...]]]:
        """The drafts' steps, and the shapes they end in."""
        fitted = []
        for draft in self.done:
            shapes: list[Shape] = [leaf.shape for leaf in draft.leaves]
            steps: list[Step] = []
            try:
                for rule in draft.rules:
                    new, shapes = _steps(rule, shapes, draft.targets)
                    steps += new
            except ValueError as error:
                self._differ(
                    draft.text,
                    "shape",
                    f"{draft.rules[0]} does not fit {advice.facts(draft.leaves)} and "
                    f"{advice.facts(draft.targets)} in nnx: {error}.",
                )
                continue
            fitted.append((draft, tuple(steps), tuple(shapes)))
        return fitted

    def _moved_stacks(
        self, fitted: list[tuple[_Draft, tuple[Step, ...], tuple[Shape, ...]]]
    ) -> list[tuple[_Draft, tuple[Step, ...]]]:
        """Adds the move of the stack axis; other shapes that differ are differences."""
        stacks = [
            Stacked(draft.targets[0].path, shapes[0], draft.targets[0].shape, i)
            for i, (draft, _, shapes) in enumerate(fitted)
            if len(shapes) == 1 and not draft.pinned
        ]
        moves, unclear = stack_moves(stacks)
        result = []
        for numbers, choices in unclear:
            pairs = [(fitted[i][0].leaves[0], fitted[i][0].targets[0]) for i in numbers]
            where, detail = advice.unclear_stack(pairs, choices)
            self._differ(where, "ambiguous", detail)
        silent = {i for numbers, _ in unclear for i in numbers}
        for i, (draft, steps, shapes) in enumerate(fitted):
            want = tuple(leaf.shape for leaf in draft.targets)
            if i in silent:
                continue
            if i in moves:
                why = f"stack axis {moves[i].why}"
                draft = dataclasses.replace(draft, origin=_origin(draft.origin, why))
                result.append((draft, (*steps, moves[i].step)))
            elif shapes != want:
                after = f" after {draft.rules[0]}." if draft.pinned else ""
                text = advice.shapes(shapes, want, draft.leaves, draft.targets, after)
                self._differ(draft.text, "shape", text)
            else:
                result.append((draft, steps))
        return result

    def _entry(self, draft: _Draft, steps: tuple[Step, ...]) -> tuple[Entry, int]:
        """The entry of a draft that fits; dtypes and axis names may still differ."""
        dtypes = {str(leaf.dtype) for leaf in draft.leaves}
        others = {str(leaf.dtype) for leaf in draft.targets}
        if len(dtypes) > 1 or dtypes != others:
            self._differ(
                draft.text,
                "dtype",
                f"linen {', '.join(sorted(dtypes))}, nnx {', '.join(sorted(others))}",
            )
        self._compare_axes(draft, steps)
        entry = Entry(
            tuple(leaf.text for leaf in draft.leaves),
            tuple(leaf.text for leaf in draft.targets),
            steps,
            draft.origin,
        )
        return entry, sum(leaf.size for leaf in draft.targets)

    def _compare_axes(self, draft: _Draft, steps: tuple[Step, ...]) -> None:
        wrong = False
        for side, leaves in (("linen", draft.leaves), ("nnx", draft.targets)):
            for leaf in leaves:
                if leaf.axes is not None and len(leaf.axes) != len(leaf.shape):
                    wrong = True
                    self._differ(
                        leaf.text,
                        "axes",
                        f"{side} names {len(leaf.axes)} axes {leaf.axes} of an array "
                        f"with ndim {len(leaf.shape)}, shape {leaf.shape}; a transform "
                        "that adds an axis must add its name.",
                    )
        # A side that names no axis anywhere has declared nothing to compare.
        if wrong or not self._both_name_axes:
            return
        have = _axes_after(steps, [leaf.axes for leaf in draft.leaves])
        want = [_declared(leaf.axes) for leaf in draft.targets]
        for leaf, names, others in zip(draft.targets, have, want, strict=True):
            if names != others and names is not _UNKNOWN:
                self._differ(
                    draft.text if len(draft.targets) == 1 else leaf.text,
                    "axes",
                    f"linen {names}, nnx {others}"
                    + (" (in NNX's order of axes)" if steps else ""),
                )

    @functools.cached_property
    def _both_name_axes(self) -> bool:
        """Whether some leaf has axis names on either side."""
        sides = self.linen, self.nnx.leaves
        return all(any(_declared(leaf.axes) for leaf in side) for side in sides)

    def _left_over(self) -> None:
        taken = {leaf.text for draft in self.done for leaf in draft.targets}
        linen = [
            (draft, leaf)
            for draft in self.open
            for leaf in draft.leaves
            if leaf.text not in self.spoken_of["linen"]
        ]
        nnx = [
            leaf
            for text, leaf in self.targets.leaves.items()
            if text not in taken and text not in self.spoken_of["nnx"]
        ]
        elsewhere = {_pathless(leaf.text): leaf for leaf in nnx}
        left = advice.likely([leaf for _, leaf in linen], nnx)
        for draft, leaf in linen:
            other = elsewhere.get(_pathless(draft.names[0]))
            if other is not None and other.shape == leaf.shape:
                self.spoken_of["nnx"].add(other.text)
                self._differ(
                    leaf.text,
                    "collection",
                    f"linen keeps it in {leaf.collection}, nnx in {other.collection} "
                    f"({other.text}). If that is meant: "
                    f"{rule_line(leaf.text, other.text)}",
                )
                continue
            text = advice.only_in("linen", leaf, left, _went(draft))
            self._differ(leaf.text, "missing", text)
        for leaf in nnx:
            if leaf.text in self.spoken_of["nnx"]:
                continue
            text = advice.only_in("nnx", leaf, left)
            self._differ(leaf.text, "missing", text)

    def _differ(self, path: str, what: str, detail: str) -> None:
        self.differences.append(Difference(path, what, detail))


def _grouped(
    rule: Rule, drafts: Sequence[_Draft]
) -> tuple[
    list[tuple[list[_Draft], tuple[str, ...]]],
    list[tuple[tuple[str, ...], list[list[_Draft]]]],
]:
    """Drafts a rule takes together, with their targets; and those that lack a part."""
    groups: dict[tuple[str, ...], list[list[_Draft]]] = {}
    for draft in drafts:
        for part in range(len(rule.linen)):
            names = rule.targets(draft.names[0], part)
            if names is not None:
                parts = groups.setdefault(names, [[] for _ in rule.linen])
                parts[part].append(draft)
    made, gaps = [], []
    for names, parts in groups.items():
        if len(parts) == 1:
            made += [([draft], names) for draft in parts[0]]
        elif all(len(found) == 1 for found in parts):
            made.append(([found[0] for found in parts], names))
        else:
            gaps.append((names, parts))
    return made, gaps


def _changes_layout(rule: Rule) -> bool:
    layout = (rule.transpose, rule.moveaxis, rule.reshape, rule.axis)
    return any(field is not None for field in layout)


def _origin(before: str, why: str | None) -> str:
    if why is None or why == "same":
        return before
    return f"known: {why}" if before == "same" else f"{before}, {why}"


def _steps(
    rule: Rule, shapes: list[Shape], targets: Sequence[Leaf]
) -> tuple[list[Step], list[Shape]]:
    """A rule as steps for these shapes.

    Raises:
      ValueError: it does not fit them.
    """
    steps: list[Step] = []
    if len(rule.linen) > 1:
        axis = _common_axis(rule, shapes)
        steps.append(Concatenate(axis, tuple(shape[axis] for shape in shapes)))
        shapes = steps[-1].shapes(shapes)
    if rule.transpose is not None:
        steps.append(Transpose(rule.transpose))
        shapes = steps[-1].shapes(shapes)
    if rule.moveaxis is not None:
        steps.append(moved(*rule.moveaxis, len(shapes[0])))
        shapes = steps[-1].shapes(shapes)
    if rule.reshape is not None:
        steps.append(reshaped(shapes[0], rule.reshape))
        shapes = steps[-1].shapes(shapes)
    if len(rule.nnx) > 1:
        axis = _common_axis(rule, [*shapes, *(leaf.shape for leaf in targets)])
        steps.append(Split(axis, tuple(leaf.shape[axis] for leaf in targets)))
        shapes = steps[-1].shapes(shapes)
    return steps, shapes


def _common_axis(rule: Rule, shapes: Sequence[Shape]) -> int:
    if len({len(shape) for shape in shapes}) > 1:
        raise ValueError(f"shapes {', '.join(map(str, shapes))} differ in ndim")
    return axis_of(rule.axis or 0, len(shapes[0]))


def _all_texts(leaf: Leaf, nnx: NNXLeaves) -> list[str]:
    return [text for text, _ in _other_texts(leaf, nnx)]


def _other_texts(leaf: Leaf, nnx: NNXLeaves) -> Iterator[tuple[str, str | None]]:
    """Further texts that mean an NNX leaf, and the known difference that says so."""
    _, _, path = leaf.text.partition("/")
    aliases = nnx.aliases.get(leaf.text, ())
    for alias in aliases:
        yield alias, "tied module"
    for collection in nnx.collections.get(leaf.text, ()):
        why = f"Variable type {leaf.collection} is one of {collection}"
        yield f"{collection}/{path}", why
        for alias in aliases:
            yield f"{collection}/{alias.partition('/')[2]}", why


_UNKNOWN = ("unknown",)


def _declared(axes: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Axis names, None where no axis has one."""
    return axes if axes and any(name is not None for name in axes) else None


def _axes_after(
    steps: Sequence[Step], axes: Sequence[tuple[Any, ...] | None]
) -> list[tuple[Any, ...] | None]:
    """Axis names in NNX's layout; `_UNKNOWN` where a reshape hides them."""
    names = [_declared(a) for a in axes]
    for step in steps:
        match step:
            case Transpose(order):
                names = [a and tuple(a[i] for i in order) for a in names]
            case Concatenate():
                names = [names[0] if len(set(names)) == 1 else _UNKNOWN]
            case Split(_, sizes):
                names = names * len(sizes)
            case Reshape():
                return [_UNKNOWN] * _results(steps, len(axes))
    return names


def _results(steps: Sequence[Step], count: int) -> int:
    for step in steps:
        count = len(step.sizes) if isinstance(step, Split) else count
        count = 1 if isinstance(step, Concatenate) else count
    return count


def _went(draft: _Draft) -> str:
    if not draft.rules:
        return ""
    return f"; {draft.origin} sends it to {', '.join(draft.names)}, which nnx lacks"


def _pathless(text: str) -> str:
    return normal(text).partition("/")[2]
