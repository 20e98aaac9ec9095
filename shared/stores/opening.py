"""Finds out what a path holds, from its content."""

from __future__ import annotations

import os
import pathlib

from shared.stores import msgpack, npz, orbax, safetensors
from shared.stores.folders import UNFINISHED, is_partial
from shared.stores.kv_path import KvPath, is_url
from shared.stores.store import CheckpointError, Store, some

_KNOWN = (
    "an orbax folder (_METADATA, items or steps that have it), a folder of "
    "safetensors, or a safetensors, npz or Flax msgpack file"
)
_REFUSED = {
    b"\x93NUMPY": "It is a single npy array, no tree: save an npz.",
    b"\x89HDF": "It is HDF5: save it as safetensors.",
    **{
        bytes([0x80, protocol]): "It is a pickle, which is never read, for it can run "
        "any code: save it as safetensors."
        for protocol in range(2, 6)
    },
}


def open_store(
    path: str | os.PathLike[str], step: int | None = None, *, partial: bool = False
) -> Store:
    """Opens a checkpoint of any format; nothing but its headers is read.

    Args:
      path: a folder or a file; of orbax also a URL (gs://, s3://, ...).
      step: of a checkpoint manager's folder; None: the latest.
      partial: also what is still being written.

    Raises:
      CheckpointError: there is nothing that we know, or it is damaged.
    """
    if is_url(path):
        return _open_remote(KvPath(str(path)), step, partial)
    where = pathlib.Path(path).absolute()
    if not partial and any(map(is_partial, (where, *where.parents))):
        raise CheckpointError(
            f"{path} was not finished when it was written: run what wrote it again."
        )
    if where.is_dir():
        return _open_folder(where, step)
    if not where.is_file():
        raise CheckpointError(f"There is no {path}. Give {_KNOWN}.")
    with where.open("rb") as stream:
        start = stream.read(16)
    for magic, reason in _REFUSED.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path} is no checkpoint that we read. {reason}")
    if start.startswith(b"PK"):
        return npz.open_file(where)
    if safetensors.is_safetensors(start):
        return safetensors.open_file(where)
    if msgpack.is_msgpack(start):
        return msgpack.open_file(where)
    size = where.stat().st_size
    raise CheckpointError(f"{path} ({size} bytes) is no checkpoint. Give {_KNOWN}.")


def _open_remote(folder: KvPath, step: int | None, partial: bool) -> Store:
    if (folder / UNFINISHED).is_file() and not partial:
        raise CheckpointError(
            f"{folder} was not finished when it was written: run what wrote it again."
        )
    if not orbax.is_orbax(folder):
        raise CheckpointError(
            f"{folder} is no checkpoint of orbax, the only format that is read from "
            "URLs: copy it to a disk."
        )
    return orbax.open_folder(folder, step)


def _open_folder(folder: pathlib.Path, step: int | None) -> Store:
    if orbax.is_orbax(folder):
        return orbax.open_folder(folder, step)
    has_index = any(folder.glob("*.safetensors.index.json"))
    if has_index or any(folder.glob("*.safetensors")):
        return safetensors.open_folder(folder)
    names = sorted(path.name for path in folder.iterdir())
    if any(name in (".zarray", "checkpoint", "manifest.ocdbt") for name in names):
        raise CheckpointError(
            f"{folder} looks like a checkpoint of an orbax without tree metadata "
            "(_METADATA): restore and save it again with a newer orbax."
        )
    raise CheckpointError(
        f"{folder} is no checkpoint. It has {some(names, 8)}. Give {_KNOWN}."
    )
