"""Lists what is in a checkpoint: paths, types, shapes, sizes, digests.

parity inspect CHECKPOINT [flags]

A checkpoint is what `parity diff` compares: an orbax folder, a folder or a file of
safetensors, an npz or a Flax msgpack file. Only its metadata is read, unless digests
are asked for: then every leaf is read once, a few MiB at a time. A digest is the
SHA-256 of the entries in C order, little-endian; it does not depend on the format.
On a terminal it is a table, elsewhere a line a leaf. Names in safetensors files are not
split at dots: there --prefix takes a whole name.
Exit status 0: all of it can be read; 1: something in it cannot; 2: bad input.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import rich.console
import rich.markup
import rich.progress
import rich.table
from absl import flags

from parity.cli import UsageError, check_files, define_step, say
from shared.stores import Store, digest, open_store, path_text


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    define_step(values)
    flags.DEFINE_string(
        "prefix", None, "List only what is below this path.", flag_values=values
    )
    flags.DEFINE_bool(
        "digests", False, "Read every leaf and print its digest.", flag_values=values
    )
    flags.DEFINE_string("json", None, "Write the list there.", flag_values=values)


class Row(NamedTuple):
    """What is known of a leaf; `digest` is None where it was not asked for."""

    path: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    digest: str | None


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Lists one checkpoint."""
    if len(arguments) != 1:
        raise UsageError(f"Give one checkpoint to inspect. Got {len(arguments)}.")
    check_files(options, ["json"])
    store = open_store(arguments[0], options["step"])
    if options["step"] is not None and store.step is None:
        raise UsageError(f"--step={options['step']}: {store.path} has no steps.")
    if options["prefix"]:
        store = store.under(options["prefix"])
    rows = list(_rows(store, options["digests"]))
    if options["json"]:
        text = json.dumps(_as_dict(store, rows), indent=2) + "\n"
        pathlib.Path(options["json"]).write_text(text, encoding="utf-8")
    _print(console, store, rows)
    return 1 if store.refused else 0


def _rows(store: Store, digests: bool) -> Iterator[Row]:
    sizes = {path: leaf.nbytes for path, leaf in store.leaves.items()}
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
    )
    err = rich.console.Console(stderr=True)
    quiet = not (digests and err.is_terminal)
    with rich.progress.Progress(*columns, console=err, disable=quiet) as bar:
        task = bar.add_task("digests", total=sum(sizes.values()))
        for path, leaf in store.leaves.items():
            text, found = path_text(path), None
            if digests:
                found = digest(
                    leaf, f"{store.path}:{text}", lambda n: bar.advance(task, n)
                )
            yield Row(text, leaf.type_name, leaf.shape, sizes[path], found)


def _print(console: rich.console.Console, store: Store, rows: Sequence[Row]) -> None:
    for note in store.notes:
        say(console, f"note: {note}")
    lines = [_cells(row) for row in rows]
    if lines and console.is_terminal:
        console.print(_table(lines), highlight=False)
    else:  # a line a leaf, for grep and diff
        for cells in lines:
            say(console, " ".join(cells))
    for path, why in store.refused.items():
        say(console, f"cannot be read: {path_text(path)}: {why}")
    entries = sum(leaf.size for leaf in store.leaves.values())
    parts = [f"{len(rows):,} leaves, {entries:,} entries, {_total(rows):,} bytes"]
    parts += [f"{t} {size:,}" for t, size in _by_type(rows).items()]
    say(console, f"{store.format}: {'; '.join(parts)}")


def _table(lines: Sequence[Sequence[str]]) -> rich.table.Table:
    table = rich.table.Table(box=None, pad_edge=False)
    for name in ("path", "type", "shape", "bytes", "sha256")[: len(lines[0])]:
        justify: Literal["left", "right"] = "right" if name == "bytes" else "left"
        table.add_column(name, overflow="fold", justify=justify)
    for cells in lines:
        table.add_row(*map(rich.markup.escape, cells))
    return table


def _cells(row: Row) -> list[str]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    cells = [row.path, row.type, shape, f"{row.bytes:,}"]
    return [*cells, row.digest] if row.digest else cells


def _total(rows: Sequence[Row]) -> int:
    return sum(row.bytes for row in rows)


def _by_type(rows: Sequence[Row]) -> dict[str, int]:
    """Bytes of each type."""
    found: dict[str, int] = {}
    for row in rows:
        found[row.type] = found.get(row.type, 0) + row.bytes
    return found


def _as_dict(store: Store, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "path": store.path,
        "format": store.format,
        "step": store.step,
        "notes": store.notes,
        "bytes": _total(rows),
        "leaves": [row._asdict() for row in rows],
        "refused": {path_text(path): why for path, why in store.refused.items()},
    }
