"""Writes folders of safetensors from leaves, a few MiB in memory at a time."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shared.stores.folders import write_json
from shared.stores.reading import read_ahead, reading
from shared.stores.safetensors import DTYPES, INDEX_FILE, SINGLE_FILE
from shared.stores.store import Leaf, blocks

BLOCK_BYTES = 8 * 2**20  # of a tensor that are in memory at once
Progress = Callable[[int], Any]


def write_folder(
    folder: pathlib.Path,
    tensors: Mapping[str, Leaf],
    *,
    max_shard_bytes: int,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Writes one file, or shards and their index where one would be too large.

    Args:
      folder: exists.
      tensors: all that is to be written, in order.
      max_shard_bytes: data in one file; a larger tensor has a file of its own.
      progress: told of bytes as they are written.

    Returns:
      The SHA-256 of each tensor's entries (`shared.stores.digest`).
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        return write_file(folder / SINGLE_FILE, shards[0], progress)
    digests: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digests |= write_file(folder / file, shard, progress)
        weight_map |= dict.fromkeys(shard, file)
    size = sum(leaf.nbytes for leaf in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / INDEX_FILE, index)
    return digests


def _split(tensors: Mapping[str, Leaf], max_shard_bytes: int) -> list[dict[str, Leaf]]:
    shards: list[dict[str, Leaf]] = [{}]
    room = max_shard_bytes
    for name, leaf in tensors.items():
        if shards[-1] and leaf.nbytes > room:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = leaf
        room -= leaf.nbytes
    return shards


def write_file(
    path: pathlib.Path, tensors: Mapping[str, Leaf], progress: Progress | None = None
) -> dict[str, str]:
    """Writes one file; it is on the disk when this returns.

    Returns:
      The SHA-256 of each tensor's entries.
    """
    # The library's own writer needs all tensors of a file at once, and its version
    # 0.8.0 stores the wrong values of an array that is not C-contiguous.
    names = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        leaf = tensors[name]
        start, end = end, end + leaf.nbytes
        header[name] = {
            "dtype": names[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        digests = {
            name: _write(file, tensors[name], name, progress) for name in ordered
        }
        os.fsync(file.fileno())
    return digests


def _write(file: Any, leaf: Leaf, name: str, progress: Progress | None) -> str:
    found = hashlib.sha256()
    with reading(leaf, name) as read:
        parts = blocks(leaf.shape, max(1, BLOCK_BYTES // leaf.dtype.itemsize))
        for _, array in read_ahead(read, parts):
            rest = array.reshape(-1).view(np.uint8).data
            found.update(rest)
            while rest:
                rest = rest[file.write(rest) :]
            if progress is not None:
                progress(array.nbytes)
    return found.hexdigest()
