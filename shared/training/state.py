"""The state of training where it is to stand, and a step compiled for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from shared.config import DecoderConfig
from shared.layers import decoder
from shared.sharding import (
    AXIS_RULES,
    AxisRules,
    ShardingError,
    partition_spec,
    tree_shardings,
)
from shared.training.step import init_state, state_shardings


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a run's arrays stand: on a mesh by its rules, or on the default device.

    Attributes:
      mesh: of all devices; None: there is one device.
      rules: see `shared.sharding`; those of the model's activations are in its config.
    """

    mesh: Mesh | None = None
    rules: AxisRules = AXIS_RULES

    def params(self, config: DecoderConfig) -> dict[str, Any] | None:
        """Shardings of the parameters; None without a mesh."""
        if self.mesh is None:
            return None
        shapes, axes = decoder.abstract_params(config), decoder.logical_axes(config)
        return tree_shardings(shapes, axes, self.mesh, self.rules)

    def batch(self, batch: Mapping[str, ArrayLike]) -> dict[str, Any]:
        """A batch [B, T] on the devices.

        Raises:
          ShardingError: its rows or its length do not divide by their mesh axes.
        """
        if self.mesh is None:
            return {name: jnp.asarray(leaf) for name, leaf in batch.items()}
        return {name: self._spread(np.asarray(leaf)) for name, leaf in batch.items()}

    def rows(self, shape: tuple[int, int]) -> NamedSharding:
        """Where an array [B, T] of a batch stands; there must be a mesh.

        Raises:
          ShardingError: its rows or its length do not divide by their mesh axes.
        """
        assert self.mesh is not None
        spec = partition_spec(("batch", "length"), self.rules, self.mesh.axis_names)
        place = NamedSharding(self.mesh, spec)
        try:
            place.shard_shape(shape)
        except ValueError as error:
            raise ShardingError(
                f"A batch of the shape {shape} cannot be spread by {spec} over "
                f"{dict(self.mesh.shape)}: its rows and its length must be multiples."
            ) from error
        return place

    def _spread(self, leaf: np.ndarray) -> jax.Array:
        # Each process has the whole batch, and gives its devices theirs.
        place = self.rows(leaf.shape)
        return jax.make_array_from_callback(leaf.shape, place, leaf.__getitem__)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """In which steps are compiled and run: activations are placed by it."""
        if self.mesh is None:
            return contextlib.nullcontext()
        return jax.set_mesh(self.mesh)


def draw_params(
    key: PRNGKeyArray, config: DecoderConfig, placement: Placement = Placement()
) -> dict[str, Any]:
    """`shared.init_params`, drawn where the parameters are to stand."""
    draw = functools.partial(decoder.init_params, config=config)
    return jax.jit(draw, out_shardings=placement.params(config))(key)


def place_params(
    params: Mapping[str, Any], config: DecoderConfig, placement: Placement = Placement()
) -> dict[str, Any]:
    """Parameters in the dtypes of the config, where they are to stand."""
    specs = decoder.abstract_params(config)
    cast = jax.tree.map(lambda p, s: jnp.asarray(p, s.dtype), dict(params), specs)
    places = placement.params(config)
    placed: dict[str, Any] = cast if places is None else jax.device_put(cast, places)
    return placed


def make_state(
    params: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    config: DecoderConfig,
    placement: Placement = Placement(),
) -> dict[str, Any]:
    """`init_state` of placed parameters, with all else beside them."""
    places = abstract_state(optimizer, config, placement)
    shardings = None
    if placement.mesh is not None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, places)
        del shardings["params"]

    def rest(params: Mapping[str, Any]) -> dict[str, Any]:
        state = init_state(params, optimizer)
        del state["params"]
        return state

    made: dict[str, Any] = jax.jit(rest, out_shardings=shardings)(params)
    return {"params": dict(params), **made}


def abstract_state(
    optimizer: optax.GradientTransformation,
    config: DecoderConfig,
    placement: Placement = Placement(),
) -> dict[str, Any]:
    """Shape, dtype and, on a mesh, place of every leaf: what a restore goes by."""
    make = functools.partial(init_state, optimizer=optimizer)
    shapes: dict[str, Any] = jax.eval_shape(make, decoder.abstract_params(config))
    places = placement.params(config)
    if places is None:
        return shapes
    placed: dict[str, Any] = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=place
        ),
        shapes,
        state_shardings(shapes, places),
    )
    return placed


def compile_step(step: Callable[..., tuple[Any, Any]], state: Any) -> Any:
    """`step`, which takes and gives a state first, as `jit` runs it again and again.

    The state's memory is given to the new one, which stands where the old one stood.
    """
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    on_mesh = any(isinstance(p, NamedSharding) for p in jax.tree.leaves(places))
    return jax.jit(
        step, donate_argnums=0, out_shardings=(places, None) if on_mesh else None
    )
