"""Folders of a checkpoint: JSON files in them, and new ones that appear whole."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from shared.stores.kv_path import KvPath, is_url
from shared.stores.store import CheckpointError, some

Folder = pathlib.Path | KvPath
UNFINISHED = "unfinished.txt"  # marks what has no name of its own until it is whole


def as_folder(path: str | os.PathLike[str]) -> Folder:
    """A local path, or one of a URL."""
    return KvPath(str(path)) if is_url(path) else pathlib.Path(path)


def contents(folder: Folder) -> str:
    """What is in a folder, as a sentence."""
    if not folder.exists():
        return "There is no such folder."
    if not folder.is_dir():
        return "It is a file."
    names = sorted(path.name for path in folder.iterdir())
    return f"It has {some(names, 8)}." if names else "It is empty."


def read_json(path: Folder) -> dict[str, Any]:
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
            f"There is no {path.name} in {path.parent}. {contents(path.parent)} Give "
            "the folder of a checkpoint."
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


def write_json(path: Folder, data: Mapping[str, Any]) -> None:
    """Writes JSON as the Hugging Face libraries do: indented, sorted."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


class OtherRunError(CheckpointError):
    """What a killed process has left is not what this one would go on with."""


def partial_folder(folder: pathlib.Path) -> pathlib.Path:
    """Where a folder is while it is being written."""
    return folder.parent / f".{folder.name}.partial"


def is_partial(folder: pathlib.Path) -> bool:
    """Whether a folder's name says that it was not finished."""
    return folder.name.startswith(".") and folder.name.endswith(".partial")


def check_new(folder: Folder) -> None:
    """Finds out whether a new folder can be written; writes nothing.

    Raises:
      CheckpointError: it exists and is not an empty folder, or cannot be made.
    """
    if isinstance(folder, KvPath):
        if folder.is_dir() and not (folder / UNFINISHED).is_file():
            names = sorted(path.name for path in folder.iterdir())
            raise CheckpointError(
                f"{folder} exists. It has {some(names, 8)}. Give another name."
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists. {contents(folder)} Give a new or an empty folder."
        )
    if folder.is_symlink() or folder.is_mount():
        raise CheckpointError(
            f"{folder} is a link or a mount point, which a finished folder cannot "
            "replace: give a folder in it."
        )
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise CheckpointError(
            f"{folder} cannot be made: {above} is no folder that can be written."
        )


@contextlib.contextmanager
def new_folder(folder: pathlib.Path, *, resume: bool = False) -> Iterator[pathlib.Path]:
    """A folder that appears, whole, under the name `folder`, or not at all.

    What a killed process has left is thrown away, or gone on with.

    Args:
      folder: new or empty.
      resume: gives what a killed process has left; bad input removes it.

    Raises:
      CheckpointError: `folder` exists and is not an empty folder, or another process
        is writing it.
    """
    check_new(folder)
    partial = partial_folder(folder)
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        if not resume:
            _clear(partial)
        try:
            yield partial
            sync(partial)
            partial.rename(folder)
            sync(folder.parent)
        except BaseException as error:
            bad_input = isinstance(error, CheckpointError)
            if not isinstance(error, OtherRunError) and (bad_input or not resume):
                shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def new_remote(folder: KvPath) -> Iterator[None]:
    """What is written meanwhile counts as unfinished, and is removed if it fails.

    Raises:
      CheckpointError: there is something under this name that is not unfinished.
    """
    check_new(folder)
    marker = folder / UNFINISHED
    folder.clear()
    marker.write_text("This checkpoint is being written, or its writer was killed.\n")
    try:
        yield
    except BaseException:
        folder.clear()
        raise
    marker.unlink()


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(
            f"Another process is writing {folder}: wait for it, or give another folder."
        ) from None
    finally:
        os.close(descriptor)


def _clear(folder: pathlib.Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: pathlib.Path) -> None:
    """Has the disk keep what a file or a folder's list of names holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
