"""Lists what is in a checkpoint: paths, types, shapes, sizes, digests.

parity inspect CHECKPOINT [flags]

A checkpoint is what `parity diff` compares: an orbax folder, a folder or a file of
safetensors, an npz or a Flax msgpack file. Only its metadata is read, unless digests
are asked for: then every leaf is read once, a few MiB at a time. A digest is the
SHA-256 of the entries in C order, little-endian; it does not depend on the format. Of a
checkpoint of ours, layout and source are told, and digests are compared with those in
its manifest.
On a terminal it is a table, elsewhere a line a leaf. Names in safetensors files are not
split at dots: there --prefix takes a whole name.
Exit status 0: all of it can be read; 1: something in it cannot, or is not what the
manifest says; 2: bad input.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import rich.console
import rich.markup
import rich.table
from absl import flags

from parity.cli import UsageError, check_files, define_step, say
from parity.cli.progress import progress
from shared.checkpoint.manifest import (
    Manifest,
    as_dict,
    check_leaves,
    manifest_of,
)
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
    """What is known of a leaf; `digest` is None where it was not asked for.

    `expected` is the digest in the manifest, if there is one.
    """

    path: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    digest: str | None
    expected: str | None = None


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
    manifest = _manifest(store, arguments[0])
    if options["prefix"]:
        store = store.under(options["prefix"])
    rows = list(_rows(store, options, manifest))
    changed = [
        row
        for row in rows
        if row.digest and row.expected and row.expected != row.digest
    ]
    if options["json"]:
        text = json.dumps(_as_dict(store, rows, manifest), indent=2) + "\n"
        pathlib.Path(options["json"]).write_text(text, encoding="utf-8")
    _print(console, store, rows)
    if manifest is not None:
        say(console, _layout(manifest))
    for row in changed:
        say(console, f"changed: {row.path}: the manifest says {row.expected}")
    return 1 if store.refused or changed else 0


def _manifest(store: Store, argument: str) -> Manifest | None:
    """The manifest of a checkpoint, which is compared with what there is.

    Raises:
      CheckpointError: paths, shapes or dtypes differ.
    """
    found = manifest_of(store, argument)
    if found is not None:
        check_leaves(store, found)
    return found


def _layout(manifest: Manifest) -> str:
    parts = [f"{manifest.tree} tree"]
    parts += [f"{name}={value}" for name, value in (manifest.layout or {}).items()]
    if manifest.source:
        parts.append(f"from {manifest.source}")
    return f"manifest: {', '.join(parts)}, written by {manifest.writer}"


def _rows(
    store: Store, options: Mapping[str, Any], manifest: Manifest | None
) -> Iterator[Row]:
    parts = [part for part in (options["prefix"] or "").split("/") if part]
    above = "".join(f"{part}/" for part in parts)
    total = sum(leaf.nbytes for leaf in store.leaves.values())
    with contextlib.ExitStack() as stack:
        advance = None
        if options["digests"]:
            advance = stack.enter_context(progress(total, "digests"))
        for path, leaf in store.leaves.items():
            text, found, known = path_text(path), None, None
            if options["digests"]:
                found = digest(leaf, f"{store.path}:{text}", advance)
            if manifest is not None:
                known = manifest.leaves[above + text].sha256
            yield Row(text, leaf.type_name, leaf.shape, leaf.nbytes, found, known)


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


def _as_dict(
    store: Store, rows: Sequence[Row], manifest: Manifest | None
) -> dict[str, Any]:
    return {
        "path": store.path,
        "format": store.format,
        "step": store.step,
        "notes": store.notes,
        "manifest": None if manifest is None else _without_leaves(manifest),
        "bytes": _total(rows),
        "leaves": [row._asdict() for row in rows],
        "refused": {path_text(path): why for path, why in store.refused.items()},
    }


def _without_leaves(manifest: Manifest) -> dict[str, Any]:
    return {name: v for name, v in as_dict(manifest).items() if name != "leaves"}
