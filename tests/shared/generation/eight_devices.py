"""What decoding gives on eight virtual devices, for test_on_a_mesh: its own process.

python eight_devices.py FILE writes logits and answers, on meshes and without.
"""

import os
import pathlib
import sys

if __name__ == "__main__":  # before JAX is imported
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
    sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

import jax
import numpy as np

import shared
import zoo_nnx
from shared import generation, sharding
from shared.config import LayerKind
from shared.generation.generate import go_on
from shared.sharding import AXIS_RULES
from tests.shared.generation import models

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

ROWS, PLACES = 8, 16
LENGTHS = np.array([7, 3, 1, 6, 7, 2, 5, 4], np.int32)
TIME, STEPS = 7, 2


def _preset(name, layers):
    config = shared.preset(name)
    return config.replace(layers=tuple(config.layers[i] for i in layers))


CONFIGS = {
    "qwen3-next": shared.preset("qwen3-next-tiny").replace(
        layers=(
            LayerKind("linear_attention", "dense"),
            LayerKind("full_attention", "moe"),
        )
    ),
    "gemma-4": _preset("gemma-4-e-tiny", (0, 6)),  # a ring, and who borrows its keys
    "deepseek": _preset("deepseek-v3-tiny", (0,)),
}
MESHES = {
    "qwen3-next": {"expert": 2, "tensor": 2, "context": 2},
    "gemma-4": {"data": 4, "tensor": 2},
    "deepseek": {"fsdp": 2, "tensor": 2, "context": 2},
}
# Positions of a cache are spread where a rule says so.
RULES = {"deepseek": (("positions", "context"), *AXIS_RULES)}
# Of the loops, whose sampling takes long to compile.
ONE = CONFIGS["qwen3-next"].replace(layers=(LayerKind("full_attention", "dense"),))
PROMPTS = [models.prompt(n, seed) for seed, n in enumerate((3, 5, 2, 7))]
NEW = 5


def on_mesh(config, name):
    """The config with rules, its parameters in their places, and the mesh."""
    mesh, rules = sharding.make_mesh(MESHES[name]), RULES.get(name, AXIS_RULES)
    config = config.replace(axis_rules=rules)
    axes = shared.logical_axes(config)
    places = sharding.tree_shardings(shared.abstract_params(config), axes, mesh)
    return config, jax.device_put(models.weights(config), places), mesh


def tokens_of(config):
    """[ROWS, TIME] of the prompts, and [STEPS, ROWS] that follow them."""
    random = np.random.default_rng(1)
    ids = random.integers(0, config.vocab_size, (ROWS, TIME + STEPS), dtype=np.int32)
    return ids[:, :TIME], ids[:, TIME:].T


def whole(config):
    """Logits after the prompts and after each step, of a plain call without a cache."""
    prompts, steps = tokens_of(config)
    tokens = np.zeros((ROWS, TIME + STEPS), np.int32)
    for row, length in enumerate(LENGTHS):
        new = *prompts[row, :length], *steps[:, row]
        tokens[row, : len(new)] = new
    logits = forward(config)(models.weights(config), tokens)
    at = np.arange(ROWS)
    return {n: logits[at, LENGTHS - 1 + n] for n in range(STEPS + 1)}


def forward(config):
    model = models.model_of("linen", config)
    return jax.jit(lambda params, tokens: model(params, tokens).logits)


def decoded(frontend, config, params, mesh):
    """The same, of a ragged prefill and of steps; whether the cache stays in place."""
    model = models.model_of("linen", config)
    if frontend == "nnx":
        model = zoo_nnx.as_function(zoo_nnx.from_params(config, params))

    def prefill(params, tokens, cache):
        return generation.prefill(model, params, tokens, cache, lengths=LENGTHS)

    def decode(params, tokens, cache):
        return generation.decode(model, params, tokens, cache)

    prefill, decode = (jax.jit(f, donate_argnums=2) for f in (prefill, decode))
    prompts, steps = tokens_of(config)
    cache = shared.init_cache(config, ROWS, PLACES)
    places = shared.cache_shardings(config, cache, mesh, config.axis_rules)
    told, caches = {}, [cache]
    told[0], cache = prefill(params, prompts, cache)
    for n, tokens in enumerate(steps, 1):
        caches.append(cache)
        told[n], cache = decode(params, tokens, cache)
    caches.append(cache)
    told["in place"] = [in_place(cache, places) for cache in caches]
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        told[f"cache {jax.tree_util.keystr(path)}"] = leaf
    return told


def in_place(cache, places):
    """Whether every array stands where it should, but those without elements."""

    def same(leaf, place):
        return not leaf.size or leaf.sharding.is_equivalent_to(place, leaf.ndim)

    return all(jax.tree.leaves(jax.tree.map(same, cache, places)))


def greedy():
    """The arg-max over growing prefixes, of plain calls."""
    run, answers = forward(ONE), []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(NEW):
            filled = np.pad(np.int32(tokens), (0, PLACES - len(tokens)))
            logits = run(models.weights(ONE), filled[None])[0, len(tokens) - 1]
            *_, second, best = np.sort(logits)
            assert best - second > models.LEAST_GAP, "Too near a tie: another prompt."
            tokens.append(int(np.argmax(logits)))
        answers.append(tokens[len(prompt) :])
    return answers


def answers(config, params):
    """What an engine serves, and how often a step was compiled."""
    model = models.model_of("linen", config)
    engine = generation.Engine(model, params, slots=2, max_length=PLACES)
    answers = [[] for _ in PROMPTS]
    for token in engine.run([generation.Request(p, NEW) for p in PROMPTS]):
        answers[token.row].append(token.token)
    return {"served": answers, "compiled": go_on._cache_size()}


def main(file):
    results = {"greedy": {"greedy": greedy()}}
    for name, config in CONFIGS.items():
        results[f"{name}/whole"] = whole(config)
        config, params, mesh = on_mesh(config, name)
        with jax.set_mesh(mesh):
            for frontend in ("linen", "nnx")[: 1 + (name == "qwen3-next")]:
                told = decoded(frontend, config, params, mesh)
                results[f"{name}/{frontend}"] = told
    config, params, mesh = on_mesh(ONE, "qwen3-next")
    with jax.set_mesh(mesh):
        results["answers"] = answers(config, params)
    np.savez(
        file,
        **{
            f"{case}|{name}": np.asarray(leaf)
            for case, result in results.items()
            for name, leaf in result.items()
        },
    )


if __name__ == "__main__":
    main(sys.argv[1])
