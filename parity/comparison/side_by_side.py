"""Which API? Both frontends measured on one model, side by side.

The two are the same model, so this is no verdict: numbers, and whether the programs are
the same. Times are of this machine and moment; counts are not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import os
import pathlib
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, zoo
from parity.comparison import dispatch
from parity.comparison.source_lines import package_lines
from parity.decoders import Apply, Pair
from parity.programs import program
from parity.reporting.report import environment
from shared.trees import flatten

SCHEMA, VERSION = "parity-zoo/side-by-side", 1
SIDES = ("linen", "nnx")
FUNCTIONS = ("forward", "gradient")
STEPS = ("trace", "lower", "compile")


class Row(NamedTuple):
    """One quantity, measured on both sides.

    Attributes:
      section: "forward", "gradient", "dispatch" or "code".
      quantity: what was measured.
      unit: "s", "µs", "bytes", "FLOP", "operations" or "lines".
      linen: None where there is nothing to measure.
      nnx: the same.
      plain: of a function without Flax; None where there is none.
    """

    section: str
    quantity: str
    unit: str
    linen: float | None
    nnx: float | None
    plain: float | None = None


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """What was measured.

    Attributes:
      target: preset or folder.
      parameters: numbers in the parameter tree.
      leaves: arrays in it.
      batch: of the tokens.
      length: of the tokens.
      rows: the quantities.
      same_program: by function, whether both frontends lower to one program.
      machine: where, with versions and backend.
    """

    target: str
    parameters: int
    leaves: int
    batch: int
    length: int
    rows: tuple[Row, ...]
    same_program: Mapping[str, bool]
    machine: Mapping[str, str]

    def row(self, section: str, quantity: str) -> Row:
        """The row of that name."""
        names = [(row.section, row.quantity) for row in self.rows]
        return self.rows[names.index((section, quantity))]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rows = [row._asdict() for row in self.rows]
        return {"schema": SCHEMA, "version": VERSION, **fields, "rows": rows}

    def to_json(self) -> str:
        """As JSON; numbers are not rounded."""
        return json.dumps(self.as_dict(), indent=2, ensure_ascii=False) + "\n"


def compare_target(
    target: str,
    *,
    functions: Sequence[str] = FUNCTIONS,
    abstract: bool = False,
    batch: int = 1,
    length: int = 64,
    repeats: int = 3,
    rounds: int = 20,
    scan_layers: bool = True,
    scan_period: int | None = None,
) -> SideBySide:
    """Measures both frontends on a preset or a checkpoint folder.

    Empties JAX's in-memory caches, or nothing would be traced twice.

    Args:
      target: name of a preset, or a folder with a Hugging Face checkpoint.
      functions: of `FUNCTIONS`.
      abstract: without weights, and so without dispatch.
      batch: of the tokens.
      length: of the tokens.
      repeats: how often to trace and lower; the median counts. Compiled is once.
      rounds: pairs of a call's time.
      scan_layers: whether layers are stacked and scanned.
      scan_period: layers in a period; None finds it.

    Raises:
      TargetError: the target, or the request, is no good; the message says why.
    """
    _check_functions(functions)
    layout: dict[str, Any] = {"scan_layers": scan_layers, "scan_period": scan_period}
    config, folder = zoo.resolve(target, layout)
    if not abstract:
        _check_size(target, config)
    params = None
    if folder is not None and not abstract:
        config, params = zoo.load(folder, **layout)

    pair, tokens = decoders.abstract_pair(config), _tokens(batch, length)
    rows, same = measure_programs(pair, tokens, functions, repeats)
    if not abstract:
        if params is None:
            params = shared.init_params(jax.random.key(0), config)
        rows += measure_calls(decoders.make_pair(config, params), rounds)
    leaves = [leaf for _, leaf in flatten(shared.abstract_params(config))]
    return SideBySide(
        target=target,
        parameters=sum(leaf.size for leaf in leaves),
        leaves=len(leaves),
        batch=batch,
        length=length,
        rows=(*rows, *code_rows()),
        same_program=same,
        machine=machine(),
    )


def measure_programs(
    pair: Pair, tokens: Any, functions: Sequence[str] = FUNCTIONS, repeats: int = 3
) -> tuple[list[Row], dict[str, bool]]:
    """Seconds, memory and FLOPs of each function, and whether the programs are one.

    Args:
      pair: abstract, or with arrays, which are not read.
      tokens: abstract, [B, T].
      functions: of `FUNCTIONS`.
      repeats: of tracing and lowering.
    """
    rows, same = [], {}
    for name in functions:
        of_sides = {
            "linen": _function(name, pair.config, zoo_linen.as_function(pair.linen)),
            "nnx": _function(name, pair.config, zoo_nnx.as_function(pair.nnx)),
        }
        measured, same[name] = _measure_function(of_sides, pair.params, tokens, repeats)
        rows += [
            Row(name, quantity, unit, values["linen"], values["nnx"])
            for (quantity, unit), values in measured.items()
        ]
    return rows, same


def measure_calls(pair: Pair, rounds: int = 20, calls: int = 10) -> list[Row]:
    """Microseconds a jitted call takes beside the computation, by way of calling.

    Args:
      pair: with arrays.
      rounds: pairs of a time; see `parity.comparison.dispatch.measure`.
      calls: in a round, of each side.
    """
    tokens = jnp.ones((1, 1), jnp.int32)
    baseline = dispatch.plain_ways(pair, tokens)[0]
    ways = dispatch.linen_ways(pair, tokens) + dispatch.nnx_ways(pair, tokens)
    timings = dispatch.measure_all(ways, baseline, rounds=rounds, calls=calls)
    # Between slow calls the baseline finds the processor's caches cold.
    plain = statistics.median(t.baseline.median for t in timings.values())
    few = max(rounds // 4, 1), max(calls // 4, 1)
    slow = dispatch.nnx_module_ways(pair, tokens)
    timings |= dispatch.measure_all(slow, baseline, rounds=few[0], calls=few[1])

    rows = []
    for name in dict.fromkeys(name for _, name in timings):
        of_sides = [timings.get((side, name)) for side in SIDES]
        linen, other = (None if t is None else t.microseconds.median for t in of_sides)
        rows.append(Row("dispatch", name, "µs", linen, other, plain))
    return rows


def code_rows() -> list[Row]:
    """Lines of code of the two zoos, file by file."""
    linen, other = package_lines(zoo_linen), package_lines(zoo_nnx)
    files = sorted(linen | other)
    rows = [Row("code", f, "lines", linen.get(f), other.get(f)) for f in files]
    total = sum(linen.values()), sum(other.values())
    return [*rows, Row("code", "all files", "lines", *total)]


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compiles as if there were no persistent cache, neither reading nor writing it."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    jax.config.update(name, False)
    # JAX looks once a process whether the cache is on, and then no more.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(name, before)
        compilation_cache.reset_cache()


def machine() -> dict[str, str]:
    """What the times depend on."""
    facts = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        **environment(),
    }
    # Models run as JAX is set, not under the precision of a proof.
    del facts["matmul_precision"]
    return {name: text for name, text in facts.items() if text}


def _function(
    name: str, config: shared.DecoderConfig, apply: Apply
) -> Callable[..., Any]:
    """A function of parameters and tokens."""

    def forward(params: Mapping[str, Any], tokens: Any) -> Any:
        return apply(params, tokens).logits

    def loss(params: Mapping[str, Any], tokens: Any) -> Any:
        return shared.decoder_loss(apply(params, tokens), tokens, config).total

    return forward if name == "forward" else jax.value_and_grad(loss)


def _measure_function(
    of_sides: Mapping[str, Callable[..., Any]], params: Any, tokens: Any, repeats: int
) -> tuple[dict[tuple[str, str], dict[str, float]], bool]:
    """Values by (quantity, unit) and side, and whether the programs are the same."""
    values: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    # First: this pays for what is imported or made lazily.
    programs = {s: program.lower(f, params, tokens) for s, f in of_sides.items()}
    for i in range(repeats):
        # Neither side always follows the other.
        for side in SIDES if i % 2 else reversed(SIDES):
            seconds, lowered = _staged(of_sides[side], params, tokens)
            for step, value in seconds.items():
                times[step, side].append(value)
            if i == repeats - 1:
                compile_seconds, memory = _compiled(lowered)
                times["compile", side].append(compile_seconds)
                values["temporary memory", "bytes"][side] = memory
    for step in STEPS:
        for side in SIDES:
            values[step, "s"][side] = statistics.median(times[step, side])
    for side, own in programs.items():
        assert own.cost is not None
        values["arithmetic", "FLOP"][side] = own.cost.flops
        values["program", "operations"][side] = len(own.operations)
    order = [(s, "s") for s in STEPS] + [
        ("temporary memory", "bytes"),
        ("arithmetic", "FLOP"),
        ("program", "operations"),
    ]
    left, right = (programs[side] for side in SIDES)
    return {key: values[key] for key in order}, left.digest == right.digest


def _staged(
    function: Callable[..., Any], *args: Any
) -> tuple[dict[str, float], jax.stages.Lowered]:
    """Traces and lowers with nothing remembered."""
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    traced = jax.jit(function, keep_unused=True).trace(*args)
    middle = time.perf_counter()
    lowered = traced.lower()
    end = time.perf_counter()
    return {"trace": middle - start, "lower": end - middle}, lowered


def _compiled(lowered: jax.stages.Lowered) -> tuple[float, float]:
    """Seconds to compile, and bytes of temporary memory."""
    with no_compilation_cache():
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return seconds, math.nan if memory is None else memory.temp_size_in_bytes


def _tokens(batch: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((batch, length), jnp.int32)


def _check_functions(functions: Sequence[str]) -> None:
    unknown = [name for name in functions if name not in FUNCTIONS]
    if unknown or not functions:
        raise zoo.TargetError(
            f"functions must be some of {', '.join(FUNCTIONS)}. "
            f"Got {', '.join(functions) or 'none'}."
        )


def _check_size(target: str, config: shared.DecoderConfig) -> None:
    size = zoo.parameter_bytes(config)
    if size > zoo.MOST_BYTES:
        raise zoo.TargetError(
            f"{target} has {size / 2**30:.1f} GiB of parameters; the time of a call is "
            f"measured with weights, of at most {zoo.MOST_BYTES / 2**30:.0f} GiB. Use "
            "--abstract, which measures the rest without weights."
        )


def _processor() -> str:
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()
