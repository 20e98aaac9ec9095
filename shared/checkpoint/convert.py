"""From a checkpoint of any format to one of another, a few MiB at a time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shared.checkpoint import hf_config, hf_names, vllm
from shared.checkpoint.manifest import (
    LAYOUT,
    LeafRecord,
    Manifest,
    check_digests,
    model_manifest,
)
from shared.checkpoint.maxtext import MaxTextLayout, maxtext_scheme
from shared.checkpoint.native import write_checkpoint
from shared.checkpoint.scheme import Conversion, Scheme, unit_specs, units, zoo_scheme
from shared.checkpoint.sharded import Processes, write_sharded
from shared.checkpoint.source import CARRIED, Source
from shared.config import DecoderConfig
from shared.stores import CheckpointError, Leaf, Path, digest, path_text
from shared.stores.folders import (
    as_folder,
    check_new,
    new_folder,
    sync,
    write_json,
)
from shared.stores.kv_path import is_url
from shared.stores.safetensors import Reader
from shared.stores.safetensors_writer import Progress, write_folder

TARGETS = ("zoo", "hf", "maxtext", "vllm")
SHARD_BYTES = 5_000_000_000


@dataclasses.dataclass(frozen=True)
class Target:
    """What to write.

    Attributes:
      format: of `TARGETS`.
      layout: fields of a zoo config (`scan_layers`, `scan_period`, `param_scan_axis`,
        `vocab_padding`) that are to be other than the source's.
      maxtext: of a MaxText tree.
      fused_experts: of Hugging Face: all experts of a layer in one tensor, or a tensor
        for each; None: as the first source had them, else a tensor for each.
      hub_style: spelling of config.json: the published one, or that of transformers 5;
        None: as the first source had it, else that of transformers 5.
      max_shard_bytes: data in one safetensors file.
      param_dtype: to which parameters are cast, but for those that stay at least
        float32; None: nothing is cast.
      carry: whether tensors that are no part of the decoder come along.
    """

    format: str
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    maxtext: MaxTextLayout = MaxTextLayout("scanned", 1)
    fused_experts: bool | None = None
    hub_style: bool | None = None
    max_shard_bytes: int = SHARD_BYTES
    param_dtype: str | None = None
    carry: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a conversion will write.

    Attributes:
      source: that is read.
      target: that is asked for.
      config: of the model as it will be stored.
      leaves: by path; of safetensors, paths of one name.
      empty: nodes without leaves.
      notes: what is left out or changed on the way.
    """

    source: Source
    target: Target
    config: DecoderConfig
    leaves: Mapping[Path, Leaf]
    empty: Mapping[Path, str]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves.values())


def plan_conversion(source: Source, target: Target) -> Plan:
    """Finds out what would be written; nothing is read or written yet.

    Raises:
      CheckpointError: the target cannot hold the model, or only if some is cast.
      ConfigError: the layers do not fit the layout that is asked for.
    """
    changes = dict(target.layout)
    if target.param_dtype is not None:
        changes["param_dtype"] = target.param_dtype
    config = source.config.replace(**changes)
    scheme = _scheme(config, source, target)
    have = source.scheme.sizes or units(source.config)
    _check_partial(source, scheme, target)
    conversion = Conversion(
        dataclasses.replace(source.scheme, sizes=have), scheme, units(config)
    )
    dtypes = None if target.param_dtype is None else _dtypes(config, scheme)
    tensors = conversion.leaves(source.tensors, dtypes)
    notes: list[str] = []
    if dtypes is not None:
        notes += _casts(conversion, source, dtypes)
    if target.format in ("hf", "vllm"):
        leaves: dict[Path, Leaf] = {(name,): leaf for name, leaf in tensors.items()}
        if target.format == "hf":
            leaves |= _more_tensors(config, source, tensors)
        if source.alike or source.rest:
            count = len(source.rest) + len(source.alike) * len(source.tensors)
            notes.append(
                f"left out: {count:,} leaves of training state, for which "
                f"{target.format} has no place"
            )
    else:
        leaves = dict(_tree(source, target, conversion, tensors))
    if target.carry and source.lost:
        raise CheckpointError("Tensors cannot be carried:", source.lost)
    if source.carried:
        total = sum(leaf.nbytes for leaf in source.carried.values())
        what = f"{len(source.carried):,} tensors of {total:,} bytes that are no part "
        if target.carry:
            top = () if target.format == "hf" else (CARRIED,)
            leaves |= {(*top, name): leaf for name, leaf in source.carried.items()}
            notes.append(f"carried: {what}of the decoder")
        else:
            way = "--carry keeps them" if target.format in ("hf", "zoo") else "no place"
            notes.append(f"left out: {what}of the decoder ({way})")
    notes += [f"left out: {lost}" for lost in source.lost]
    return Plan(source, target, config, leaves, source.empty, tuple(notes))


def _check_partial(source: Source, scheme: Scheme, target: Target) -> None:
    """Moments of some parameters are not told from other leaves: they must stay."""
    same = scheme.shapes == source.scheme.shapes
    same = same and scheme.places() == source.scheme.places()
    if source.partial and not same and target.format in ("zoo", "maxtext"):
        raise CheckpointError(
            f"{len(source.partial)} leaves look like optimizer state of only some "
            "parameters, and would stay in the old layout: keep the layout, or leave "
            "them out of the source.",
            [path_text(tuple(map(str, path))) for path in source.partial[:20]],
        )


def _scheme(config: DecoderConfig, source: Source, target: Target) -> Scheme:
    if target.format == "zoo":
        return zoo_scheme(config)
    if target.format == "maxtext":
        return maxtext_scheme(config, target.maxtext)
    if target.format == "vllm":
        return vllm.vllm_scheme(config)
    if target.format == "hf":
        fused = target.fused_experts
        if fused is None:
            fused = bool(source.origin.get("fused_experts", False))
        tensors = hf_names.tensors(config, lambda name: fused, _prefix(source))
        return hf_names.scheme(config, tensors)
    raise CheckpointError(
        f"There is no format {target.format}. There are {', '.join(TARGETS)}."
    )


def _dtypes(config: DecoderConfig, scheme: Scheme) -> dict[str, np.dtype]:
    """The dtype of each tensor of a model whose parameters are `config.param_dtype`."""
    specs = unit_specs(config)
    return {
        name: np.dtype(specs[content[0][0]].dtype(config.param_dtype))
        for name, content in scheme.contents().items()
    }


def _casts(
    conversion: Conversion, source: Source, dtypes: Mapping[str, np.dtype]
) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = {}
    for name, dtype in dtypes.items():
        for behind in conversion.behind(name):
            have = source.tensors[behind].dtype
            if have != dtype:
                key = str(have), str(dtype)
                counts[key] = counts.get(key, 0) + 1
    for (old, new), count in counts.items():
        yield f"cast: {count:,} tensors from {old} to {new}, so not the same bytes"


def _more_tensors(
    config: DecoderConfig, source: Source, tensors: Mapping[str, Leaf]
) -> dict[Path, Leaf]:
    """The head of a tied model, where the first source had a copy of it."""
    if not (config.tie_word_embeddings and source.origin.get("tied_copy")):
        return {}
    prefix = _prefix(source)
    return {(hf_names.head(prefix),): tensors[hf_names.embedding(prefix)]}


def _prefix(source: Source) -> str:
    """What names began with in the first source."""
    return hf_names.check_prefix(source.origin.get("prefix", hf_names.PREFIX))


def _tree(
    source: Source, target: Target, conversion: Conversion, tensors: Mapping[str, Leaf]
) -> Iterator[tuple[Path, Leaf]]:
    """A tree with the parameters, what is like them, and the rest."""
    more = ("params",) if target.format == "maxtext" else ()
    for name, leaf in tensors.items():
        yield ("params", *more, *name.split("/")), leaf
    for top, tree in source.alike.items():
        for name, leaf in conversion.leaves(tree).items():
            yield (*top, *more, *name.split("/")), leaf
    yield from source.rest.items()


def convert(
    plan: Plan,
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    processes: Processes | None = None,
) -> dict[str, str]:
    """Writes what was planned, and reads it back.

    The folder appears when it is complete and equal to what was to be written, and, of
    a source with a manifest, all of it what the manifest says.

    Args:
      plan: from `plan_conversion`.
      folder: new or empty.
      progress: told of bytes as they are written, and again as they are read back.
      processes: where several do it together; each calls this.

    Returns:
      The SHA-256 of each leaf that was written; in the first process, where there are
      several.

    Raises:
      CheckpointError: the source is damaged, the folder is not empty, or what was read
        back is not what was written.
    """
    source = plan.source
    check_destination(plan, folder)
    if is_url(folder) and (processes or plan.target.format in ("hf", "vllm")):
        raise CheckpointError(
            f"{folder}: to a URL one process writes zoo or maxtext: write to a disk "
            "and copy it."
        )
    if processes is not None and plan.target.format in ("hf", "vllm"):
        raise CheckpointError(
            f"Several processes write zoo and maxtext, not {plan.target.format}: "
            "convert in one process."
        )
    if processes is not None:
        written = write_sharded(
            pathlib.Path(folder),
            plan.leaves,
            lambda records: _manifest(plan, records),
            processes,
            empty=plan.empty,
            item="items" if plan.target.format == "maxtext" else "",
            files=source.files,
            check=functools.partial(_check_source, source, processes),
            progress=progress,
        )
        return {} if written is None else _digests(written)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # Beside the writing, which is not shown before this has passed.
        checked = thread.submit(_check_source, source)
        try:
            return _write(plan, folder, progress, checked.result)
        except CheckpointError:
            checked.result()  # what is wrong with the source says more
            raise


def _write(
    plan: Plan,
    folder: str | os.PathLike[str],
    progress: Progress | None,
    check: Callable[[], Any],
) -> dict[str, str]:
    if plan.target.format in ("hf", "vllm"):
        return _write_safetensors(plan, pathlib.Path(folder), progress, check)

    def describe(records: Mapping[str, LeafRecord]) -> Manifest:
        check()
        return _manifest(plan, records)

    manifest = write_checkpoint(
        folder,
        plan.leaves,
        describe,
        empty=plan.empty,
        fingerprint=_fingerprint(plan),
        item="items" if plan.target.format == "maxtext" else "",
        files=plan.source.files,
        progress=progress,
    )
    return _digests(manifest)


def check_destination(plan: Plan, folder: str | os.PathLike[str]) -> None:
    """Finds out whether a folder can be written; writes nothing.

    Raises:
      CheckpointError: it exists and is not empty, cannot be made, or is in the source.
    """
    check_new(as_folder(folder))
    if is_url(folder) or is_url(plan.source.path):
        return
    source, new = (pathlib.Path(p).resolve() for p in (plan.source.path, folder))
    if source in new.parents:
        raise CheckpointError(
            f"{folder} is inside the source, which is not to be changed: give another "
            "folder."
        )


def _digests(manifest: Manifest) -> dict[str, str]:
    return {path: leaf.sha256 for path, leaf in manifest.leaves.items()}


def _check_source(source: Source, processes: Processes | None = None) -> None:
    """Compares a source with its manifest; of several processes, each some of it."""
    store, manifest = source.store, source.manifest
    if manifest is None or store is None:
        return
    number, among = (0, 1) if processes is None else processes[:2]
    check_digests(store, manifest, only=list(store.leaves)[number::among])


def _manifest(plan: Plan, records: Mapping[str, Any]) -> Manifest:
    origin = plan.source.origin or {"format": plan.source.format}
    fields = {"source": str(pathlib.Path(plan.source.path).name), "origin": origin}
    if plan.target.format == "maxtext":
        layout = {"vocab_padding": plan.config.vocab_padding}
        manifest = model_manifest(plan.config, records, **fields)
        return dataclasses.replace(manifest, tree="maxtext", layout=layout)
    return model_manifest(plan.config, records, **fields)


def _fingerprint(plan: Plan) -> dict[str, Any] | None:
    """Of all that the result depends on: the source's files, and what is asked for."""
    if is_url(plan.source.path):
        return None
    root = pathlib.Path(plan.source.path).resolve()
    paths = sorted(root.rglob("*")) if root.is_dir() else [root]
    stats = [(path, path.stat()) for path in paths if path.is_file()]
    places = plan.source.scheme.places()
    return {
        "source": str(root),
        "files": [[str(p), stat.st_size, stat.st_mtime_ns] for p, stat in stats],
        "places": hashlib.sha256(repr(places).encode()).hexdigest(),
        "format": plan.target.format,
        "config": repr(plan.config),
        "leaves": [
            [path_text(tuple(map(str, path))), list(leaf.shape), leaf.type_name]
            for path, leaf in plan.leaves.items()
        ],
    }


def _write_safetensors(
    plan: Plan,
    folder: pathlib.Path,
    progress: Progress | None,
    check: Callable[[], Any],
) -> dict[str, str]:
    tensors = {path[0]: leaf for path, leaf in plan.leaves.items()}
    with new_folder(folder.absolute()) as partial:
        write_json(partial / "config.json", _config_json(plan))
        digests = write_folder(
            partial,
            {str(name): leaf for name, leaf in tensors.items()},
            max_shard_bytes=plan.target.max_shard_bytes,
            progress=progress,
        )
        reader = Reader(partial)
        for name, written in digests.items():
            if digest(reader.leaf(name), name, progress) != written:
                raise CheckpointError(
                    f"{name} was read back from {partial} with other bytes than were "
                    "written: check the disk."
                )
        check()
        for file in plan.source.files:
            (partial / file.name).write_bytes(file.read_bytes())
        for path in partial.iterdir():
            sync(path)
    return digests


def _config_json(plan: Plan) -> Mapping[str, Any]:
    """The first source's config.json where it still says the same, or a new one."""
    first, style = plan.source.origin.get("config"), plan.target.hub_style
    if first is None:
        return hf_config.to_hf(plan.config, hub_style=bool(style))
    own, published = hf_config.from_hf(first), hf_config.is_hub_style(first)
    plain = {name: getattr(own, name) for name in LAYOUT}
    if style in (None, published) and own == _comparable(plan.config, own, plain):
        return first
    return hf_config.rewritten(
        first, plan.config, published if style is None else style
    )


def _comparable(
    config: DecoderConfig, own: DecoderConfig, layout: Mapping[str, Any]
) -> DecoderConfig:
    """The config but for what config.json has no place for."""
    again = hf_config.from_hf(hf_config.to_hf(config))
    return dataclasses.replace(again, **layout)
