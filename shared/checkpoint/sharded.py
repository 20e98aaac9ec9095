"""One checkpoint written by several processes, on one machine or many.

The processes see one file system. Each writes a share of every leaf that is large and
some of the small ones whole, then reads some leaves back whole and compares what it
reads with what was written. The first process begins and ends the folder.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from shared.checkpoint.manifest import LeafRecord, Manifest, record, write_manifest
from shared.stores import CheckpointError, Leaf, Path, Store, open_store, path_text
from shared.stores.folders import (
    Folder,
    new_folder,
    partial_folder,
    read_json,
    write_json,
)
from shared.stores.orbax_writer import (
    BLOCK_BYTES,
    WHOLE,
    Progress,
    Share,
    check_dtypes,
    check_names,
    create_array,
    parts_of,
    sync_array,
    write_array,
    write_tree_file,
)
from shared.stores.reading import read_ahead, reading


class Processes(NamedTuple):
    """The processes that work together.

    Attributes:
      number: of this one.
      among: how many there are.
      wait: returns when all have called it with the same name.
    """

    number: int
    among: int
    wait: Callable[[str], Any]


def write_sharded(
    folder: pathlib.Path,
    leaves: Mapping[Path, Leaf],
    describe: Callable[[Mapping[str, LeafRecord]], Manifest],
    processes: Processes,
    *,
    empty: Mapping[Path, str] | None = None,
    item: str = "",
    files: Sequence[Folder] = (),
    check: Callable[[], Any] = lambda: None,
    progress: Progress | None = None,
) -> Manifest | None:
    """Writes what `native.write_checkpoint` writes; every process calls it.

    Args:
      folder: new or empty, the same for all.
      leaves: the same for all; each process reads what it writes.
      describe: gives the manifest when the digests are known.
      processes: this one and the others.
      empty: nodes without leaves, as in `Store.empty`.
      item: folder of the tree in `folder`.
      files: copied beside it.
      check: done first; what it raises, all raise.
      progress: told of bytes as this process writes them and reads them back.

    Returns:
      The manifest, in the first process.

    Raises:
      CheckpointError: in every process, if there is something wrong in any.
    """
    work = _Work(folder.absolute(), item, leaves, processes, progress)
    first = processes.number == 0
    with ExitStack() as stack:
        work.step("check", check)
        work.step("begin", lambda: work.begin(stack) if first else None)
        work.step("write", work.write)
        work.step("tree", lambda: work.write_tree(empty or {}) if first else None)
        work.step("verify", work.verify)
        return work.step(
            "end",
            lambda: work.end(stack, describe, files) if first else None,
        )


class _Work:
    """What one process does; `step` has all of them fail where one does."""

    def __init__(
        self,
        folder: pathlib.Path,
        item: str,
        leaves: Mapping[Path, Leaf],
        processes: Processes,
        progress: Progress | None,
    ):
        self._folder, self._partial = folder, partial_folder(folder)
        self._tree = self._partial / item
        self._leaves, self._processes = leaves, processes
        self._progress = progress

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """Does one step and waits for the others.

        Raises:
          CheckpointError: what went wrong here or elsewhere.
        """
        own, problem, result = self._note(name, self._processes.number), None, None
        try:
            result = work()
        except Exception as error:  # the others wait for this process
            problem = error
        own.parent.mkdir(parents=True, exist_ok=True)
        write_json(own, {"error": None if problem is None else str(problem)})
        self._processes.wait(name)
        problems = self._problems(name)
        self._processes.wait(f"{name} is read")
        own.unlink(missing_ok=True)
        if problem is not None:
            raise problem
        if problems:
            raise CheckpointError("Another process has failed:", problems)
        return result

    def _note(self, step: str, number: int) -> pathlib.Path:
        """A file beside the folder, for the folder itself is renamed at the end."""
        name = f".{self._folder.name}.{step}.{number}.json"
        return self._folder.parent / name

    def _problems(self, step: str) -> list[str]:
        notes = {n: self._note(step, n) for n in range(self._processes.among)}
        errors = {n: read_json(note)["error"] for n, note in notes.items()}
        return [f"process {n}: {error}" for n, error in errors.items() if error]

    def begin(self, stack: ExitStack) -> None:
        """Makes the folder and the arrays in it."""
        check_names(self._leaves)
        dtypes = {path: leaf.dtype for path, leaf in self._leaves.items()}
        check_dtypes({path: d for path, d in dtypes.items() if d.kind != "U"})
        stack.enter_context(new_folder(self._folder))
        self._tree.mkdir(exist_ok=True)
        for path, leaf in self._leaves.items():
            if self._share(path, leaf) != WHOLE:
                create_array(self._tree, path, leaf)

    def _share(self, path: Path, leaf: Leaf) -> Share:
        """Which part of a leaf this process writes; of a small one all or nothing."""
        if leaf.nbytes > BLOCK_BYTES * self._processes.among:
            return Share(self._processes.number, self._processes.among)
        return WHOLE

    def _is_mine(self, number: int) -> bool:
        return number % self._processes.among == self._processes.number

    def write(self) -> None:
        """Writes this process's shares, and notes their digests."""
        digests = {}
        for number, (path, leaf) in enumerate(self._leaves.items()):
            share = self._share(path, leaf)
            if share != WHOLE or self._is_mine(number):
                digests[path_text(path)] = write_array(
                    self._tree, path, leaf, self._progress, share
                )
        write_json(self._digests("written", self._processes.number), digests)

    def _digests(self, what: str, number: int) -> pathlib.Path:
        return self._partial / f"{what}.{number}.json"

    def _all_digests(self, what: str) -> list[dict[str, str]]:
        among = range(self._processes.among)
        return [read_json(self._digests(what, number)) for number in among]

    def write_tree(self, empty: Mapping[Path, str]) -> None:
        """Makes a tree of the arrays."""
        write_tree_file(self._tree, self._leaves, empty)

    def verify(self) -> None:
        """Reads some leaves back, whole, and compares them share by share."""
        written = self._all_digests("written")
        store = open_store(self._partial, partial=True)
        digests, problems = {}, []
        for number, (path, leaf) in enumerate(self._leaves.items()):
            if not self._is_mine(number):
                continue
            sync_array(self._tree, path)
            text = path_text(path)
            whole, shares = self._read_back(store, path, leaf)
            wanted = [known[text] for known in written if text in known]
            if shares != wanted:
                problems.append(f"{text} was read back with other bytes")
            digests[text] = whole
        if problems:
            raise CheckpointError("The disk does not keep what is written:", problems)
        write_json(self._digests("read", self._processes.number), digests)

    def _read_back(self, store: Store, path: Path, leaf: Leaf) -> tuple[str, list[str]]:
        """The digest of a leaf, and those of the shares it was written in."""
        whole, shares = hashlib.sha256(), []
        stored = store.leaves[path]
        with reading(stored, path_text(path)) as read:
            for share in self._shares(path, leaf):
                found = hashlib.sha256()
                for _, array in read_ahead(read, parts_of(leaf, share)):
                    data = array.reshape(-1).view(np.uint8).data
                    whole.update(data)
                    found.update(data)
                    if self._progress is not None:
                        self._progress(array.nbytes)
                shares.append(found.hexdigest())
        return whole.hexdigest(), shares

    def _shares(self, path: Path, leaf: Leaf) -> Iterator[Share]:
        if self._share(path, leaf) == WHOLE:
            yield WHOLE
            return
        for number in range(self._processes.among):
            yield Share(number, self._processes.among)

    def end(
        self,
        stack: ExitStack,
        describe: Callable[[Mapping[str, LeafRecord]], Manifest],
        files: Sequence[Folder],
    ) -> Manifest:
        """Writes the manifest and gives the folder its name."""
        found: dict[str, str] = {}
        for digests in self._all_digests("read"):
            found |= digests
        records = {
            path_text(path): record(leaf, found[path_text(path)])
            for path, leaf in self._leaves.items()
        }
        manifest = describe(records)
        write_manifest(self._partial, manifest)
        for number in range(self._processes.among):
            for what in ("written", "read"):
                self._digests(what, number).unlink()
        for file in files:
            (self._partial / file.name).write_bytes(file.read_bytes())
        stack.close()  # renames
        return manifest


def jax_processes() -> Processes | None:
    """The processes of `jax.distributed`; None: there is only this one."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return None
    return Processes(
        jax.process_index(),
        jax.process_count(),
        multihost_utils.sync_global_devices,
    )
