"""Folders of a checkpoint: JSON files in them, and new ones that appear whole."""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from shared.stores.store import CheckpointError, some


def contents(folder: pathlib.Path) -> str:
    """What is in a folder, as a sentence."""
    if not folder.exists():
        return "There is no such folder."
    if not folder.is_dir():
        return "It is a file."
    names = sorted(path.name for path in folder.iterdir())
    return f"It has {some(names, 8)}." if names else "It is empty."


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


def write_json(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """Writes JSON as the Hugging Face libraries do: indented, sorted."""
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that appears, whole, under the name `folder`, or not at all.

    Raises:
      CheckpointError: `folder` exists and is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists. {contents(folder)} Give a new or an empty folder."
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
