"""Says where every parameter stands on a mesh, leaf by leaf, and what a device holds.

parity shardings TARGET --mesh=fsdp=8,tensor=2 [--rules=FILE] [flags]

TARGET is a preset (see `parity models`) or a folder with a checkpoint, of which only
the config is read; no device is needed. Mesh axes are data, fsdp, expert, tensor and
context. Rules are tried in order, the first that fits a dimension holds, and no mesh
axis is used twice in a leaf; FILE is a JSON list of them, such as
[["embed", "fsdp"], ["vocab", ["tensor", "fsdp"]], ["layers", null]], instead of ours.
Exit status 0: every leaf can be spread so; 2: an axis has no rule, or does not divide.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
import rich.table
from absl import flags
from jax.sharding import AbstractMesh

import shared
from parity import zoo
from parity.cli import UsageError, check_files, say
from shared import sharding
from shared.config import FLOAT_DTYPES
from shared.sharding import AXIS_RULES, MESH_AXES, AxisRules
from shared.trees import flatten, path_text


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    flags.DEFINE_list(
        "mesh", [], "Sizes of the mesh axes: fsdp=8,tensor=2.", flag_values=values
    )
    flags.DEFINE_string("rules", None, "JSON file with rules.", flag_values=values)
    flags.DEFINE_bool(
        "scan_layers", True, "Whether layers are stacked.", flag_values=values
    )
    flags.DEFINE_enum(
        "param_dtype",
        None,
        FLOAT_DTYPES,
        "Of the parameters. Default: the target's.",
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "Write the list there.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Prints the table."""
    if len(arguments) != 1:
        raise UsageError("parity shardings takes one TARGET: a preset or a folder.")
    check_files(options, ["json"])
    config, _ = zoo.resolve(arguments[0], {"scan_layers": options["scan_layers"]})
    if options["param_dtype"]:
        config = config.replace(param_dtype=options["param_dtype"])
    sizes = read_mesh(options["mesh"])
    rules = AXIS_RULES if options["rules"] is None else read_rules(options["rules"])
    rows = describe(config, sizes, rules)
    total, whole = (sum(row[key] for row in rows) for key in ("bytes", "whole_bytes"))

    table = rich.table.Table()
    table.add_column("parameter", no_wrap=True)
    table.add_column("dimensions: axis, size / mesh axes")
    table.add_column("MB a device", justify="right", no_wrap=True)
    for row in rows:
        sizes_of = zip(row["axes"], row["shape"], row["mesh_axes"], strict=True)
        dimensions = (
            f"{axis or '-'} {size}" + f" / {'+'.join(spread)}" * bool(spread)
            for axis, size, spread in sizes_of
        )
        megabytes = f"{row['bytes'] / 1e6:,.3f}"
        table.add_row(row["parameter"], ", ".join(dimensions), megabytes)
    console.print(table)
    devices = math.prod(sizes.values())
    say(
        console,
        f"{len(rows)} leaves on {devices} devices: {total / 1e9:,.3f} GB a device, of "
        f"{whole / 1e9:,.3f} GB",
    )
    if options["json"]:
        result = {"target": arguments[0], "mesh": sizes, "leaves": rows}
        pathlib.Path(options["json"]).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def describe(
    config: shared.DecoderConfig, sizes: Mapping[str, int], rules: AxisRules
) -> list[dict[str, Any]]:
    """Of each parameter: its axes, where it stands, and its bytes on a device.

    Raises:
      ShardingError: an axis has no rule, or a dimension does not divide.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    shapes = shared.abstract_params(config)
    axes = shared.logical_axes(config)
    places = dict(flatten(sharding.tree_shardings(shapes, axes, mesh, rules)))
    named = dict(flatten(axes))
    rows = []
    for path, leaf in flatten(shapes):
        place = places[path]
        size = leaf.dtype.itemsize * math.prod(place.shard_shape(leaf.shape))
        rows.append(
            {
                "parameter": path_text(path),
                "shape": list(leaf.shape),
                "dtype": str(leaf.dtype),
                "axes": list(named[path]),
                "mesh_axes": [list(sharding.as_tuple(entry)) for entry in place.spec],
                "bytes": size,
                "whole_bytes": leaf.dtype.itemsize * leaf.size,
            }
        )
    return rows


def read_mesh(texts: Sequence[str], *, with_rest: bool = False) -> dict[str, int]:
    """Sizes by mesh axis, in their order, from texts like "fsdp=8".

    Args:
      texts: one an axis.
      with_rest: whether a size may be -1, for all devices that are left.

    Raises:
      UsageError: there are none, or one says no size of an axis.
    """
    if not texts:
        raise UsageError(
            f"--mesh is missing: sizes of {', '.join(MESH_AXES)}, such as "
            "--mesh=fsdp=8,tensor=2."
        )
    sizes: dict[str, int] = {}
    for text in texts:
        axis, _, size = text.partition("=")
        is_size = size.isdecimal() or (with_rest and size == "-1")
        if axis not in MESH_AXES or axis in sizes or not is_size:
            raise UsageError(
                f"--mesh has {text!r}: it must give each axis of "
                f"{', '.join(MESH_AXES)} once and a size, such as fsdp=8."
            )
        sizes[axis] = int(size)
    if 0 in sizes.values():
        raise UsageError("--mesh: no axis can have the size 0.")
    return {axis: sizes[axis] for axis in MESH_AXES if axis in sizes}


def read_rules(file: str) -> AxisRules:
    """Rules from a JSON file.

    Raises:
      UsageError: it holds no rules.
    """
    try:
        given = json.loads(pathlib.Path(file).read_text())
    except ValueError as error:
        raise UsageError(f"--rules={file} is no JSON: {error}") from None
    rules: list[tuple[str, Any]] = []
    for rule in given if isinstance(given, list) else [given]:
        if not isinstance(rule, list) or len(rule) != 2 or not _is_rule(*rule):
            raise UsageError(
                f"--rules={file} has {json.dumps(rule)}: a rule is [axis, mesh axis], "
                "[axis, [mesh axes]] or [axis, null]."
            )
        rules.append((rule[0], tuple(rule[1]) if type(rule[1]) is list else rule[1]))
    return tuple(rules)


def _is_rule(name: Any, axes: Any) -> bool:
    several = axes if isinstance(axes, list) else [axes or ""]
    return isinstance(name, str) and all(isinstance(axis, str) for axis in several)
