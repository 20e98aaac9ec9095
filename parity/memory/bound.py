"""What a step of training needs at the least, by arithmetic.

Between the forward and the backward pass of a model whose layers are all rematerialised
a device holds the residual stream before each layer. Whatever a layer does, its
experts' matrices must be there to be multiplied, and their gradient to be written. And
gradients wait for the optimizer, each as large as its parameter.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import shared
from parity.memory.job import Job
from shared import sharding


class Bound(NamedTuple):
    """Bytes on each device.

    Attributes:
      streams: the residual stream before each layer.
      matrices: the experts' matrices of one layer as they are multiplied, a part of
        them where they are gathered in parts, and the gradient of one of the three.
      gradients: of all parameters.
    """

    streams: int
    matrices: int
    gradients: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(self)


def bound(job: Job) -> Bound:
    """The least that a step with rematerialised layers needs besides its arguments."""
    config = job.config
    itemsize = jnp.dtype(config.dtype).itemsize
    rules, axes = config.axis_rules, job.mesh.axis_names
    rows = sharding.partition_spec(("batch", "length"), rules, axes)
    tokens = job.batch * job.length // math.prod(_sizes(job, rows))
    stream = tokens * config.hidden_size * itemsize
    params = shared.abstract_params(config)
    names = shared.logical_axes(config)
    places = sharding.tree_shardings(params, names, job.mesh, rules)
    held = jax.tree.map(sharding.bytes_held, params, places)
    return Bound(
        streams=config.num_layers * stream,
        matrices=_expert_matrices(job) * itemsize,
        gradients=sum(jax.tree.leaves(held)),
    )


def _sizes(job: Job, spec: PartitionSpec) -> list[int]:
    return [job.mesh.shape[a] for entry in spec for a in sharding.as_tuple(entry)]


def _expert_matrices(job: Job) -> int:
    """Elements of the experts of one layer that a device has at once, and a gradient.

    Along the axes of the model width they are gathered; along those of experts and of
    the expert width each device keeps to its own.
    """
    moe = job.config.moe
    if moe is None:
        return 0
    spec = sharding.partition_spec(
        ("expert", "embed", "mlp"), job.config.axis_rules, job.mesh.axis_names
    )
    kept = math.prod(_sizes(job, PartitionSpec(spec[0], spec[2])))
    matrix = moe.num_experts * moe.hidden_size * moe.expert_size // kept
    return 4 * matrix // job.config.expert_chunks
