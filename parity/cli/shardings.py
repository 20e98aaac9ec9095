"""Says where every parameter stands on a mesh, leaf by leaf, and what a device holds.

parity shardings TARGET --mesh=fsdp=8,tensor=2 [--cache=ROWS,LENGTH] [--rules=FILE] …

TARGET is a preset (see `parity models`) or a folder with a checkpoint, of which only
the config is read; no device is needed. Mesh axes are data, fsdp, expert, tensor and
context. Rules are tried in order, the first that fits a dimension holds, and no mesh
axis is used twice in a leaf; FILE is a JSON list of them, such as
[["embed", "fsdp"], ["vocab", ["tensor", "fsdp"]], ["layers", null]], instead of ours.
With --cache the arrays of a cache for so many rows and positions follow.
Exit status 0: every leaf can be spread so; 2: an axis has no rule, or does not divide.
"""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.table
from absl import flags
from jax.sharding import AbstractMesh

import shared
from parity import zoo
from parity.cli import UsageError, check_files, say
from shared import sharding
from shared.config import FLOAT_DTYPES
from shared.layers import decoder_cache
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
    flags.DEFINE_list(
        "cache", None, "Rows and length of a cache: 32,4096.", flag_values=values
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
    lists = {"parameter": describe(config, sizes, rules)}
    if options["cache"] is not None:
        lists["cache"] = describe_cache(
            config, sizes, rules, *read_cache(options["cache"])
        )
    for name, rows in lists.items():
        console.print(_table(name, rows))
        total, whole = (sum(row[key] for row in rows) for key in _BYTES)
        say(
            console,
            f"{len(rows)} leaves on {math.prod(sizes.values())} devices: "
            f"{total / 1e9:,.3f} GB a device, of {whole / 1e9:,.3f} GB",
        )
    if options["json"]:
        result = {"target": arguments[0], "mesh": sizes, "leaves": lists["parameter"]}
        result |= {"cache": lists["cache"]} if "cache" in lists else {}
        pathlib.Path(options["json"]).write_text(json.dumps(result, indent=2) + "\n")
    return 0


_BYTES = ("bytes", "whole_bytes")


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> rich.table.Table:
    table = rich.table.Table()
    table.add_column(name, no_wrap=True)
    table.add_column("dimensions: axis, size / mesh axes")
    table.add_column("MB a device", justify="right", no_wrap=True)
    for row in rows:
        sizes_of = zip(row["axes"], row["shape"], row["mesh_axes"], strict=True)
        dimensions = (
            f"{axis or '-'} {size}" + f" / {'+'.join(spread)}" * bool(spread)
            for axis, size, spread in sizes_of
        )
        megabytes = f"{row['bytes'] / 1e6:,.3f}"
        table.add_row(row[name], ", ".join(dimensions), megabytes)
    return table


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
    return [
        {"parameter": path_text(path), **_row(leaf, named[path], places[path])}
        for path, leaf in flatten(shapes)
    ]


def describe_cache(
    config: shared.DecoderConfig,
    sizes: Mapping[str, int],
    rules: AxisRules,
    rows: int,
    length: int,
) -> list[dict[str, Any]]:
    """The same of each array of a cache, as `shared.cache_shardings` has it.

    Raises:
      ShardingError: an axis has no rule.
    """
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    cache = jax.eval_shape(functools.partial(shared.init_cache, config, rows, length))
    places = shared.cache_shardings(config, cache, mesh, rules)
    told = decoder_cache.map_named(
        config, lambda leaf, axes: functools.partial(_row, leaf, axes), cache
    )
    named = jax.tree_util.tree_leaves_with_path(told)
    return [
        {"cache": jax.tree_util.keystr(path, simple=True, separator="/"), **row(place)}
        for (path, row), place in zip(named, jax.tree.leaves(places), strict=True)
    ]


def _row(leaf: Any, axes: Sequence[str | None], place: Any) -> dict[str, Any]:
    return {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "axes": list(axes),
        "mesh_axes": [list(sharding.as_tuple(entry)) for entry in place.spec],
        "bytes": sharding.bytes_held(leaf, place),
        "whole_bytes": leaf.dtype.itemsize * leaf.size,
    }


def read_cache(texts: Sequence[str]) -> tuple[int, int]:
    """Rows and length of a cache, from texts like "32" and "4096".

    Raises:
      UsageError: they are not two positive numbers.
    """
    if len(texts) != 2 or not all(t.isdecimal() and int(t) for t in texts):
        raise UsageError(
            f"--cache has {','.join(texts)!r}: it must give rows and positions, such "
            "as 32,4096."
        )
    rows, length = map(int, texts)
    return rows, length


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
