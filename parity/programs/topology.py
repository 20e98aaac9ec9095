"""Compiling for a TPU that is not there, with libtpu alone (the extra `tpu`)."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class TopologyError(RuntimeError):
    """A topology that cannot be compiled for here."""


class CompiledMemory(NamedTuple):
    """Bytes that a compiled program needs on each device.

    Attributes:
      arguments: of the arguments.
      outputs: of the results.
      temporary: in between.
      code: of the program itself.
    """

    arguments: int
    outputs: int
    temporary: int
    code: int


def topology(name: str) -> Sequence[jax.Device]:
    """The devices of a topology such as "v5p:2x2x1"; they compile but do not run."""
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"Compiling for {name} needs libtpu, which is not installed: "
            'pip install "parity-zoo[tpu]".'
        )
    # libtpu would ask Google Cloud's metadata server what TPU it is on.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        return topologies.get_topology_desc(name, "tpu").devices
    except Exception as error:
        raise TopologyError(
            f"libtpu gives no topology {name!r}: {error}. Names are like v5p:2x2x1. "
            "Only one process may use libtpu at a time: if another one does, wait for "
            "it; if none does, remove /tmp/libtpu_lockfile."
        ) from error


def compile_for(
    device: jax.Device, function: Callable[..., Any], *args: Any
) -> jax.stages.Compiled:
    """A function of positional arguments, arrays or abstract, for one device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    jitted = jax.jit(
        function, in_shardings=sharding, out_shardings=sharding, keep_unused=True
    )
    return jitted.trace(*args).lower().compile()


def compiled_memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """What a compiled program needs."""
    found = compiled.memory_analysis()
    if found is None:
        raise TopologyError("The compiler of this backend tells no memory.")
    return CompiledMemory(
        found.argument_size_in_bytes,
        found.output_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
    )
