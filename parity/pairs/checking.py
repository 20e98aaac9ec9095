"""The check of any pair: a Linen module and an NNX module that should be one model."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from parity.mapping import suggest as drafts
from parity.mapping.correspondence import Correspondence, match
from parity.mapping.leaves import Leaf, NNXLeaves
from parity.mapping.rules import Rules
from parity.pairs import calls, first_values, frontends, tolerance
from parity.pairs.calls import Args, Call, CheckError
from parity.pairs.frontends import Functions, LinenSide, NNXSide, Outcome
from parity.pairs.search import search
from parity.programs import tier as program_tier
from parity.reporting import gate
from parity.reporting.report import Report, Tier
from parity.trees import Comparison, Difference, compare_bytes

TIERS = ("tree", "init", "program", "bits", "tolerance", "oracle")
STRATEGY_EXAMPLES = 20  # drawn by Hypothesis; shapes are drawn twice

Steps = tuple[Args, ...]
Results = dict[str, np.ndarray]


class Oracle(NamedTuple):
    """An independent reference for the outputs, such as a numpy function.

    Attributes:
      function: called as `function(values, *args, **keywords)` with numpy arrays,
        `values` by Linen's paths (`params/Dense_0/kernel`); gives the outputs.
      rtol: relative tolerance.
      atol: absolute tolerance.
    """

    function: Callable[..., Any]
    rtol: float = 1e-5
    atol: float = 1e-6


class _Options(NamedTuple):
    """What `check` was asked for, but for modules and tiers."""

    seed: int
    examples: int | None
    replay: str
    finite: bool
    platforms: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _Subject:
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
    runs: tuple[_Run, _Run]
    outcomes: tuple[Outcome, Outcome]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Both modules with the values they hold, and the ways to call them."""

    linen: LinenSide
    nnx: NNXSide
    trees: Correspondence
    subjects: tuple[_Subject, ...]
    seed: int
    examples: int | None
    replay: str
    finite: bool
    platforms: tuple[str | None, ...]

    @property
    def abstract(self) -> bool:
        """Whether there are shapes only: nothing can be run."""
        return self.nnx.abstract or frontends.is_abstract(self.linen.values)

    def inputs(self, subject: _Subject) -> Iterator[Steps]:
        """Examples for one way to call, unless a strategy draws them."""
        return calls.examples(subject.call.inputs, self.seed, self.examples or 2)


class _Run:
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
            if i == 0 and self._gradient is not None:
                found |= self._gradient(values, args, self._key)
            prefix = f"step_{i}/" if len(steps) > 1 else ""
            results |= frontends.as_numpy({prefix + k: v for k, v in found.items()})
            state = {k.removeprefix("state/"): v for k, v in found.items()}
            values |= {k: v for k, v in state.items() if k in values}
        return results


def check(
    linen: Any,
    nnx: Any,
    inputs: Any,
    *,
    rules: Rules | str | pathlib.Path | Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    call: Call | Mapping[str, Any] | Sequence[Call] | None = None,
    methods: Sequence[str] | Mapping[str, Any] | None = None,
    tiers: Sequence[str] = TIERS,
    seed: int = 0,
    examples: int | None = None,
    loss: Callable[[Any], Array] | None = None,
    oracle: Oracle | None = None,
    fail_on: str | Sequence[str] | None = None,
    finite: bool = True,
    platforms: Sequence[str | None] = (None,),
    target: str = "pair",
    replay: str = "",
) -> Report:
    """Checks whether a Linen and an NNX module are the same model.

    The trees are brought into correspondence, Linen's values are put into both, and
    both are called in the same ways with the same inputs and the same random keys.

    Args:
      linen: a module, or (module, variables).
      nnx: a module, or a function that makes one and may take `rngs`.
      inputs: an array; a tuple of positional arguments; `parity.Args`; `parity.Steps`;
        a list of these; or a Hypothesis strategy of these. Arrays may be
        `jax.ShapeDtypeStruct` or `parity.Integers`, to be drawn.
      rules: what corresponds to what where names say too little: a file, or `Rules`.
      variables: Linen's, if not given with the module; else they are initialised.
      call: constant keywords for both, or the calls to compare.
      methods: methods to compare; a mapping gives each its inputs.
      tiers: of `TIERS`. Tolerance is looked at only where bits differ.
      seed: of first values, inputs and random keys.
      examples: how many inputs are drawn.
      loss: of the outputs, for the gradients; by default every output counts.
      oracle: independent reference.
      fail_on: tiers that decide; see `parity.reporting.gate`.
      finite: whether NaN and infinity count as differences, equal or not: two models
        that both break prove nothing.
      platforms: for which the program tier lowers, such as "cpu" and "tpu"; None: this
        machine's.
      target: what to call the pair.
      replay: command that runs this again.

    Raises:
      CheckError: modules, inputs or options that cannot be checked.
      RuleError: a rule file that cannot be read.
    """
    _check_tiers(tiers, oracle)
    wanted = calls.make_calls(call, methods, inputs)
    required = gate.required(fail_on or ())
    with jax.default_matmul_precision("highest"):
        options = _Options(seed, examples, replay, finite, tuple(platforms))
        pair = _prepare(linen, nnx, wanted, rules, variables, loss, options)
        found = tuple(_tiers(pair, tiers, oracle))
    return Report(target, found, required=required)


def assert_parity(linen: Any, nnx: Any, inputs: Any, **options: Any) -> Report:
    """As `check`; raises with the report where the verdict is not "proved".

    Raises:
      AssertionError: the two differ.
    """
    report = check(linen, nnx, inputs, **options)
    if not report.ok:
        raise AssertionError(f"{report.verdict}\n{report.to_markdown()}")
    return report


def suggest(
    linen: Any,
    nnx: Any,
    inputs: Any,
    *,
    call: Call | Mapping[str, Any] | Sequence[Call] | None = None,
    variables: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> str:
    """A draft of the rule file that a pair needs, to be reviewed.

    Args:
      linen: as for `check`.
      nnx: as for `check`.
      inputs: as for `check`.
      call: as for `check`.
      variables: as for `check`.
      seed: as for `check`.
    """
    wanted = calls.make_calls(call, None, inputs)
    linen_leaves, nnx_leaves = _leaves(*_sides(linen, nnx, wanted, variables, seed))
    return drafts.suggest(linen_leaves, nnx_leaves)


def _prepare(
    linen: Any,
    module: Any,
    wanted: Sequence[Call],
    rules: Any,
    variables: Mapping[str, Any] | None,
    loss: Callable[[Any], Array] | None,
    options: _Options,
) -> _Pair:
    left, right, outcomes = _sides(linen, module, wanted, variables, options.seed)
    trees = match(*_leaves(left, right, outcomes), Rules.of(rules))
    key = jax.random.key(options.seed)
    subjects = tuple(
        _subject(call, (left, right), pair, trees, loss, key, many=len(wanted) > 1)
        for call, pair in zip(wanted, outcomes, strict=True)
    )
    return _Pair(left, right, trees, subjects, *options)


def _sides(
    linen: Any,
    module: Any,
    wanted: Sequence[Call],
    variables: Mapping[str, Any] | None,
    seed: int,
) -> tuple[LinenSide, NNXSide, list[tuple[Outcome, Outcome]]]:
    """Both modules, and what each call gives, abstract."""
    right = frontends.make_nnx(module, seed)
    first = [_first_args(call, right, seed) for call in wanted]
    left = frontends.make_linen(linen, variables, wanted[0], first[0], seed)
    key = jax.random.key(seed)
    outcomes = [
        (
            frontends.probe(left, call, args, key),
            frontends.probe(right, call, args, key),
        )
        for call, args in zip(wanted, first, strict=True)
    ]
    return left, right, outcomes


def _leaves(
    left: LinenSide, right: NNXSide, outcomes: Sequence[tuple[Outcome, Outcome]]
) -> tuple[tuple[Leaf, ...], NNXLeaves]:
    """The leaves that both start with, and those that calls add."""
    return (
        _all_linen(left, [outcome for outcome, _ in outcomes]),
        _all_nnx(right, [outcome for _, outcome in outcomes]),
    )


def _subject(
    call: Call,
    sides: tuple[LinenSide, NNXSide],
    outcomes: tuple[Outcome, Outcome],
    trees: Correspondence,
    loss: Callable[[Any], Array] | None,
    key: Array,
    *,
    many: bool,
) -> _Subject:
    loss = loss or frontends.default_loss
    leaves = jax.tree.leaves(outcomes[0].outputs)
    floats = any(frontends.is_float(leaf) and leaf.size for leaf in leaves)
    call = dataclasses.replace(call, gradient=call.gradient and floats)
    functions = (
        frontends.linen_functions(sides[0], call, loss, trees),
        frontends.nnx_functions(sides[1], call, loss, trees),
    )
    runs = _Run(functions[0], key), _Run(functions[1], key)
    return _Subject(call, f"{call.name}/" if many else "", functions, runs, outcomes)


def _tiers(pair: _Pair, tiers: Sequence[str], oracle: Oracle | None) -> Iterator[Tier]:
    if "tree" in tiers:
        yield _tree_tier(pair)
    wanted = [tier for tier in TIERS if tier in tiers and tier != "tree"]
    if not pair.trees.usable:
        yield from _skipped(wanted, "the values of one tree do not fit into the other")
        return
    if pair.abstract:
        yield from (_program_tier(pair) for tier in wanted if tier == "program")
        rest = [tier for tier in wanted if tier != "program"]
        yield from _skipped(rest, "there are shapes only, no values")
        return
    if "init" in wanted:
        theirs = pair.trees.to_linen(pair.nnx.values)
        yield first_values.check_first_values(pair.linen.values, theirs)
    if "program" in wanted:
        yield _program_tier(pair)
    differing: list[tolerance.Case] = []
    if "bits" in wanted or "tolerance" in wanted:
        bits, differing = _bits_tier(pair)
        yield from (bits for tier in wanted if tier == "bits")
    if "tolerance" in wanted and differing:
        yield tolerance.check_tolerance(differing, pair.linen.values, pair.seed)
    if "oracle" in wanted and oracle is not None:
        yield _oracle_tier(pair, oracle)


def _tree_tier(pair: _Pair) -> Tier:
    note = "paths, shapes, dtypes, axis names, collections"
    details = pair.trees.describe()
    return Tier("tree", pair.trees.comparison, note=note, details=details)


def _skipped(tiers: Iterable[str], why: str) -> Iterator[Tier]:
    for name in tiers:
        if name not in ("tolerance", "oracle"):
            yield Tier(name, Comparison(), note=why, status="skipped")


def _program_tier(pair: _Pair) -> Tier:
    tiers = [_programs_of(pair, subject) for subject in pair.subjects]
    compared = sum((tier.compared for tier in tiers), Comparison())
    details = tuple(line for tier in tiers for line in tier.details)
    return Tier("program", compared, note=program_tier.NOTE, details=details)


def _programs_of(pair: _Pair, subject: _Subject) -> Tier:
    kinds = ("forward", "gradient")[: 1 + subject.call.gradient]
    functions = {
        subject.prefix + kind: tuple(getattr(f, kind) for f in subject.functions)
        for kind in kinds
    }
    args = _first_args(subject.call, pair.nnx, pair.seed)
    values, key = pair.linen.values, jax.random.key(pair.seed)
    tier = program_tier.check_programs(functions, (values, args, key), pair.platforms)
    if tier.status == "proved" or pair.abstract:
        return tier
    used = [
        (kind, *(run.temporary_bytes(kind, values, args) for run in subject.runs))
        for kind in kinds
    ]
    lines = tuple(
        f"{subject.prefix}{kind}: temporary bytes: linen {linen}, nnx {nnx}"
        for kind, linen, nnx in used
    )
    return dataclasses.replace(tier, details=tier.details + lines)


def _bits_tier(pair: _Pair) -> tuple[Tier, list[tolerance.Case]]:
    """The tier, and the examples for the tolerance tier: those that differ by value."""
    total, count, deterministic = Comparison(), 0, True
    differing: list[tolerance.Case] = []
    details: list[str] = []
    for subject in pair.subjects:
        found = list(_compared(pair, subject, details))
        total += _compare_requests(subject)
        total += sum((compared for _, compared in found), Comparison())
        total += _changed_parameters(pair, subject, found[-1][0])
        count += sum(compared.leaves > 0 for _, compared in found)
        deterministic &= _repeats(pair, subject, found[-1][0])
        differing += [
            tolerance.Case(subject.prefix, _frontends(pair, subject), steps)
            for steps, compared in found
            if compared.differences
        ]
    if any(difference.what != "value" for difference in total.differences):
        differing = []  # no rounding gives another shape
    note = f"{_names(pair)}: outputs, state, loss, every gradient under jit, to the bit"
    tier = Tier(
        "bits",
        _merged(total),
        count,
        note,
        details=tuple(details),
        deterministic=deterministic,
    )
    return tier, differing


def _compared(
    pair: _Pair, subject: _Subject, details: list[str]
) -> Iterator[tuple[Steps, Comparison]]:
    """Examples with what differs; of drawn ones that differ, only the smallest."""
    if not calls.is_strategy(subject.call.inputs):
        for steps in pair.inputs(subject):
            yield steps, _compare(pair, subject, steps)
        return
    found: list[tuple[Steps, Comparison]] = []

    def compare(example: Any) -> Comparison:
        steps = calls.as_arrays(example)
        found.append((steps, _compare(pair, subject, steps)))
        return found[-1][1]

    count = pair.examples or STRATEGY_EXAMPLES
    smallest = search(
        subject.call.inputs, compare, seed=pair.seed, count=count
    ).smallest
    if smallest is None:
        yield from found
        return
    shown = f"{subject.prefix}smallest example that differs: {smallest!r}"
    details.append(" ".join(shown.split()))
    details += [f"again: {pair.replay}"] if pair.replay else []
    steps = calls.as_arrays(smallest)
    yield steps, _compare(pair, subject, steps)


def _compare(pair: _Pair, subject: _Subject, steps: Steps) -> Comparison:
    results = [run(pair.linen.values, steps) for run in subject.runs]
    compared = compare_bytes(*results, finite=pair.finite)
    named = tuple(
        d._replace(path=subject.prefix + d.path) for d in compared.differences
    )
    return dataclasses.replace(compared, differences=named)


def _compare_requests(subject: _Subject) -> Comparison:
    """Whether both ask for random keys equally often; else masks cannot be the same."""
    linen, nnx = (outcome.requests for outcome in subject.outcomes)
    if linen == nnx:
        return Comparison()
    path = f"{subject.prefix}(random keys)"
    detail = (
        f"linen asks for {linen}, nnx for {nnx}: is dropout on in one of them only? "
        'Call(linen={…}, mode="eval") says how each is called'
    )
    return Comparison(0, 0, (Difference(path, "count", detail),))


def _changed_parameters(pair: _Pair, subject: _Subject, steps: Steps) -> Comparison:
    """Parameters that a call of the NNX module changes, which Linen's cannot."""
    if not subject.outcomes[1].touched & frontends.nnx_parameters(pair.trees):
        return Comparison()
    key = jax.random.key(pair.seed)
    run = jax.jit(subject.functions[1].parameters)
    after = frontends.as_numpy(run(pair.linen.values, steps[0], key))
    before = frontends.as_numpy({k: pair.linen.values[k] for k in after})
    changed = tuple(
        Difference(
            f"{subject.prefix}state/{d.path}",
            "changed",
            f"nnx changes this parameter while it is called: {d.detail}",
        )
        for d in compare_bytes(before, after).differences
    )
    return Comparison(0, 0, changed)


def _repeats(pair: _Pair, subject: _Subject, steps: Steps) -> bool:
    """Whether each frontend gives the same bytes again."""
    return all(
        not compare_bytes(
            run(pair.linen.values, steps), run(pair.linen.values, steps)
        ).differences
        for run in subject.runs
    )


def _merged(compared: Comparison) -> Comparison:
    """Of several examples that differ in one path, the first is told."""
    first = {d.path: d for d in reversed(compared.differences)}
    ordered = sorted(reversed(first.values()), key=_rank)
    return dataclasses.replace(compared, differences=tuple(ordered))


def _rank(difference: Difference) -> int:
    """What comes first in a model is told first: a gradient only follows."""
    order = ("outputs", "state", "loss", "input_gradient", "gradient")
    parts = difference.path.split("/")
    return next((order.index(part) for part in parts if part in order), -1)


def _frontends(
    pair: _Pair, subject: _Subject
) -> tuple[tolerance.Frontend, tolerance.Frontend]:
    key = jax.random.key(pair.seed)

    def frontend(run: _Run, functions: Functions) -> tolerance.Frontend:
        def coarsest(values: Mapping[str, Any], steps: Steps) -> float:
            return tolerance.coarsest_eps(functions.forward, values, steps[0], key)

        return tolerance.Frontend(run, coarsest)

    left, right = map(frontend, subject.runs, subject.functions)
    return left, right


def _oracle_tier(pair: _Pair, oracle: Oracle) -> Tier:
    values = frontends.as_numpy(pair.linen.values)
    total, count, worst = Comparison(), 0, 0.0
    for subject in pair.subjects:
        for steps in pair.inputs(subject):
            args = jax.tree.map(np.asarray, steps[0])
            outputs = oracle.function(values, *args.positional, **args.keywords)
            expected = frontends.flat(outputs, "outputs")
            mine = subject.runs[0](pair.linen.values, steps[:1])
            mine = {k: v for k, v in mine.items() if k.startswith("outputs")}
            compared, error = _near(mine, expected, oracle, subject.prefix)
            total, worst, count = total + compared, max(worst, error), count + 1
    note = f"outputs against the reference: worst {worst:.2f} of the tolerance"
    return Tier("oracle", _merged(total), count, note)


def _near(
    mine: Results, expected: Mapping[str, Any], oracle: Oracle, prefix: str
) -> tuple[Comparison, float]:
    differences: list[Difference] = []
    elements, worst = 0, 0.0
    for path in sorted(mine.keys() | expected.keys()):
        if path not in mine or path not in expected:
            where = "the reference" if path in expected else "the models"
            differences.append(Difference(prefix + path, "missing", f"only in {where}"))
            continue
        a, b = (np.asarray(x, np.float64) for x in (mine[path], expected[path]))
        if a.shape != b.shape:
            detail = f"models {a.shape}, reference {b.shape}"
            differences.append(Difference(prefix + path, "shape", detail))
            continue
        elements += a.size
        allowed = oracle.atol + oracle.rtol * np.abs(b)
        share = float(np.max(np.abs(a - b) / allowed, initial=0.0))
        worst = max(worst, share)
        if not share <= 1.0:
            off = float(np.max(np.abs(a - b)))
            detail = f"off by {off:.3g}, {share:.3g} of the tolerance"
            differences.append(Difference(prefix + path, "value", detail))
    return Comparison(len(mine), elements, tuple(differences)), worst


def _check_tiers(tiers: Sequence[str], oracle: Oracle | None) -> None:
    unknown = [tier for tier in tiers if tier not in TIERS]
    if unknown or not tiers:
        raise CheckError(
            f"tiers must be some of {', '.join(TIERS)}. "
            f"Got {', '.join(tiers) or 'none'}."
        )
    if oracle is None and "oracle" in tiers and tuple(tiers) != TIERS:
        raise CheckError("The oracle tier needs a reference: give parity.Oracle(…).")


def _first_args(call: Call, nnx: NNXSide, seed: int) -> Args:
    """Arguments of the first step: shapes only where the module has no values."""
    if nnx.abstract:
        return calls.abstract(call.inputs)
    return calls.first_example(call.inputs, seed)[0]


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


def _names(pair: _Pair) -> str:
    names = [subject.call.name for subject in pair.subjects]
    return "one call" if len(names) == 1 else ", ".join(names)
