"""Hugging Face checkpoints into parameter trees and back, tensor by tensor."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared.checkpoint import hf_checks, hf_config, hf_names
from shared.checkpoint.scheme import Conversion, units, zoo_scheme
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.plan import insert
from shared.stores import CheckpointError, Leaf, safetensors
from shared.stores.folders import new_folder, write_json
from shared.stores.reading import read_whole
from shared.stores.safetensors_writer import write_folder
from shared.stores.tree import array_leaf
from shared.trees import check_same_paths, flatten, path_text


def load_hf(
    folder: str | os.PathLike[str],
    scan_layers: bool = True,
    param_dtype: Any = None,
    **changes: Any,
) -> tuple[DecoderConfig, dict[str, Any]]:
    """Config and parameters of a Hugging Face checkpoint.

    Beyond what is finished, at most one leaf and a part of one tensor of the checkpoint
    are in memory. Names, shapes and dtypes are all checked before anything is read.

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
    reader = safetensors.Reader(folder)
    params: dict[str, Any] = {}
    for path, leaf in hf_leaves(reader, config, cast=param_dtype is not None).items():
        insert(params, tuple(path.split("/")), jax.device_put(read_whole(leaf, path)))
    return config, params


def hf_leaves(
    reader: safetensors.Reader, config: DecoderConfig, *, cast: bool = False
) -> dict[str, Leaf]:
    """Every leaf by its path, in the layout of `config.plan`; none is read yet.

    Args:
      reader: of the checkpoint's tensors.
      config: of the model.
      cast: to the dtypes that `config.param_dtype` asks for; else as in the file.

    Raises:
      CheckpointError: lists everything that does not fit.
    """
    prefix = hf_names.find_prefix(reader.tensors)
    head, embedding = hf_names.head(prefix), hf_names.embedding(prefix)
    wanted = hf_names.tensors(config, reader.tensors.__contains__, prefix)
    ignored = hf_names.ignored(config, (*reader.tensors, *reader.unlisted))
    hf_checks.check_names(reader, config, wanted, ignored, head)
    source = hf_names.scheme(config, wanted)
    conversion = Conversion(source, zoo_scheme(config), units(config))
    targets = {
        path_text(path): (spec, conversion.behind(path_text(path)))
        for path, spec in flatten(decoder.param_specs(config))
    }
    param_dtype = config.param_dtype if cast else None
    dtypes = hf_checks.find_dtypes(reader, targets, param_dtype)
    if config.tie_word_embeddings and head in reader.tensors:
        hf_checks.check_tied(reader, head, embedding)
    hf_checks.log_ignored(reader, ignored)
    hf_checks.log_dtypes(reader, config, targets, dtypes)
    tensors = {tensor.name: reader.leaf(tensor.name) for tensor in wanted}
    return conversion.leaves(tensors, dtypes)


def save_hf(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    fused_experts: bool = False,
    prefix: str = hf_names.PREFIX,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a checkpoint that `load_hf` and the Hugging Face libraries read.

    The folder appears when it is complete. Beyond `params`, a part of one tensor is in
    memory.

    Args:
      folder: new or empty.
      config: of the model.
      params: nested dicts of NumPy or JAX arrays in the layout of `config.plan`.
      fused_experts: all experts of a layer in one tensor, or a tensor for each; Gemma
        has them in one in any case.
      prefix: what the names of the decoder begin with, of `hf_names.PREFIXES`; it is
        another in multimodal repositories, whose config.json differs, too.
      max_shard_bytes: data in one file; a larger tensor has a file of its own.

    Raises:
      CheckpointError: `folder` is not empty, or `params` do not fit `config`.
    """
    tensors = _tensors(config, params, fused_experts, prefix)
    with new_folder(pathlib.Path(folder).resolve()) as partial:
        write_json(partial / "config.json", hf_config.to_hf(config))
        write_folder(partial, tensors, max_shard_bytes=max_shard_bytes)


def hf_tensors(
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    fused_experts: bool = False,
    prefix: str = hf_names.PREFIX,
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of each tensor that `save_hf` would write, one at a time."""
    for name, leaf in _tensors(config, params, fused_experts, prefix).items():
        yield name, read_whole(leaf, name)


def _tensors(
    config: DecoderConfig, params: Mapping[str, Any], fused_experts: bool, prefix: str
) -> dict[str, Leaf]:
    _check_leaves(config, params)
    prefix = hf_names.check_prefix(prefix)
    tensors = hf_names.tensors(config, lambda name: fused_experts, prefix)
    target = hf_names.scheme(config, tensors)
    leaves = {path_text(path): array_leaf(leaf) for path, leaf in flatten(params)}
    return Conversion(zoo_scheme(config), target, units(config)).leaves(leaves)


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
