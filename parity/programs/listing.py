"""A program as a graph, and the graph as lines in canonical order.

`Scope`, `Node` and `Value` are the graph. `mark` finds what is needed, `sort_carries`
orders what loops carry, and `Listing` writes the rest down, each operation after what
it needs, numbered anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

REGION = "(region)"


class Operation(NamedTuple):
    """One line of a listing.

    Attributes:
      name: of the operation, as stablehlo.add; "(region)" where a body begins or ends.
      text: canonical: operands by number, attributes, types.
      location: file:line (function) of the user's code that asked for it.
    """

    name: str
    text: str
    location: str


@dataclasses.dataclass(eq=False)
class Scope:
    """A body: of the program (depth 0) or of a region.

    Attributes:
      depth: how many regions it lies in.
      types: of its arguments.
      node: whose region it is.
      nodes: of the body, in the order written.
      effects: those that are kept though nobody may use their results.
      outputs: what it gives.
      terminator: how.
    """

    depth: int
    types: tuple[str, ...]
    node: Node | None = None
    nodes: list[Node] = dataclasses.field(default_factory=list)
    effects: list[Node] = dataclasses.field(default_factory=list)
    outputs: tuple[Value, ...] = ()
    terminator: str = ""


@dataclasses.dataclass(eq=False)
class Node:
    """An operation.

    Attributes:
      name: of the operation.
      attributes: canonical text; of a constant, the constant.
      operands: in order.
      types: of its results.
      scope: where it stands.
      places: its location, then those of the calls it was reached by, innermost first.
      regions: its bodies.
      live: whether it is needed.
      carries: of a loop: those that are needed, in the order to be listed.
    """

    name: str
    attributes: str
    operands: tuple[Value, ...]
    types: tuple[str, ...]
    scope: Scope
    places: tuple[Any, ...]
    regions: list[Scope] = dataclasses.field(default_factory=list)
    live: bool = False
    carries: list[int] = dataclasses.field(default_factory=list)

    @property
    def is_loop(self) -> bool:
        """Whether operands, results and arguments of the regions are its carries."""
        return self.name == "stablehlo.while"

    @property
    def is_constant(self) -> bool:
        """Whether it is listed inside the lines that use it."""
        return self.name == "stablehlo.constant"

    def place(self, effect: bool) -> tuple[Value, ...]:
        """Puts the node, with its regions, into its scope and gives its results."""
        self.scope.nodes.append(self)
        if effect or any(region.effects for region in self.regions):
            self.scope.effects.append(self)
        return tuple(Value(self, i) for i in range(len(self.types)))

    def taken(self) -> Sequence[Value]:
        """The operands that are listed."""
        return self._carried(self.operands)

    def results(self) -> list[Value]:
        """The results that are listed."""
        order = self.carries if self.is_loop else range(len(self.types))
        return [Value(self, i) for i in order]

    def arguments(self, region: Scope) -> list[Value]:
        """The arguments of one of its regions that are listed."""
        order = self.carries if self.is_loop else range(len(region.types))
        return [Value(region, i) for i in order]

    def outputs(self, region: Scope) -> Sequence[Value]:
        """What one of its regions gives, as it is listed."""
        condition = region is self.regions[0]
        return region.outputs if condition else self._carried(region.outputs)

    def _carried(self, values: Sequence[Value]) -> Sequence[Value]:
        return [values[i] for i in self.carries] if self.is_loop else values


class Value(NamedTuple):
    """A result of a node or an argument of a scope."""

    owner: Node | Scope
    slot: int

    @property
    def type(self) -> str:
        """As MLIR prints it."""
        return self.owner.types[self.slot]


def mark(root: Scope) -> None:
    """Marks what the results and effects need; of loops, the carries they need."""
    waiting = list(root.outputs)
    seen: set[Value] = set()

    def touch(node: Node) -> None:
        if node.live:
            return
        node.live = True
        for region in node.regions:
            for effect in region.effects:
                touch(effect)
        if node.is_loop:
            waiting.extend(node.regions[0].outputs)
            return
        waiting.extend(node.operands)
        waiting.extend(value for region in node.regions for value in region.outputs)

    for effect in root.effects:
        touch(effect)
    while waiting:
        value = waiting.pop()
        node = value.owner if isinstance(value.owner, Node) else value.owner.node
        if value in seen or node is None:
            continue
        seen.add(value)
        touch(node)
        if node.is_loop and value.slot not in node.carries:
            node.carries = sorted([*node.carries, value.slot])
            body = node.regions[1]
            waiting.extend((node.operands[value.slot], body.outputs[value.slot]))


def sort_carries(root: Scope) -> None:
    """Orders the carries of every loop by how they are computed, not as written."""
    _paint(root, {Value(root, i): f"argument {i}" for i in range(len(root.types))})


def digest(text: str) -> str:
    """A hash that no two texts share."""
    return hashlib.sha256(text.encode()).hexdigest()


def _paint(scope: Scope, colors: dict[Value, str]) -> None:
    """Colors each value by how it is computed.

    Colors only choose an order: where two values have one, the order written stays.
    """
    for node in scope.nodes:
        if not node.live:
            continue
        if node.is_loop:
            _sort_loop(node, colors)
        parts = [node.name, node.attributes]
        parts += [value.type for value in node.results()]
        parts += [colors[value] for value in node.taken()]
        for region in node.regions:
            for i, value in enumerate(node.arguments(region)):
                colors[value] = f"region {region.depth} {i}"
            _paint(region, colors)
            parts += [colors[value] for value in node.outputs(region)]
        base = digest("\n".join(parts))
        for i, value in enumerate(node.results()):
            colors[value] = f"{base} {i}"


def _sort_loop(node: Node, colors: dict[Value, str]) -> None:
    """By initial values, then by what a step makes of each."""
    condition, body = node.regions
    own = {i: f"{colors[node.operands[i]]} {node.types[i]}" for i in node.carries}
    # The second round tells apart what differs by what it meets.
    for _ in range(2):
        for i, color in own.items():
            colors[Value(condition, i)] = colors[Value(body, i)] = color
        _paint(condition, colors)
        _paint(body, colors)
        end = colors[condition.outputs[0]]
        own = {
            i: digest(f"{color} {colors[body.outputs[i]]} {end}")
            for i, color in own.items()
        }
    node.carries.sort(key=lambda i: (own[i], i))


class Listing:
    """The live operations of a marked graph.

    The order follows from the graph alone: results in order, each after its operands.
    Numbers count from 0 in every scope, with the scope's depth in front.
    """

    def __init__(self, root: Scope, location: Callable[[Any], str] = lambda _: ""):
        """Lists `root`; `location` gives the text for a node's places."""
        self._location = location
        self._names: dict[Value, str] = {}
        self._lines: dict[Scope, list[Operation]] = {}
        self._numbers: dict[Scope, int] = {}
        self._listed: set[Node] = set()
        arguments = [Value(root, i) for i in range(len(root.types))]
        self.operations = tuple(self._body(root, arguments, root.outputs))

    def name(self, value: Value) -> str:
        """A value by number; a constant by itself."""
        if isinstance(value.owner, Node) and value.owner.is_constant:
            return value.owner.attributes
        return self._names[value]

    def _body(
        self, scope: Scope, arguments: Iterable[Value], outputs: Iterable[Value]
    ) -> list[Operation]:
        self._lines[scope], self._numbers[scope] = [], 0
        for i, value in enumerate(arguments):
            self._names[value] = f"%{_prefix(scope)}arg{i}"
        for effect in scope.effects:
            self._visit(effect)
        for value in outputs:
            self._visit(value.owner)
        return self._lines[scope]

    def _visit(self, start: Node | Scope) -> None:
        """Lists a node after its operands; no recursion, as chains are long."""
        stack = [start]
        while stack:
            node = stack[-1]
            if not isinstance(node, Node) or node.is_constant or node in self._listed:
                stack.pop()
                continue
            waiting = [
                value.owner
                for value in node.taken()
                if isinstance(value.owner, Node)
                and not value.owner.is_constant
                and value.owner not in self._listed
            ]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                stack.pop()
                self._list(node)

    def _list(self, node: Node) -> None:
        """Puts a node and its regions behind what they need from outside of them."""
        place, inner = self._location(node.places), []
        for region in node.regions:
            inner += self._region(region, node, place)
        self._listed.add(node)
        results = node.results()
        for value in results:
            self._names[value] = f"%{_prefix(node.scope)}{self._numbers[node.scope]}"
            self._numbers[node.scope] += 1
        head = ", ".join(self._names[value] for value in results)
        takes = ", ".join(self.name(value) for value in node.taken())
        taken = ", ".join(value.type for value in node.taken())
        given = ", ".join(value.type for value in results)
        parts = [f"{head} =" if head else "", f"{node.name}({takes})"]
        parts += [node.attributes, f": ({taken}) -> ({given})"]
        text = " ".join(part for part in parts if part)
        self._lines[node.scope] += [Operation(node.name, text, place), *inner]

    def _region(self, region: Scope, node: Node, place: str) -> list[Operation]:
        arguments, outputs = node.arguments(region), node.outputs(region)
        lines = self._body(region, arguments, outputs)
        types = ", ".join(value.type for value in arguments)
        gives = ", ".join(f"{self.name(value)} : {value.type}" for value in outputs)
        return [
            Operation(REGION, f"  region ({types})", place),
            *(line._replace(text=f"  {line.text}") for line in lines),
            Operation(REGION, f"  {region.terminator} {gives}", place),
        ]


def _prefix(scope: Scope) -> str:
    return f"{scope.depth}." if scope.depth else ""
