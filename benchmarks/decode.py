"""Prefill and decoding beside Hugging Face on one CPU core, and what they depend on.

python benchmarks/decode.py [--hf-python=PYTHON] [--parts=hf,growth,forms]
  [--rounds=5] [--json=FILE]

Exit status 0: every claim holds; 1: one does not. README.md beside this file tells what
is measured and holds the numbers seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
CONFIG = HERE / "configs" / "qwen3_next_51m.json"
PROMPT, STEPS = 512, 32
BATCHES = (1, 4)
AT_LEAST = {"prefill": 1.5, "decode": 3.0}  # times Hugging Face's tokens per second
MOST_COMPILE, MOST_LENGTH = 1.3, 1.3
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
}
PASSIVE = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


@dataclasses.dataclass(frozen=True)
class Claim:
    """One row of the table.

    Attributes:
      name: what is measured.
      one: seconds.
      other: seconds of what it stands beside.
      ratio: of the two.
      limit: that the ratio must keep, as text; "" claims nothing.
      ok: whether it does.
    """

    name: str
    one: float
    other: float
    ratio: float
    limit: str
    ok: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hf-python", help="a Python with torch and transformers; none: no peer"
    )
    parser.add_argument(
        "--parts",
        default=None,
        help="what to measure, by default all: hf (needs --hf-python), growth, forms",
    )
    parser.add_argument("--rounds", type=int, default=5, help="alternated runs a side")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers there")
    parser.add_argument("--serve", metavar="LAYOUT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
        return 0
    parts = options.parts.split(",") if options.parts else list(PARTS)
    if set(parts) - set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}. Got {options.parts}.")
    if "hf" in parts and not options.hf_python:
        if options.parts:
            parser.error("--parts=hf needs --hf-python.")
        print("No --hf-python: not beside Hugging Face.")
        parts.remove("hf")
    claims = []
    for part in parts:
        for claim in PARTS[part](options):
            claims.append(claim)
            print(_row(claim), flush=True)
            if options.json:
                rows = [dataclasses.asdict(claim) for claim in claims]
                options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(claim.ok for claim in claims) else 1


def _row(claim: Claim) -> str:
    verdict = f"{claim.limit}: {'holds' if claim.ok else 'FAILS'}" * bool(claim.limit)
    seconds = f"{claim.one:8.4f} s {claim.other:8.4f} s"
    return f"{claim.name:72} {seconds} {claim.ratio:6.2f} {verdict}".rstrip()


# Both sides are processes that answer a line with CPU and wall seconds.


class Side:
    """A process that measures when it is asked."""

    def __init__(self, command: list[str], environment: dict[str, str], pinned: bool):
        core = {max(os.sched_getaffinity(0))}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            preexec_fn=(lambda: os.sched_setaffinity(0, core)) if pinned else None,
        )
        self.versions = self._answer()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait()

    def ask(self, line: str) -> tuple[float, float]:
        """CPU and wall seconds of what the line asks for."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        cpu, wall = self._answer().split()
        return float(cpu), float(wall)

    def _answer(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended: see what it wrote above.")
        return line.strip()


def _ours(layout: str, environment: dict[str, str], pinned: bool = True) -> Side:
    command = [sys.executable, __file__, f"--serve={layout}"]
    return Side(
        command,
        {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "", **environment},
        pinned,
    )


def _theirs(python: str, environment: dict[str, str], pinned: bool = True) -> Side:
    threads = environment["OMP_NUM_THREADS"]
    return Side([python, str(HERE / "decode_hf.py"), threads], environment, pinned)


def _alternate(
    sides: list[Side], questions: list[str], rounds: int
) -> list[list[tuple[float, float]]]:
    """Of each side, the medians for each question, in turn; a first round warms up."""
    seen: list[list[list[tuple[float, float]]]] = [
        [[] for _ in questions] for _ in sides
    ]
    for turn in range(rounds + 1):
        for number, question in enumerate(questions):
            for side, answers in zip(sides, seen, strict=True):
                answer = side.ask(question)
                if turn:
                    answers[number].append(answer)
    return [
        [tuple(map(statistics.median, zip(*runs, strict=True))) for runs in answers]
        for answers in seen
    ]


def _questions() -> list[str]:
    return [f"prefill {batch}" for batch in BATCHES] + [
        f"decode {batch} {STEPS}" for batch in BATCHES
    ]


def _beside_hf(options: argparse.Namespace) -> Iterator[Claim]:
    """Prefill and decoding beside Hugging Face; the claims are for one core."""
    for name, environment, pinned, column in (
        ("one core, one thread each, CPU s", ONE_THREAD, True, 0),
        ("two cores, passive waiting, wall s", PASSIVE, False, 1),
    ):
        with (
            _ours("flat", environment, pinned) as ours,
            _theirs(options.hf_python, environment, pinned) as theirs,
        ):
            print(ours.versions, theirs.versions, sep="; ")
            medians = _alternate([ours, theirs], _questions(), options.rounds)
        for question, our, their in zip(_questions(), *medians, strict=True):
            limit = AT_LEAST[question.split()[0]] if pinned else 0.0
            yield _claim(
                f"{question}: Hugging Face beside ours; {name}",
                their[column],
                our[column],
                at_least=limit,
            )


def _forms(options: argparse.Namespace) -> Iterator[Claim]:
    """The scanned form beside the flat one, which decodes faster."""
    with _ours("scanned", ONE_THREAD) as scanned, _ours("flat", ONE_THREAD) as flat:
        medians = _alternate([scanned, flat], _questions(), options.rounds)
    for question, one, other in zip(_questions(), *medians, strict=True):
        yield _claim(f"{question}: scanned beside flat; CPU s", one[0], other[0])


def _growth(options: argparse.Namespace) -> Iterator[Claim]:
    """What must not grow: the step with the cache's length, compiling with depth."""
    with _ours("flat", ONE_THREAD) as side:
        questions = ["length 1024", "length 16384"]
        ((short, long),) = _alternate([side], questions, options.rounds)
        shallow, deep = (
            statistics.median(side.ask(f"compile {layers}")[0] for _ in range(3))
            for layers in (8, 48)
        )
    name = f"{STEPS} steps after {PROMPT} tokens: cache of 16384 beside 1024; CPU s"
    yield _claim(name, long[0], short[0], at_most=MOST_LENGTH)
    name = "compiling the scanned step: 48 layers beside 8; CPU s"
    yield _claim(name, deep, shallow, at_most=MOST_COMPILE)


PARTS = {"hf": _beside_hf, "growth": _growth, "forms": _forms}


def _claim(
    name: str,
    one: float,
    other: float,
    *,
    at_least: float = 0.0,
    at_most: float = float("inf"),
) -> Claim:
    limit = f">= {at_least}" if at_least else f"<= {at_most}"
    return Claim(
        name,
        one,
        other,
        one / other,
        "" if limit == "<= inf" else limit,
        at_least <= one / other <= at_most,
    )


# Our side.


def _serve(layout: str) -> None:
    import jax

    import shared
    import zoo_linen

    config = shared.DecoderConfig.from_hf(CONFIG)
    config = config.replace(scan_layers=layout == "scanned")
    params = jax.jit(shared.init_params, static_argnums=1)(jax.random.key(0), config)
    model = zoo_linen.as_function(zoo_linen.Decoder(config))
    measures = {
        "prefill": lambda batch: _prefill(model, params, batch),
        "decode": lambda batch, steps: _decode(model, params, batch, steps),
        "length": lambda length: _decode(model, params, 1, STEPS, length),
        "compile": _compile,
    }
    print(f"jax {jax.__version__}", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(*measures[what](*map(int, numbers)), flush=True)


def _prefill(model: Any, params: Any, batch: int) -> tuple[float, float]:
    cache, prompt = _start(model, batch, PROMPT + STEPS)
    return _timed(lambda: _prefill_function(model)(params, prompt, cache))


def _decode(
    model: Any, params: Any, batch: int, steps: int, length: int = PROMPT + STEPS
) -> tuple[float, float]:
    import jax

    cache, prompt = _start(model, batch, length)
    step = _prefill_function(model)(params, prompt, cache)
    token, cache = step.logits.argmax(-1).astype("int32"), step.cache
    jax.block_until_ready((token, cache))
    decode = _decode_function(model)
    if (batch, length) not in _WARM:  # compiles, on a cache of its own
        _WARM.add((batch, length))
        decode(params, token, _start(model, batch, length)[0])

    def run() -> Any:
        last, held = token, cache
        for _ in range(steps):
            last, held = decode(params, last, held)
        return last

    return _timed(run)


def _compile(layers: int) -> tuple[float, float]:
    import jax
    import jax.numpy as jnp

    import shared
    import zoo_linen

    config = shared.DecoderConfig.from_hf(CONFIG)
    config = config.replace(layers=config.layers[:4] * (layers // 4))
    model = zoo_linen.as_function(zoo_linen.Decoder(config))
    params = shared.abstract_params(config)
    cache = jax.eval_shape(lambda: shared.init_cache(config, 1, PROMPT))
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.clear_caches()  # or the first compilation would serve the others
    lowered = _decode_function(model).lower(params, token, cache)
    return _timed(lowered.compile)


_WARM: set[tuple[int, int]] = set()
_FUNCTIONS: dict[tuple[str, Any], Any] = {}


def _prefill_function(model: Any) -> Any:
    import jax

    from shared import generation

    def prefill(params: Any, tokens: Any, cache: Any) -> Any:
        return generation.prefill(model, params, tokens, cache)

    key = "prefill", model
    return _FUNCTIONS.setdefault(key, jax.jit(prefill))


def _decode_function(model: Any) -> Any:
    import jax

    from shared import generation

    def decode(params: Any, token: Any, cache: Any) -> Any:
        step = generation.decode(model, params, token, cache)
        return step.logits.argmax(-1).astype("int32"), step.cache

    key = "decode", model
    return _FUNCTIONS.setdefault(key, jax.jit(decode, donate_argnums=2))


def _start(model: Any, batch: int, length: int) -> tuple[Any, Any]:
    import jax

    import shared

    shape = batch, PROMPT
    prompt = jax.random.randint(jax.random.key(1), shape, 1, model.config.vocab_size)
    return shared.init_cache(model.config, batch, length), prompt


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds of a call, until its results are there."""
    import jax

    start = time.process_time(), time.perf_counter()
    result = run()
    jax.block_until_ready(result if not hasattr(result, "as_text") else 0)
    return time.process_time() - start[0], time.perf_counter() - start[1]


if __name__ == "__main__":
    raise SystemExit(main())
