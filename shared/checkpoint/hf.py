"""Hugging Face checkpoints into parameter trees and back, tensor by tensor."""

from __future__ import annotations

import collections
import itertools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from shared.checkpoint import hf_config, hf_names, safetensors
from shared.checkpoint.hf_names import JOIN_AXIS, Tensor
from shared.checkpoint.safetensors import CheckpointError, NewTensor, TensorInfo
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.params import ParamSpec
from shared.plan import insert, node_at
from shared.trees import Path, check_same_paths, flatten, path_text

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # from which on JAX takes an array over instead of copying it
_SHOWN = 1000  # lines of one sort in an error message


@runtime_checkable
class TensorReader(Protocol):
    """What is needed of `safetensors.Reader`."""

    tensors: dict[str, TensorInfo]
    unlisted: dict[str, TensorInfo]

    def read(self, name: str, part: Any = ...) -> np.ndarray:
        """A tensor, or a part of it."""
        ...


def load_hf(
    folder: str | os.PathLike[str],
    scan_layers: bool = True,
    param_dtype: Any = None,
    **changes: Any,
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Config and parameters of a Hugging Face checkpoint.

    Beyond what is finished, at most one leaf and one tensor of the checkpoint are in
    memory. Names, shapes and dtypes are all checked before anything is read.

    Args:
      folder: with config.json and safetensors files.
      scan_layers: layers stacked by the config's plan, or one by one.
      param_dtype: None keeps every parameter as it is in the file. Else all are cast,
        but for those that stay at least float32 (`ParamSpec.at_least_float32`).
      **changes: other fields of the config, such as `scan_period`.

    Returns:
      The config, and nested dicts of arrays in the layout of its plan.

    Raises:
      CheckpointError: lists everything that is missing, unexpected or misshapen.
      ConfigError: config.json describes no model that we have.
    """
    config = hf_config.from_hf(folder).replace(scan_layers=scan_layers, **changes)
    if param_dtype is not None:
        name = param_dtype if isinstance(param_dtype, str) else jnp.dtype(param_dtype)
        config = config.replace(param_dtype=str(name))
    params: dict[str, Any] = {}
    leaves = iter_hf_leaves(
        safetensors.Reader(folder), config, cast=param_dtype is not None
    )
    for path, leaf in leaves:
        insert(params, path, jax.device_put(leaf))
        del leaf
    return config, params


def iter_hf_leaves(
    reader: TensorReader, config: DecoderConfig, *, cast: bool = False
) -> Iterator[tuple[Path, np.ndarray]]:
    """Path and value of one leaf after the other, in the layout of `config.plan`.

    Args:
      reader: of the checkpoint's tensors.
      config: of the model.
      cast: to the dtypes that `config.param_dtype` asks for; else as in the file.

    Raises:
      CheckpointError: before the first leaf; lists everything that does not fit.
    """
    names = hf_names.family(config)
    wanted = hf_names.tensors(config, reader.tensors.__contains__)
    _check_names(reader, config, wanted)
    targets = _find_targets(config, wanted)
    dtypes = _find_dtypes(reader, targets, config.param_dtype if cast else None)
    if config.tie_word_embeddings and names.head in reader.tensors:
        _check_tied(reader, names.head, names.embedding)
    _log_ignored(reader, names)
    _log_dtypes(reader, config, targets, dtypes)
    for path, target in targets.items():
        yield path, _build(reader, target, dtypes[path])


class Piece(NamedTuple):
    """What a tensor and a leaf have in common.

    Attributes:
      tensor: of the checkpoint.
      part: index of the piece in the tensor.
      path: of the leaf.
      slot: index of the layer in the leaf; what is there is a leaf without stack axes.
    """

    tensor: Tensor
    part: Any
    path: Path
    slot: tuple[Any, ...]


class Target(NamedTuple):
    """A leaf and all that it is made of."""

    spec: ParamSpec
    pieces: list[Piece]


def _pieces(config: DecoderConfig, tensors: list[Tensor]) -> Iterator[Piece]:
    places = config.plan.places()
    specs = dict(flatten(decoder.param_specs(config)))
    for tensor in tensors:
        place = None if tensor.layer is None else places[tensor.layer]
        above, slot = ((), ()) if place is None else (place.path, place.slot)
        for leaf, part in zip(tensor.row.leaves, tensor.parts, strict=True):
            path = (*above, *leaf.split("/"))
            at = min(config.param_scan_axis, len(specs[path].shape) - len(slot))
            yield Piece(tensor, part, path, (slice(None),) * at + slot)


def _find_targets(config: DecoderConfig, tensors: list[Tensor]) -> dict[Path, Target]:
    specs = flatten(decoder.param_specs(config))
    targets = {path: Target(spec, []) for path, spec in specs}
    for piece in _pieces(config, tensors):
        targets[piece.path].pieces.append(piece)
    return targets


def _build(reader: TensorReader, target: Target, dtype: np.dtype) -> np.ndarray:
    leaf = _empty(target.spec.shape, dtype)
    for piece in target.pieces:
        slot = _one_expert(leaf[piece.slot], piece)
        to_leaf = piece.tensor.row.layout.to_leaf
        slot[...] = to_leaf(reader.read(piece.tensor.name, piece.part))
    return leaf


def _one_expert(leaf: np.ndarray, piece: Piece) -> np.ndarray:
    return leaf if piece.tensor.expert is None else leaf[piece.tensor.expert]


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX on a CPU takes over as it is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _check_names(
    reader: TensorReader, config: DecoderConfig, wanted: list[Tensor]
) -> None:
    """Compares all names, shapes and dtypes; reads headers only."""
    names, have = hf_names.family(config), reader.tensors
    known = {tensor.name for tensor in wanted}
    if config.tie_word_embeddings:
        known.add(names.head)
    missing = [tensor for tensor in wanted if tensor.name not in have]
    extra = [n for n in have if n not in known and not names.ignores(n)]
    unlisted = [n for n in reader.unlisted if not names.ignores(n)]
    floats = ", ".join(safetensors.FLOATS)
    problems = {
        "missing": [
            f"missing: {t.name} {t.shape}"
            + (" (not listed in the index)" if t.name in reader.unlisted else "")
            for t in missing
        ],
        "unexpected": [
            f"unexpected: {n} {have[n].shape} in {have[n].file}" for n in extra
        ],
        "unlisted": [
            f"unlisted: {n} is in {reader.unlisted[n].file}, but not in the index"
            for n in unlisted
        ],
        "wrong shape": [
            f"wrong shape: {t.name} must be {t.shape} by {t.row.sizes}. "
            f"Got {have[t.name].shape}"
            for t in wanted
            if t.name in have and have[t.name].shape != t.shape
        ],
        "wrong dtype": [
            f"wrong dtype: {n} must be one of {floats}. Got {have[n].dtype}"
            for n in sorted(known & have.keys())
            if have[n].dtype not in safetensors.FLOATS
        ],
    }
    if any(problems.values()):
        counts = [f"{len(lines)} {sort}" for sort, lines in problems.items() if lines]
        shown = [_shorten(sort, lines) for sort, lines in problems.items()]
        raise CheckpointError(
            f"The tensors do not fit config.json: {', '.join(counts)}. Nothing was "
            "loaded; correct config.json or the files.",
            [
                *itertools.chain(*shown),
                *_hints(config, names, reader, missing, extra),
            ],
        )


def _shorten(sort: str, lines: list[str]) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"{sort}: and {len(lines) - _SHOWN} more"]


def _hints(
    config: DecoderConfig,
    names: hf_names.Family,
    reader: TensorReader,
    missing: list[Tensor],
    extra: list[str],
) -> list[str]:
    hints = []
    stored = [n for n in map(names.layer_of, reader.tensors) if n is not None]
    if stored and max(stored) + 1 != config.num_layers:
        hints.append(
            f"hint: config.json has num_hidden_layers={config.num_layers}, the files "
            f"have {max(stored) + 1} layers"
        )
    if any(tensor.name == names.head for tensor in missing):
        hints.append(
            f"hint: without {names.head} the head is tied to the embedding, and "
            "config.json needs tie_word_embeddings=true. It is false"
        )
    changed = {t.layer for t in missing} & set(map(names.layer_of, extra))
    kinds = [f"{i}: {k}" for i, k in enumerate(config.layers) if i in changed]
    if kinds:
        hints.append(
            "hint: these layers have other tensors than their kinds, check layer_types "
            "or full_attention_interval, mlp_only_layers or decoder_sparse_step: "
            + ", ".join(kinds[:8])
        )
    return hints


def _find_dtypes(
    reader: TensorReader, targets: Mapping[Path, Target], param_dtype: str | None
) -> dict[Path, np.dtype]:
    dtypes: dict[Path, Any] = {}
    problems = []
    for path, (spec, pieces) in targets.items():
        by_dtype = {reader.tensors[p.tensor.name].dtype: p.tensor.name for p in pieces}
        if param_dtype is not None:
            dtypes[path] = spec.dtype(param_dtype)
        elif len(by_dtype) > 1:
            some = ", ".join(f"{d} ({name})" for d, name in sorted(by_dtype.items()))
            problems.append(f"{path_text(path)} would be stacked from {some}")
        else:
            dtypes[path] = safetensors.FLOATS[next(iter(by_dtype))]
    if problems:
        raise CheckpointError(
            "A stacked leaf has one dtype: pass param_dtype to cast, or "
            "scan_layers=False.",
            problems,
        )
    # JAX would make float32 of it without a word.
    wide = [path for path, dtype in dtypes.items() if dtype == np.float64]
    if wide and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise CheckpointError(
            f"{len(wide)} leaves would be float64 ({path_text(wide[0])}, …), and "
            "jax_enable_x64 is off: switch it on, or pass param_dtype='float32'."
        )
    return dtypes


def _check_tied(reader: TensorReader, head: str, embedding: str) -> None:
    """A tied model may bring its head as a copy of the embedding."""
    infos = reader.tensors[head], reader.tensors[embedding]
    way_out = (
        "config.json has tie_word_embeddings=true: set it to false, or remove "
        f"{head} from the checkpoint."
    )
    if infos[0][:2] != infos[1][:2]:
        raise CheckpointError(
            f"{head} is {infos[0].dtype} {infos[0].shape} and {embedding} is "
            f"{infos[1].dtype} {infos[1].shape}, but {way_out}"
        )
    rows = max(1, infos[0].shape[0] // max(1, infos[0].nbytes >> 24))  # 16 MiB
    for start in range(0, infos[0].shape[0], rows):
        part = (slice(start, start + rows),)
        ours, theirs = (
            np.ascontiguousarray(reader.read(name, part)).view(np.uint8)
            for name in (head, embedding)
        )
        unequal = np.any(ours != theirs, axis=-1)
        if unequal.any():
            row = start + int(np.argmax(unequal))
            raise CheckpointError(
                f"{head} differs from {embedding}, first in row {row}, but {way_out}"
            )
    logger.info("%s equals %s, to which it is tied: one leaf.", head, embedding)


def _log_ignored(reader: TensorReader, names: hf_names.Family) -> None:
    everything = {**reader.unlisted, **reader.tensors}
    for beginning, reason in names.ignored.items():
        sizes = [i.nbytes for n, i in everything.items() if n.startswith(beginning)]
        if sizes:
            logger.info(
                "Ignored %d tensors %s* of %d bytes: %s.",
                len(sizes),
                beginning,
                sum(sizes),
                reason,
            )


def _log_dtypes(
    reader: TensorReader,
    config: DecoderConfig,
    targets: Mapping[Path, Target],
    dtypes: Mapping[Path, np.dtype],
) -> None:
    casts: collections.Counter[str] = collections.Counter()
    other: collections.Counter[str] = collections.Counter()
    for path, (spec, pieces) in targets.items():
        for piece in pieces:
            stored = safetensors.FLOATS[reader.tensors[piece.tensor.name].dtype]
            if stored != dtypes[path]:
                casts[f"{stored} to {dtypes[path]}"] += 1
        if dtypes[path] != config.param_dtype and not spec.at_least_float32:
            other[str(dtypes[path])] += 1
    for cast, count in casts.items():
        logger.info("Cast %d tensors from %s.", count, cast)
    for dtype, count in other.items():
        logger.warning(
            "config.json says %s, but %d of %d leaves are %s and stay so.",
            config.param_dtype,
            count,
            len(targets),
            dtype,
        )


def save_hf(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    fused_experts: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint that `load_hf` and the Hugging Face libraries read.

    The folder appears when it is complete. Beyond `params`, one layer's leaf and one
    tensor are in memory.

    Args:
      folder: new or empty.
      config: of the model.
      params: nested dicts of NumPy or JAX arrays in the layout of `config.plan`.
      fused_experts: all experts of a layer in one tensor, or a tensor for each.
      max_shard_bytes: data in one file; a larger tensor has a file of its own.

    Raises:
      CheckpointError: `folder` is not empty, or `params` do not fit `config`.
    """
    new, value = _new_tensors(config, params, fused_experts)
    with safetensors.new_folder(pathlib.Path(folder).resolve()) as partial:
        safetensors.write_json(partial / "config.json", hf_config.to_hf(config))
        safetensors.write_tensors(partial, new, value, max_shard_bytes=max_shard_bytes)


def hf_tensors(
    config: DecoderConfig, params: Mapping[str, Any], *, fused_experts: bool = False
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor that `save_hf` would write, one at a time."""
    new, value = _new_tensors(config, params, fused_experts)
    for tensor in new:
        yield tensor.name, value(tensor.name)


def _new_tensors(
    config: DecoderConfig, params: Mapping[str, Any], fused_experts: bool
) -> tuple[list[NewTensor], Callable[[str], np.ndarray]]:
    """The tensors of a checkpoint of `params`, and what gives a tensor's value."""
    _check_leaves(config, params)
    tensors = hf_names.tensors(config, lambda name: fused_experts)
    shares: dict[str, list[Piece]] = {tensor.name: [] for tensor in tensors}
    for piece in _pieces(config, tensors):
        shares[piece.tensor.name].append(piece)
    new = [NewTensor(t.name, _dtype(params, shares[t.name]), t.shape) for t in tensors]
    layer_leaf = _layer_leaves(params)

    def value(name: str) -> np.ndarray:
        parts = [
            p.tensor.row.layout.to_tensor(_one_expert(layer_leaf(p), p))
            for p in shares[name]
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, JOIN_AXIS)

    return new, value


def _dtype(params: Mapping[str, Any], pieces: list[Piece]) -> np.dtype:
    dtypes = {node_at(params, piece.path).dtype: piece.path for piece in pieces}
    if len(dtypes) > 1:
        some = ", ".join(f"{path_text(path)} {d}" for d, path in dtypes.items())
        raise CheckpointError(
            f"{pieces[0].tensor.name} has one dtype, but would be made of {some}: cast "
            "them, or write one tensor for each expert."
        )
    return next(iter(dtypes))


def _layer_leaves(params: Mapping[str, Any]) -> Callable[[Piece], np.ndarray]:
    """Gives a layer's leaf on the host; the last one is kept, for its experts."""
    last: dict[tuple[Path, int | None], np.ndarray] = {}

    def layer_leaf(piece: Piece) -> np.ndarray:
        key = piece.path, piece.tensor.layer
        if key not in last:
            last.clear()
            last[key] = _on_host(node_at(params, piece.path), piece.slot)
        return last[key]

    return layer_leaf


def _on_host(leaf: np.ndarray | Array, slot: tuple[Any, ...]) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        on_host = {device.platform for device in leaf.devices()} == {"cpu"}
        if not on_host or len(leaf.devices()) > 1:
            return np.asarray(leaf[slot])
    return np.asarray(leaf)[slot]  # no copy: NumPy sees the memory of JAX


def _check_leaves(config: DecoderConfig, params: Mapping[str, Any]) -> None:
    problems = []
    for path, leaf in flatten(params):
        if not isinstance(leaf, np.ndarray | jax.Array):
            problems.append(f"{path_text(path)} must be an array. Got {type(leaf)}")
        elif leaf.dtype not in safetensors.FLOATS.values():
            floats = ", ".join(map(str, safetensors.FLOATS.values()))
            problems.append(
                f"{path_text(path)} must be one of {floats}. Got {leaf.dtype}"
            )
    if problems:
        raise CheckpointError("The parameters cannot be saved:", problems)
    try:
        check_same_paths(decoder.param_specs(config), params)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
