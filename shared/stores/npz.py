"""npz: a zip of npy members, read as streams."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shared.stores.store import (
    ByRuns,
    CheckpointError,
    Leaf,
    Path,
    Read,
    Store,
    collect,
    read_into,
    some,
    split_name,
    take,
)


def open_file(path: pathlib.Path) -> Store:
    """The arrays of an npz; `a/b` is b in a.

    Raises:
      CheckpointError: it is damaged, or a zip of something else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            arrays = [name for name in members if name.endswith(".npy")]
            other = [name for name in members if not name.endswith(".npy")]
            if any(name.endswith(".pkl") for name in other):
                raise CheckpointError(
                    f"{path} holds a pickle (PyTorch?), which is never read, for it "
                    "can run any code: save it as safetensors."
                )
            if not arrays:
                raise CheckpointError(f"{path} is a zip without npy arrays, so no npz.")
            found = [(_path(name), _leaf(path, archive, name)) for name in arrays]
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(
            f"{path} is a damaged zip ({error}): fetch or write it again."
        ) from None
    notes = (f"ignored, no arrays: {some(other, 4)}",) if other else ()
    return collect(Store(str(path), "npz", {}, notes=notes), found)


def _path(member: str) -> Path:
    return split_name(member.removesuffix(".npy"))


def _leaf(path: pathlib.Path, archive: zipfile.ZipFile, member: str) -> Leaf | str:
    with archive.open(member) as stream:
        try:
            shape, fortran, dtype = _header(stream)
        except ValueError as error:
            return f"{member} is no npy that is read here ({error})"
    if dtype.hasobject:
        return (
            "it holds Python objects, whose pickles are never read, for they can run "
            "any code: save arrays of numbers"
        )
    if dtype.kind not in "biufcSU":
        return (
            f"dtype {dtype}: an npz does not keep bfloat16, float8 and int4; save it "
            "as safetensors or convert it"
        )
    where = _Member(path, member, shape, dtype)
    return Leaf(shape, dtype, where.whole if fortran else where.streamed)


def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"npy version {version}, not 1.0 or 2.0")


class _Member(NamedTuple):
    path: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @contextlib.contextmanager
    def streamed(self) -> Iterator[Read]:
        with zipfile.ZipFile(self.path) as archive, archive.open(self.name) as stream:
            _header(stream)
            runs = _Runs(stream, stream.tell(), self.dtype.itemsize)
            yield ByRuns(self.shape, self.dtype, runs)

    @contextlib.contextmanager
    def whole(self) -> Iterator[Read]:
        """Of an array in Fortran order no part is a run of the stream: all is read."""
        with zipfile.ZipFile(self.path) as archive, archive.open(self.name) as stream:
            _header(stream)
            data = stream.read(math.prod(self.shape) * self.dtype.itemsize)
        array = np.frombuffer(data, self.dtype).reshape(self.shape, order="F")
        yield functools.partial(take, array)


class _Runs(NamedTuple):
    stream: Any
    start: int
    itemsize: int

    def fill(self, first: int, memory: np.ndarray) -> None:
        self.stream.seek(self.start + first * self.itemsize)
        read_into(self.stream, memory.data)
