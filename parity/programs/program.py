"""The canonical form of a lowered program: equal digests compute the same function.

A StableHLO module is read with JAX's own MLIR bindings and listed anew. What carries no
meaning is gone: names of functions and meshes, locations, the order of independent
statements, which helper functions were shared, dead code (carries of loops included),
how often a constant is written down, the order of arguments and results (they go by
path) and of what loops carry, and whether axes of size one are added by a broadcast or
a reshape. All else is kept: operations, the order of operands,
every attribute and type, constants to the last bit, shardings, layouts and donation of
arguments, unused arguments, and how often a value is computed. So two programs of one
digest are equal for all inputs; two of different digests may be, too.

Outside of the claim, as StableHLO does not hold it: whether a result is weakly typed,
and donation to a `jax.jit` inside of the function, which has no effect there. A Python
callback is the same if it is the same object; then the digest holds in this process
only. What cannot be compared raises `ProgramError`: several callbacks in one program,
`jax.debug.callback`, custom partitioning, callbacks for another platform than this
machine's.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir

from parity.programs import callbacks, cost, stablehlo
from parity.programs.listing import REGION, Operation
from parity.programs.stablehlo import ProgramError

__all__ = [
    "Operation",
    "Program",
    "ProgramDifference",
    "ProgramError",
    "canonical",
    "compare",
    "counts",
    "first_difference",
    "lower",
    "temporary_bytes",
]


@dataclasses.dataclass(frozen=True)
class Program:
    """A lowered function in canonical form.

    Attributes:
      module: its attributes.
      arguments: path, type and attributes of each, ordered by path.
      operations: in the order in which the results need them.
      results: path, value and attributes of each, ordered by path.
      digest: of all that has meaning.
      cost: floating-point operations and bytes, where the function is known.
      lowered: what JAX made of it, for those who compile.
    """

    module: str
    arguments: tuple[tuple[str, str], ...]
    operations: tuple[Operation, ...]
    results: tuple[tuple[str, str], ...]
    digest: str
    cost: cost.Cost | None = dataclasses.field(default=None, compare=False)
    lowered: Any = dataclasses.field(default=None, compare=False, repr=False)

    def text(self) -> str:
        """The listing, to be read or compared by other tools."""
        return "\n".join(stablehlo.lines(self))


class ProgramDifference(NamedTuple):
    """Where two programs first part.

    Attributes:
      what: "argument", "operation", "result" or "module".
      left: what stands there on the left.
      right: the same on the right.
      locations: file:line (function) of both, empty where there is none.
    """

    what: str
    left: str
    right: str
    locations: tuple[str, str] = ("", "")

    def lines(self, names: tuple[str, str] = ("left", "right")) -> tuple[str, ...]:
        """The difference in three lines: what, and each side with its place."""
        sides = zip(names, (self.left, self.right), self.locations, strict=True)
        return (
            f"first difference: {self.what}",
            *(
                f"  {name}: {text}" + (f"  at {place}" if place else "")
                for name, text, place in sides
            ),
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def lower(
    function: Callable[..., Any], *args: Any, platform: str | None = None
) -> Program:
    """The canonical program of a function of positional arguments.

    Args:
      function: jitted or not.
      *args: trees of arrays, or of `jax.ShapeDtypeStruct`: nothing is computed.
      platform: "cpu", "tpu", ...; need not be there. None is the default backend.

    Raises:
      ProgramError: the program has no canonical form.
    """
    traced = jax.jit(function, keep_unused=True).trace(*args)
    python = callbacks.called(traced.jaxpr)
    platforms = None if platform is None else (platform,)
    try:
        lowered = traced.lower(lowering_platforms=platforms)
    except ValueError as error:
        if not python:
            raise
        raise ProgramError(
            f"A Python callback cannot be lowered for {platform}: {error}."
        ) from error
    program = of_lowered(lowered, python)
    return dataclasses.replace(program, cost=cost.count_jaxpr(traced.jaxpr))


def of_lowered(lowered: jax.stages.Lowered, python: str = "") -> Program:
    """The canonical program of what JAX has lowered, without its cost.

    Args:
      lowered: a function of positional arguments, all of which it uses or keeps.
      python: see `canonical`.
    """
    (arguments, _), results = lowered.args_info, lowered.out_info
    module: Any = lowered.compiler_ir("stablehlo")
    program = canonical(module, _paths(arguments), _paths(results), python)
    return dataclasses.replace(program, lowered=lowered)


def canonical(
    module: ir.Module,
    arguments: Sequence[str],
    results: Sequence[str],
    python: str = "",
) -> Program:
    """The canonical form of a StableHLO module.

    Args:
      module: with a function `main`, as JAX lowers it; it is not changed.
      arguments: path of each argument of `main`, in its order.
      results: path of each result, in its order.
      python: name of the only Python function that it calls; "": it must call none.
    """
    return Program(*stablehlo.canonical(module, arguments, results, python))


def first_difference(left: Program, right: Program) -> ProgramDifference | None:
    """The first thing in which two programs differ, None if their digests are equal."""
    if left.digest == right.digest:
        return None
    return (
        _first_of("argument", left.arguments, right.arguments)
        or _first_operation(left.operations, right.operations)
        or _first_of("result", left.results, right.results)
        or ProgramDifference("module", left.module, right.module)
    )


def counts(program: Program) -> dict[str, int]:
    """How often each operation occurs, helper functions written out; no constants."""
    names = (op.name for op in program.operations if op.name != REGION)
    return dict(sorted(collections.Counter(names).items()))


def temporary_bytes(program: Program) -> int | None:
    """Temporary memory of the compiled program; None if it cannot be had here."""
    if program.lowered is None:
        return None
    try:
        analysis = program.lowered.compile().memory_analysis()
    # A program lowered for another platform than this machine's.
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def compare(
    left: Program,
    right: Program,
    names: tuple[str, str] = ("linen", "nnx"),
    *,
    memory: bool = False,
) -> tuple[bool, tuple[str, ...]]:
    """Whether two programs are equal, and what to show if not.

    Args:
      left: one program.
      right: the other.
      names: what to call them.
      memory: compile different programs for their temporary memory.

    Returns:
      Equality of the digests; the first difference with its place on both sides, counts
      of operations that differ, floating-point operations, bytes, temporary memory.
    """
    difference = first_difference(left, right)
    if difference is None:
        return True, ()
    have = counts(left), counts(right)
    rows = [
        (name, *(count.get(name, 0) for count in have))
        for name in sorted(have[0] | have[1])
    ]
    rows = [row for row in rows if row[1] != row[2]]
    if left.cost is not None and right.cost is not None:
        rows += [
            ("FLOPs", int(left.cost.flops), int(right.cost.flops)),
            ("bytes", int(left.cost.bytes), int(right.cost.bytes)),
        ]
    if memory:
        used = temporary_bytes(left), temporary_bytes(right)
        if None not in used:
            rows.append(("temporary bytes", *used))
    facts = (f"{what}: {names[0]} {a}, {names[1]} {b}" for what, a, b in rows)
    return False, (*difference.lines(names), *facts)


def _paths(tree: Any) -> tuple[str, ...]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    text = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return tuple(text(path) for path, _ in leaves)


def _first_of(
    what: str,
    left: Iterable[tuple[str, str]],
    right: Iterable[tuple[str, str]],
) -> ProgramDifference | None:
    have = dict(left), dict(right)
    for path in sorted(have[0].keys() | have[1].keys()):
        texts = have[0].get(path, "absent"), have[1].get(path, "absent")
        if texts[0] != texts[1]:
            return ProgramDifference(f"{what} {path or '(the only one)'}", *texts)
    return None


def _first_operation(
    left: Sequence[Operation], right: Sequence[Operation]
) -> ProgramDifference | None:
    pairs = zip(left, right, strict=False)
    start = next((i for i, (a, b) in enumerate(pairs) if a.text != b.text), None)
    if start is None:
        if len(left) == len(right):
            return None
        start = min(len(left), len(right))
    sides = [
        ops[start] if start < len(ops) else Operation("", "(nothing more)", "")
        for ops in (left, right)
    ]
    name = next((side.name for side in sides if side.name), "")
    texts = (sides[0].text.strip(), sides[1].text.strip())
    return ProgramDifference(
        f"operation {name}", *texts, (sides[0].location, sides[1].location)
    )
