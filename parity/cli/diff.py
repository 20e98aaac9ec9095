"""Compares two checkpoints, of any format and frontend, by path and to the bit.

parity diff LEFT RIGHT [flags]

Each is an orbax folder (a tree, a checkpoint, or a manager's folder with its steps), a
folder of safetensors with or without an index, or a safetensors, npz or Flax msgpack
file. At most a part of one pair of leaves is in memory. Of orbax, it is the chunks that
the part lies in, about twice: a chunk is a leaf, or its shard, unless it was saved with
`chunk_byte_size`. Of npz, an array in Fortran order is read whole.
Exit status 0: equal; 1: something differs; 2: bad input.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.console
from absl import flags

from parity.cli import UsageError, check_files, define_step, say
from parity.diff import Diff, diff
from shared.stores import Store, open_store

SIDES = ("left", "right")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    define_step(values)
    for side in SIDES:
        flags.DEFINE_string(
            f"{side}_prefix",
            None,
            f"Compare only what is below this path in {side.upper()}, such as params.",
            flag_values=values,
        )
    flags.DEFINE_integer(
        "show",
        20,
        "Differences to print; the JSON has all.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_string("json", None, "Write the result there.", flag_values=values)


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Compares two checkpoints."""
    if len(arguments) != 2:
        raise UsageError(f"Give two checkpoints to compare. Got {len(arguments)}.")
    check_files(options, ["json"])
    stores = [open_store(argument, options["step"]) for argument in arguments]
    if options["step"] is not None and all(store.step is None for store in stores):
        raise UsageError(f"--step={options['step']}: neither checkpoint has steps.")
    for i, side in enumerate(SIDES):
        if options[f"{side}_prefix"]:
            stores[i] = stores[i].under(options[f"{side}_prefix"])
    for side, store in zip(SIDES, stores, strict=True):
        say(console, f"{side}: {_describe(store)}")
    found = diff(stores[0], stores[1], names=SIDES)
    _print(console, found, options["show"])
    if options["json"]:
        data = _as_dict(stores, found)
        pathlib.Path(options["json"]).write_text(json.dumps(data, indent=2) + "\n")
    return 0 if found.equal else 1


def _describe(store: Store) -> str:
    notes = "".join(f"; {note}" for note in store.notes)
    return f"{store.format}, {len(store.leaves):,} leaves: {store.path}{notes}"


def _print(console: rich.console.Console, found: Diff, limit: int) -> None:
    for note in (*found.notes, *_not_finite(found)):
        say(console, f"note: {note}")
    for difference in found.differences[:limit]:
        say(console, str(difference))
    if len(found.differences) > limit:
        say(console, f"and {len(found.differences) - limit:,} more")
    counted = f"{found.leaves:,} leaves and {found.elements:,} entries compared"
    if found.equal:
        say(console, f"equal to the bit: {counted}")
    else:
        say(console, f"DIFFERENT: {len(found.differences):,} differences; {counted}")


def _not_finite(found: Diff) -> list[str]:
    if not found.not_finite:
        return []
    counts = [sum(pair[i] for pair in found.not_finite.values()) for i in range(2)]
    return [
        f"{counts[0]:,} entries of left and {counts[1]:,} of right are NaN or "
        f"infinite, in {len(found.not_finite):,} leaves: "
        f"{next(iter(found.not_finite))}"
    ]


def _as_dict(stores: Sequence[Store], found: Diff) -> dict[str, Any]:
    return {
        "target": f"{stores[0].path} against {stores[1].path}",
        "ok": found.equal,
        **{
            side: {
                "path": store.path,
                "format": store.format,
                "step": store.step,
                "leaves": len(store.leaves),
                "notes": store.notes,
            }
            for side, store in zip(SIDES, stores, strict=True)
        },
        "leaves": found.leaves,
        "elements": found.elements,
        "notes": found.notes,
        "not_finite": found.not_finite,
        "differences": [
            _plain(d._asdict() | _values(found, d.path)) for d in found.differences
        ],
    }


def _values(found: Diff, path: str) -> dict[str, Any]:
    return found.values[path]._asdict() if path in found.values else {}


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Infinity as text: JSON has none."""
    infinite = (float("inf"), float("-inf"))
    return {key: str(v) if v in infinite else v for key, v in data.items()}
