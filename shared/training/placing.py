"""Where a batch stands on a mesh, in one process or in many. B batch, T time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shared.sharding import AXIS_RULES, AxisRules, ShardingError, partition_spec

_NAMES = (None, "batch", "length")  # of positions [3, B, T]; others have no first one


def place_batch(
    batch: Mapping[str, Any], mesh: Mesh, rules: AxisRules = AXIS_RULES
) -> dict[str, jax.Array]:
    """A batch on the mesh, of which each process gives the part of its own devices.

    With `jax.distributed` the rows of the processes together are the batch, in the
    order of the mesh; where the mesh spreads rows inside of processes only, all give
    the same ones. One process alone gives all rows.

    Example usage::

      >>> import jax, numpy as np
      >>> from shared import sharding, training
      >>> mesh = sharding.make_mesh({"data": 1}, jax.devices()[:1])
      >>> batch = training.place_batch({"tokens": np.zeros((4, 8), np.int32)}, mesh)
      >>> batch["tokens"].shape
      (4, 8)

    Args:
      batch: arrays of the host, as `gradients` takes them.
      mesh: of the devices of all processes.
      rules: see `shared.sharding`.

    Raises:
      ShardingError: rows or tokens do not divide by the mesh axes that they get.
    """
    placed = {}
    for name, leaf in batch.items():
        array = np.asarray(leaf)
        spec = partition_spec(_NAMES[-array.ndim :], rules, mesh.axis_names)
        try:
            placed[name] = jax.make_array_from_process_local_data(
                NamedSharding(mesh, spec), array
            )
        except ValueError as error:
            raise ShardingError(
                f"{name} {list(array.shape)} of a batch cannot be spread by {spec} on "
                f"a mesh of {dict(mesh.shape)}: give each process as many rows as its "
                f"devices divide. {error}"
            ) from None
    return placed
