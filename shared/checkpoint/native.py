"""The zoo's own checkpoints: orbax's tree folders with a manifest.

    CHECKPOINT/manifest.json     layout, config, a digest for each leaf
    CHECKPOINT/_METADATA         orbax's: which paths there are
    CHECKPOINT/params.norm/ ...  the arrays (zarr)

Both frontends write and read the same files, and stock orbax reads them, too.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from shared.checkpoint.manifest import (
    ADAPTERS,
    LeafRecord,
    Manifest,
    check_digests,
    check_leaves,
    manifest_of,
    model_manifest,
    record,
    write_manifest,
)
from shared.checkpoint.scheme import Conversion, units, zoo_scheme
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.plan import insert
from shared.stores import CheckpointError, Leaf, Path, Store, open_store, path_text
from shared.stores.folders import (
    Folder,
    OtherRunError,
    as_folder,
    new_folder,
    new_remote,
    sync,
)
from shared.stores.kv_path import KvPath, is_url
from shared.stores.orbax_writer import (
    Progress,
    array_name,
    check_dtypes,
    check_names,
    sync_array,
    write_array,
    write_tree_file,
)
from shared.stores.reading import read_whole
from shared.stores.tree import array_leaf
from shared.trees import check_same_paths, flatten

PARAMS = "params"  # what a model's parameters stand below
_SYNCING = 4  # arrays at once that the disk is waited for
_JOURNAL = "journal.jsonl"


def save(
    folder: str | os.PathLike[str], config: DecoderConfig, params: Mapping[str, Any]
) -> None:
    """Writes parameters, from whichever frontend.

    The folder appears when it is complete and has been read back.

    Args:
      folder: new or empty.
      config: of the model.
      params: nested dicts of arrays in the layout of `config.plan`.

    Raises:
      CheckpointError: `folder` is not empty, or `params` do not fit `config`.
    """
    try:
        check_same_paths(decoder.param_specs(config), params)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    leaves: dict[Path, Leaf] = {
        (PARAMS, *path): array_leaf(leaf) for path, leaf in flatten(params)
    }
    write_checkpoint(
        folder, leaves, lambda records: model_manifest(config, records, source="save")
    )


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    verify: bool = True,
    **layout: Any,
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Config and parameters of a checkpoint that `save` or `parity convert` wrote.

    Args:
      folder: of the checkpoint; or of a run (`shared.checkpoint.training`) or a step.
      step: of a run; None: the latest.
      verify: whether to read them all first and compare them with the manifest.
      **layout: `scan_layers`, `scan_period` or `param_scan_axis`, where the layers are
        to be stacked in another way than they are stored.

    Returns:
      The config, and nested dicts of arrays in the layout of its plan.

    Raises:
      CheckpointError: it is damaged, no checkpoint of ours, or has dtypes that JAX
        would change (float64 without `jax_enable_x64`).
    """
    store, manifest = open_checkpoint(folder, step)
    config = manifest.decoder_config()
    if manifest.tree == ADAPTERS:
        raise CheckpointError(
            f"{folder} holds adapters, not a model: shared.checkpoint.adapters.load "
            "reads them."
        )
    leaves = {path_text(p): leaf for p, leaf in store.under(PARAMS).leaves.items()}
    check_kept(leaves, store.path)
    if verify:
        only = [path for path in store.leaves if path[0] == PARAMS]
        check_digests(store, manifest, only=only)
    new = config.replace(**layout)
    if new != config:
        conversion = Conversion(zoo_scheme(config), zoo_scheme(new), units(config))
        leaves = conversion.leaves(leaves)
    params: dict[str, Any] = {}
    for path, leaf in leaves.items():
        insert(params, tuple(path.split("/")), jax.device_put(read_whole(leaf, path)))
    return new, params


def check_kept(leaves: Mapping[str, Leaf], where: str) -> None:
    """Raises CheckpointError if JAX would narrow a dtype without a word."""
    problems = [
        f"{text} is {leaf.dtype}"
        for text, leaf in leaves.items()
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    ]
    if problems:
        raise CheckpointError(
            f'{where} needs jax.config.update("jax_enable_x64", True).', problems
        )


def open_checkpoint(
    folder: str | os.PathLike[str], step: int | None = None
) -> tuple[Store, Manifest]:
    """A checkpoint of ours, or a step of a run, not yet read.

    Args:
      folder: of the checkpoint, the run or the step.
      step: of a run; None: the latest.

    Raises:
      CheckpointError: it has no manifest, or is not what the manifest says.
    """
    store = open_store(folder, step)
    # A step's lies beside its tree.
    manifest = manifest_of(store, folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder} has no manifest.json, so it is no checkpoint of ours: convert "
            "it (parity convert), or migrate it (parity migrate)."
        )
    if manifest.tree == "maxtext":
        raise CheckpointError(
            f"{folder} is in MaxText's layout: parity convert {folder} NEW --to=zoo "
            "makes a checkpoint of ours of it."
        )
    check_leaves(store, manifest)
    _check_no_more(store)
    return store, manifest


def _check_no_more(store: Store) -> None:
    """Raises CheckpointError if arrays lie about that the tree does not have."""
    names = {array_name(path) for path in store.leaves}
    more = [
        str(path.parent)
        for path in as_folder(store.path).glob("*/.zarray")
        if path.parent.name not in names
    ]
    if more:
        raise CheckpointError(
            f"{store.path} has arrays that are not in its tree: remove them, or fetch "
            "or write the checkpoint again.",
            sorted(more),
        )


def write_checkpoint(
    folder: str | os.PathLike[str],
    leaves: Mapping[Path, Leaf],
    describe: Callable[[Mapping[str, LeafRecord]], Manifest],
    *,
    empty: Mapping[Path, str] | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    item: str = "",
    files: Sequence[Folder] = (),
    progress: Progress | None = None,
) -> Manifest:
    """Writes leaves one after the other, reads them back, and then shows the folder.

    A run that was killed leaves a hidden folder, which is never taken for a checkpoint;
    the next run with the same fingerprint goes on where it was.

    Args:
      folder: new or empty; or a URL (gs://, s3://, ...), where a run that was killed
        leaves a marker instead.
      leaves: by path; a chunk of one is in memory.
      describe: gives the manifest when the digests are known.
      empty: nodes without leaves, as in `Store.empty`.
      fingerprint: of all that the result depends on, as JSON; None: a killed run is
        not gone on with.
      item: folder of the tree in `folder`, as orbax's checkpoints of items have it.
      files: copied beside it.
      progress: told of bytes as they are written, and again as they are read back.

    Raises:
      CheckpointError: `folder` is not empty, a source is damaged, or what was read back
        is not what was written.
    """
    check_names(leaves)
    dtypes = {path: leaf.dtype for path, leaf in leaves.items()}
    check_dtypes({path: dtype for path, dtype in dtypes.items() if dtype.kind != "U"})
    if is_url(folder):
        remote = KvPath(str(folder))
        with new_remote(remote):
            tree: Folder = remote / item
            found = {
                path_text(path): record(leaf, write_array(tree, path, leaf, progress))
                for path, leaf in leaves.items()
            }
            return _finish(
                remote, tree, leaves, empty or {}, describe(found), files, progress
            )
    target = pathlib.Path(folder).absolute()
    with new_folder(target, resume=fingerprint is not None) as partial:
        journal = _Journal.open(partial, fingerprint)
        tree = partial / item
        tree.mkdir(exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(_SYNCING) as threads:
            synced = []
            for path, leaf in leaves.items():
                if path_text(path) in journal.records:
                    continue
                sha256 = write_array(tree, path, leaf, progress)
                journal.add(path_text(path), record(leaf, sha256))
                synced.append(threads.submit(sync_array, tree, path))
        for done in synced:
            done.result()
        records = {path_text(path): journal.records[path_text(path)] for path in leaves}
        manifest = _finish(
            partial, tree, leaves, empty or {}, describe(records), files, progress
        )
        for file in (*partial.iterdir(), *tree.iterdir()):
            if file.is_file():
                sync(file)
        journal.file.unlink()
    return manifest


def _finish(
    folder: Folder,
    tree: Folder,
    leaves: Mapping[Path, Leaf],
    empty: Mapping[Path, str],
    manifest: Manifest,
    files: Sequence[Folder],
    progress: Progress | None,
) -> Manifest:
    """Makes a checkpoint of arrays that are written, and reads them back."""
    write_tree_file(tree, leaves, empty)
    check_digests(open_store(str(folder), partial=True), manifest, progress)
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())
    write_manifest(folder, manifest)
    return manifest


class _Journal(NamedTuple):
    """What a run has finished, a line a leaf."""

    file: pathlib.Path
    records: dict[str, LeafRecord]

    @classmethod
    def open(
        cls, folder: pathlib.Path, fingerprint: Mapping[str, Any] | None
    ) -> _Journal:
        """The journal in a folder, or a new one.

        Raises:
          CheckpointError: it is that of another run.
        """
        journal = cls(folder / _JOURNAL, {})
        lines = _whole_lines(journal.file)
        wanted = json.loads(json.dumps(fingerprint))
        if not lines:
            journal._append(wanted)
            return journal
        if lines[0] != wanted:
            raise OtherRunError(
                f"{folder} was left by a run with another source or other options, "
                "which was killed: run that again to finish it, or remove the folder."
            )
        for line in lines[1:]:
            known = LeafRecord(tuple(line["shape"]), line["dtype"], line["sha256"])
            journal.records[line["path"]] = known
        return journal

    def add(self, path: str, known: LeafRecord) -> None:
        """Notes a leaf that is on the disk."""
        self._append({"path": path, **known._asdict()})
        self.records[path] = known

    def _append(self, line: Any) -> None:
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def _whole_lines(file: pathlib.Path) -> list[Any]:
    """Lines of a journal but for a last one that was not finished."""
    if not file.is_file():
        return []
    text = file.read_text("utf-8")
    whole, _, rest = text.rpartition("\n")
    if rest:  # cut it off, so that the next line starts anew
        file.write_text(whole + "\n" if whole else "", "utf-8")
    return [json.loads(line) for line in whole.splitlines()]
