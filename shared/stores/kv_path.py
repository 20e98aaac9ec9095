"""Paths in whatever tensorstore can reach: gs://, s3://, file://, memory://, ...

Of pathlib's interface, what checkpoints of ours need: small files as a whole, and lists
of names. There are no folders: one is where names begin with it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from typing import Any

import tensorstore

_CONTEXT = tensorstore.Context()


class KvPath:
    """One name in a key-value store.

    Args:
      url: as tensorstore writes it, such as gs://bucket/checkpoints/7.
    """

    def __init__(self, url: str):
        self._url = url.rstrip("/")

    def __truediv__(self, name: str) -> KvPath:
        return KvPath(f"{self._url}/{name}") if name else self

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"KvPath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KvPath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> KvPath:
        """Without the last part."""
        return KvPath(self._url.rpartition("/")[0])

    @property
    def kvstore(self) -> str:
        """What tensorstore opens arrays below this path with."""
        return f"{self._url}/"

    def is_file(self) -> bool:
        """Whether something is kept under this very name."""
        if self._url.count("/") < 3:  # a bucket
            return False
        return self._read().state == "value"

    def is_dir(self) -> bool:
        """Whether names begin with this one."""
        return any(True for _ in self._keys())

    def exists(self) -> bool:
        """Whether there is a file or a folder of this name."""
        return self.is_file() or self.is_dir()

    def read_text(self, encoding: str = "utf-8") -> str:
        """What is kept under this name.

        Raises:
          FileNotFoundError: nothing is.
        """
        return self.read_bytes().decode(encoding)

    def read_bytes(self) -> bytes:
        """What is kept under this name.

        Raises:
          FileNotFoundError: nothing is.
        """
        found = self._read()
        if found.state != "value":
            raise FileNotFoundError(f"There is no {self}.")
        return found.value

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Keeps a text under this name, durably."""
        self.write_bytes(text.encode(encoding))

    def write_bytes(self, data: bytes) -> None:
        """Keeps bytes under this name, durably."""
        _open(self.parent.kvstore).write(self.name, data).result()

    def unlink(self) -> None:
        """Forgets what is kept under this name."""
        _open(self.parent.kvstore).write(self.name, None).result()

    def clear(self) -> None:
        """Forgets all that is kept below this name."""
        _open(self.kvstore).delete_range(tensorstore.KvStore.KeyRange()).result()

    def mkdir(self, **options: Any) -> None:
        """Does nothing: there are no folders."""

    def iterdir(self) -> Iterator[KvPath]:
        """What is directly below this name."""
        yield from (
            self / name for name in sorted({k.split("/")[0] for k in self._keys()})
        )

    def glob(self, pattern: str) -> Iterator[KvPath]:
        """What is below this name and matches, part by part."""
        parts = pattern.split("/")
        for key in sorted(self._keys()):
            names = key.split("/")
            if len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts)):
                yield self / key

    def _read(self) -> Any:
        return _open(self.parent.kvstore).read(self.name).result()

    def _keys(self) -> Iterator[str]:
        try:
            keys = _open(self.kvstore).list().result()
        except ValueError:  # the file system says that it is no folder
            return
        yield from (key.decode() for key in keys)


def _open(url: str) -> Any:
    return tensorstore.KvStore.open(url, context=_CONTEXT).result()


def context(**resources: Any) -> Any:
    """A context for arrays, in which memory:// is that of paths."""
    return tensorstore.Context(resources, parent=_CONTEXT)


def is_url(path: object) -> bool:
    """Whether a path is one for `KvPath`."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(path)) is not None
