"""Reads the text of a compiled program: XLA's HLO in the order in which it runs.

Only what memory depends on is read: the order of instructions, shapes with the layout
that pads them, operands, computations that are called, and where an operation is from.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_BYTES = {"pred": 1, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^{}]*\})?")
_TILE = re.compile(r"T?\(([0-9,*]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_HEAD = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .* \{$")
_END = re.compile(r"^\}(, \w+=.*)?$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([^\s=]+) = (.*)$")
_NAME = re.compile(r"%([A-Za-z0-9_.\-]+)")
_CALLED = re.compile(
    r"(?:calls|body|to_apply|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^{}]*\}|%[^\s,)]+)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX = re.compile(r"index=(\d+)")


class HloError(ValueError):
    """A text that is not a compiled program, or not in the order of running."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a result.

    Attributes:
      text: type and dimensions, such as "bf16[8,128]".
      size: bytes, padding of the layout included.
      space: memory space; 0 is the large memory of the device.
    """

    text: str
    size: int
    space: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
      name: its own.
      opcode: such as "fusion".
      leaves: arrays of its result, those of nested tuples in order.
      widths: leaves of each element of a result that is a tuple; (): it is none.
      operands: names, in order.
      called: computations.
      index: of `get-tuple-element`; of a parameter, its number.
      op_name: the path of JAX's functions that it is from; "" if unknown.
      is_root: whether it gives the result of its computation.
    """

    name: str
    opcode: str
    leaves: tuple[Leaf, ...]
    widths: tuple[int, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    index: int
    op_name: str
    is_root: bool


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: tuple[Instruction, ...]

    @property
    def root(self) -> Instruction:
        """The instruction whose result is that of the computation."""
        return next(line for line in self.instructions if line.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: Mapping[str, Computation]
    entry: str


def read(text: str) -> Module:
    """The program of `jax.stages.Compiled.as_text()`.

    Raises:
      HloError: the text is not of a compiled program.
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise HloError(
            "The text must be of a compiled program, is_scheduled=true in its first "
            f"line. It starts with {text[:60]!r}."
        )
    computations: dict[str, Computation] = {}
    entry, name = "", ""
    lines: list[str] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, lines = head[2], []
            entry = name if head[1] else entry
        elif _END.match(line) and name:
            computations[name] = Computation(name, tuple(map(_instruction, lines)))
            name = ""
        elif name and _INSTRUCTION.match(line):
            lines.append(line)
        elif name and lines:  # an attribute with a line break in it
            lines[-1] += line
    if entry not in computations:
        raise HloError("The text has no ENTRY computation.")
    return Module(computations, entry)


def _instruction(line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    assert found is not None
    is_root, name, rest = bool(found[1]), found[2], found[3]
    end = _end_of_type(rest)
    kind, after = rest[:end], rest[end:].lstrip()
    opcode, _, tail = after.partition("(")
    arguments, attributes = _split_arguments(tail)
    called = [
        inner for found in _CALLED.finditer(attributes) for inner in _names(found[1])
    ]
    index = _INDEX.search(attributes)
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        name=name,
        opcode=opcode,
        leaves=tuple(leaves_of(kind)),
        widths=tuple(_widths(kind)),
        operands=tuple(_names(arguments)),
        called=tuple(called),
        index=_number(opcode, arguments, index[1] if index else "0"),
        op_name=op_name[1] if op_name else "",
        is_root=is_root,
    )


def _number(opcode: str, arguments: str, index: str) -> int:
    return int(arguments if opcode == "parameter" else index)


def _names(text: str) -> list[str]:
    return _NAME.findall(text)


def _end_of_type(text: str) -> int:
    """Where the type at the start of an instruction ends."""
    if not text.startswith("("):
        return text.index(" ")
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    raise HloError(f"A tuple's type has no end: {text[:80]!r}.")


def _split_arguments(tail: str) -> tuple[str, str]:
    depth = 1
    for place, character in enumerate(tail):
        depth += (character in "({") - (character in ")}")
        if depth == 0:
            return tail[:place], tail[place + 1 :]
    return tail, ""


def leaves_of(kind: str) -> Iterator[Leaf]:
    """The arrays of a type, those of nested tuples in order."""
    for found in _ARRAY.finditer(re.sub(r"/\*.*?\*/", "", kind)):
        dtype, dimensions, layout = found.groups()
        sizes = [int(d.lstrip("<=")) for d in dimensions.split(",") if d]
        space = _SPACE.search(layout or "")
        yield Leaf(
            f"{dtype}[{dimensions}]",
            _padded_elements(sizes, layout or "") * _item_bits(dtype) // 8,
            int(space[1]) if space else 0,
        )


def _item_bits(dtype: str) -> int:
    if dtype in _BYTES:
        return 8 * _BYTES[dtype]
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) if bits else 32


def _padded_elements(sizes: list[int], layout: str) -> int:
    """Elements, with those that the first tile of a layout adds."""
    order, _, tiling = layout.strip("{}").partition(":")
    tile = _TILE.match(tiling)
    if not tile or not sizes:
        return math.prod(sizes)
    minor = [sizes[int(d)] for d in order.split(",") if d]  # the fastest first
    edges = [int(edge) for edge in reversed(tile[1].split(",")) if edge.isdigit()]
    for place, edge in enumerate(edges[: len(minor)]):
        minor[place] = -(-minor[place] // edge) * edge
    return math.prod(minor)


def _widths(kind: str) -> Iterator[int]:
    """Leaves of each element of a tuple's type."""
    if not kind.startswith("("):
        return
    depth, start = 0, 1
    for place, character in enumerate(kind):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            element = kind[start:place]
            if element.strip():
                yield sum(1 for _ in leaves_of(element))
            start = place + 1
