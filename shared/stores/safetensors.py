"""safetensors: a file, or a folder with an index and its shards.

A folder holds `model.safetensors`, or `model.safetensors.index.json` and the files it
names. A file is a length (8 bytes), a JSON header (name: dtype, shape, place) and data.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from shared.stores.folders import contents, read_json
from shared.stores.store import (
    CheckpointError,
    Extent,
    Leaf,
    Path,
    Store,
    collect,
    file_leaf,
    some,
    split_name,
)

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

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


# What a parameter may be; everything else is refused by name.
FLOATS = {name: np.dtype(DTYPES[name]) for name in ("F64", "F32", "F16", "BF16")}


class TensorInfo(NamedTuple):
    """What a header says of a tensor; `dtype` in the words of the format ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        bits = re.search(r"\d+", self.dtype)  # BF16, F8_E4M3, I64; but BOOL
        return math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8


class Reader:
    """Tensors of a folder, by name; nothing but headers is read until asked for.

    Attributes:
      folder: where the files are.
      tensors: what there is; with an index, what the index lists.
      unlisted: tensors in the index's files that the index does not list.
      stray: files that hold no listed tensor.

    Raises:
      CheckpointError: lists files that are absent, truncated or no safetensors, and
        tensors that are not where the index says, or in two places.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = pathlib.Path(folder)
        self.unlisted: dict[str, TensorInfo] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            self.tensors = self._read_indexed(_read_weight_map(index))
        elif (self.folder / SINGLE_FILE).is_file():
            headers = _read_headers(self.folder, {SINGLE_FILE: []})
            self.tensors = headers[SINGLE_FILE]
        else:
            raise CheckpointError(
                f"There is neither {INDEX_FILE} nor {SINGLE_FILE} in {self.folder}. "
                f"{contents(self.folder)} Give the folder of a checkpoint in "
                "safetensors files."
            )
        used = {info.file for info in self.tensors.values()}
        found = {path.name for path in self.folder.glob("*.safetensors")}
        self.stray = sorted(found - used)
        if self.stray:
            logger.warning(
                "Ignored %d files of %s that hold no listed tensor: %s",
                len(self.stray),
                self.folder,
                ", ".join(self.stray),
            )

    def _read_indexed(self, weight_map: Mapping[str, str]) -> dict[str, TensorInfo]:
        listed: dict[str, list[str]] = {file: [] for file in weight_map.values()}
        for name, file in weight_map.items():
            listed[file].append(name)
        headers = _read_headers(self.folder, listed)
        problems = []
        for name, file in weight_map.items():
            if name not in headers[file]:
                elsewhere = [f for f, header in headers.items() if name in header]
                problems.append(
                    f"{name} is not in {file}, where the index has it"
                    + (f", but in {', '.join(elsewhere)}" if elsewhere else "")
                )
        for file, header in headers.items():
            for name, info in header.items():
                if name not in weight_map:
                    self.unlisted[name] = info
                elif weight_map[name] != file and name in headers[weight_map[name]]:
                    problems.append(f"{name} is in {weight_map[name]} and in {file}")
        if problems:
            raise CheckpointError(
                f"The files of {self.folder} contradict {INDEX_FILE}: fetch or write "
                "the checkpoint again.",
                problems,
            )
        return {name: headers[file][name] for name, file in weight_map.items()}

    def leaf(self, name: str) -> Leaf:
        """The tensor `name`, not yet read."""
        info = self.tensors[name]
        leaf = _leaf(self.folder, info)
        if isinstance(leaf, str):
            raise CheckpointError(f"{name} of {self.folder}: {leaf}")
        return leaf


def is_safetensors(start: bytes) -> bool:
    """Whether a file starts with a header's length and a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**40


def open_file(path: pathlib.Path) -> Store:
    """One file.

    Raises:
      CheckpointError: it is damaged.
    """
    try:
        tensors = _read_header(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}): fetch or write it "
            "again."
        ) from None
    store = Store(str(path), "safetensors", {})
    return collect(store, _leaves(path.parent, tensors))


def open_folder(folder: pathlib.Path) -> Store:
    """The files that an index names, or the only one.

    Raises:
      CheckpointError: files are absent, damaged or contradict the index, or there are
        several files and no index.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not any((folder / name).is_file() for name in (INDEX_FILE, SINGLE_FILE)):
        if len(files) == 1:
            return open_file(files[0])
        raise CheckpointError(
            f"{folder} has no {INDEX_FILE}, but {some([f.name for f in files], 4)}: "
            "give one of the files."
        )
    reader = Reader(folder)
    stray = f"ignored, not in the index: {some(reader.stray, 4)}"
    notes = (stray,) if reader.stray else ()
    store = Store(str(folder), "safetensors", {}, notes=notes)
    return collect(store, _leaves(folder, reader.tensors))


def _leaves(
    folder: pathlib.Path, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[Path, Leaf | str]]:
    for name, info in tensors.items():
        yield split_name(name), _leaf(folder, info)


def _leaf(folder: pathlib.Path, info: TensorInfo) -> Leaf | str:
    if info.dtype not in DTYPES:
        return f"dtype {info.dtype} is not supported: convert it to another"
    extent = Extent(info.offset, math.prod(info.shape))
    return file_leaf(
        folder / info.file, info.shape, np.dtype(DTYPES[info.dtype]), [extent]
    )


def _read_weight_map(index: pathlib.Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map from tensor names to files: fetch or write it "
            "again."
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or pathlib.PurePath(file).name != file:
            raise CheckpointError(
                f"{index} must name files of its own folder. Got {file!r} for {name}."
            )
    return weight_map


def _read_headers(
    folder: pathlib.Path, listed: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, TensorInfo]]:
    """Headers by file; `listed` has the tensors that are expected in each."""
    headers, problems = {}, []
    for file in sorted(listed):
        try:
            headers[file] = _read_header(folder / file)
        except (OSError, SafetensorError) as error:
            problems.append(_describe_damage(folder / file, error, listed[file]))
    if problems:
        raise CheckpointError(
            f"{len(problems)} of {len(listed)} files of {folder} cannot be read: fetch "
            "them again.",
            problems,
        )
    return headers


def _read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
    with safe_open(path, framework="numpy"):  # refuses what is damaged
        pass
    with path.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(start - 8))
    header.pop("__metadata__", None)
    return {
        name: TensorInfo(
            entry["dtype"],
            tuple(entry["shape"]),
            path.name,
            start + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def _describe_damage(
    path: pathlib.Path, error: Exception, listed: Sequence[str]
) -> str:
    """What is wrong with a file that the safetensors library refuses."""
    if not path.is_file():
        return f"{path.name}, where the index has {some(listed, 3)}, is not there"
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > size:
                return f"{path.name} is truncated in its header: it has {size} bytes"
            header = json.loads(file.read(start - 8))
        ends = {
            name: start + entry["data_offsets"][1]
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except OSError:
        return f"{path.name} cannot be read ({error})"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{path.name} is not a safetensors file ({error})"
    cut = sorted(name for name, end in ends.items() if end > size)
    if not cut:
        return f"{path.name} is not a valid safetensors file ({error})"
    return (
        f"{path.name} is truncated: it has {size} bytes and should have "
        f"{max(ends.values())}; incomplete: {some(cut, 3)}"
    )
