"""Folders of safetensors files: one tensor in memory at a time, both ways.

A folder holds `model.safetensors`, or `model.safetensors.index.json` and the files it
names. A file is a length (8 bytes), a JSON header (name: dtype, shape, place) and data.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# What a parameter may be; everything else is refused by name.
FLOATS = {
    "F64": jnp.dtype("float64"),
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}

# Pages read through a mapping count as memory of the process until it is closed.
_MAPPED_BYTES = 64 * 2**20


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked.

    Attributes:
      problems: everything that is wrong, one line each.
    """

    def __init__(self, summary: str, problems: Sequence[str] = ()):
        self.problems = tuple(problems)
        super().__init__("\n  ".join([summary, *self.problems]))


class TensorInfo(NamedTuple):
    """What a header says of a tensor; `dtype` in the words of the format ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    file: str

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
                f"{_contents(self.folder)} Give the folder of a checkpoint in "
                "safetensors files."
            )
        used = {info.file for info in self.tensors.values()}
        stray = sorted({p.name for p in self.folder.glob("*.safetensors")} - used)
        if stray:
            logger.warning(
                "Ignored %d files of %s that hold no listed tensor: %s",
                len(stray),
                self.folder,
                ", ".join(stray),
            )
        self._file: Any = None
        self._file_name = ""
        self._mapped_bytes = 0

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

    def read(self, name: str, part: Any = ...) -> np.ndarray:
        """The tensor `name`, or the `part` of it that indexing with it would give."""
        info = self.tensors[name]
        if info.file != self._file_name or self._mapped_bytes > _MAPPED_BYTES:
            self.close()
            self._file = safe_open(self.folder / info.file, framework="numpy")
            self._file_name = info.file
        if part is ...:
            array = self._file.get_tensor(name)
        else:
            array = self._file.get_slice(name)[part]
        self._mapped_bytes += array.nbytes
        return array

    def close(self) -> None:
        """Lets go of the open file; reading opens it again."""
        self._file, self._file_name, self._mapped_bytes = None, "", 0


def _contents(folder: pathlib.Path) -> str:
    if not folder.exists():
        return "There is no such folder."
    if not folder.is_dir():
        return "It is a file."
    names = sorted(path.name for path in folder.iterdir())
    return f"It has {_some(names, 8)}." if names else "It is empty."


def _some(names: Sequence[str], count: int) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CheckpointError: there is no such file, it is no JSON object, or a key stands
        twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise CheckpointError(
                f"{path} has keys twice: {', '.join(twice)}. Fetch or write it again."
            )
        return dict(pairs)

    if not path.is_file():
        raise CheckpointError(
            f"There is no {path.name} in {path.parent}. {_contents(path.parent)} Give "
            "the folder of a Hugging Face checkpoint."
        )
    try:
        data = json.loads(path.read_text("utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is not JSON ({error}): fetch or write it again."
        ) from None
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object. Got {type(data).__name__}."
        )
    return data


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
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {
            name: TensorInfo(s.get_dtype(), tuple(s.get_shape()), path.name)
            for name, s in slices.items()
        }


def _describe_damage(
    path: pathlib.Path, error: Exception, listed: Sequence[str]
) -> str:
    """What is wrong with a file that the safetensors library refuses."""
    if not path.is_file():
        return f"{path.name}, where the index has {_some(listed, 3)}, is not there"
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
        f"{max(ends.values())}; incomplete: {_some(cut, 3)}"
    )


class NewTensor(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    folder: pathlib.Path,
    tensors: Iterable[NewTensor],
    value: Callable[[str], np.ndarray],
    *,
    max_shard_bytes: int,
) -> None:
    """Writes one file, or shards and their index where one would be too large.

    Args:
      folder: exists.
      tensors: all that is to be written, in order.
      value: gives a tensor by name; asked once for each, and not kept.
      max_shard_bytes: data in one file; a larger tensor has a file of its own.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        _write_file(folder / SINGLE_FILE, shards[0], value)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, shard, value)
        weight_map |= {tensor.name: file for tensor in shard}
    size = sum(tensor.nbytes for shard in shards for tensor in shard)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / INDEX_FILE, index)


def write_json(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """Writes JSON as the Hugging Face libraries do: indented, sorted."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


def _split(tensors: Iterable[NewTensor], max_shard_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def _write_file(
    path: pathlib.Path,
    tensors: Sequence[NewTensor],
    value: Callable[[str], np.ndarray],
) -> None:
    # The library's own writer needs all tensors of a file at once, and its version
    # 0.8.0 stores the wrong values of an array that is not C-contiguous.
    names = {dtype: name for name, dtype in FLOATS.items()}
    # Wide dtypes first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered:
            array = value(tensor.name)
            assert (array.dtype, array.shape) == tensor[1:], tensor.name
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            file.write(data.data)


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that appears, whole, under the name `folder`, or not at all.

    Raises:
      CheckpointError: `folder` exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists. {_contents(folder)} Give a new or an empty folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
