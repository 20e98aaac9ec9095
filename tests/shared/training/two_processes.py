"""A train step of two processes, for test_two_processes: each is one of them.

python two_processes.py FILE PORT NUMBER; the first writes losses and gradients.
"""

import functools
import pathlib
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

import jax
import numpy as np

import shared
import zoo_linen
import zoo_nnx
from shared import sharding, training
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from shared.sharding import AXIS_RULES
from shared.trees import flatten, path_text

CONFIG = qwen3_next_tiny(1).replace(
    layers=(LayerKind("full_attention", "dense"),), axis_rules=AXIS_RULES
)
# Matrices are gathered from both processes; heads are spread over devices of one.
MESH = {"fsdp": 2, "tensor": 2}
FRONTENDS = ("linen", "nnx")
# Without clipping and mean, what the optimizer keeps is the gradient.
OPTIMIZER = training.make_optimizer(
    training.OptimizerConfig(b1=0.0, clip_norm=None), CONFIG
)


def rows(first, last):
    """Tokens and segments; a row is padding for the most part."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 12))
    segments = np.ones((8, 12), np.int32)
    segments[1, 2:] = 0
    batch = {"tokens": tokens.astype(np.int32), "segment_ids": segments}
    return {name: leaf[first:last] for name, leaf in batch.items()}


def function_of(frontend):
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(CONFIG))
    params = shared.abstract_params(CONFIG)
    return zoo_nnx.as_function(zoo_nnx.from_params(CONFIG, params))


def first_state():
    params = shared.init_params(jax.random.key(0), CONFIG)
    return training.init_state(params, OPTIMIZER)


def step_of(frontend):
    """A step that gives its loss and, by name, its gradients."""
    step = functools.partial(training.train_step, function_of(frontend), OPTIMIZER)

    def run(state, batch):
        state, metrics = step(state, batch)
        means = flatten(state["opt_state"][0].mu)
        named = {path_text(path): leaf for path, leaf in means}
        return {"loss": metrics.loss, "tokens": metrics.tokens, **named}

    return run


def main(file, port, number):
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", 2, int(number))
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    assert len(jax.devices()) == 4 and len(jax.local_devices()) == 2
    mesh = sharding.make_mesh(MESH)
    shapes, axes = shared.abstract_params(CONFIG), shared.logical_axes(CONFIG)
    params = sharding.tree_shardings(shapes, axes, mesh)
    places = training.state_shardings(jax.eval_shape(first_state), params)
    state = jax.jit(first_state, out_shardings=places)()
    mine = 4 * jax.process_index()
    batch = training.place_batch(rows(mine, mine + 4), mesh)
    assert batch["tokens"].shape == (8, 12)
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    results = {}
    with jax.set_mesh(mesh):
        for frontend in FRONTENDS:
            step = jax.jit(step_of(frontend), out_shardings=everywhere)
            for name, leaf in step(state, batch).items():
                results[f"{frontend}|{name}"] = np.asarray(leaf)
    if jax.process_index() == 0:
        np.savez(file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
