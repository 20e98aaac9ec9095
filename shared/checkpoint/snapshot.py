"""A training state on the host, and its way to the disk while training goes on."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shared.checkpoint.manifest import (
    LeafRecord,
    Manifest,
    record,
    write_manifest,
)
from shared.stores import CheckpointError, Leaf, Path, path_text
from shared.stores.folders import sync
from shared.stores.orbax_writer import (
    check_dtypes,
    check_names,
    sync_array,
    write_array,
    write_pieces,
    write_tree_file,
)
from shared.stores.store import Index, Piece
from shared.stores.tree import array_leaf, is_empty, key_kind, named_nodes
from shared.stores.views import assembled

SPREAD = "spread over processes: none of them has all of it"
_SYNCING = 4  # arrays at once that the disk is waited for


class Copy(NamedTuple):
    """What this process writes of a leaf, in memory that nobody changes.

    Attributes:
      shape: of the whole leaf.
      dtype: of the entries.
      kind: what the entries stand for (`Leaf.kind`).
      pieces: index and entries of each piece; none if others have them all.
      shard: sizes of a shard, of a leaf that several processes write; else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str
    pieces: tuple[tuple[Index, np.ndarray], ...]
    shard: tuple[int, ...] | None = None

    def leaf(self) -> Leaf:
        """The copy, to be read."""
        if len(self.pieces) == 1 and self.shard is None:
            ((_, array),) = self.pieces
            return array_leaf(array)._replace(kind=self.kind)
        pieces = [Piece(at, array_leaf(array)) for at, array in self.pieces]
        leaf = assembled(self.shape, self.dtype, lambda: pieces)
        return leaf._replace(kind=self.kind)

    def outline(self) -> Leaf:
        """What there is to know of the leaf without its entries."""
        return Leaf(self.shape, self.dtype, _gone, self.kind)


class Snapshot(NamedTuple):
    """A state as it was; the copies are let go one by one as they are written."""

    copies: dict[Path, Copy]
    empty: dict[Path, str]


def check(state: Any) -> None:
    """Whether a state can be saved.

    Raises:
      CheckpointError: lists what is no array, and names that orbax cannot tell apart.
    """
    leaves = {path: node for path, node in named_nodes(state)[0] if not is_empty(node)}
    dtypes = {
        path: np.asarray(node).dtype if not isinstance(node, jax.Array) else node.dtype
        for path, node in leaves.items()
    }
    problems = [
        f"{path_text(path)} is {leaves[path]!r:.60}, no array: leave it out"
        for path, dtype in dtypes.items()
        if not _is_key(dtype) and dtype.kind not in _NUMBERS
    ]
    if problems:
        raise CheckpointError("Only arrays can be saved.", sorted(problems))
    check_names(leaves)
    plain = {path: dtype for path, dtype in dtypes.items() if not _is_key(dtype)}
    check_dtypes(plain)


def take(state: Any) -> Snapshot:
    """A state that `check` has passed, on the host.

    Of arrays on other devices all transfers are started before the first is waited for.
    """
    nodes, _ = named_nodes(state)
    empty = {path: type(node).__name__ for path, node in nodes if is_empty(node)}
    arrays = {path: _as_array(node) for path, node in nodes if path not in empty}
    for array, _ in arrays.values():
        for shard in _own_shards(array):
            shard.data.copy_to_host_async()
    copies = {path: _copy(array, kind) for path, (array, kind) in arrays.items()}
    return Snapshot(copies, empty)


_NUMBERS = "biufcV"  # V: dtypes that NumPy lacks, such as bfloat16


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def write(folder: pathlib.Path, snapshot: Snapshot, manifest: Manifest) -> None:
    """Writes a snapshot as a tree with its manifest; all of it is on the disk then.

    Args:
      folder: that all processes write into.
      snapshot: is empty afterwards, also if this fails.
      manifest: gets the leaves that were written.
    """
    try:
        _write(folder, snapshot, manifest)
    finally:
        snapshot.copies.clear()  # the error would keep them


def _write(folder: pathlib.Path, snapshot: Snapshot, manifest: Manifest) -> None:
    primary = jax.process_index() == 0
    records: dict[str, LeafRecord] = {}
    outlines: dict[Path, Leaf] = {}
    with concurrent.futures.ThreadPoolExecutor(_SYNCING) as threads:
        synced = []
        for path in list(snapshot.copies):
            copy = snapshot.copies.pop(path)
            outlines[path] = copy.outline()
            known = _write_copy(folder, path, copy, primary)
            del copy
            if known is not None:
                records[path_text(path)] = known
                synced.append(threads.submit(sync_array, folder, path))
    for done in synced:
        done.result()
    if not primary:
        return
    write_manifest(folder, dataclasses.replace(manifest, leaves=records))
    write_tree_file(folder, outlines, snapshot.empty)
    for file in folder.iterdir():
        sync(file)
    sync(folder)


def _write_copy(
    folder: pathlib.Path, path: Path, copy: Copy, primary: bool
) -> LeafRecord | None:
    """Writes what this process has to write of a leaf; None: nothing."""
    if copy.shard is not None:
        write_pieces(folder, path, copy.leaf(), copy.shard)
        return record(copy.outline(), "", SPREAD)
    if not primary:
        return None
    return record(copy.outline(), write_array(folder, path, copy.leaf()))


def _as_array(node: Any) -> tuple[np.ndarray | jax.Array, str]:
    """The array that a leaf is, and what its entries stand for."""
    if not isinstance(node, jax.Array):
        return np.asarray(node), ""
    if _is_key(node.dtype):
        return jax.random.key_data(node), key_kind(str(jax.random.key_impl(node)))
    return node, ""


def _copy(array: np.ndarray | jax.Array, kind: str) -> Copy:
    shape, dtype = array.shape, np.dtype(array.dtype)
    make = functools.partial(Copy, shape, dtype, kind)
    if not isinstance(array, jax.Array):
        whole = tuple(slice(0, n) for n in shape)
        return make(((whole, np.array(array, order="C")),))
    pieces = tuple((shard.index, _on_host(shard.data)) for shard in _own_shards(array))
    return make(pieces, _shard_shape(array))


def _own_shards(array: np.ndarray | jax.Array) -> list[Any]:
    """The shards that are this process's to write."""
    if not isinstance(array, jax.Array):
        return []
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _shard_shape(array: jax.Array) -> tuple[int, ...] | None:
    """Sizes of a shard of an array that several processes write."""
    if array.is_fully_addressable:
        return None
    first = [shard for shard in array.global_shards if shard.replica_id == 0]
    if {shard.device.process_index for shard in first} == {0}:
        return None
    return array.sharding.shard_shape(array.shape)


def _on_host(array: jax.Array) -> np.ndarray:
    """An array on one device, in memory that keeps it, whatever becomes of the array.

    On a CPU it is the array's own: as long as NumPy sees that, JAX gives it neither to
    a function that the array is donated to nor to another array.
    """
    host = np.asarray(array)
    (device,) = array.devices()
    if device.platform == "cpu" or array.sharding.memory_kind == "device":
        return host
    return np.array(host, order="C")


def _gone() -> Any:
    raise CheckpointError("The entries of this leaf are not in memory.")
