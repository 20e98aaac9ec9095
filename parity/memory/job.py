"""A step of training, compiled for devices that are not there."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

import shared
import zoo_linen
import zoo_nnx
from parity.programs.topology import CompiledMemory, compiled_memory
from shared import sharding, training
from shared.training.step import DecoderFunction

FRONTENDS = ("linen", "nnx")


@dataclasses.dataclass(frozen=True)
class Job:
    """What is compiled.

    Attributes:
      config: of the model, with where its activations stand (`axis_rules`).
      mesh: of the devices.
      batch: rows of the batch, of all devices together.
      length: tokens of a row.
      optimizer: with its state, it is part of the step.
      options: of the step.
    """

    config: shared.DecoderConfig
    mesh: Mesh
    batch: int
    length: int
    optimizer: training.OptimizerConfig = training.OptimizerConfig()
    options: training.StepOptions = training.StepOptions()


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step.

    Attributes:
      memory: bytes on each device.
      digest: SHA-256 of the StableHLO that was compiled.
      seconds: that compiling took.
      text: the compiled program (see `scheduled.read`).
    """

    memory: CompiledMemory
    digest: str
    seconds: float
    text: str


def lower(job: Job, frontend: str) -> jax.stages.Lowered:
    """The step of one frontend, sharded over the mesh; no array is made.

    Raises:
      ShardingError: the model or the batch cannot be spread over the mesh.
    """
    config, rules = job.config, job.config.axis_rules
    optimizer = training.make_optimizer(job.optimizer, config)
    params = shared.abstract_params(config)
    axes = shared.logical_axes(config)
    places = sharding.tree_shardings(params, axes, job.mesh, rules)
    state = jax.eval_shape(lambda p: training.init_state(p, optimizer), params)
    state_places = training.state_shardings(state, places)
    step = functools.partial(
        training.train_step, _function(config, frontend), optimizer, options=job.options
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(state_places, None))
    with jax.set_mesh(job.mesh):
        return jitted.lower(
            jax.tree.map(_placed, state, state_places), {"tokens": _tokens(job)}
        )


def compile_step(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles a step; minutes for a large model."""
    digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text() or ""
    return Compiled(compiled_memory(compiled), digest, seconds, text)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a job; without sizes all devices along `fsdp`."""
    return sharding.make_mesh(sizes or {"fsdp": -1}, devices)


def _function(config: shared.DecoderConfig, frontend: str) -> DecoderFunction:
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    model = nnx.eval_shape(lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0)))
    return zoo_nnx.as_function(model)


def _placed(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _tokens(job: Job) -> jax.ShapeDtypeStruct:
    spec = sharding.partition_spec(
        ("batch", "length"), job.config.axis_rules, job.mesh.axis_names
    )
    place = NamedSharding(job.mesh, spec)
    tokens = jax.ShapeDtypeStruct((job.batch, job.length), jnp.int32, sharding=place)
    try:
        place.shard_shape(tokens.shape)
    except ValueError as error:
        raise sharding.ShardingError(
            f"A batch of [{job.batch}, {job.length}] tokens does not divide by the "
            f"mesh: {error}"
        ) from None
    return tokens
