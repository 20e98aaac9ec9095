"""What comes out on eight virtual devices, for test_on_a_mesh: a process of its own.

python eight_devices.py FILE writes experts and gradients, whole and on meshes, by name.
"""

import os
import pathlib
import sys
import tempfile

if __name__ == "__main__":  # before JAX is imported
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
    sys.path.insert(0, str(pathlib.Path(__file__).parents[3]))

import jax
import numpy as np

import shared
import zoo_linen
import zoo_nnx
from shared import sharding, training
from shared.checkpoint.training import Manager
from shared.config import LayerKind
from shared.layers import experts
from shared.layers.self_attention import attend_to_own
from shared.ops.attention import Keys
from shared.ops.routing import route
from shared.params import draw_tree
from shared.presets import qwen3_next_tiny
from shared.sharding import AXIS_RULES
from shared.trees import flatten, path_text

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

MOE = shared.preset("qwen3-next-tiny").moe
# Mesh and number of chunks.
EXPERTS = {
    "fsdp": ({"fsdp": 8}, 1),
    "fsdp in chunks": ({"fsdp": 8}, 4),
    "expert": ({"expert": 8}, 1),
    "tensor": ({"data": 4, "tensor": 2}, 1),
    "all": ({"fsdp": 2, "expert": 2, "tensor": 2}, 2),
    "context": ({"expert": 4, "context": 2}, 1),
}
# How rows and heads of attention are spread; rows in parts are for the reference.
ATTENTION = {
    "heads": {"fsdp": 2, "tensor": 4},
    "lengths": {"fsdp": 4, "context": 2},
}
TRAINING = {"data": 2, "fsdp": 4}
MODELS = {
    "fsdp": ({"data": 2, "fsdp": 4}, 2),
    "all": ({"fsdp": 2, "expert": 2, "tensor": 2}, 1),
}
TRAINED = qwen3_next_tiny(1).replace(layers=(LayerKind("full_attention", "dense"),))
CONFIG = qwen3_next_tiny(2).replace(remat_policy="full")

random = np.random.default_rng(0)
X = np.float32(random.normal(size=(8, 6, MOE.hidden_size)))
ROUTER = np.float32(random.normal(size=(MOE.hidden_size, MOE.num_experts)))
WANTED = np.float32(random.normal(size=X.shape))
SEGMENTS = np.ones((8, 6), np.int32)
SEGMENTS[0, 3:] = SEGMENTS[5] = 0
TOKENS = random.integers(0, CONFIG.vocab_size, (8, 12), dtype=np.int32)


def expert_results(mesh, chunks):
    """Output and gradients of the experts alone; some tokens are padding."""
    weights = draw_tree(experts.param_specs(MOE), jax.random.key(0), "float32")
    context = shared.Context.create(
        X.shape[:2],
        segment_ids=SEGMENTS,
        axis_rules=() if mesh is None else AXIS_RULES,
        expert_chunks=chunks,
    )

    def total(weights, x):
        routing = route(x.reshape(-1, x.shape[-1]) @ ROUTER, 2, normalize=True)
        y = experts.apply(weights, x, routing, context, config=MOE)
        return (y * WANTED).sum(), y

    def run(weights, x):
        grads, y = jax.grad(total, argnums=(0, 1), has_aux=True)(weights, x)
        return {"y": y, "x": grads[1], **grads[0]}

    if mesh is None:
        return jax.jit(run)(weights, X)
    axes = {name: spec.axes for name, spec in experts.param_specs(MOE).items()}
    places = sharding.tree_shardings(weights, axes, mesh)
    with jax.set_mesh(mesh):
        return jax.jit(run)(jax.device_put(weights, places), X)


def attention_results(mesh, kernel="splash_interpreted"):
    """Output and gradients of attention to rows of 128, by a kernel."""
    random = np.random.default_rng(0)
    q, k, v, wanted = (
        np.float32(random.normal(size=(8, 128, heads, 64))) for heads in (8, 4, 4, 8)
    )
    ids = np.ones((8, 128), np.int32)
    ids[0, 50:] = 2
    ids[1, :9] = 0

    def attend(q, k, v, ids):
        rules = () if mesh is None else AXIS_RULES
        context = shared.Context.create(
            ids.shape, segment_ids=ids, axis_rules=rules, attention_kernel=kernel
        )
        index = jax.numpy.cumsum(ids > 0, axis=1, dtype=np.int32) - 1
        own = Keys(k, v, context.segment_ids, index)
        return attend_to_own(q, context, own, scale=0.125)

    def run(q, k, v, ids):
        y, transpose = jax.vjp(lambda *heads: attend(*heads, ids), q, k, v)
        return dict(zip("yqkv", (y, *transpose(wanted)), strict=True))

    if mesh is None:
        return jax.jit(run)(q, k, v, ids)
    names = "batch", "length", "heads", None
    at = sharding.partition_spec(names, AXIS_RULES, mesh.axis_names)
    with jax.set_mesh(mesh):
        heads = jax.device_put((q, k, v), jax.sharding.NamedSharding(mesh, at))
        return jax.jit(run)(*heads, ids)


def model_results(frontend, mesh, chunks):
    """Loss and gradients of a model."""
    config = CONFIG
    if mesh is not None:
        config = config.replace(axis_rules=AXIS_RULES, expert_chunks=chunks)
    params = shared.init_params(jax.random.key(0), config)
    function = zoo_nnx.as_function(zoo_nnx.from_params(config, params))
    if frontend == "linen":
        function = zoo_linen.as_function(zoo_linen.Decoder(config))

    def step(params, tokens):
        metrics, grads = training.gradients(function, params, {"tokens": tokens})
        named = {path_text(path): leaf for path, leaf in flatten(grads)}
        return {"loss": metrics.loss, "norm": metrics.gradient_norm, **named}

    if mesh is None:
        return jax.jit(step)(params, TOKENS)
    places = sharding.tree_shardings(params, shared.logical_axes(config), mesh)
    with jax.set_mesh(mesh):
        rows = sharding.partition_spec(("batch", None), AXIS_RULES, mesh.axis_names)
        tokens = jax.device_put(TOKENS, jax.sharding.NamedSharding(mesh, rows))
        return jax.jit(step)(jax.device_put(params, places), tokens)


def training_results(frontend, sizes):
    """Losses of three steps, the third again after a resume, and a parameter."""
    config, placement = TRAINED, training.Placement()
    if sizes is not None:
        placement = training.Placement(sharding.make_mesh(sizes))
        config = config.replace(axis_rules=placement.rules)
    optimizer = training.make_optimizer(training.OptimizerConfig(), config)
    make = {"linen": zoo_linen.Trainer, "nnx": zoo_nnx.Trainer}[frontend]
    batches = training.data.SyntheticTokens(config.vocab_size, 8, 12)
    with placement.context(), tempfile.TemporaryDirectory() as folder:
        params = training.draw_params(jax.random.key(0), config, placement)
        state = training.make_state(params, optimizer, config, placement)
        trainer, losses = make(config, state, optimizer), []
        with Manager(folder, config) as manager:
            for step in range(3):
                if step == 2:
                    manager.save(step, trainer.tree())
                losses.append(trainer.step(placement.batch(batches(step))).loss)
            tree = trainer.tree()
            last = np.asarray(tree["params"]["lm_head"])
            outline = training.abstract_state(optimizer, config, placement)
            restored = manager.restore(outline)
        for leaf, spec in zip(*map(jax.tree.leaves, (tree, outline)), strict=True):
            assert placement.mesh is None or leaf.sharding == spec.sharding
        again = make(config, restored, optimizer)
        losses.append(again.step(placement.batch(batches(2))).loss)
    return {"losses": np.stack(losses), "lm_head": last}


def main(file):
    results = {"experts/whole": expert_results(None, 1)}
    for name, (sizes, chunks) in EXPERTS.items():
        results[f"experts/{name}"] = expert_results(sharding.make_mesh(sizes), chunks)
    results["attention/whole"] = attention_results(None, "reference")
    for name, sizes in ATTENTION.items():
        results[f"attention/{name}"] = attention_results(sharding.make_mesh(sizes))
    results["linen/whole"] = model_results("linen", None, 1)
    for name, (sizes, chunks) in MODELS.items():
        mesh = sharding.make_mesh(sizes)
        for frontend in ("linen", "nnx"):
            results[f"{frontend}/{name}"] = model_results(frontend, mesh, chunks)
    results["training/whole"] = training_results("linen", None)
    for frontend in ("linen", "nnx"):
        results[f"training/{frontend}"] = training_results(frontend, TRAINING)
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
