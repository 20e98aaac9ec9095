"""A training step on one CPU core beside Hugging Face and MaxText, and its compiling.

python benchmarks/train.py [--hf-python=PYTHON] [--maxtext-python=PYTHON]
  [--parts=hf,maxtext,forms,frontends,depth] [--rounds=5] [--json=FILE]

Exit status 0: every claim holds; 1: one does not. README.md beside this file tells what
is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from sides import ONE_THREAD, Claim, Side, alternate, chosen, compare, report, timed

HERE = pathlib.Path(__file__).parent
CONFIG = HERE / "configs" / "qwen3_next_18m.json"
SIZES = ((1, 128), (2, 512))  # rows of a batch, tokens of a row
STEPS = 3
MOST_OF_HF, MOST_OF_MAXTEXT, MOST_TEMPORARY = 0.7, 0.25, 0.7
MOST_OF_FLAT, MOST_GROWTH = 1.05, 1.2
SAME_LOSS = 1e-4  # float32 sums in another order
DEPTHS, UNROLLED_DEPTHS = (8, 48, 96), (8, 48)
COMPILES = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf-python", help="a Python with torch and transformers")
    parser.add_argument("--maxtext-python", help="a Python with MaxText")
    parser.add_argument("--parts", help=f"what to measure: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="alternated runs a side")
    parser.add_argument("--json", type=pathlib.Path, help="write the numbers there")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options.serve, options.folder)
        return 0
    parts = chosen(parser, options, PARTS, peers=("hf", "maxtext"))
    with tempfile.TemporaryDirectory() as folder:
        options.folder = pathlib.Path(folder) / "model"
        claims = (claim for part in parts for claim in PARTS[part](options))
        return report(claims, options.json)


def _ours(options: argparse.Namespace, **changes: Any) -> Side:
    served = {"frontend": "linen"} | changes
    command = [sys.executable, __file__, f"--serve={json.dumps(served)}"]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": ""}
    command.append(f"--folder={options.folder}")
    return Side(command, environment | ONE_THREAD, pinned=True)


def _theirs(python: str, script: str, *arguments: str) -> Side:
    environment = {"JAX_PLATFORMS": "cpu", **ONE_THREAD}
    return Side([python, str(HERE / script), *arguments], environment, pinned=True)


def _steps() -> list[str]:
    return [f"step {batch} {length}" for batch, length in SIZES]


def _beside_hf(options: argparse.Namespace) -> Iterator[Claim]:
    """From the same weights; the faster of its two forms of attention."""
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_ours(options, remat_policy="none"))
        theirs = [
            stack.enter_context(
                _theirs(options.hf_python, "train_hf.py", str(options.folder), form)
            )
            for form in ("eager", "sdpa")
        ]
        print(ours.versions, theirs[0].versions, sep="; ")
        losses = [side.ask("loss 1 128")[0] for side in (ours, *theirs)]
        if max(losses) - min(losses) > SAME_LOSS * losses[0]:
            raise RuntimeError(f"The sides do not compute the same: losses {losses}.")
        our, *their = alternate([ours, *theirs], _steps(), options.rounds)
    for number, question in enumerate(_steps()):
        fastest = min(seen[number][0] for seen in their)
        name = f"{question}: ours beside Hugging Face; CPU s"
        yield compare(name, our[number][0], fastest, at_most=MOST_OF_HF)


def _beside_maxtext(options: argparse.Namespace) -> Iterator[Claim]:
    """Both rematerialise every layer."""
    with (
        _ours(options, remat_policy="full") as ours,
        _theirs(options.maxtext_python, "train_maxtext.py") as theirs,
    ):
        print(ours.versions, theirs.versions, sep="; ")
        medians = alternate([ours, theirs], _steps(), options.rounds)
        memory = [
            [side.ask(f"temporary {batch} {length}")[0] for side in (ours, theirs)]
            for batch, length in SIZES
        ]
    for question, our, their in zip(_steps(), *medians, strict=True):
        name = f"{question}: ours beside MaxText; CPU s"
        yield compare(name, our[0], their[0], at_most=MOST_OF_MAXTEXT)
    for question, (our, their) in zip(_steps(), memory, strict=True):
        name = f"{question}: ours beside MaxText; temporary bytes"
        yield compare(name, our, their, at_most=MOST_TEMPORARY)


def _forms(options: argparse.Namespace) -> Iterator[Claim]:
    """Nested blocks beside flat ones: what less memory costs in time."""
    with (
        _ours(options, remat_policy="full", block_form="nested") as nested,
        _ours(options, remat_policy="full", block_form="flat") as flat,
    ):
        medians = alternate([nested, flat], _steps(), options.rounds)
    for question, one, other in zip(_steps(), *medians, strict=True):
        name = f"{question}: nested beside flat blocks; CPU s"
        yield compare(name, one[0], other[0], at_most=MOST_OF_FLAT)


def _frontends(options: argparse.Namespace) -> Iterator[Claim]:
    """One program, so one time."""
    with _ours(options) as linen, _ours(options, frontend="nnx") as nnx:
        medians = alternate([linen, nnx], _steps(), options.rounds)
    for question, one, other in zip(_steps(), *medians, strict=True):
        yield compare(f"{question}: NNX beside Linen; CPU s", other[0], one[0])


def _depth(options: argparse.Namespace) -> Iterator[Claim]:
    """What compiling costs as layers are added; unrolled layers beside."""
    for scanned, depths in ((True, DEPTHS), (False, UNROLLED_DEPTHS)):
        with _ours(options, scan_layers=scanned, remat_policy="full") as side:
            seconds = [
                statistics.median(
                    side.ask(f"compile {layers}")[0] for _ in range(COMPILES)
                )
                for layers in depths
            ]
        form, limit = ("scanned", MOST_GROWTH) if scanned else ("unrolled", None)
        for layers, taken in zip(depths[1:], seconds[1:], strict=True):
            name = f"compiling the {form} step: {layers} layers beside 8; CPU s"
            limits = {} if limit is None else {"at_most": limit}
            yield compare(name, taken, seconds[0], **limits)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Claim]]] = {
    "hf": _beside_hf,
    "maxtext": _beside_maxtext,
    "forms": _forms,
    "frontends": _frontends,
    "depth": _depth,
}


# Our side.


def _serve(served: dict[str, Any], folder: pathlib.Path) -> None:
    import jax

    import shared

    changes = {name: value for name, value in served.items() if name != "frontend"}
    config = shared.DecoderConfig.from_hf(CONFIG).replace(**changes)
    params = jax.jit(shared.init_params, static_argnums=1)(jax.random.key(0), config)
    if not folder.exists():
        shared.checkpoint.save_hf(folder, config, params)
    measures = {
        "step": functools.partial(_step, served["frontend"], config, params),
        "loss": functools.partial(_loss, served["frontend"], config, params),
        "temporary": functools.partial(_temporary, served["frontend"], config),
        "compile": functools.partial(_compile, served["frontend"], config),
    }
    print(f"jax {jax.__version__}", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        print(*measures[what](*map(int, numbers)), flush=True)


def _tokens(config: Any, batch: int, length: int) -> Any:
    """The same numbers as in train_hf.py."""
    import numpy as np

    shape = batch, length
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)


@functools.cache
def _compiled(frontend: str, config: Any, batch: int, length: int) -> Any:
    import jax
    import jax.numpy as jnp

    from parity.memory.job import decoder_function
    from shared import training

    optimizer = training.make_optimizer(training.OptimizerConfig(), config)
    state = training.abstract_state(optimizer, config)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    function = decoder_function(config, frontend)
    step = functools.partial(training.train_step, function, optimizer)
    lowered = training.compile_step(step, state).lower(state, {"tokens": tokens})
    return lowered.compile(), optimizer


_STATES: dict[tuple[int, int], Any] = {}


def _step(
    frontend: str, config: Any, params: Any, batch: int, length: int
) -> tuple[float, float]:
    """Seconds of a step, the mean of a few; the state goes on from call to call."""
    import jax
    import jax.numpy as jnp

    from shared import training

    step, optimizer = _compiled(frontend, config, batch, length)
    tokens = {"tokens": jnp.asarray(_tokens(config, batch, length))}
    if (batch, length) not in _STATES:
        own = jax.tree.map(jnp.copy, params)
        _STATES[batch, length] = training.init_state(own, optimizer)

    def run() -> Any:
        state = _STATES[batch, length]
        for _ in range(STEPS):
            state, _ = step(state, tokens)
        _STATES[batch, length] = state
        return state

    cpu, wall = timed(run)
    return cpu / STEPS, wall / STEPS


def _loss(
    frontend: str, config: Any, params: Any, batch: int, length: int
) -> tuple[float, float]:
    import shared
    from parity.memory.job import decoder_function

    tokens = _tokens(config, batch, length)
    output = decoder_function(config, frontend)(params, tokens)
    return float(shared.decoder_loss(output, tokens, config).cross_entropy), 0.0


def _temporary(
    frontend: str, config: Any, batch: int, length: int
) -> tuple[float, float]:
    step, _ = _compiled(frontend, config, batch, length)
    return float(step.memory_analysis().temp_size_in_bytes), 0.0


def _compile(frontend: str, config: Any, layers: int) -> tuple[float, float]:
    import jax

    jax.clear_caches()  # or the first compilation would serve the others
    config = config.replace(layers=config.layers[:4] * (layers // 4))

    def run() -> None:
        _compiled.__wrapped__(frontend, config, *SIZES[0])

    return timed(run)


if __name__ == "__main__":
    raise SystemExit(main())
