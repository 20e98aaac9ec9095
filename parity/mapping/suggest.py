"""A first draft of a rule file, from shapes and names, for a person to review.

What the known differences explain needs no rule. The rest is paired module by
module: by name, then by the shapes below it, then by order. Where several modules look
alike the draft says so.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from parity.mapping.correspondence import match
from parity.mapping.known import KNOWN, ONLY_IN_LINEN, normal
from parity.mapping.layout import Shape
from parity.mapping.leaves import Leaf, NNXLeaves, natural, path_text
from parity.mapping.rules import Rules, escaped, quoted

Tokens = tuple[str, ...]
Signature = frozenset[tuple[tuple[str, Shape], int]]

_HEADER = """\
# A draft made from shapes and names: read it before you trust it.
# Order in a rule: concatenate, transpose or moveaxis, reshape, split.
"""


def suggest(linen: Sequence[Leaf], nnx: NNXLeaves) -> str:
    """The text of a rule file for what does not match by itself.

    Args:
      linen: from `linen_leaves`.
      nnx: from `nnx_leaves` of a module that was made, or from `declared_leaves`: a
        module from `nnx.eval_shape` has lost its order, and modules that look alike are
        then paired by name.
    """
    drawn = _Drawn(linen, nnx)
    drawn.pair()
    for modules in (_generalised(drawn.modules), drawn.modules):
        text = _text(modules, drawn.leaves, drawn)
        found = match(linen, nnx, Rules.parse(text, "the draft"))
        # A pattern may take more than it was made from: then each leaf has its own.
        if not any(difference.what == "rule" for difference in found.differences):
            break
    return text


@dataclasses.dataclass
class _Node:
    """A module of either tree: what it holds, and where it is."""

    tokens: Tokens = ()
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)
    leaves: list[Leaf] = dataclasses.field(default_factory=list)

    def all_leaves(self) -> list[Leaf]:
        below = (child.all_leaves() for child in self.children.values())
        return [*self.leaves, *itertools.chain.from_iterable(below)]

    @functools.cached_property
    def signatures(self) -> list[Signature]:
        """What is below by leaf name and shape; then so with gates fused, each way."""
        leaves = self.all_leaves()
        found = [_counted((_name(leaf.text), leaf.shape) for leaf in leaves)]
        fused = (_fused(leaves, known.rules) for known in KNOWN)
        return found + [_counted(items) for items in fused if items is not None]

    def all_nodes(self) -> Iterator[_Node]:
        for child in self.children.values():
            yield from child.all_nodes()
        yield self


@dataclasses.dataclass(frozen=True)
class _Module:
    """A module of Linen's that is one of NNX's, and which of its leaves.

    Attributes:
      linen: tokens; private characters stand for what both sides share.
      nnx: tokens.
      collection: of the leaves.
      leaves: their names; empty for all that there is below.
      note: why it may be wrong, or nothing.
      shared: by private character, the pattern it stands for.
    """

    linen: Tokens
    nnx: Tokens
    collection: str
    leaves: tuple[str, ...]
    note: str = ""
    shared: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Single:
    """One rule for leaves that need their own: other leaf name or other layout."""

    linen: tuple[Leaf, ...]
    nnx: tuple[Leaf, ...]
    extra: str
    note: str


class _Drawn:
    """The pairs that were found, and what is left."""

    def __init__(self, linen: Sequence[Leaf], nnx: NNXLeaves) -> None:
        entries = match(linen, nnx).entries
        mine = {text for entry in entries for text in entry.linen}
        others = {text for entry in entries for text in entry.nnx}
        self.nnx = nnx
        self.free_linen = {x.text: x for x in linen if x.text not in mine}
        self.free_nnx = {x.text: x for x in nnx.leaves if x.text not in others}
        self.modules: list[_Module] = []
        self.leaves: list[_Single] = []

    def pair(self) -> None:
        left = _tree(self.free_linen.values())
        right = _tree(self.free_nnx.values())
        self._align(left, right, "")
        self._anywhere()
        self._joined()
        self._single_leaves()

    def _align(self, left: _Node, right: _Node, note: str) -> None:
        """Pairs two modules that are taken for one, and what is below them."""
        if self._is_cell(left, right):
            self._take_cell(left, right, note)
            return
        self._take_leaves(left, right, note)
        lefts = sorted(left.children, key=natural)
        rights = list(right.children)
        for one, other in _equal_names(lefts, rights):
            if _alike(left.children[one], right.children[other]):
                lefts.remove(one)
                rights.remove(other)
                self._align(left.children[one], right.children[other], note)
        for group in _groups(left, lefts, right, rights):
            about = _about_order(*group)
            for mine, its in zip(*group, strict=False):
                lefts.remove(mine.tokens[-1])
                rights.remove(its.tokens[-1])
                self._align(mine, its, about or note)
        for one, other in _equal_names(lefts, rights):
            lefts.remove(one)
            rights.remove(other)
            self._align(left.children[one], right.children[other], note)
        for mine, its in _most_alike(left, lefts, right, rights):
            about = f"guess: {_place(mine)} and {_place(its)} differ below"
            self._align(mine, its, about)

    def _anywhere(self) -> None:
        """Pairs modules wherever they are in the trees, larger ones first."""
        left = _tree(self.free_linen.values())
        right = _tree(self.free_nnx.values())
        sizes = sorted({len(n.all_leaves()) for n in right.all_nodes()}, reverse=True)
        for size in sizes:
            lefts = sorted(_branching(left), key=lambda n: [*map(natural, n.tokens)])
            rights = [n for n in _branching(right) if len(n.all_leaves()) == size]
            for other in rights:
                if not self._all_free(other):
                    continue
                ones = [n for n in lefts if self._all_free(n) and _alike(n, other)]
                if not ones:
                    continue
                others = [n for n in rights if self._all_free(n) and _alike(ones[0], n)]
                note = "" if len(ones) == len(others) == 1 else _about(ones, others)
                self._align(ones[0], other, note)

    def _all_free(self, node: _Node) -> bool:
        leaves = node.all_leaves()
        return bool(leaves) and all(
            leaf.text in self.free_linen or leaf.text in self.free_nnx
            for leaf in leaves
        )

    def _is_cell(self, left: _Node, right: _Node) -> bool:
        return bool(
            {"dense_i", "dense_h"} & set(right.children)
            and not {"dense_i", "dense_h"} & set(left.children)
            and not left.leaves
        )

    def _take_cell(self, left: _Node, right: _Node, note: str) -> None:
        leaves = left.all_leaves()
        self._add(left, right, leaves, note, by_name=False)
        only = [x for x in leaves if any(p.fullmatch(x.text) for p, _ in ONLY_IN_LINEN)]
        for leaf in leaves:
            if leaf not in only:
                self.free_linen.pop(leaf.text, None)
        for leaf in right.all_leaves():
            self.free_nnx.pop(leaf.text, None)

    def _take_leaves(self, left: _Node, right: _Node, note: str) -> None:
        taken = []
        for leaf in left.leaves:
            for other in right.leaves:
                if _same(leaf, other, self.nnx) and other.text in self.free_nnx:
                    taken.append(leaf)
                    del self.free_nnx[other.text], self.free_linen[leaf.text]
                    break
        if taken:
            self._add(left, right, taken, note, by_name=True)
        for leaf in left.leaves:
            if leaf.text not in self.free_linen:
                continue
            free = [x for x in right.leaves if x.text in self.free_nnx]
            self._take_one(leaf, free, "names differ")

    def _take_one(self, leaf: Leaf, free: Sequence[Leaf], why: str) -> None:
        """Pairs one leaf by shape, or by a transposed shape."""
        fits = [x for x in free if x.shape == leaf.shape]
        turned = [x for x in free if x.shape == leaf.shape[::-1] and len(x.shape) > 1]
        if not fits and not turned:
            return
        chosen = (fits or turned)[0]
        order = list(range(len(leaf.shape)))[::-1]
        extra = "" if fits else f"transpose = {order}\n"
        others = [x.text for x in (fits or turned)[1:]]
        note = f"guess: {why}, shapes {'fit' if fits else 'fit transposed'}"
        if others:
            note += f"; or {', '.join(others)}"
        self.leaves.append(_Single((leaf,), (chosen,), extra, note))
        del self.free_linen[leaf.text], self.free_nnx[chosen.text]

    def _joined(self) -> None:
        """Several leaves that are one on the other side, put together on one axis."""
        for sides in (
            (self.free_linen, self.free_nnx),
            (self.free_nnx, self.free_linen),
        ):
            for whole in list(sides[1].values()):
                found = _parts(whole, list(sides[0].values()))
                if found is None:
                    continue
                parts, axis = found
                note = (
                    "guess: the order of the parts, and the axis, are from shapes only"
                )
                linen, nnx = tuple(parts), (whole,)
                if sides[0] is self.free_nnx:
                    linen, nnx = nnx, linen
                self.leaves.append(_Single(linen, nnx, f"axis = {axis}\n", note))
                del sides[1][whole.text]
                for part in parts:
                    del sides[0][part.text]

    def _single_leaves(self) -> None:
        for leaf in list(self.free_linen.values()):
            if not any(pattern.fullmatch(leaf.text) for pattern, _ in ONLY_IN_LINEN):
                free = list(self.free_nnx.values())
                shapes = [x.shape for x in free]
                shape = leaf.shape if leaf.shape in shapes else leaf.shape[::-1]
                if shapes.count(shape) == 1:
                    self._take_one(leaf, free, "nothing else is left")

    def _add(
        self,
        left: _Node,
        right: _Node,
        leaves: Sequence[Leaf],
        note: str,
        *,
        by_name: bool,
    ) -> None:
        # A collection has a rule of its own, so that the rule is known backwards, too.
        for collection in dict.fromkeys(leaf.collection for leaf in leaves):
            mine = [leaf for leaf in leaves if leaf.collection == collection]
            found = {path_text(leaf.path[-1:]) for leaf in mine if by_name}
            names = tuple(sorted(found))
            self.modules.append(
                _Module(left.tokens, right.tokens, collection, names, note)
            )


def _tree(leaves: Iterable[Leaf]) -> _Node:
    root = _Node()
    for leaf in leaves:
        node = root
        for token in _module_tokens(leaf):
            child = _Node((*node.tokens, token))
            node = node.children.setdefault(token, child)
        node.leaves.append(leaf)
    return root


def _module_tokens(leaf: Leaf) -> list[str]:
    """The tokens above a leaf; an index belongs to the name before it."""
    tokens: list[str] = []
    for token in leaf.path[:-1]:
        text = path_text([token])
        if isinstance(token, int) and tokens:
            tokens[-1] += f"/{text}"
        else:
            tokens.append(text)
    return tokens


def _branching(root: _Node) -> list[_Node]:
    """All modules but those that hold one module and nothing else."""
    return [n for n in root.all_nodes() if n.leaves or len(n.children) > 1]


def _place(node: _Node) -> str:
    return "/".join(node.tokens) or "the root"


def _name(text: str) -> str:
    return re.split(r"[/,]", re.sub(r"['\"()]", "", text))[-1].rstrip("_")


def _fused(leaves: Sequence[Leaf], rules: Rules) -> list[tuple[str, Shape]] | None:
    rest = {leaf.text: leaf for leaf in leaves}
    made: list[tuple[str, Shape]] = []
    for rule in rules.rules:
        groups: dict[str, list[Leaf]] = {}
        for part, leaf in itertools.product(range(len(rule.linen)), leaves):
            names = rule.targets(leaf.text, part)
            if names is not None and leaf.text in rest:
                groups.setdefault(names[0], []).append(leaf)
        for name, parts in groups.items():
            if len(parts) == len(rule.linen):
                last = sum(x.shape[-1] for x in parts) if rule.axis else None
                shape = parts[0].shape
                made.append((_name(name), (*shape[:-1], last) if last else shape))
                for leaf in parts:
                    del rest[leaf.text]
    if not made:
        return None
    return made + [
        (_name(leaf.text), leaf.shape)
        for leaf in rest.values()
        if not any(pattern.fullmatch(leaf.text) for pattern, _ in ONLY_IN_LINEN)
    ]


def _counted(items: Iterable[tuple[str, Shape]]) -> Signature:
    return frozenset(collections.Counter(items).items())


def _alike(left: _Node, right: _Node) -> bool:
    return right.signatures[0] in left.signatures


def _same(leaf: Leaf, other: Leaf, nnx: NNXLeaves) -> bool:
    may_be = {other.collection, *nnx.collections.get(other.text, ())}
    return (
        leaf.collection in may_be
        and leaf.shape == other.shape
        and _name(leaf.text) == _name(other.text)
    )


def _equal_names(lefts: Sequence[str], rights: Sequence[str]) -> list[tuple[str, str]]:
    by_name = {normal(f"/{name}"): name for name in rights}
    pairs = [(one, by_name.get(normal(f"/{one}"))) for one in lefts]
    return [(one, other) for one, other in pairs if other is not None]


def _groups(
    left: _Node, lefts: Sequence[str], right: _Node, rights: Sequence[str]
) -> list[tuple[list[_Node], list[_Node]]]:
    """Children that look alike, of either side, in order; none is in two groups."""
    groups = []
    ones, others = list(lefts), list(rights)
    while others:
        first = right.children[others[0]]
        same = [n for n in others if _alike(right.children[n], first)]
        mine = [n for n in ones if _alike(left.children[n], first)]
        count = min(len(same), len(mine))
        if count:
            groups.append(
                (
                    [left.children[n] for n in mine],
                    [right.children[n] for n in same],
                )
            )
        others = [n for n in others if n not in same]
        ones = [n for n in ones if n not in mine[:count]]
    return groups


def _most_alike(
    left: _Node, lefts: Sequence[str], right: _Node, rights: Sequence[str]
) -> Iterator[tuple[_Node, _Node]]:
    """Children that share more than half of what they hold."""
    free = list(rights)
    for name in lefts:
        one = collections.Counter(dict(left.children[name].signatures[-1]))
        shared = {
            other: (
                one & collections.Counter(dict(right.children[other].signatures[0]))
            )
            for other in free
        }
        best = max(free, key=lambda n: shared[n].total(), default=None)
        if best is not None and 2 * shared[best].total() > one.total():
            free.remove(best)
            yield left.children[name], right.children[best]


def _about_order(ones: Sequence[_Node], others: Sequence[_Node]) -> str:
    if len(ones) == len(others) == 1 or _numbered(ones, others):
        return ""
    return _about(ones, others)


def _numbered(ones: Sequence[_Node], others: Sequence[_Node]) -> bool:
    """Whether NNX has a list, and Linen as many of one class: the order is no guess."""
    names = {re.sub(r"_\d+$", "_#", node.tokens[-1]) for node in ones}
    lists = {re.sub(r"/\d+$", "/#", node.tokens[-1]) for node in others}
    return (
        len(ones) == len(others)
        and len(names) == len(lists) == 1
        and names.pop().endswith("_#")
        and lists.pop().endswith("/#")
    )


def _about(ones: Sequence[_Node], others: Sequence[_Node]) -> str:
    left, right = (", ".join(map(_place, nodes)) for nodes in (ones, others))
    return f"guess, by order: {left} in linen look like {right} in nnx"


def _parts(whole: Leaf, leaves: Sequence[Leaf]) -> tuple[list[Leaf], int] | None:
    """Two to four leaves of neighbours that make up the whole along one axis."""
    groups: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        key = (leaf.collection, leaf.path[:-2], leaf.path[-1])
        if len(leaf.shape) == len(whole.shape) and _name(leaf.text) == _name(
            whole.text
        ):
            groups.setdefault(key, []).append(leaf)
    for parts in groups.values():
        for axis in reversed(range(len(whole.shape))):
            shapes = [part.shape for part in parts]
            rest = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
            if (
                1 < len(parts) < 5
                and rest == {whole.shape[:axis] + whole.shape[axis + 1 :]}
                and sum(shape[axis] for shape in shapes) == whole.shape[axis]
            ):
                return sorted(parts, key=_qkv), axis
    return None


def _qkv(leaf: Leaf) -> int:
    """Queries, keys, values is the order that all who fuse them use."""
    name = path_text(leaf.path[-2:-1])
    return "qkv".find(name[:1]) if name[:1] in "qkv" else 0


# Private characters stand for a part that both sides share until patterns are written.
_FIRST_MARK = 0xE000


def _generalised(modules: Sequence[_Module]) -> list[_Module]:
    """Modules that differ in a number, or in a name both sides share, as one."""
    result = list(modules)
    for mark in itertools.count(_FIRST_MARK):
        families: dict[object, list[tuple[_Module, _Module, str]]] = {}
        for module in result:
            for found, value in _abstracted(module, chr(mark)):
                families.setdefault(_form(found), []).append((module, found, value))
        # Numbers first: a pattern for all layers is what a person would write.
        best = max(
            families.values(),
            key=lambda family: (len(family) > 1, family[0][2].isdigit(), len(family)),
            default=[],
        )
        if len(best) < 2:
            return result
        values = [value for *_, value in best]
        digits = all(value.isdigit() for value in values)
        pattern = r"\d+" if digits else "|".join(map(escaped, dict.fromkeys(values)))
        _, merged, _ = best[0]
        notes = list(dict.fromkeys(m.note for m, *_ in best if m.note))
        likewise = f" (and {len(notes) - 1} more like it)" if len(notes) > 1 else ""
        merged = dataclasses.replace(
            merged,
            note=f"{notes[0]}{likewise}" if notes else "",
            shared=(*merged.shared, (chr(mark), pattern)),
        )
        gone = [module for module, *_ in best]
        place = result.index(gone[0])
        result[place] = merged
        result = [m for m in result if m not in gone]
    return result


def _form(module: _Module) -> object:
    """What two modules have in common whose marks were made at different times."""
    marks = re.findall("[\ue000-\uf8ff]", "/".join(module.linen))
    table = str.maketrans({mark: f"<{i}>" for i, mark in enumerate(marks)})
    patterns = dict(module.shared)
    return (
        "/".join(module.linen).translate(table),
        "/".join(module.nnx).translate(table),
        tuple(patterns.get(mark) for mark in marks),
        module.collection,
        module.leaves,
    )


def _abstracted(module: _Module, mark: str) -> Iterator[tuple[_Module, str]]:
    """The module with one number or one shared name as a mark, in every way."""
    left = [token for text in module.linen for token in text.split("/")]
    right = [token for text in module.nnx for token in text.split("/")]
    for i, j in itertools.product(range(len(left)), range(len(right))):
        for value in _shared(left[i], right[j]):
            one = left[i][: len(left[i]) - len(value)] + mark
            other = right[j][: len(right[j]) - len(value)] + mark
            yield (
                dataclasses.replace(
                    module,
                    linen=(*left[:i], one, *left[i + 1 :]),
                    nnx=(*right[:j], other, *right[j + 1 :]),
                ),
                value,
            )


def _shared(one: str, other: str) -> list[str]:
    numbers = [re.search(r"\d+$", token) for token in (one, other)]
    if all(numbers) and numbers[0] and numbers[1] and numbers[0][0] == numbers[1][0]:
        return [numbers[0][0]]
    plain = re.fullmatch(r"[^\ue000-\uf8ff]+", one)
    return [one] if one == other and plain else []


def _text(modules: Sequence[_Module], leaves: Sequence[_Single], drawn: _Drawn) -> str:
    blocks = [_HEADER]
    blocks += [_module_rule(module) for module in modules]
    blocks += [_single_rule(single) for single in leaves]
    rest = [("linen", x) for x in drawn.free_linen.values()]
    rest += [("nnx", x) for x in drawn.free_nnx.values()]
    if rest:
        blocks.append(_rest(rest))
    if len(blocks) == 1:
        blocks.append("# Every leaf corresponds by itself: no rule is needed.\n")
    return "\n".join(blocks)


def _module_rule(module: _Module) -> str:
    order = [mark for mark in re.findall("[\ue000-\uf8ff]", "/".join(module.linen))]
    groups = {mark: i for i, mark in enumerate(order, 1)}
    patterns = dict(module.shared)
    linen = [escaped(token) for text in module.linen for token in text.split("/")]
    nnx = [token for text in module.nnx for token in text.split("/")]
    for mark, number in groups.items():
        linen = [token.replace(mark, f"({patterns[mark]})") for token in linen]
        nnx = [token.replace(mark, f"\\{number}") for token in nnx]
    names = "|".join(map(escaped, module.leaves))
    left = [module.collection, *linen]
    right = [module.collection, *nnx]
    if len(module.leaves) == 1:
        left.append(names)
        right.append(module.leaves[0])
    else:
        left.append(f"({names or '.+'})")
        right.append(f"\\{len(groups) + 1}")
    return _rule(quoted(_join(left)), quoted(_join(right)), "", module.note)


def _join(tokens: Iterable[str]) -> str:
    return "/".join(token for token in tokens if token)


def _single_rule(single: _Single) -> str:
    linen = [quoted(escaped(leaf.text)) for leaf in single.linen]
    nnx = [quoted(leaf.text) for leaf in single.nnx]
    return _rule(_list(linen), _list(nnx), single.extra, single.note)


def _list(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _rule(linen: str, nnx: str, extra: str, note: str) -> str:
    """A table of TOML; the two are quoted already."""
    return f"{_comment(note)}[[rule]]\nlinen = {linen}\nnnx = {nnx}\n{extra}"


def _comment(note: str) -> str:
    return "".join(f"# {line}\n" for line in note.splitlines())


def _rest(rest: Sequence[tuple[str, Leaf]]) -> str:
    lines = [
        "# Nothing was found for these. Write rules, or say why they may be left out:"
    ]
    for side, leaf in rest:
        lines.append(f"# {side}: {leaf.text} {leaf.shape} {leaf.dtype}")
        for pattern, why in ONLY_IN_LINEN:
            if pattern.fullmatch(leaf.text) and side == "linen":
                lines += [
                    f"#   {why}. To accept that:",
                    "# [[ignore]]",
                    f"# linen = {quoted(escaped(leaf.text))}",
                    "# reason = 'zero in our checkpoints, and frozen'",
                ]
    return "\n".join(lines) + "\n"
