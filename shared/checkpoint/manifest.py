"""What a checkpoint of ours says of itself: layout, config, a digest for each leaf.

The manifest is a JSON file beside the arrays. It says whose tree it is, how the layers
are stacked, and of each leaf shape, dtype and SHA-256: enough to read it without
guessing, and to tell when a byte has changed since.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shared.checkpoint import hf_config
from shared.config import DecoderConfig
from shared.lora import LoraConfig
from shared.stores import CheckpointError, Leaf, Path, Store, digest, path_text
from shared.stores.folders import Folder, as_folder, read_json, write_json

FILE = "manifest.json"
VERSION = 1
ADAPTERS = "adapters"
LAYOUT = ("scan_layers", "scan_period", "param_scan_axis", "vocab_padding")


class LeafRecord(NamedTuple):
    """What is known of a leaf.

    Attributes:
      shape: of the whole.
      dtype: and what the entries stand for.
      sha256: of the entries (`shared.stores.digest`); "": it was not taken.
      note: why not.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      tree: whose it is: "zoo", or a user's "linen" or "nnx"; "adapters" are those of a
        zoo model.
      leaves: by path, a/b/0.
      source: where they came from.
      config: of a zoo model, the fields of config.json.
      layout: of a zoo model, the fields `LAYOUT` of its config.
      origin: how the source was written, so that it can be written so again; of
        adapters, their options below "lora".
      writer: program and version.
    """

    tree: str
    leaves: Mapping[str, LeafRecord]
    source: str = ""
    config: Mapping[str, Any] | None = None
    layout: Mapping[str, Any] | None = None
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    writer: str = ""

    def decoder_config(self) -> DecoderConfig:
        """The config of a zoo model.

        Raises:
          CheckpointError: it is another model's.
        """
        if self.config is None or self.layout is None:
            raise CheckpointError(
                f"The checkpoint holds a {self.tree} tree without the config of a "
                "model of the zoo: convert or migrate it."
            )
        try:
            return hf_config.from_hf(self.config).replace(**self.layout)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"The manifest has a config or a layout that make no model ({error}): "
                "fetch or write the checkpoint again."
            ) from None


def model_manifest(
    config: DecoderConfig, leaves: Mapping[str, LeafRecord], **fields: Any
) -> Manifest:
    """The manifest of a model of the zoo."""
    layout = {name: getattr(config, name) for name in LAYOUT}
    return Manifest(
        "zoo",
        leaves,
        config=hf_config.to_hf(config),
        layout=layout,
        writer=writer(),
        **fields,
    )


def adapter_manifest(
    config: DecoderConfig,
    options: LoraConfig,
    leaves: Mapping[str, LeafRecord],
    **fields: Any,
) -> Manifest:
    """The manifest of low-rank adapters of a model of the zoo."""
    manifest = model_manifest(config, leaves, **fields)
    origin = {
        **manifest.origin,
        "lora": json.loads(json.dumps(dataclasses.asdict(options))),
    }
    return dataclasses.replace(manifest, tree=ADAPTERS, origin=origin)


def writer() -> str:
    """This program and its version."""
    try:
        return f"parity-zoo {importlib.metadata.version('parity-zoo')}"
    except importlib.metadata.PackageNotFoundError:
        return "parity-zoo"


def record(leaf: Leaf, sha256: str, note: str = "") -> LeafRecord:
    """What is known of a leaf with this digest."""
    return LeafRecord(leaf.shape, leaf.type_name, sha256, note)


def write_manifest(folder: Folder, manifest: Manifest) -> None:
    """Writes it into a folder."""
    write_json(folder / FILE, {"version": VERSION, **as_dict(manifest)})


def as_dict(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON has it."""
    data = {
        field.name: getattr(manifest, field.name)
        for field in dataclasses.fields(manifest)
    }
    data["leaves"] = {path: _as_dict(leaf) for path, leaf in manifest.leaves.items()}
    return data


def _as_dict(known: LeafRecord) -> dict[str, Any]:
    data = {**known._asdict(), "shape": list(known.shape)}
    if not known.note:
        del data["note"]
    return data


def find_manifest(folder: Folder) -> Manifest | None:
    """The manifest of a checkpoint; None: it has none of ours.

    Raises:
      CheckpointError: it is damaged, or of a later version.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    data = read_json(path)
    if not data.keys() & {"tree", "leaves"}:
        return None  # other programs have files of this name, too
    return from_dict(data, str(path))


def manifest_of(store: Store, given: str | os.PathLike[str]) -> Manifest | None:
    """The manifest of what was opened: in the tree's folder, or in the one given."""
    return find_manifest(as_folder(store.path)) or find_manifest(as_folder(given))


def from_dict(data: Mapping[str, Any], where: str) -> Manifest:
    """A manifest from JSON.

    Raises:
      CheckpointError: it is damaged, or of a later version.
    """
    if data.get("version") != VERSION:
        raise CheckpointError(
            f"{where} has version {data.get('version')!r}, and {VERSION} is what is "
            "known here: use a newer parity-zoo."
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    try:
        leaves = {
            path: LeafRecord(**{**leaf, "shape": tuple(leaf["shape"])})
            for path, leaf in data["leaves"].items()
        }
        fields = {name: data[name] for name in known - {"leaves"}}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is damaged ({error!r}): fetch or write the checkpoint again."
        ) from None
    return Manifest(leaves=leaves, **fields)


def check_leaves(store: Store, manifest: Manifest) -> None:
    """Compares paths, shapes and dtypes with the manifest; reads no entries.

    Raises:
      CheckpointError: lists everything that differs.
    """
    have = {path_text(path): leaf for path, leaf in store.leaves.items()}
    want = manifest.leaves
    problems = [f"missing: {path}" for path in want if path not in have]
    problems += [f"unexpected: {path}" for path in have if path not in want]
    for path in want.keys() & have.keys():
        known = record(have[path], want[path].sha256, want[path].note)
        if known != want[path]:
            problems.append(
                f"{path} is {known.dtype} {known.shape}, and the manifest says "
                f"{want[path].dtype} {want[path].shape}"
            )
    if problems:
        raise CheckpointError(
            f"{store.path} is not what its manifest says: fetch or write it again.",
            sorted(problems),
        )


def check_digests(
    store: Store,
    manifest: Manifest,
    progress: Callable[[int], Any] | None = None,
    only: Iterable[Path] | None = None,
) -> None:
    """Reads every leaf and compares its digest with the manifest.

    Args:
      store: the checkpoint.
      manifest: of it.
      progress: told of bytes as they are read.
      only: paths of the leaves to read; None: all that have a digest.

    Raises:
      CheckpointError: lists everything that differs.
    """
    check_leaves(store, manifest)
    problems = []
    for path in store.leaves if only is None else only:
        text = path_text(path)
        known = manifest.leaves[text].sha256
        if not known:
            continue
        found = digest(store.leaves[path], f"{store.path}:{text}", progress)
        if found != known:
            problems.append(
                f"{text}: its SHA-256 is {found}, and the manifest says {known}"
            )
    if problems:
        raise CheckpointError(
            f"{len(problems)} of {len(store.leaves)} leaves of {store.path} have "
            "changed since they were written: fetch or write it again.",
            problems,
        )
