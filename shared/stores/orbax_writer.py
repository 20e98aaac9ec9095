"""Writes orbax's tree folders from leaves, a chunk at a time; stock orbax reads them.

Each array is a zarr folder of its own, cut into chunks of some MiB along the leading
axes, so that a layer of a stacked leaf is read without the others. Orbax itself writes
a leaf's shard as one chunk, and needs it in memory.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from shared.stores.folders import Folder, sync
from shared.stores.kv_path import KvPath, context
from shared.stores.orbax import FEW_THREADS, kvstore
from shared.stores.reading import read_ahead, reading
from shared.stores.store import (
    CheckpointError,
    Leaf,
    Part,
    Path,
    blocks,
    part_shape,
    path_text,
)

CHUNK_BYTES = 4 * 2**20
BLOCK_BYTES = 8 * 2**20  # read and digested at once: whole chunks
TREE_FILE = "_METADATA"
_STRINGS_FILE = "_strings.json"
_PENDING = 2  # chunks on their way to the disk
_KEY = "key<"  # start of the kind of PRNG keys

Progress = Callable[[int], Any]


class Share(NamedTuple):
    """The n-th of several equal parts of a leaf, which are runs of its blocks."""

    number: int
    among: int


WHOLE = Share(0, 1)


def write_array(
    folder: Folder,
    path: Path,
    leaf: Leaf,
    progress: Progress | None = None,
    share: Share = WHOLE,
) -> str:
    """Writes one leaf of a tree; `sync_array` then waits until the disk has it.

    Args:
      folder: of the tree.
      path: of the leaf.
      leaf: read a chunk at a time, in C order.
      progress: told of bytes as they are written.
      share: to write less than the whole, into an array that `create_array` has made.

    Returns:
      The SHA-256 of the entries that were written (`shared.stores.digest`).
    """
    found = hashlib.sha256()
    if leaf.dtype.kind == "U":
        return _digest_text(leaf)
    chunk, _ = _chunks(leaf)
    array = _create(folder / array_name(path), leaf, chunk, new=share == WHOLE)
    pending: collections.deque[Any] = collections.deque()
    with reading(leaf, path_text(path)) as read:
        for part, data in read_ahead(read, parts_of(leaf, share)):
            found.update(data.reshape(-1).view(np.uint8).data)
            pending.append(_write(array[part], data))
            while len(pending) >= _PENDING:
                pending.popleft().result()
            if progress is not None:
                progress(data.nbytes)
    while pending:
        pending.popleft().result()
    return found.hexdigest()


def create_array(folder: Folder, path: Path, leaf: Leaf) -> None:
    """Makes an array of which several processes then write shares."""
    if leaf.dtype.kind != "U":
        _create(folder / array_name(path), leaf, _chunks(leaf)[0])


def parts_of(leaf: Leaf, share: Share) -> list[Part]:
    """The blocks of a share, in C order."""
    parts = list(blocks(leaf.shape, _chunks(leaf)[1]))
    start, stop = (len(parts) * (share.number + end) // share.among for end in (0, 1))
    return parts[start:stop]


def write_pieces(
    folder: Folder, path: Path, leaf: Leaf, shard: tuple[int, ...]
) -> None:
    """Writes the pieces of a leaf that this process has; others write theirs.

    Args:
      folder: of the tree.
      path: of the leaf.
      leaf: of which `pieces` gives some, shards or whole multiples of shards.
      shard: sizes of one. Chunks are cut so that no two processes write the same one.
    """
    limit = max(1, CHUNK_BYTES // leaf.dtype.itemsize)
    rows = part_shape(next(iter(blocks(shard, limit))))
    chunk = tuple(map(_divisor, shard, rows))
    array = _create(folder / array_name(path), leaf, chunk, new=False)
    for piece in leaf.pieces() if leaf.pieces is not None else ():
        with piece.leaf.open() as read:
            data = read(tuple(slice(0, n) for n in piece.leaf.shape))
        _write(array[piece.at], data).result()


def _divisor(size: int, most: int) -> int:
    """The largest divisor of a size that is at most so large."""
    return next(n for n in range(max(1, most), 0, -1) if size % n == 0)


def _write(array: Any, data: np.ndarray) -> Any:
    """Starts to write; nobody changes the data, so that no copy is made of it."""
    return array.write(data, can_reference_source_data_indefinitely=True)


def _chunks(leaf: Leaf) -> tuple[tuple[int, ...], int]:
    """Shape of a chunk, and entries of a block, which is one or several of them."""
    small, large = (
        part_shape(next(blocks(leaf.shape, max(1, size // leaf.dtype.itemsize))))
        for size in (CHUNK_BYTES, BLOCK_BYTES)
    )
    axis = next((i for i, n in enumerate(small) if n != leaf.shape[i] and n > 1), None)
    limit = math.prod(large)
    if axis is not None and large[axis] != leaf.shape[axis]:
        limit = math.prod(small) * (large[axis] // small[axis])
    return small, limit


def sync_array(folder: Folder, path: Path) -> None:
    """Has the disk keep an array that was written."""
    if isinstance(folder, KvPath):
        return
    for file in (folder / array_name(path)).rglob("*"):
        # Another process that writes its pieces has locks there for a moment.
        with contextlib.suppress(FileNotFoundError):
            sync(file)


def _digest_text(leaf: Leaf) -> str:
    with leaf.open() as read:
        data = np.ascontiguousarray(read(tuple(slice(0, n) for n in leaf.shape)))
    return hashlib.sha256(data.tobytes()).hexdigest()


def _create(
    folder: Folder, leaf: Leaf, chunk: tuple[int, ...], *, new: bool = True
) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": kvstore(folder),
        "metadata": {
            "shape": leaf.shape,
            "chunks": [max(1, n) for n in chunk],
            "compressor": None,
        },
        "dtype": leaf.dtype.name,
        "store_data_equal_to_fill_value": True,
    }
    how = _NO_SYNC if new else _SYNC
    opening = tensorstore.open(
        spec, create=True, open=not new, delete_existing=new, context=how
    )
    return opening.result()


# A chunk is a file: to wait for the disk at each takes longer than to write it.
_NO_SYNC = context(file_io_sync=False, **FEW_THREADS)
_SYNC = context()


def array_name(path: Path) -> str:
    """The folder of an array, as orbax calls it."""
    return ".".join(map(str, path))


def write_tree_file(
    folder: Folder, leaves: Mapping[Path, Leaf], empty: Mapping[Path, str]
) -> None:
    """Writes what makes a folder of arrays a tree: orbax's metadata.

    Args:
      folder: of the tree.
      leaves: all of them.
      empty: nodes without leaves, and what they are called (`Store.empty`).

    Raises:
      CheckpointError: two leaves would have one name.
    """
    check_names(leaves)
    nodes = {path: _value_type(leaf) for path, leaf in leaves.items()}
    nodes |= {path: _EMPTY.get(what, "None") for path, what in empty.items()}
    tree = {
        str(tuple(map(str, path))): {
            "key_metadata": [
                {"key": str(key), "key_type": 1 if isinstance(key, int) else 2}
                for key in path
            ],
            "value_metadata": {
                "value_type": value_type,
                "skip_deserialize": path not in leaves,
            },
        }
        for path, value_type in nodes.items()
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    _write_arrays_file(folder, leaves)
    _write_strings(folder, leaves)
    (folder / TREE_FILE).write_text(json.dumps(metadata), "utf-8")


# What orbax calls nodes without leaves, all others None; formats and trees in memory
# have names of their own.
_EMPTY = {
    name: kind
    for kind, names in {
        "Dict": ("Dict", "dict", "OrderedDict", "FrozenDict"),
        "List": ("List", "list"),
        "Tuple": ("Tuple", "tuple"),
    }.items()
    for name in names
}


def check_names(leaves: Iterable[Path]) -> None:
    """Orbax joins a path by dots: two paths must not give one name.

    Raises:
      CheckpointError: names both.
    """
    names: dict[str, Path] = {}
    for path in leaves:
        other = names.setdefault(array_name(path), path)
        if other != path:
            raise CheckpointError(
                f"Orbax keeps {other} and {path} under one name, {array_name(path)}: "
                "rename one with a rule."
            )


def check_dtypes(dtypes: Mapping[Path, np.dtype]) -> None:
    """Not every dtype that NumPy and JAX have can be stored.

    Raises:
      CheckpointError: lists the leaves whose dtype cannot.
    """
    problems = [
        f"{path_text(path)} is {dtype}"
        for path, dtype in dtypes.items()
        if not _is_stored(dtype)
    ]
    if problems:
        raise CheckpointError(
            "Tensorstore has no such dtypes: cast these leaves, or leave them out.",
            sorted(problems),
        )


def _is_stored(dtype: np.dtype) -> bool:
    try:
        return tensorstore.dtype(dtype.name).numpy_dtype == dtype
    except (TypeError, ValueError):
        return False


def _value_type(leaf: Leaf) -> str:
    if leaf.dtype.kind == "U":
        return "string"
    return "jax.Array" if leaf.kind.startswith(_KEY) else "np.ndarray"


def _write_arrays_file(folder: Folder, leaves: Mapping[Path, Leaf]) -> None:
    """Says of which arrays the entries are PRNG keys."""
    keys = {
        array_name(path): leaf
        for path, leaf in leaves.items()
        if leaf.kind.startswith(_KEY)
    }
    if not keys:
        return
    arrays = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": leaf.shape,
                "chunk_shape": leaf.shape,
                "ext_metadata": {"random_key_impl": leaf.kind[len(_KEY) : -1]},
            }
        }
        for name, leaf in keys.items()
    ]
    (folder / "array_metadatas").mkdir(exist_ok=True)
    text = json.dumps({"array_metadatas": arrays})
    (folder / "array_metadatas" / "process_0").write_text(text, "utf-8")
    # Of what it makes JAX arrays of, orbax wants to know on which device.
    place = {"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}
    shardings = {
        base64.b64encode(name.encode()).decode(): json.dumps(place) for name in keys
    }
    (folder / "_sharding").write_text(json.dumps(shardings), "utf-8")


def _write_strings(folder: Folder, leaves: Mapping[Path, Leaf]) -> None:
    texts = {}
    for path, leaf in leaves.items():
        if leaf.dtype.kind == "U":
            with leaf.open() as read:
                texts[array_name(path)] = str(read(()))
    if texts:
        (folder / _STRINGS_FILE).write_text(json.dumps(texts), "utf-8")
