"""Which buffers of a compiled program live at its fullest point, and whose they are.

The compiler tells how much memory a program needs, not for what. This follows the
program in its order: a buffer lives from the instruction that makes it to the last that
reads it, and all that is alive around a loop stays so within. Instructions that only
name buffers (tuples, bitcasts, loops on what they carry), and updates in place make
none. What the compiler does beyond that is not seen, so the sum is near the compiler's
own figure and not equal to it: give both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from parity.memory.scheduled import Computation, Instruction, Leaf, Module

# Their result is one of their operands, or a part of it.
_SAME = {"bitcast", "optimization-barrier", "copy-done", "reshape"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_NO_BUFFER = {"parameter", "constant", "after-all", "partition-id", "replica-id"}
_LOOPS = {"while", "call", "conditional"}
# Their result is another form of their only large operand.
_FORMS = {
    "fusion",
    "copy",
    "convert",
    "all-gather",
    "slice",
    "dynamic-slice",
    "transpose",
}
_SMALL = 8  # so many times smaller than the largest
DEVICE_MEMORY = 0


@dataclasses.dataclass(frozen=True)
class Buffer:
    """What an instruction makes.

    Attributes:
      leaf: the array.
      opcode: of the instruction.
      op_name: the path of JAX's functions that it is from.
      computation: where it stands.
      parameter: name of the argument of the program that it is a form of; "": unknown.
    """

    leaf: Leaf
    opcode: str
    op_name: str
    computation: str
    parameter: str = ""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The fullest point.

    Attributes:
      total: bytes of all live buffers.
      buffers: they, the largest first; arguments of the program are not among them.
    """

    total: int
    buffers: tuple[Buffer, ...]


Places = tuple[int, ...]  # a buffer's number for each leaf of a result


def peak(module: Module) -> Peak:
    """The fullest point of a program, arguments not counted."""
    live = _Liveness(module)
    total, numbers = live.fullest(module.computations[module.entry])
    buffers = [live.buffers[number] for number in numbers]
    ordered = sorted(buffers, key=lambda buffer: -buffer.leaf.size)
    return Peak(total, tuple(ordered))


class _Liveness:
    """Buffers of a module, numbered as they are found."""

    def __init__(self, module: Module):
        self.module = module
        self.buffers: list[Buffer] = []

    def fullest(
        self, computation: Computation, given: Sequence[str] = ()
    ) -> tuple[int, tuple[int, ...]]:
        """Bytes, and numbers of the buffers made within, at the fullest point.

        The result of a computation stands where its caller has room for it: in what a
        loop carries, or in the outputs of the program. It is not counted here.

        Args:
          computation: to follow.
          given: for each array of its parameter, the argument of the program that it
            is a form of.
        """
        lines = computation.instructions
        results, made = self._results(computation, given)
        outside = set(results[computation.root.name])
        last = _last_uses(lines, results)
        alive: dict[int, None] = {}
        best: tuple[int, tuple[int, ...]] = (0, ())
        now = 0
        for place, line in enumerate(lines):
            for number in (n for n in made[place] if n not in outside):
                alive[number] = None
                now += self.buffers[number].leaf.size
            inside, numbers = self._inside(line, results)
            if now + inside > best[0]:
                best = now + inside, (*alive, *numbers)
            for number in [n for n in alive if last.get(n, place) <= place]:
                now -= self.buffers[number].leaf.size
                del alive[number]
        return best

    def _inside(
        self, line: Instruction, results: Mapping[str, Places]
    ) -> tuple[int, tuple[int, ...]]:
        if line.opcode not in _LOOPS:
            return 0, ()
        given = [
            self.buffers[number].parameter
            for name in line.operands
            for number in results.get(name, ())
        ]
        inner = [
            self.fullest(self.module.computations[name], given) for name in line.called
        ]
        return max(inner, default=(0, ()))

    def _results(
        self, computation: Computation, given: Sequence[str]
    ) -> tuple[dict[str, Places], list[list[int]]]:
        """The buffers of every result, and those that each instruction makes."""
        results: dict[str, Places] = {}
        made: list[list[int]] = []
        by_name = {line.name: line for line in computation.instructions}
        for line in computation.instructions:
            known = self._shared(line, results, by_name)
            origins = self._origins(line, results, given)
            new, places = [], []
            for place, leaf in enumerate(line.leaves):
                number = known[place] if place < len(known) else None
                if number is None:
                    number = len(self.buffers)
                    origin = origins[place] if place < len(origins) else ""
                    self.buffers.append(
                        Buffer(
                            leaf, line.opcode, line.op_name, computation.name, origin
                        )
                    )
                    counts = line.opcode not in _NO_BUFFER
                    if counts and leaf.space == DEVICE_MEMORY and leaf.size:
                        new.append(number)
                places.append(number)
            results[line.name] = tuple(places)
            made.append(new)
        return results, made

    def _origins(
        self, line: Instruction, results: Mapping[str, Places], given: Sequence[str]
    ) -> Sequence[str]:
        """The argument that each array of a result is a form of."""
        if line.opcode == "parameter":
            return given or [line.op_name] * len(line.leaves)
        if line.opcode not in _FORMS or len(line.leaves) != 1:
            return ()
        numbers = [n for name in line.operands for n in results.get(name, ())]
        read = sorted((self.buffers[n] for n in numbers), key=lambda b: -b.leaf.size)
        if not read or len(read) > 1 and read[1].leaf.size * _SMALL > read[0].leaf.size:
            return ()
        return [read[0].parameter]

    def _shared(
        self,
        line: Instruction,
        results: Mapping[str, Places],
        by_name: Mapping[str, Instruction],
    ) -> Sequence[int | None]:
        """The buffers of operands that the leaves of a result are; None: a new one."""
        operands = [results.get(name, ()) for name in line.operands]
        if line.opcode == "tuple":
            return [number for places in operands for number in places]
        if line.opcode == "while" or line.opcode in _SAME:
            return operands[0] if operands else ()
        if line.opcode == "get-tuple-element":
            widths = by_name[line.operands[0]].widths
            start = sum(widths[: line.index])
            return operands[0][start : start + len(line.leaves)]
        if line.opcode in _IN_PLACE:
            return operands[0]
        if line.opcode.endswith("-start") or line.opcode.endswith("-update"):
            return self._started(line, operands)
        if line.opcode.endswith("-done"):
            return self._done(line, operands)
        if line.opcode == "fusion":
            return self._updated(line, operands)
        return ()

    def _started(
        self, line: Instruction, operands: Sequence[Places]
    ) -> list[int | None]:
        """An operation that runs beside others holds its operands and its results."""
        given = [number for places in operands for number in places]
        same = [self.buffers[number].leaf.text for number in given]
        shared: list[int | None] = []
        for place, leaf in enumerate(line.leaves):
            known = place < len(given) and leaf.text == same[place]
            shared.append(given[place] if known else None)
        return shared

    def _done(self, line: Instruction, operands: Sequence[Places]) -> list[int | None]:
        """The result that its start made: the last of that shape."""
        shared: list[int | None] = []
        free = [number for places in operands for number in places]
        for leaf in line.leaves:
            fits = [n for n in free if self.buffers[n].leaf.text == leaf.text]
            shared.append(fits[-1] if fits else None)
            free = [n for n in free if n not in fits[-1:]]
        return shared

    def _updated(
        self, line: Instruction, operands: Sequence[Places]
    ) -> list[int | None]:
        """A fusion whose result is an update of an operand writes it in place."""
        (name,) = line.called[:1] or ("",)
        computation = self.module.computations.get(name)
        if computation is None:
            return []
        lines = {inner.name: inner for inner in computation.instructions}
        root = computation.root
        leaves = (
            [lines[name] for name in root.operands]
            if root.opcode == "tuple"
            else [root]
        )
        shared: list[int | None] = []
        for inner in leaves:
            target = _updated_parameter(inner, lines)
            places = operands[lines[target].index] if target else ()
            shared.append(places[0] if len(places) == 1 else None)
        return shared


def _updated_parameter(line: Instruction, lines: Mapping[str, Instruction]) -> str:
    """The parameter that a line is an update of, through bitcasts; "": of none."""
    updated = False
    while line.opcode in _IN_PLACE | _SAME:
        updated = updated or line.opcode in _IN_PLACE
        line = lines[line.operands[0]]
    return line.name if updated and line.opcode == "parameter" else ""


def _last_uses(
    lines: Sequence[Instruction], results: Mapping[str, Places]
) -> dict[int, int]:
    """Where each buffer is read last; the result is read at the end."""
    last: dict[int, int] = {}
    for place, line in enumerate(lines):
        for name in (*line.operands, line.name):
            for number in results.get(name, ()):
                last[number] = place
    for line in lines:
        if line.is_root:
            last.update(dict.fromkeys(results[line.name], len(lines)))
    return last
