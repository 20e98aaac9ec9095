"""What must hold before a Hugging Face checkpoint is read, and what is worth a line."""

from __future__ import annotations

import collections
import itertools
import logging
import re
from collections.abc import Mapping

import jax
import numpy as np

from shared.checkpoint import hf_names
from shared.checkpoint.hf_names import Ignored, NameTable, Tensor
from shared.config import DecoderConfig
from shared.params import ParamSpec
from shared.stores import CheckpointError, safetensors
from shared.stores.reading import reading
from shared.stores.safetensors import Reader

logger = logging.getLogger(__name__)

_SHOWN = 1000  # lines of one sort in an error message
_VLLM = re.compile(r"\.(qkv_proj|gate_up_proj)\.weight$|\.(w13|w2)_weight$")
Targets = Mapping[str, tuple[ParamSpec, list[str]]]


def check_names(
    reader: Reader,
    config: DecoderConfig,
    wanted: list[Tensor],
    ignored: Mapping[str, Ignored],
    head: str,
) -> None:
    """Compares all names, shapes and dtypes; reads headers only.

    Args:
      reader: of the checkpoint.
      config: of the model.
      wanted: all tensors of the decoder.
      ignored: of those there are, those that are no part of it.
      head: name of the head.

    Raises:
      CheckpointError: lists everything that does not fit.
    """
    have = reader.tensors
    known = {tensor.name for tensor in wanted}
    if config.tie_word_embeddings:
        known.add(head)
    missing = [tensor for tensor in wanted if tensor.name not in have]
    extra = [name for name in have if name not in known and name not in ignored]
    fused = next(filter(_VLLM.search, extra), None)
    if fused is not None:
        raise CheckpointError(
            f"{reader.folder} has fused weights of vLLM, {fused}: that format is "
            "written, never read. Use the checkpoint that it was made from."
        )
    unlisted = [name for name in reader.unlisted if name not in ignored]
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
                *_hints(config, reader, missing, extra, head),
            ],
        )


def _shorten(sort: str, lines: list[str]) -> list[str]:
    if len(lines) <= _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"{sort}: and {len(lines) - _SHOWN} more"]


def _hints(
    config: DecoderConfig,
    reader: Reader,
    missing: list[Tensor],
    extra: list[str],
    head: str,
) -> list[str]:
    hints = []
    names: NameTable = hf_names.family(config)
    stored = [n for n in map(names.layer_of, reader.tensors) if n is not None]
    if stored and max(stored) + 1 != config.num_layers:
        hints.append(
            f"hint: config.json has num_hidden_layers={config.num_layers}, the files "
            f"have {max(stored) + 1} layers"
        )
    if any(tensor.name == head for tensor in missing):
        hints.append(
            f"hint: without {head} the head is tied to the embedding, and "
            "config.json needs tie_word_embeddings=true. It is false"
        )
    changed = {t.layer for t in missing} & set(map(names.layer_of, extra))
    kinds = [f"{i}: {k}" for i, k in enumerate(config.layers) if i in changed]
    if kinds:
        hints.append(
            "hint: these layers have other tensors than their kinds, check "
            f"{names.kinds}: " + ", ".join(kinds[:8])
        )
    return hints


def find_dtypes(
    reader: Reader, targets: Targets, param_dtype: str | None
) -> dict[str, np.dtype]:
    """The dtype of each leaf; `param_dtype` None: that of its tensors."""
    dtypes: dict[str, np.dtype] = {}
    problems = []
    for path, (spec, tensors) in targets.items():
        by_dtype = {reader.tensors[name].dtype: name for name in tensors}
        if param_dtype is not None:
            dtypes[path] = spec.dtype(param_dtype)
        elif len(by_dtype) > 1:
            some = ", ".join(f"{d} ({name})" for d, name in sorted(by_dtype.items()))
            problems.append(f"{path} would be stacked from {some}")
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
            f"{len(wide)} leaves would be float64 ({wide[0]}, …), and "
            "jax_enable_x64 is off: switch it on, or pass param_dtype='float32'."
        )
    return dtypes


def check_tied(reader: Reader, head: str, embedding: str) -> None:
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
    with (
        reading(reader.leaf(head), head) as read_head,
        reading(reader.leaf(embedding), embedding) as read_embedding,
    ):
        for start in range(0, infos[0].shape[0], rows):
            part = (
                slice(start, min(start + rows, infos[0].shape[0])),
                slice(0, infos[0].shape[1]),
            )
            ours, theirs = (
                np.ascontiguousarray(read(part)).view(np.uint8)
                for read in (read_head, read_embedding)
            )
            unequal = np.any(ours != theirs, axis=-1)
            if unequal.any():
                row = start + int(np.argmax(unequal))
                raise CheckpointError(
                    f"{head} differs from {embedding}, first in row {row}, but "
                    f"{way_out}"
                )
    logger.info("%s equals %s, to which it is tied: one leaf.", head, embedding)


def log_ignored(reader: Reader, ignored: Mapping[str, Ignored]) -> None:
    """A line for each sort of tensors that are no part of the decoder."""
    everything = {**reader.unlisted, **reader.tensors}
    sizes: dict[Ignored, list[int]] = {}
    for name, why in ignored.items():
        sizes.setdefault(why, []).append(everything[name].nbytes)
    for (sort, reason), found in sizes.items():
        logger.info(
            "Ignored %d tensors %s of %d bytes: %s.",
            len(found),
            sort,
            sum(found),
            reason,
        )


def log_dtypes(
    reader: Reader,
    config: DecoderConfig,
    targets: Targets,
    dtypes: Mapping[str, np.dtype],
) -> None:
    """Lines for what is cast, and for what is not as config.json says."""
    casts: collections.Counter[str] = collections.Counter()
    other: collections.Counter[str] = collections.Counter()
    for path, (spec, tensors) in targets.items():
        for name in tensors:
            stored = safetensors.FLOATS[reader.tensors[name].dtype]
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
