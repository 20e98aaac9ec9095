"""Where arrays stand on a mesh of devices: from logical axis names to mesh axes.

Every dimension of a parameter, and of the activations that matter, has a name
(`ParamSpec.axes`). Rules say which mesh axes a name is spread over, and one function
reads them for both frontends, for parameters and activations alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from shared.trees import flatten, path_text

MeshAxes = str | tuple[str, ...] | None
AxisRules = tuple[tuple[str, MeshAxes], ...]
Names = Sequence[str | None]

# data: copies of the model. fsdp: each device holds a part of every matrix, and gathers
# the rest when it is wanted. tensor: parts of heads and widths, never gathered. expert:
# whole experts, to which tokens are sent. context: parts of the sequences.
# A length is that of the tokens of a call, positions are those of a cache.
MESH_AXES = ("data", "fsdp", "expert", "tensor", "context")
AXIS_RULES: AxisRules = (
    ("batch", ("data", "fsdp", "expert")),
    ("length", "context"),
    ("positions", None),
    ("expert", "expert"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("embed", ("fsdp", "context")),
    ("embed", "fsdp"),
    ("blocks", None),
    ("layers", None),
)


MOST_SHOWN = 20  # lines of one sort in an error message


class ShardingError(ValueError):
    """Rules, a mesh and arrays that do not go together."""


def partition_spec(
    names: Names, rules: AxisRules, mesh_axes: Sequence[str]
) -> PartitionSpec:
    """The mesh axes of each dimension.

    Rules are taken in order. A rule holds for the dimension of its name if no rule has
    done so before and no mesh axis of it is taken by another dimension: so the first
    that fits wins, and no mesh axis is used twice. Mesh axes that the mesh has not are
    left out of rules; a rule that has none left does not fit.

    Example usage::

      >>> from shared import sharding
      >>> rules = (("embed", "fsdp"), ("mlp", "tensor"), ("embed", "expert"))
      >>> axes = ("fsdp", "tensor", "expert")
      >>> tuple(sharding.partition_spec(("embed", "mlp"), rules, axes))
      ('fsdp', 'tensor')

    Args:
      names: of the dimensions; None: not spread.
      rules: (name, mesh axes) in order.
      mesh_axes: that there are.

    Raises:
      ShardingError: a name is in no rule, or stands for two dimensions.
    """
    _check_names(names, rules)
    found: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name, axes in rules:
        present = tuple(axis for axis in as_tuple(axes) if axis in mesh_axes)
        fits = axes is None or (present and not taken & set(present))
        if name in names and name not in found and fits:
            found[name] = present
            taken |= set(present)
    return PartitionSpec(
        *(_entry(found.get(name, ())) if name else None for name in names)
    )


def _check_names(names: Names, rules: AxisRules) -> None:
    known = {name for name, _ in rules}
    given = [name for name in names if name is not None]
    missing = sorted(set(given) - known)
    if missing:
        raise ShardingError(
            f"No rule says where the axis {missing[0]!r} of {tuple(names)} goes. There "
            f"are rules for {', '.join(sorted(known)) or 'nothing'}: add "
            f"({missing[0]!r}, None), or the mesh axes to spread it over."
        )
    if len(set(given)) < len(given):
        raise ShardingError(
            f"The axes {tuple(names)} have one name twice: dimensions that are spread "
            "apart need names of their own."
        )


def decode_rules(rules: AxisRules) -> AxisRules:
    """The rules of a step of one token a row, and of the caches that it reads.

    One token is not spread: rows get the mesh axes of the length besides their own,
    where they fit; all else stands where it stood.

    Example usage::

      >>> from shared import sharding
      >>> rules = (("batch", "data"), ("length", "context"), ("heads", "tensor"))
      >>> sharding.decode_rules(rules)[:2]
      (('length', None), ('batch', ('data', 'context')))
    """
    if not rules:
        return ()
    freed: tuple[str, ...] = ()
    for name, axes in rules:
        if name == "length":
            freed += tuple(axis for axis in as_tuple(axes) if axis not in freed)
    changed: list[tuple[str, MeshAxes]] = [("length", None)]
    for name, axes in rules:
        own = as_tuple(axes)
        more = tuple(axis for axis in freed if axis not in own)
        if name == "batch" and more:
            changed.append((name, own + more))
        if name != "length":
            changed.append((name, axes))
    return tuple(changed)


def as_tuple(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh axes of a rule or of an entry of a `PartitionSpec`; none: ()."""
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _entry(axes: tuple[str, ...]) -> MeshAxes:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def make_mesh(
    sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes of `sizes`, in the order of `MESH_AXES`.

    Args:
      sizes: of the axes; one may be -1, for all devices that are left.
      devices: None: all there are.

    Raises:
      ShardingError: an axis is unknown, or the sizes do not make up the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    unknown = sorted(set(sizes) - set(MESH_AXES))
    if unknown:
        raise ShardingError(
            f"A mesh has no axis {unknown[0]!r}. There are {', '.join(MESH_AXES)}."
        )
    named = {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}
    given = math.prod(size for size in named.values() if size != -1)
    if list(named.values()).count(-1) == 1 and given and len(devices) % given == 0:
        named = {a: len(devices) // given if s == -1 else s for a, s in named.items()}
    if math.prod(named.values()) != len(devices) or min(named.values(), default=1) < 1:
        said = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ShardingError(
            f"A mesh of {said or 'no axes'} does not make up the {len(devices)} "
            "devices: the product of the sizes must be their number (one size may be "
            "-1)."
        )
    return jax.make_mesh(
        tuple(named.values()),
        tuple(named),
        axis_types=(AxisType.Auto,) * len(named),
        devices=devices,
    )


def tree_shardings(
    shapes: Mapping[str, Any],
    axes: Mapping[str, Any],
    mesh: Mesh | AbstractMesh,
    rules: AxisRules = AXIS_RULES,
) -> dict[str, Any]:
    """The sharding of every leaf.

    Args:
      shapes: tree of arrays or `jax.ShapeDtypeStruct`.
      axes: the same tree of axis names, one a dimension (`shared.logical_axes`).
      mesh: of devices.
      rules: see `partition_spec`.

    Raises:
      ShardingError: a name has no rule, or a dimension cannot be divided; the leaves
        that cannot are listed.
    """
    places: dict[str, Any] = jax.tree.map(
        lambda _, names: NamedSharding(
            mesh, partition_spec(names, rules, mesh.axis_names)
        ),
        dict(shapes),
        dict(axes),
    )
    named, spread = dict(flatten(axes)), dict(flatten(places))
    problems = []
    for path, leaf in flatten(shapes):
        dimensions = zip(named[path], leaf.shape, spread[path].spec, strict=True)
        for name, size, entry in dimensions:
            parts = math.prod(mesh.shape[axis] for axis in as_tuple(entry))
            if size % parts:
                problems.append(
                    f"{path_text(path)}: {name} of {size} over {entry} of {parts}"
                )
    if problems:
        more = len(problems) - MOST_SHOWN
        problems[MOST_SHOWN:] = [f"and {more} more"] if more > 0 else []
        raise ShardingError(
            "These dimensions do not divide by the mesh axes that rules give them; "
            "change the mesh, or give the axis another rule (for a vocabulary, "
            "vocab_padding):\n  " + "\n  ".join(problems)
        )
    return places


def bytes_held(leaf: Any, place: jax.sharding.Sharding | None) -> int:
    """Bytes of an array, abstract or not, on each device; None: on the only one."""
    shape = leaf.shape if place is None else place.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def constrain(x: Array, names: Names, rules: AxisRules) -> Array:
    """Says where an activation stands on the mesh at hand (`jax.set_mesh`).

    Without rules or a mesh it does nothing. Of the mesh axes that do not divide a
    dimension, such as those of one row in decoding, it says nothing.
    """
    spec = activation_spec(x.shape, names, rules)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def activation_spec(
    shape: Sequence[int], names: Names, rules: AxisRules
) -> PartitionSpec | None:
    """`partition_spec` on the mesh at hand; None: there are no rules or no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return None
    return dividing_spec(shape, names, mesh, rules)


def dividing_spec(
    shape: Sequence[int], names: Names, mesh: Mesh | AbstractMesh, rules: AxisRules
) -> PartitionSpec:
    """`partition_spec` without the mesh axes that do not divide a dimension."""
    spec = partition_spec(names, rules, mesh.axis_names)
    entries = zip(shape, spec, strict=True)
    return PartitionSpec(*(_dividing(size, axes, mesh.shape) for size, axes in entries))


def zeros(shape: Sequence[int], dtype: Any, names: Names, rules: AxisRules) -> Array:
    """Zeros that stand on the mesh at hand from the start, as `constrain` has it."""
    spec = activation_spec(shape, names, rules)
    if spec is None:
        return jnp.zeros(shape, dtype)
    return _zeros(tuple(shape), jnp.dtype(dtype), spec)


# Compiled, so that no device ever holds all of them.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), spec)


def partition_spec_here(names: Names, rules: AxisRules) -> PartitionSpec:
    """`partition_spec` on the mesh at hand (`jax.set_mesh`)."""
    mesh_axes = jax.sharding.get_abstract_mesh().axis_names
    return partition_spec(names, rules, mesh_axes)


def _dividing(size: int, axes: MeshAxes, sizes: Mapping[str, int]) -> MeshAxes:
    kept: tuple[str, ...] = ()
    for axis in as_tuple(axes):
        if size % (math.prod(sizes[a] for a in kept) * sizes[axis]) == 0:
            kept += (axis,)
    return _entry(kept)
