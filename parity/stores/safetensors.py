"""safetensors: a file, or a folder with an index and its shards."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import safetensors

from parity.stores.store import (
    Extent,
    Leaf,
    Path,
    Store,
    StoreError,
    collect,
    file_leaf,
    some,
    split_name,
)
from shared.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, Reader

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def is_safetensors(start: bytes) -> bool:
    """Whether a file starts with a header's length and a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**40


def open_file(path: pathlib.Path) -> Store:
    """One file.

    Raises:
      StoreError: it is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = {path: list(file.keys())}
    except safetensors.SafetensorError as error:
        raise StoreError(
            f"{path} is not a whole safetensors file ({error}): fetch or write it "
            "again."
        ) from None
    return collect(Store(str(path), "safetensors", {}), _leaves(names))


def open_folder(folder: pathlib.Path) -> Store:
    """The files that an index names, or the only one.

    Raises:
      shared.checkpoint.CheckpointError: files are absent, damaged or contradict the
        index.
      StoreError: there are several files and no index.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not any((folder / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)):
        if len(files) == 1:
            return open_file(files[0])
        raise StoreError(
            f"{folder} has no {INDEX_FILE}, but {some([f.name for f in files], 4)}: "
            "give one of the files."
        )
    tensors = Reader(folder).tensors
    names: dict[pathlib.Path, list[str]] = {}
    for name, info in tensors.items():
        names.setdefault(folder / info.file, []).append(name)
    stray = [f.name for f in files if f not in names]
    notes = (f"ignored, not in the index: {some(stray, 4)}",) if stray else ()
    store = Store(str(folder), "safetensors", {}, notes=notes)
    return collect(store, _leaves(names))


def _leaves(
    names: Mapping[pathlib.Path, Iterable[str]],
) -> Iterator[tuple[Path, Leaf | str]]:
    for file, listed in names.items():
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name in listed:
            entry = header[name]
            yield split_name(name), _leaf(file, 8 + length, entry)


def _leaf(file: pathlib.Path, data: int, entry: Mapping) -> Leaf | str:
    if entry["dtype"] not in DTYPES:
        return f"dtype {entry['dtype']} is not supported: convert it to another"
    shape, dtype = tuple(entry["shape"]), np.dtype(DTYPES[entry["dtype"]])
    extent = Extent(data + entry["data_offsets"][0], math.prod(shape))
    return file_leaf(file, shape, dtype, [extent])
