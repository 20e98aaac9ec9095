"""The tiers of a pair, one after the other."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from parity.pairs import (
    calls,
    first_values,
    frontends,
    outputs,
    reference,
    tolerance,
)
from parity.pairs.frontends import Functions
from parity.pairs.outputs import compare_containers
from parity.pairs.pair import Pair, Run, Steps, Subject, call_key
from parity.pairs.search import search
from parity.programs import tier as program_tier
from parity.reporting import gate
from parity.reporting.report import Tier
from parity.trees import Comparison, Difference, compare_bytes

_progress = logging.getLogger("parity.tiers")
STRATEGY_EXAMPLES = 20  # drawn by Hypothesis; shapes are drawn twice


def run_tiers(
    pair: Pair, tiers: Sequence[str], oracle: reference.Oracle | None
) -> Iterator[Tier]:
    """The tiers asked for, in order; tolerance only where bits differ by value."""
    if "tree" in tiers:
        _progress.info("tier tree")
        yield _tree_tier(pair)
    wanted = [tier for tier in gate.TIERS if tier in tiers and tier != "tree"]
    if not pair.trees.usable:
        yield from _skipped(wanted, "the values of one tree do not fit into the other")
        return
    if pair.abstract:
        yield from (_program_tier(pair) for tier in wanted if tier == "program")
        rest = [tier for tier in wanted if tier != "program"]
        yield from _skipped(rest, "there are shapes only, no values")
        return
    if "init" in wanted:
        _progress.info("tier init")
        theirs = pair.trees.to_linen(pair.nnx.values)
        yield first_values.check_first_values(pair.linen.values, theirs)
    if "program" in wanted:
        _progress.info("tier program: tracing and lowering")
        yield _program_tier(pair)
    differing: list[tolerance.Case] = []
    if "bits" in wanted or "tolerance" in wanted:
        _progress.info("tier bits: compiling and running both")
        bits, differing = _bits_tier(pair)
        yield from (bits for tier in wanted if tier == "bits")
    if "tolerance" in wanted and differing:
        _progress.info("tier tolerance: once more, with other inputs and in float64")
        yield tolerance.check_tolerance(differing, pair.seed)
    if "oracle" in wanted and oracle is not None:
        _progress.info("tier oracle")
        yield reference.check_oracle(pair, oracle)


def _tree_tier(pair: Pair) -> Tier:
    note = "paths, shapes, dtypes, axis names, collections"
    details = (*pair.trees.describe(), *_untrained(pair))
    return Tier("tree", pair.trees.comparison, note=note, details=details)


def _untrained(pair: Pair) -> Iterator[str]:
    """A line for each of Linen's parameters that NNX's filters do not take for one."""
    leaves = {leaf.text: leaf for leaf in pair.nnx.leaves.leaves}
    for entry in pair.trees.entries:
        for text in entry.nnx if entry.linen[0].startswith("params/") else ():
            if text in pair.nnx.leaves.arrays:
                yield f"{text} is an array without a Variable: no filter trains it"
            elif not frontends.is_parameter(leaves.get(text), pair.nnx.leaves):
                yield f"{text} is no nnx.Param, though Linen's is a parameter"


def _skipped(tiers: Iterable[str], why: str) -> Iterator[Tier]:
    for name in tiers:
        if name not in ("tolerance", "oracle"):
            yield Tier(name, Comparison(), note=why, status="skipped")


def _program_tier(pair: Pair) -> Tier:
    return program_tier.merged([_programs_of(pair, each) for each in pair.subjects])


def _programs_of(pair: Pair, subject: Subject) -> Tier:
    kinds = ("forward", "gradient")[: 1 + subject.call.gradient]
    functions = {
        subject.prefix + kind: tuple(getattr(f, kind) for f in subject.functions)
        for kind in kinds
    }
    values, key = pair.linen.values, call_key(pair.seed)
    shapes = pair.shapes(subject)
    givens = [(values, args, key) for args in shapes]
    tier = program_tier.check_programs(functions, givens, pair.platforms)
    if tier.status != "failed" or pair.abstract:
        return tier
    used = [
        (kind, *(run.temporary_bytes(kind, values, shapes[0]) for run in subject.runs))
        for kind in kinds
    ]
    lines = tuple(
        f"{subject.prefix}{kind}: temporary bytes: linen {linen}, nnx {nnx}"
        for kind, linen, nnx in used
    )
    return dataclasses.replace(tier, details=tier.details + lines)


class _Bits(NamedTuple):
    """What running a pair came to.

    Attributes:
      compared: all examples together.
      examples: how many were run.
      deterministic: whether each frontend repeats its own bytes.
      differing: the examples that differ, for the tolerance tier.
      details: lines to show.
    """

    compared: Comparison = Comparison()
    examples: int = 0
    deterministic: bool = True
    differing: tuple[tolerance.Case, ...] = ()
    details: tuple[str, ...] = ()


def _bits_tier(pair: Pair) -> tuple[Tier, list[tolerance.Case]]:
    """The tier, and the examples for the tolerance tier: those that differ by value."""
    runs = [_run(pair, subject) for subject in pair.subjects]
    total = sum((run.compared for run in runs), Comparison())
    tier = Tier(
        "bits",
        _merged(total),
        sum(run.examples for run in runs),
        f"{_names(pair)}: outputs, state, loss, every gradient under jit, to the bit",
        details=tuple(line for run in runs for line in run.details),
        deterministic=all(run.deterministic for run in runs),
    )
    if any(difference.what != "value" for difference in total.differences):
        return tier, []  # no rounding gives another shape
    return tier, [case for run in runs for case in run.differing]


def _run(pair: Pair, subject: Subject) -> _Bits:
    """One call of both, with all its examples."""
    found, examples, details = _compared(pair, subject)
    total = _compare_requests(subject) + _compare_outcomes(subject)
    total += sum((compared for _, compared in found), Comparison())
    differing = [
        tolerance.Case(
            subject.prefix, _frontends(pair, subject), steps, pair.linen.values
        )
        for steps, compared in found
        if compared.differences
    ]
    last, _ = found[-1]
    deterministic = _repeats(pair, subject, last)
    if deterministic and not total.differences:
        case = _moved(pair, subject, last)
        moved = _compare_moved(pair, subject, case)
        total += moved
        differing += [case] if moved.differences else []
    return _Bits(total, examples, deterministic, tuple(differing), details)


def _compared(
    pair: Pair, subject: Subject
) -> tuple[list[tuple[Steps, Comparison]], int, tuple[str, ...]]:
    """Examples with what differs, how many were run, and what to show.

    Drawn examples stand together under the last; where some differ, that is the
    smallest that does.
    """
    inputs = subject.call.inputs
    if not calls.is_strategy(inputs):
        found = [(s, _compare(pair, subject, s)) for s in pair.inputs(subject)]
        return found, sum(compared.leaves > 0 for _, compared in found), ()
    drawn = search(
        inputs,
        lambda example: _compare(pair, subject, calls.as_arrays(example)),
        seed=pair.seed,
        count=pair.examples or STRATEGY_EXAMPLES,
    )
    again = f"again: {pair.replay}" if pair.replay else ""
    together = calls.as_arrays(drawn.last), drawn.compared
    return [together], drawn.examples, drawn.lines(again, subject.prefix)


def _compare(
    pair: Pair,
    subject: Subject,
    steps: Steps,
    values: Mapping[str, Any] | None = None,
) -> Comparison:
    values = pair.linen.values if values is None else values
    results = [run(values, steps) for run in subject.runs]
    return compare_bytes(*results, finite=pair.finite).under(subject.prefix)


def _moved(pair: Pair, subject: Subject, steps: Steps) -> tolerance.Case:
    """An example once more, with other values: zeros and ones hide whole terms."""
    values = outputs.move(pair.linen.values, pair.trees.ignored.get("linen", ()))
    prefix = f"(other values)/{subject.prefix}"
    return tolerance.Case(prefix, _frontends(pair, subject), steps, values)


def _compare_moved(pair: Pair, subject: Subject, case: tolerance.Case) -> Comparison:
    lax = dataclasses.replace(pair, finite=False)  # not every value may be moved
    return _compare(lax, subject, case.example, case.values).under("(other values)/")


def _compare_requests(subject: Subject) -> Comparison:
    """Whether both ask for random keys equally often; else masks cannot be the same."""
    linen, nnx = (outcome.requests for outcome in subject.outcomes)
    if linen == nnx:
        return Comparison()
    path = f"{subject.prefix}(random keys)"
    detail = (
        f"linen asks for {linen}, nnx for {nnx}: is dropout on in one of them only? "
        'parity.Call(linen={…}, mode="eval") says how each is called (--calls)'
    )
    return Comparison(0, 0, (Difference(path, "count", detail),))


def _compare_outcomes(subject: Subject) -> Comparison:
    """What no run shows: containers of outputs, attributes, deleted parameters."""
    linen, nnx = subject.outcomes
    found: list[Difference] = []
    if outputs.flat(linen.outputs, "").keys() == outputs.flat(nnx.outputs, "").keys():
        found += compare_containers(linen.outputs, nnx.outputs, "outputs")
    found += [
        Difference("(attributes)", "static", f"nnx changes {text} while it is called")
        for text in nnx.static
    ]
    found += [
        Difference(path, "missing", "nnx deletes it while it is called")
        for path in sorted(nnx.touched - nnx.state.keys())
    ]
    return Comparison(0, 0, tuple(found)).under(subject.prefix)


def _repeats(pair: Pair, subject: Subject, steps: Steps) -> bool:
    """Whether each frontend gives the same bytes again."""
    return all(
        not compare_bytes(
            run(pair.linen.values, steps), run(pair.linen.values, steps)
        ).differences
        for run in subject.runs
    )


def _merged(compared: Comparison) -> Comparison:
    """Of several examples that differ in one path, the worst is told."""
    worst: dict[str, Difference] = {}
    for difference in compared.differences:
        known = worst.setdefault(difference.path, difference)
        if _badness(difference) > _badness(known):
            worst[difference.path] = difference
    ordered = sorted(worst.values(), key=_rank)
    return dataclasses.replace(compared, differences=tuple(ordered))


def _badness(difference: Difference) -> tuple[bool, float, float]:
    """Anything but a distance is worse than any distance."""
    far = difference.absolute or 0.0, difference.ulps or 0.0
    return difference.what != "value", *far


def _rank(difference: Difference) -> int:
    """What comes first in a model is told first: a gradient only follows."""
    order = ("outputs", "state", "loss", "input_gradient", "gradient")
    parts = difference.path.split("/")
    return next((order.index(part) for part in parts if part in order), -1)


def _frontends(
    pair: Pair, subject: Subject
) -> tuple[tolerance.Frontend, tolerance.Frontend]:
    key = call_key(pair.seed)

    def frontend(run: Run, functions: Functions) -> tolerance.Frontend:
        def coarsest(values: Mapping[str, Any], steps: Steps) -> float:
            return tolerance.coarsest_eps(functions.forward, values, steps[0], key)

        return tolerance.Frontend(run, coarsest)

    left, right = map(frontend, subject.runs, subject.functions)
    return left, right


def _names(pair: Pair) -> str:
    names = [subject.call.name for subject in pair.subjects]
    return "one call" if len(names) == 1 else ", ".join(names)
