"""Both modules of a pair, brought into one naming, and the ways to call them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from parity.mapping.correspondence import Correspondence, match
from parity.mapping.leaves import Leaf, NNXLeaves
from parity.mapping.rules import Rules
from parity.pairs import calls, frontends
from parity.pairs.calls import Args, Call, CheckError
from parity.pairs.frontends import Functions, LinenSide, NNXSide, Outcome
from parity.pairs.outputs import as_numpy, is_float

Steps = tuple[Args, ...]
Results = dict[str, np.ndarray]


class Options(NamedTuple):
    """What `check` was asked for, but for modules and tiers."""

    seed: int
    examples: int | None
    replay: str
    finite: bool
    platforms: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Subject:
    """One way to call both modules.

    Attributes:
      call: what is called.
      prefix: of its paths in reports.
      functions: of Linen and of NNX.
      runs: these, compiled.
      outcomes: of both, abstract.
    """

    call: Call
    prefix: str
    functions: tuple[Functions, Functions]
    runs: tuple[Run, Run]
    outcomes: tuple[Outcome, Outcome]


@dataclasses.dataclass(frozen=True)
class Pair:
    """Both modules with the values they hold, and the ways to call them."""

    linen: LinenSide
    nnx: NNXSide
    trees: Correspondence
    subjects: tuple[Subject, ...]
    seed: int
    examples: int | None
    replay: str
    finite: bool
    platforms: tuple[str | None, ...]

    @property
    def abstract(self) -> bool:
        """Whether there are shapes only: nothing can be run."""
        return self.nnx.abstract or frontends.is_abstract(self.linen.values)

    def inputs(self, subject: Subject) -> Iterator[Steps]:
        """Examples for one way to call, unless a strategy draws them."""
        return calls.examples(subject.call.inputs, self.seed, self.examples or 2)

    def shapes(self, subject: Subject) -> list[Args]:
        """Arguments of each shape that inputs have; of drawn ones, of the first."""
        inputs = subject.call.inputs
        if self.abstract or calls.is_strategy(inputs):
            return calls.abstract(inputs)
        found: dict[Any, Args] = {}
        for steps in self.inputs(subject):
            for args in steps:
                leaves, tree = jax.tree.flatten(args)
                facts = tuple((x.shape, str(x.dtype)) for x in leaves)
                found.setdefault((tree, facts), args)
        return list(found.values())


class Run:
    """One frontend's call, compiled once and run over the steps of an example."""

    def __init__(self, functions: Functions, key: Array):
        self._forward = jax.jit(functions.forward)
        self._gradient = None
        if functions.gradient is not None:
            self._gradient = jax.jit(functions.gradient)
        self._key = key

    def temporary_bytes(
        self, kind: str, values: Mapping[str, Any], args: Args
    ) -> int | None:
        """Temporary memory of "forward" or "gradient", compiled; None if unknown."""
        function = self._forward if kind == "forward" else self._gradient
        assert function is not None
        # Later calls find this compilation.
        compiled = function.lower(values, args, self._key).compile()
        analysis = compiled.memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def __call__(self, values: Mapping[str, Any], steps: Steps) -> Results:
        """Everything the call gives; state goes from each step to the next."""
        results: Results = {}
        values = dict(values)
        for i, args in enumerate(steps):
            found = self._forward(values, args, self._key)
            state = {
                path.removeprefix("state/"): x
                for path, x in found.items()
                if path.startswith("state/")
            }
            if self._gradient is not None:
                found |= self._gradient(values, args, self._key)
            if i + 1 < len(steps):
                _refuse_new(state, values)
            prefix = f"step_{i}/" if len(steps) > 1 else ""
            results |= as_numpy({prefix + k: v for k, v in found.items()})
            values |= {k: v for k, v in state.items() if k in values}
        return results


def prepare(
    linen: Any,
    module: Any,
    wanted: Sequence[Call],
    rules: Any,
    variables: Mapping[str, Any] | None,
    loss: Callable[[Any], Array] | None,
    options: Options,
) -> Pair:
    """Makes both sides, finds out which leaf is which, and builds the functions.

    Args:
      linen: a module, or (module, variables).
      module: NNX's, or a function that makes it.
      wanted: the ways to call both.
      rules: see `Rules.of`.
      variables: Linen's, if not given with the module.
      loss: of the outputs; None: every output and sown value counts.
      options: what else was asked for.

    Raises:
      CheckError: a side cannot be made or called.
      RuleError: the rules are wrong.
    """
    left, right, outcomes = make_sides(linen, module, wanted, variables, options.seed)
    trees = match(*all_leaves(left, right, outcomes), Rules.of(rules))
    key = call_key(options.seed)
    subjects = tuple(
        _subject(call, (left, right), pair, trees, loss, key, many=len(wanted) > 1)
        for call, pair in zip(wanted, outcomes, strict=True)
    )
    return Pair(left, right, trees, subjects, *options)


def make_sides(
    linen: Any,
    module: Any,
    wanted: Sequence[Call],
    variables: Mapping[str, Any] | None,
    seed: int,
) -> tuple[LinenSide, NNXSide, list[tuple[Outcome, Outcome]]]:
    """Both modules, and what each call gives, abstract."""
    right = frontends.make_nnx(module, seed)
    first = [first_args(call, right, seed) for call in wanted]
    left = frontends.make_linen(
        linen, variables, wanted[0], first[0], seed, right.streams
    )
    key = call_key(seed)
    outcomes = [
        (
            frontends.probe(left, call, args, key),
            frontends.probe(right, call, args, key),
        )
        for call, args in zip(wanted, first, strict=True)
    ]
    return left, right, outcomes


def all_leaves(
    left: LinenSide, right: NNXSide, outcomes: Sequence[tuple[Outcome, Outcome]]
) -> tuple[tuple[Leaf, ...], NNXLeaves]:
    """The leaves that both start with, and those that calls add."""
    return (
        _all_linen(left, [outcome for outcome, _ in outcomes]),
        _all_nnx(right, [outcome for _, outcome in outcomes]),
    )


def call_key(seed: int) -> Array:
    """The random key of every call; not one that a model may have been made with."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(b"masks"))


def first_args(call: Call, nnx: NNXSide, seed: int) -> Args:
    """Arguments of the first step: shapes only where the module has no values."""
    if nnx.abstract:
        return calls.abstract(call.inputs)[0]
    return calls.first_example(call.inputs, seed)[0]


def _subject(
    call: Call,
    sides: tuple[LinenSide, NNXSide],
    outcomes: tuple[Outcome, Outcome],
    trees: Correspondence,
    loss: Callable[[Any], Array] | None,
    key: Array,
    *,
    many: bool,
) -> Subject:
    leaves = jax.tree.leaves(outcomes[0].outputs)
    floats = any(is_float(leaf) and leaf.size for leaf in leaves)
    call = dataclasses.replace(call, gradient=call.gradient and floats)
    namings = frontends.namings(trees, sides[1].leaves, outcomes[1].touched)
    functions = (
        frontends.make_functions(sides[0], call, loss, namings[0]),
        frontends.make_functions(sides[1], call, loss, namings[1]),
    )
    runs = Run(functions[0], key), Run(functions[1], key)
    return Subject(call, f"{call.name}/" if many else "", functions, runs, outcomes)


def _refuse_new(state: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """State that the first call makes has no place in the second.

    Sown values have: they end in their number, and are of one call.
    """
    new = [
        path
        for path in state
        if path not in values and not path.rpartition("/")[2].isdigit()
    ]
    if new:
        raise CheckError(
            f"A call makes state, {', '.join(new)}, that is not carried on to the next "
            "step: give both modules with it from the start, Linen's as (module, "
            "variables)."
        )


def _all_linen(side: LinenSide, outcomes: Sequence[Outcome]) -> tuple[Leaf, ...]:
    """The leaves it starts with, and those that calls add."""
    leaves = {leaf.text: leaf for leaf in side.leaves}
    for outcome in outcomes:
        leaves = {leaf.text: leaf for leaf in outcome.leaves} | leaves
    return tuple(leaves.values())


def _all_nnx(side: NNXSide, outcomes: Sequence[Outcome]) -> NNXLeaves:
    leaves = {leaf.text: leaf for leaf in side.leaves.leaves}
    aliases = dict(side.leaves.aliases)
    collections = dict(side.leaves.collections)
    for outcome in outcomes:
        leaves |= {x.text: x for x in outcome.leaves.leaves if x.text not in leaves}
        aliases = {**outcome.leaves.aliases, **aliases}
        collections = {**outcome.leaves.collections, **collections}
    return dataclasses.replace(
        side.leaves,
        leaves=tuple(leaves.values()),
        aliases=aliases,
        collections=collections,
    )
