"""MaxText's side of train.py: answers each line of its input with two numbers.

python benchmarks/train_maxtext.py; needs MaxText 0.2.5, not this project. A line is
"step BATCH LENGTH", answered by CPU and wall seconds of its own training step on random
weights, or "temporary BATCH LENGTH", answered by bytes and 0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import pathlib
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEPS = 3
# The model of configs/qwen3_next_18m.json, in MaxText's words; its own choices for a
# CPU: dense products over experts, since its grouped ones are for accelerators.
MODEL = {
    "model_name": "qwen3-next-80b-a3b",
    "override_model_config": True,
    "base_emb_dim": 256,
    "base_num_decoder_layers": 8,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 64,
    "base_mlp_dim": 256,
    "base_moe_mlp_dim": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 1024,
    "gdn_num_key_heads": 4,
    "gdn_num_value_heads": 8,
    "gdn_key_head_dim": 64,
    "gdn_value_head_dim": 64,
    "gdn_chunk_size": 64,
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    "remat_policy": "full",
    "sparse_matmul": False,
    "megablox": False,
    "scan_layers": True,
}
RUN = {
    "run_name": "train",
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
    "steps": 3,
    "hardware": "cpu",
    "log_config": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
}


def main() -> None:
    spec = importlib.util.find_spec("maxtext")
    base = pathlib.Path(spec.origin).parent / "configs" / "base.yml"
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            build = functools.cache(functools.partial(_build, base, folder))
            build(1, 128)
        version = importlib.metadata.version("maxtext")
        print(f"maxtext {version}, jax {jax.__version__}", flush=True)
        for line in sys.stdin:
            what, *numbers = line.split()
            with contextlib.redirect_stdout(sys.stderr):
                answer = MEASURES[what](build(*map(int, numbers)))
            print(*answer, flush=True)


def _build(base: pathlib.Path, folder: str, batch: int, length: int) -> dict[str, Any]:
    """MaxText's compiled step, as its own ahead-of-time entry point makes it."""
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    size = {"per_device_batch_size": batch, "max_target_length": length}
    given = MODEL | RUN | size | {"base_output_directory": folder}
    flags = [f"{name}={value}" for name, value in given.items()]
    config = pyconfig.initialize(["train", str(base), *flags])
    one_sized = config.remove_size_one_mesh_axis_from_type
    jax.config.update("jax_remove_size_one_mesh_axis_from_type", one_sized)
    devices = maxtext_utils.create_device_mesh(config, jax.devices())
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    shapes, _, states, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, states = sharding.maybe_update_params_sharding_with_opt(config, states)
    data = sharding.get_input_data_sharding(config, mesh)
    step, inputs, outputs, static, donated = (
        maxtext_utils.get_functional_train_with_signature(
            train.train_step, data, states, model, config, params
        )
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        compiled = (
            jax.jit(
                step,
                in_shardings=inputs,
                out_shardings=outputs,
                static_argnums=static,
                donate_argnums=donated,
            )
            .lower(*shapes)
            .compile()
        )
        state = jax.tree_util.tree_map_with_path(_first_value, shapes[0])
    batch_of = {name: _row(name, leaf, config) for name, leaf in shapes[1].items()}
    return {"step": compiled, "state": state, "batch": batch_of, "mesh": mesh}


def _first_value(path: Any, leaf: Any) -> Any:
    """Small random weights; what the optimizer holds starts from zero."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = jax.random.key(0)
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    if leaf.dtype == jax.dtypes.float0 or not jnp.issubdtype(leaf.dtype, np.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    name = jax.tree_util.keystr(path)
    if "opt_state" in name:
        return jnp.zeros(leaf.shape, leaf.dtype)
    if "A_log" in name:
        return jnp.full(leaf.shape, np.log(4), leaf.dtype)
    values = np.random.default_rng(1).standard_normal(leaf.shape)
    return jnp.asarray(0.02 * values, leaf.dtype)


def _row(name: str, leaf: Any, config: Any) -> Any:
    if "segment" in name:
        return jnp.ones(leaf.shape, leaf.dtype)
    if "position" in name:
        return jnp.broadcast_to(jnp.arange(leaf.shape[1], dtype=leaf.dtype), leaf.shape)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, leaf.shape)
    return jnp.asarray(tokens, leaf.dtype)


def step(built: dict[str, Any]) -> tuple[float, float]:
    state = built["state"]
    with jax.set_mesh(built["mesh"]):
        start = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            state, metrics = built["step"](state, built["batch"])
        jax.block_until_ready((state, metrics))
        ends = time.process_time(), time.perf_counter()
    built["state"] = state
    return tuple((end - begin) / STEPS for end, begin in zip(ends, start, strict=True))


def temporary(built: dict[str, Any]) -> tuple[float, float]:
    return built["step"].memory_analysis().temp_size_in_bytes, 0.0


MEASURES = {"step": step, "temporary": temporary}

if __name__ == "__main__":
    main()
