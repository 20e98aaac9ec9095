"""Leaves read part by part: damage is told by name, bytes become a digest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from shared.stores.store import CheckpointError, Leaf, Part, Read, blocks

BLOCK_BYTES = 4 * 2**20  # of a leaf that are in memory at once
_WHOLE_BLOCK = 64 * 2**20
_ALIGNMENT = 64  # from which on JAX takes an array over instead of copying it

_DAMAGE = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)


@contextlib.contextmanager
def reading(leaf: Leaf, name: str) -> Iterator[Read]:
    """The leaf's `read`, of which errors name the leaf.

    Raises:
      CheckpointError: what is stored is damaged, or is not what the format promised.
    """
    with contextlib.ExitStack() as stack:
        with _named(name):
            read = stack.enter_context(leaf.open())

        yield functools.partial(_read_named, name, read)


def _read_named(name: str, read: Read, part: Part) -> np.ndarray:
    with _named(name):
        array = np.asarray(read(part))
        expected = tuple(s.stop - s.start for s in part)
        if array.shape != expected:
            raise ValueError(f"{array.shape} came for {expected}")
        return array


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(
            f"{name} cannot be read ({error}): fetch or write it again."
        ) from error


def read_ahead(read: Read, parts: Iterable[Part]) -> Iterator[tuple[Part, np.ndarray]]:
    """Parts of a leaf, in order; the next is read while one is worked on.

    Args:
      read: of the opened leaf.
      parts: to read; two of them are in memory.
    """
    rest = iter(parts)
    now = next(rest, None)
    if now is None:
        return
    following = next(rest, None)
    if following is None:
        yield now, _in_order(read, now)
        return
    ahead = _READER.submit(_in_order, read, now)
    for part in itertools.chain([following], rest):
        array = ahead.result()
        ahead = _READER.submit(_in_order, read, part)
        yield now, array
        now = part
        del array
    yield now, ahead.result()


# Two for all: what a thread has freed, its arena keeps.
_READER = concurrent.futures.ThreadPoolExecutor(2, "read ahead")


def _in_order(read: Read, part: Part) -> np.ndarray:
    return np.asarray(read(part), order="C")


def read_whole(leaf: Leaf, name: str) -> np.ndarray:
    """The whole leaf, in memory that JAX on a CPU takes over as it is.

    Args:
      leaf: a part at a time is in memory besides.
      name: for errors.

    Raises:
      CheckpointError: the leaf cannot be read.
    """
    memory = np.empty(leaf.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    array = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    _fill(array, leaf, name)
    return array


def _fill(array: np.ndarray, leaf: Leaf, name: str) -> None:
    if leaf.pieces is not None:
        for piece in leaf.pieces():
            _fill(array[(*piece.at, ...)], piece.leaf, name)
        return
    with reading(leaf, name) as read:
        for part in blocks(leaf.shape, max(1, _WHOLE_BLOCK // leaf.dtype.itemsize)):
            array[part] = read(part)


def digest(leaf: Leaf, name: str, progress: Callable[[int], None] | None = None) -> str:
    """SHA-256, in hexadecimal digits, of the entries in C order, little-endian.

    Neither shape nor dtype is part of it: two leaves are the same if all three are.

    Args:
      leaf: read in parts of `BLOCK_BYTES`.
      name: for errors.
      progress: told of bytes as they are read.

    Raises:
      CheckpointError: the leaf cannot be read.
    """
    found = hashlib.sha256()
    parts = blocks(leaf.shape, max(1, BLOCK_BYTES // leaf.dtype.itemsize))
    with reading(leaf, name) as read:
        for _, array in read_ahead(read, parts):
            if sys.byteorder == "big":
                array = array.byteswap()
            found.update(array.reshape(-1).view(np.uint8).data)
            if progress is not None:
                progress(array.nbytes)
    return found.hexdigest()
