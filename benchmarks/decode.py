"""Prefill and decoding beside Hugging Face on one CPU core, and what they depend on.

python benchmarks/decode.py [--hf-python=PYTHON] [--parts=hf,growth,forms]
  [--rounds=5] [--json=FILE]

Exit status 0: every claim holds; 1: one does not. README.md beside this file tells what
is measured and holds the numbers seen.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from sides import ONE_THREAD, Claim, Side, alternate, chosen, compare, report, timed

HERE = pathlib.Path(__file__).parent
CONFIG = HERE / "configs" / "qwen3_next_51m.json"
PROMPT, STEPS = 512, 32
BATCHES = (1, 4)
AT_LEAST = {"prefill": 1.5, "decode": 3.0}  # times Hugging Face's tokens per second
MOST_COMPILE, MOST_LENGTH = 1.3, 1.3
PASSIVE = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


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
    parts = chosen(parser, options, PARTS, peers=("hf",))
    claims = (claim for part in parts for claim in PARTS[part](options))
    return report(claims, options.json)


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
            medians = alternate([ours, theirs], _questions(), options.rounds)
        for question, our, their in zip(_questions(), *medians, strict=True):
            limit = AT_LEAST[question.split()[0]] if pinned else 0.0
            yield compare(
                f"{question}: Hugging Face beside ours; {name}",
                their[column],
                our[column],
                at_least=limit,
            )


def _forms(options: argparse.Namespace) -> Iterator[Claim]:
    """The scanned form beside the flat one, which decodes faster."""
    with _ours("scanned", ONE_THREAD) as scanned, _ours("flat", ONE_THREAD) as flat:
        medians = alternate([scanned, flat], _questions(), options.rounds)
    for question, one, other in zip(_questions(), *medians, strict=True):
        yield compare(f"{question}: scanned beside flat; CPU s", one[0], other[0])


def _growth(options: argparse.Namespace) -> Iterator[Claim]:
    """What must not grow: the step with the cache's length, compiling with depth."""
    with _ours("flat", ONE_THREAD) as side:
        questions = ["length 1024", "length 16384"]
        ((short, long),) = alternate([side], questions, options.rounds)
        shallow, deep = (
            statistics.median(side.ask(f"compile {layers}")[0] for _ in range(3))
            for layers in (8, 48)
        )
    name = f"{STEPS} steps after {PROMPT} tokens: cache of 16384 beside 1024; CPU s"
    yield compare(name, long[0], short[0], at_most=MOST_LENGTH)
    name = "compiling the scanned step: 48 layers beside 8; CPU s"
    yield compare(name, deep, shallow, at_most=MOST_COMPILE)


PARTS = {"hf": _beside_hf, "growth": _growth, "forms": _forms}


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
    return timed(lambda: _prefill_function(model)(params, prompt, cache))


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

    return timed(run)


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
    return timed(lowered.compile)


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


if __name__ == "__main__":
    raise SystemExit(main())
