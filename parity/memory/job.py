"""A step of training, compiled for devices that are not there."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from parity.programs.topology import CompiledMemory, compiled_memory
from shared import sharding, training
from shared.training.step import DecoderFunction


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

    @property
    def placement(self) -> training.Placement:
        """Of the step's arrays."""
        return training.Placement(self.mesh, self.config.axis_rules)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says of a step.

    Attributes:
      memory: bytes on each device.
      seconds: that compiling took.
      text: the compiled program (see `scheduled.read`).
    """

    memory: CompiledMemory
    seconds: float
    text: str


def lower(job: Job, frontend: str) -> jax.stages.Lowered:
    """The step of one frontend, sharded over the mesh; no array is made.

    Raises:
      ShardingError: the model or the batch cannot be spread over the mesh.
    """
    traced = trace(job, frontend)
    with job.placement.context():
        return traced.lower()


def trace(job: Job, frontend: str) -> jax.stages.Traced:
    """The step of one frontend before it is lowered; raises as `lower`."""
    config, placement = job.config, job.placement
    optimizer = training.make_optimizer(job.optimizer, config)
    state = training.abstract_state(optimizer, config, placement)
    shape = job.batch, job.length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placement.rows(shape))
    step = functools.partial(
        training.train_step,
        decoder_function(config, frontend),
        optimizer,
        options=job.options,
    )
    with placement.context():
        return training.compile_step(step, state).trace(state, {"tokens": tokens})


def compile_step(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles a step; minutes for a large model."""
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text() or ""
    return Compiled(compiled_memory(compiled), seconds, text)


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """The mesh of a job; without sizes all devices along `fsdp`."""
    return sharding.make_mesh(sizes or {"fsdp": -1}, devices)


def decoder_function(config: shared.DecoderConfig, frontend: str) -> DecoderFunction:
    """The model of a config in a frontend, without parameters of its own."""
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    return zoo_nnx.as_function(decoders.abstract_nnx(config))
