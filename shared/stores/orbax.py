"""Orbax folders, by their own tree metadata; the arrays are read with tensorstore.

A tree's folder has `_METADATA` (JSON: keys with their types, and what each value is)
and the arrays, one a name: together in one OCDBT database, or each in a folder. A
checkpoint has a folder an item (`default`), and a manager's folder has one a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorstore

from shared.stores.folders import Folder, read_json
from shared.stores.kv_path import KvPath, context
from shared.stores.store import (
    CheckpointError,
    Leaf,
    Part,
    Path,
    Read,
    Store,
    collect,
    constant,
    some,
    split_name,
)
from shared.stores.tree import key_kind

_TREE = "_METADATA"
_SEQUENCE = 1  # key type of an index; 2 is a dict's key
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")
# Of tensorstore: each thread keeps what it has freed.
FEW_THREADS = {"file_io_concurrency": {"limit": 4}}
_CACHE_BYTES = 32 * 2**20  # of chunks kept decoded, for all arrays of a tree
_UNFINISHED = ".orbax-checkpoint-tmp"


def is_orbax(folder: Folder) -> bool:
    """Whether there is a tree, a checkpoint or steps of a manager."""
    return (
        (folder / _TREE).is_file()
        or (folder / "_CHECKPOINT_METADATA").is_file()
        or bool(_items(folder) or _steps(folder))
    )


def open_folder(folder: Folder, step: int | None = None) -> Store:
    """A tree, or the only tree of a checkpoint, or that of a manager's step.

    Args:
      folder: of any of the three.
      step: which one, where there are several; None: the latest.

    Raises:
      CheckpointError: it is damaged, has no such step, or several trees.
    """
    if _UNFINISHED in folder.name:
        raise CheckpointError(
            f"{folder} was not finished when it was saved: take another step."
        )
    if (folder / _TREE).is_file():
        return _open_tree(folder)
    steps = _steps(folder)
    if steps:
        return _open_step(folder, steps, step)
    items = _items(folder)
    if len(items) == 1:
        return _open_tree(folder / items[0])
    if not items:
        raise CheckpointError(
            f"{folder} is a checkpoint of orbax without a tree ({_TREE}): it is "
            "damaged, or older than orbax's tree metadata; restore and save it again."
        )
    raise CheckpointError(
        f"{folder} has {len(items)} trees. Give one of them: "
        + some([str(folder / item) for item in items], 8)
    )


def _open_step(folder: Folder, steps: Mapping[int, Any], step: int | None) -> Store:
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        known = some([str(number) for number in sorted(steps)], 8)
        raise CheckpointError(f"{folder} has no step {chosen}. It has {known}.")
    store = open_folder(steps[chosen])
    if step is None:
        note = f"step {chosen}, the latest of {len(steps)}"
    else:
        note = f"step {chosen} of {len(steps)}"
    return dataclasses.replace(store, notes=(note, *store.notes), step=chosen)


def _steps(folder: Folder) -> dict[int, Any]:
    found = {}
    for path in folder.iterdir():
        match = re.fullmatch(r"(?:[^.]*_)?(\d+)", path.name)
        if match and path.is_dir() and ((path / _TREE).is_file() or _items(path)):
            found[int(match[1])] = path
    return found


def _items(folder: Folder) -> list[str]:
    paths = [path.parent for path in folder.glob(f"*/{_TREE}")]
    names = [p.name for p in paths if _UNFINISHED not in p.name]
    # A manager's folder may hold its steps' trees directly.
    return sorted(name for name in names if not re.fullmatch(r"(.*_)?\d+", name))


def _open_tree(folder: Folder) -> Store:
    metadata = read_json(folder / _TREE)
    try:
        nodes = [
            (
                tuple(key["key"] for key in node["key_metadata"]),
                _path(node["key_metadata"]),
                node["value_metadata"]["value_type"],
            )
            for node in metadata["tree_metadata"].values()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / _TREE} is not orbax's tree metadata as we know it ({error!r}): "
            "restore and save it again with another version of orbax."
        ) from None
    arrays = _Arrays(folder, metadata)
    counts = Counter(".".join(keys) for keys, _, _ in nodes)

    empty = {path: kind for _, path, kind in nodes if kind in _EMPTY}

    def found() -> Iterator[tuple[Path, Leaf | str]]:
        for keys, path, value_type in nodes:
            name = ".".join(keys)
            if value_type in _ARRAYS and counts[name] > 1:
                yield path, f"orbax stores two arrays as {name}: rename one, save again"
            elif value_type in _ARRAYS:
                yield path, arrays.leaf(name)
            elif value_type == "string":
                yield path, constant(arrays.text(name))
            elif value_type not in _EMPTY:
                yield path, f"orbax's {value_type} is not supported: leave it out"

    store = Store(str(folder), "orbax", {}, boxes=True, empty=empty)
    return collect(store, found())


def _path(keys: list[dict[str, Any]]) -> Path:
    path: Path = ()
    for key in keys:
        if key["key_type"] == _SEQUENCE:
            path += (int(key["key"]),)
        else:
            path += split_name(str(key["key"]))
    return path


class _Arrays:
    """The arrays of one tree, by name."""

    def __init__(self, folder: Folder, metadata: Mapping[str, Any]):
        self._folder = folder
        self._one_file = metadata.get("use_ocdbt", True)
        self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        # Where also zeros are written, a chunk that is not there has been lost.
        self._complete = metadata.get("store_array_data_equal_to_fill_value", False)
        cache = {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}}
        self._context = context(**cache, **FEW_THREADS)
        self._opened: dict[str, Any] = {}
        self._kinds = dict(_kinds(folder))
        self._texts: dict[str, Any] | None = None

    def leaf(self, name: str) -> Leaf:
        """An array, by its name in the folder."""
        array = self._array(name)
        shape, dtype = tuple(array.shape), np.dtype(array.dtype.numpy_dtype)
        chunk = array.chunk_layout.read_chunk.shape or shape
        limit = _band(shape, tuple(chunk)) * dtype.itemsize
        opened = functools.partial(self._reader, name, limit)
        return Leaf(shape, dtype, opened, self._kinds.get(name, ""))

    @contextlib.contextmanager
    def _reader(self, name: str, limit: int) -> Iterator[Read]:
        # A chunk is decoded whole; it is kept until the parts in it are read.
        if 2 * limit <= _CACHE_BYTES:
            yield functools.partial(_read_part, self._array(name))
            return
        cache = {"cache_pool": {"total_bytes_limit": limit + 2**20}}
        array = self._open(name, context(**cache, **FEW_THREADS))
        yield functools.partial(_read_part, array)

    def _array(self, name: str) -> Any:
        """The array, opened once, with a cache that all share."""
        if name not in self._opened:
            self._opened[name] = self._open(name, self._context)
        return self._opened[name]

    def text(self, name: str) -> str:
        """A text, by its name in the folder."""
        if self._texts is None:
            self._texts = read_json(self._folder / "_strings.json")
        return self._texts[name]

    def _open(self, name: str, context: Any) -> Any:
        if self._one_file:
            base = kvstore(self._folder)
            store: Any = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        else:
            store = kvstore(self._folder / name)
        spec = {
            "driver": self._driver,
            "kvstore": store,
            "recheck_cached_data": False,
            "fill_missing_data_reads": not self._complete,
        }
        try:
            opening = tensorstore.open(spec, read=True, open=True, context=context)
            return opening.result()
        except ValueError as error:
            raise CheckpointError(
                f"{self._folder}: the array {name} is in {_TREE} and cannot be opened: "
                f"fetch or write it again. {_brief(error)}"
            ) from None


def _read_part(array: Any, part: Part) -> np.ndarray:
    return np.asarray(array[part].read().result())


def kvstore(folder: Folder) -> Any:
    """What tensorstore opens an array in a folder with."""
    if isinstance(folder, KvPath):
        return folder.kvstore
    return {"driver": "file", "path": f"{folder}/"}


def _kinds(folder: Folder) -> Iterator[tuple[str, str]]:
    for file in (folder / "array_metadatas").glob("process_*"):
        for entry in read_json(file).get("array_metadatas", []):
            array = entry.get("array_metadata", {})
            extension = array.get("ext_metadata") or {}
            if "random_key_impl" in extension:
                yield array["param_name"], key_kind(extension["random_key_impl"])


def _band(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    """Entries in the chunks that parts in C order go back and forth between."""
    first = next((i for i, size in enumerate(chunk) if size > 1), len(chunk))
    return math.prod(chunk[: first + 1]) * math.prod(shape[first + 1 :])


def _brief(error: Exception) -> str:
    """What tensorstore says, without the specification that it repeats."""
    return re.split(r" \[(?:tensorstore_spec|source)", str(error))[0]
