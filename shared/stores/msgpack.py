"""Flax's msgpack: where each array stands in the file; the arrays are not read.

The format (`flax.serialization`): maps with text or int keys; an array is an extension
that holds shape, dtype name and bytes; a large one is a map of flat chunks.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import os
import pathlib
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shared.stores.store import (
    CheckpointError,
    Extent,
    Leaf,
    Path,
    Store,
    collect,
    constant,
    file_leaf,
    numeric_order,
    split_name,
)

_CHUNKED = "__msgpack_chunked_array__"
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # types of Flax's extensions
_LENGTHS = {
    **{0xC4 + i: ("bin", 1 << i) for i in range(3)},
    **{0xC7 + i: ("ext", 1 << i) for i in range(3)},
    **{0xD9 + i: ("str", 1 << i) for i in range(3)},
    **{0xDC + i: ("array", 2 << i) for i in range(2)},
    **{0xDE + i: ("map", 2 << i) for i in range(2)},
}
_NUMBERS = dict(zip([*range(0xCA, 0xD4)], [f">{c}" for c in "fdBHIQbhiq"], strict=True))
_NOTHING = {("constant", None): "None", ("map", 0): "Dict", ("array", 0): "List"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def is_msgpack(start: bytes) -> bool:
    """Whether a file starts with a map."""
    return start[:1] in {bytes([code]) for code in (*range(0x80, 0x90), 0xDE, 0xDF)}


def open_file(path: pathlib.Path) -> Store:
    """The leaves of `flax.serialization.to_bytes`.

    Raises:
      CheckpointError: it is damaged, or no msgpack.
    """
    try:
        with path.open("rb") as stream:
            found = list(_Parser(path, stream).parse())
    except RecursionError:
        raise CheckpointError(
            f"{path} is nested too deeply to be a checkpoint."
        ) from None
    empty = {where: str(value) for where, value in found if isinstance(value, _Empty)}
    store = Store(str(path), "msgpack", {}, boxes=True, empty=empty)
    return collect(store, _leaves(path, found))


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int


def _leaves(
    path: pathlib.Path, found: list[tuple[Path, Any]]
) -> Iterator[tuple[Path, Leaf | str]]:
    chunked = {where[:-1] for where, _ in found if where and where[-1] == _CHUNKED}
    parts: dict[Path, dict[Path, Any]] = collections.defaultdict(dict)
    for where, value in found:
        above = next((p for p in (where[:-1], where[:-2]) if p in chunked), None)
        if above is not None:
            parts[above][where[len(above) :]] = value
        elif isinstance(value, _Array):
            extent = Extent(value.offset, math.prod(value.shape))
            yield where, file_leaf(path, value.shape, value.dtype, [extent])
        elif isinstance(value, _Refused):
            yield where, value
        elif not isinstance(value, _Empty):
            yield where, constant(value)
    for above, pieces in parts.items():
        yield above, _unchunked(path, pieces)


def _unchunked(path: pathlib.Path, pieces: dict[Path, Any]) -> Leaf | str:
    shape = tuple(_in_order(pieces, "shape"))
    chunks = _in_order(pieces, "chunks")
    if not chunks or not all(isinstance(chunk, _Array) for chunk in chunks):
        return "its chunks are no arrays: write it again"
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        return f"its shape is {shape}: write it again"
    extents = [Extent(chunk.offset, math.prod(chunk.shape)) for chunk in chunks]
    total = sum(extent.entries for extent in extents)
    if total != math.prod(shape) or len({chunk.dtype for chunk in chunks}) > 1:
        return f"its chunks hold {total} entries of shape {shape}: write it again"
    return file_leaf(path, shape, chunks[0].dtype, extents)


def _in_order(pieces: dict[Path, Any], name: str) -> list[Any]:
    found = {key: pieces[key] for key in pieces if key[0] == name and len(key) == 2}
    return [found[key] for key in sorted(found, key=numeric_order)]


class _Refused(str):
    """Why a value is not read."""


class _Empty(str):
    """What a node without leaves is."""


class _Parser:
    """Walks a file and steps over the bytes of arrays."""

    def __init__(self, path: pathlib.Path, stream: io.BufferedIOBase):
        self._path = path
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size

    def parse(self) -> Iterator[tuple[Path, Any]]:
        """Path and value of all leaves: an `_Array`, a number, text, None."""
        yield from self._walk(())
        if self._stream.tell() != self._size:
            raise self._error(f"{self._size - self._stream.tell()} bytes follow it")

    def _walk(self, path: Path) -> Iterator[tuple[Path, Any]]:
        kind, value = self._head()
        if (kind, value) in _NOTHING:
            yield path, _Empty(_NOTHING[kind, value])
        elif kind == "map":
            for _ in range(value):
                key = self._key(path)
                yield from self._walk((*path, *key))
        elif kind == "array":
            for i in range(value):
                yield from self._walk((*path, i))
        elif kind == "ext":
            yield path, self._extension(value)
        elif kind == "str":
            yield path, self._text(value)
        elif kind == "bin":
            yield path, np.frombuffer(self._take(value), np.uint8)
        else:
            yield path, value

    def _key(self, path: Path) -> Path:
        kind, value = self._head()
        if kind == "str":
            return split_name(self._text(value))
        if kind == "int":
            return (value,)
        raise self._error(f"a key below {'/'.join(map(str, path))!r} is a {kind}")

    def _extension(self, length: int) -> Any:
        code = self._integer(1)
        end = self._stream.tell() + length
        if end > self._size:
            raise self._error(f"it ends after {self._size} bytes, within an array")
        if code == _COMPLEX:
            self._expect("array", 2)
            value: Any = complex(*(self._expect("float") for _ in range(2)))
        elif code in (_ARRAY, _SCALAR):
            value = self._array()
        else:
            value = _Refused(f"extension type {code} is none of Flax's: leave it out")
        self._stream.seek(end)
        return value

    def _array(self) -> _Array | _Refused:
        self._expect("array", 3)
        rank = self._expect("array")
        shape = tuple(self._expect("int") for _ in range(rank))
        if any(size < 0 for size in shape):
            raise self._error(f"an array has shape {shape}")
        name = self._text(self._expect("str"))
        count = self._expect("bin")
        try:
            dtype = np.dtype(name)
        except (TypeError, ValueError, SyntaxError):
            return _Refused(f"dtype {name} is not known: convert it to another")
        if dtype.hasobject or dtype.type is np.void:
            return _Refused(f"dtype {name} is not supported: convert it to another")
        if math.prod(shape) * dtype.itemsize != count:
            raise self._error(f"{count} bytes for {name} {shape}")
        return _Array(shape, dtype, self._stream.tell())

    def _head(self) -> tuple[str, Any]:
        """Kind of the next object, and its length or value."""
        code = self._integer(1)
        if code < 0x80:
            return "int", code
        if code < 0x90:
            return "map", code & 0x0F
        if code < 0xA0:
            return "array", code & 0x0F
        if code < 0xC0:
            return "str", code & 0x1F
        if code >= 0xE0:
            return "int", code - 0x100
        if code in _CONSTANTS:
            return "constant", _CONSTANTS[code]
        if code in _LENGTHS:
            kind, width = _LENGTHS[code]
            return kind, self._integer(width)
        if code in _NUMBERS:
            layout = _NUMBERS[code]
            data = self._take(struct.calcsize(layout))
            value = struct.unpack(layout, data)[0]
            return type(value).__name__, value
        if 0xD4 <= code <= 0xD8:
            return "ext", 1 << (code - 0xD4)
        raise self._error(f"byte 0x{code:02x} starts nothing")

    def _expect(self, kind: str, value: int | None = None) -> Any:
        found, content = self._head()
        if found != kind or value not in (None, content):
            raise self._error(f"an array's {kind} must come, not a {found}")
        return content

    def _text(self, length: int) -> str:
        with contextlib.suppress(UnicodeDecodeError):
            return self._take(length).decode()
        raise self._error("a text is not UTF-8")

    def _integer(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _take(self, length: int) -> bytes:
        if self._stream.tell() + length > self._size:
            raise self._error(f"it ends after {self._size} bytes, within an object")
        return self._stream.read(length)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is not a whole msgpack of Flax ({what}): fetch or write it "
            "again."
        )
