"""A checkpoint of any format, opened: its config, its parameters, and what else it has.

Nothing but headers is read, and everything that can be checked without reading the
entries is checked here.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shared.checkpoint import hf_checks, hf_config, hf_names, maxtext, zoo_layouts
from shared.checkpoint.manifest import (
    Manifest,
    check_leaves,
    find_manifest,
    manifest_of,
)
from shared.checkpoint.scheme import Scheme, Shape, check_tensors, zoo_scheme
from shared.config import DecoderConfig
from shared.stores import CheckpointError, Leaf, Path, Store, open_store, path_text
from shared.stores.folders import Folder, as_folder, read_json
from shared.stores.safetensors import DTYPES, FLOATS, Reader

FORMATS = ("zoo", "hf", "maxtext")
CARRIED = "carried"  # what a decoder has no use for stands below it in our checkpoints

# What lies beside the weights of a Hugging Face model and belongs to it.
_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.model",
    "LICENSE*",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that can be converted.

    Attributes:
      path: of the checkpoint.
      format: of `FORMATS`.
      config: of the model, in the layout of the checkpoint where it is the zoo's.
      scheme: where each parameter is.
      tensors: the parameters, by the names of the scheme.
      alike: trees like that of the parameters (optimizer moments), by their paths.
      rest: other leaves: counts, the step, RNG state.
      partial: of those, what belongs to trees with only some of the parameters.
      empty: nodes without leaves.
      carried: tensors of a Hugging Face checkpoint that are no part of the decoder.
      lost: of those, which cannot be carried, and why.
      files: what lies beside the weights and belongs to the model.
      origin: how the first source was written, so that it can be written so again.
      manifest: of a checkpoint of ours.
      store: of a checkpoint of ours.
      notes: what was chosen on opening.
    """

    path: str
    format: str
    config: DecoderConfig
    scheme: Scheme
    tensors: Mapping[str, Leaf]
    alike: Mapping[Path, Mapping[str, Leaf]] = dataclasses.field(default_factory=dict)
    rest: Mapping[Path, Leaf] = dataclasses.field(default_factory=dict)
    empty: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    carried: Mapping[str, Leaf] = dataclasses.field(default_factory=dict)
    lost: tuple[str, ...] = ()
    partial: tuple[Path, ...] = ()
    files: tuple[Folder, ...] = ()
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    manifest: Manifest | None = None
    store: Store | None = None
    notes: tuple[str, ...] = ()


def open_source(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    config: DecoderConfig | None = None,
    step: int | None = None,
    vocab_padding: int | None = None,
    **layout: Any,
) -> Source:
    """Opens a checkpoint of any format.

    Args:
      path: a folder or a file.
      format: of `FORMATS`; None: found from what is there.
      config: of the model, for a checkpoint that does not say it.
      step: of a checkpoint manager's folder; None: the latest.
      vocab_padding: rows behind the vocabulary, for a checkpoint without a manifest;
        None: none.
      **layout: `scan_layers`, `scan_period` or `param_scan_axis` of the source; None
        where unknown.

    Raises:
      CheckpointError: there is nothing that we know; it is damaged or incomplete; or
        what is given contradicts it.
    """
    folder = as_folder(path)
    if not folder.exists():
        raise CheckpointError(f"There is no {path}. Give a checkpoint.")
    given = {name: value for name, value in layout.items() if value is not None}
    if vocab_padding is not None:
        given["vocab_padding"] = vocab_padding
    found = _detect_format(folder)
    if format == "hf" and not (folder / "config.json").is_file():
        raise _without_config(path)
    if format == "hf" or (format is None and found == "hf"):
        more = {"config": config, "step": step}
        more = {name: value for name, value in more.items() if value is not None}
        _refuse(path, more | given)
        return _open_hf(pathlib.Path(path))
    if format is not None and found not in (None, format):
        raise CheckpointError(
            f"{path} is said to be {format}, but it is {found}: leave --from out."
        )
    store = open_store(path, step)
    if step is not None and store.step is None:
        raise CheckpointError(f"step={step} is given, but {path} has no steps.")
    manifest = manifest_of(store, path)
    if manifest is not None and manifest.tree in ("zoo", "maxtext"):
        if format not in (None, manifest.tree):
            raise CheckpointError(
                f"{path} is said to be {format}, but its manifest says "
                f"{manifest.tree}: leave --from out."
            )
        if manifest.tree == "zoo":
            return _open_ours(folder, store, manifest, config, given)
        return _open_our_maxtext(folder, store, manifest, config, given)
    if any(_HF_NAME.search(path_text(name)) for name in store.leaves):
        raise _without_config(path)
    if config is None:
        raise CheckpointError(
            f"{path} does not say which model it is of: give its config (--config, a "
            "preset or a folder with config.json)."
        )
    config = config.replace(vocab_padding=given.pop("vocab_padding", 0))
    if (format or found or _tree_format(store)) == "maxtext":
        return _open_maxtext(store, config, given)
    return _open_tree(store, config, given)


_HF_NAME = re.compile(r"(^|\.)layers\.\d+\.")


def _without_config(path: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} has no config.json, which says of which model the tensors are, that "
        "have Hugging Face's names: copy it into their folder, and give the folder."
    )


def _refuse(path: Any, given: Mapping[str, Any]) -> None:
    """Nothing need be said of a Hugging Face folder, and nothing may be."""
    if given:
        text = ", ".join(
            name if name == "config" else f"{name}={value}"
            for name, value in given.items()
        )
        raise CheckpointError(
            f"{path} has a config.json: another config cannot be given."
            if "config" in given
            else f"{path} is a Hugging Face folder, of which config.json says all: "
            f"{text} cannot be given."
        )


def _open_our_maxtext(
    folder: Folder,
    store: Store,
    manifest: Manifest,
    config: DecoderConfig | None,
    given: dict[str, Any],
) -> Source:
    check_leaves(store, manifest)
    own = manifest.decoder_config()
    padding = {k: given.pop(k) for k in ("vocab_padding",) if k in given}
    _check_given(folder, own, config, padding)
    return dataclasses.replace(
        _open_maxtext(store, own, given),
        origin=manifest.origin,
        files=_files(folder),
        manifest=manifest,
        store=store,
    )


def _detect_format(folder: Folder) -> str | None:
    """What a folder's files say; None: the tree has to be looked at."""
    if not folder.is_dir():
        return None
    if find_manifest(folder) is not None:
        return None
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return "hf"
    return None


def _tree_format(store: Store) -> str:
    texts = map(path_text, store.leaves)
    is_maxtext = any(text.endswith("token_embedder/embedding") for text in texts)
    return "maxtext" if is_maxtext else "zoo"


def _open_hf(folder: pathlib.Path) -> Source:
    data = read_json(folder / "config.json")
    config = hf_config.from_hf(folder)
    reader = Reader(folder)
    prefix = hf_names.find_prefix(reader.tensors)
    head = hf_names.head(prefix)
    wanted = hf_names.tensors(config, reader.tensors.__contains__, prefix)
    ignored = hf_names.ignored(config, (*reader.tensors, *reader.unlisted))
    hf_checks.check_names(reader, config, wanted, ignored, head)
    tied_copy = config.tie_word_embeddings and head in reader.tensors
    if tied_copy:
        hf_checks.check_tied(reader, head, hf_names.embedding(prefix))
    carried = [name for name in reader.tensors if name in ignored]
    unlisted = [name for name in reader.unlisted if name in ignored]
    lost = [n for n in carried if reader.tensors[n].dtype not in DTYPES]
    fused_rows = hf_names.family(config).fused_experts
    origin = {
        "format": "hf",
        "config": data,
        "fused_experts": any(tensor.row in fused_rows for tensor in wanted),
        "prefix": prefix,
        "tied_copy": tied_copy,
    }
    return Source(
        path=str(folder),
        format="hf",
        config=config,
        scheme=hf_names.scheme(config, wanted),
        tensors={tensor.name: reader.leaf(tensor.name) for tensor in wanted},
        carried={name: reader.leaf(name) for name in carried if name not in lost},
        lost=(
            *(f"{n}: dtype {reader.tensors[n].dtype} is not known here" for n in lost),
            *(f"{name}: it is not in the index" for name in unlisted),
        ),
        files=_files(folder),
        origin=origin,
        notes=tuple(f"ignored, not in the index: {name}" for name in reader.stray),
    )


def _open_ours(
    folder: Folder,
    store: Store,
    manifest: Manifest,
    config: DecoderConfig | None,
    given: Mapping[str, Any],
) -> Source:
    check_leaves(store, manifest)
    own = manifest.decoder_config()
    _check_given(folder, own, config, given)
    source = _split(store, zoo_scheme(own), own, ("params",))
    names = [path for path in source.rest if path[0] == CARRIED]
    carried = {"/".join(map(str, path[1:])): source.rest[path] for path in names}
    return dataclasses.replace(
        source,
        rest={p: leaf for p, leaf in source.rest.items() if p not in names},
        partial=tuple(path for path in source.partial if path not in names),
        carried=carried,
        files=_files(folder),
        origin=manifest.origin,
        manifest=manifest,
        store=store,
    )


def _files(folder: Folder) -> tuple[Folder, ...]:
    """What lies beside the weights and belongs to the model."""
    found = {file.name: file for name in _FILES for file in folder.glob(name)}
    return tuple(found[name] for name in sorted(found) if found[name].is_file())


def _check_given(
    folder: Folder,
    own: DecoderConfig,
    config: DecoderConfig | None,
    given: Mapping[str, Any],
) -> None:
    problems = [
        f"{name}={value} is given, and the manifest says {getattr(own, name)}"
        for name, value in given.items()
        if not zoo_layouts.has(own, name, value)
    ]
    if config is not None and hf_config.to_hf(config) != hf_config.to_hf(own):
        ours, theirs = hf_config.to_hf(own), hf_config.to_hf(config)
        problems += [
            f"{name}={theirs.get(name)!r} is given, and the manifest says "
            f"{ours.get(name)!r}"
            for name in sorted(ours.keys() | theirs.keys())
            if ours.get(name) != theirs.get(name)
        ]
    if problems:
        raise CheckpointError(
            f"What is given contradicts the manifest of {folder}: leave it out.",
            problems,
        )


def _open_tree(store: Store, config: DecoderConfig, given: Mapping[str, Any]) -> Source:
    """A tree of the zoo without a manifest, in a layout that its shapes tell."""
    below = "params" if any(path[0] == "params" for path in store.leaves) else ""
    params = store.under(below) if below else store
    shapes = _shapes(params)
    others = {name for name in shapes if not name.startswith(("layers", "prefix"))}
    outer = {"embed_tokens", "norm", "lm_head"}
    if not below:
        shapes = {name: s for name, s in shapes.items() if name not in others - outer}
    _check_width(shapes, config, "embed_tokens", "norm")
    config, scheme = zoo_layouts.detect(shapes, config, **given)
    return _split(store, scheme, config, (below,) if below else ())


def _open_maxtext(
    store: Store, config: DecoderConfig, given: Mapping[str, Any]
) -> Source:
    params = maxtext.below(store)
    shapes = _shapes(params)
    embedding, norm = "token_embedder/embedding", "decoder/decoder_norm/scale"
    _check_width(shapes, config, embedding, norm)
    layout = _maxtext_layout(shapes, config, given)
    scheme = maxtext.tree_scheme(config, layout)
    check_tensors(shapes, scheme)
    prefix = params.path[len(store.path) :].removeprefix(":")
    above = tuple(part for part in prefix.split("/") if part)
    source = _split(store, scheme, config, above)
    note = f"MaxText, {layout.name}"
    if layout.name != "unscanned":
        note += f", param_scan_axis={layout.param_scan_axis}"
    return dataclasses.replace(
        source,
        format="maxtext",
        alike=_without_params(source.alike),
        origin={"format": "maxtext", **dataclasses.asdict(layout)},
        notes=(*source.notes, note),
    )


def _check_width(
    shapes: Mapping[str, Shape], config: DecoderConfig, embedding: str, norm: str
) -> None:
    """Of a model of another width, every tensor would be listed: this says it once.

    Raises:
      CheckpointError: the embedding and the last norm have another width.
    """
    found = {shapes[name][-1] for name in (embedding, norm) if shapes.get(name)}
    if len(found) == 1 and found != {config.hidden_size}:
        [width] = found
        raise CheckpointError(
            f"hidden_size is {width} in the checkpoint and {config.hidden_size} in the "
            "config, so that the shapes contradict the config: give that of this model."
        )


def _without_params(
    alike: Mapping[Path, Mapping[str, Leaf]],
) -> dict[Path, Mapping[str, Leaf]]:
    """MaxText has moments below `mu/params`, and so do others, or below `mu`."""
    found: dict[Path, Mapping[str, Leaf]] = {}
    for path, tree in alike.items():
        top = path[:-1] if path[-1:] == ("params",) else path
        if top in found or not top:
            raise CheckpointError(
                f"Two trees would stand at {path_text(top)}: rename one."
            )
        found[top] = tree
    return found


def _maxtext_layout(
    shapes: Mapping[str, Shape], config: DecoderConfig, given: Mapping[str, Any]
) -> maxtext.MaxTextLayout:
    """The layout that the tree is in, which may not be another than the given one."""
    name = maxtext.detect_name(shapes)
    if name == "unscanned" and "param_scan_axis" in given:
        raise CheckpointError(
            f"param_scan_axis={given['param_scan_axis']} is given, but the names are "
            f"of MaxText's layout {name!r}, which has no stack axes: leave it out."
        )
    if "param_scan_axis" in given:
        layout = maxtext.MaxTextLayout(name, given["param_scan_axis"])
    else:
        layout = maxtext.detect_layout(shapes, config)
    if given.get("scan_layers", name != "unscanned") != (name != "unscanned"):
        raise CheckpointError(
            f"scan_layers={given['scan_layers']} is given, but the names are of "
            f"MaxText's layout {name!r}: leave it out."
        )
    return layout


def _shapes(store: Store) -> dict[str, Shape]:
    return {path_text(path): leaf.shape for path, leaf in store.leaves.items()}


def _split(store: Store, scheme: Scheme, config: DecoderConfig, above: Path) -> Source:
    """Tells parameters, trees like them, and the rest of a store apart."""
    if store.refused:
        raise CheckpointError(
            f"{len(store.refused)} leaves of {store.path} cannot be read:",
            [f"{path_text(path)}: {why}" for path, why in store.refused.items()],
        )
    trees = dict(_trees(store, scheme))
    partial = _partial(store, scheme, trees)
    if above not in trees:
        raise CheckpointError(
            f"{store.path} has no parameters under {path_text(above)}."
        )
    inside = {(*top, *name.split("/")) for top in trees for name in scheme.shapes}
    _check_floats({name: trees[above][name].dtype for name in scheme.shapes})
    return Source(
        path=store.path,
        format="zoo",
        config=config,
        scheme=scheme,
        tensors=trees.pop(above),
        alike=trees,
        rest={path: leaf for path, leaf in store.leaves.items() if path not in inside},
        partial=partial,
        empty=store.empty,
        notes=store.notes,
    )


def _check_floats(dtypes: Mapping[str, Any]) -> None:
    problems = [
        f"{name} is {dtype}"
        for name, dtype in dtypes.items()
        if dtype not in FLOATS.values()
    ]
    if problems:
        floats = ", ".join(map(str, FLOATS.values()))
        raise CheckpointError(f"Parameters must be one of {floats}:", problems)


def _partial(
    store: Store, scheme: Scheme, trees: Mapping[Path, Any]
) -> tuple[Path, ...]:
    """Leaves that are named like parameters, below a place that lacks some of them."""
    names = {tuple(name.split("/")) for name in scheme.shapes}
    found: dict[Path, list[Path]] = {}
    for path in store.leaves:
        for length in range(len(path), 0, -1):
            top = path[: len(path) - length]
            if path[-length:] in names and top not in trees:
                if not any(path[: len(tree)] == tree for tree in trees):
                    found.setdefault(top, []).append(path)
                break
    return tuple(path for paths in found.values() if len(paths) > 1 for path in paths)


def _trees(store: Store, scheme: Scheme) -> Iterator[tuple[Path, dict[str, Leaf]]]:
    """Every place at which all tensors of the scheme stand, with their shapes."""
    names = {tuple(name.split("/")): shape for name, shape in scheme.shapes.items()}
    first = next(iter(names))
    for path in store.leaves:
        top = path[: len(path) - len(first)]
        if path[len(top) :] != first:
            continue
        leaves = {name: store.leaves.get((*top, *name)) for name in names}
        if all(
            leaf is not None and leaf.shape == names[name]
            for name, leaf in leaves.items()
        ):
            yield top, {"/".join(name): leaf for name, leaf in leaves.items()}  # type: ignore[misc]


def describe(source: Source) -> str:
    """A source as a line."""
    parts = [f"{len(source.tensors):,} tensors of parameters"]
    if source.alike:
        parts.append(f"{len(source.alike)} trees like them")
    if source.rest:
        parts.append(f"{len(source.rest)} other leaves")
    if source.carried:
        parts.append(f"{len(source.carried):,} tensors that are no part of the decoder")
    notes = "".join(f"; {note}" for note in source.notes)
    return f"{source.format}: {', '.join(parts)}{notes}"
