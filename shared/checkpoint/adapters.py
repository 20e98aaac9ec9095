"""Checkpoints of low-rank adapters (`shared.lora`): ours, and PEFT's of Hugging Face.

Ours are orbax trees with a manifest, as those of models are: the adapters stand below
`params`, and the manifest has the model's config and the `LoraConfig`. The steps of a
run that trains adapters (`shared.checkpoint.training.Manager` with `lora=`) are such.

PEFT keeps A [R, D] and B [F, R] of each layer apart:

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared import lora
from shared.checkpoint import hf_names, native
from shared.checkpoint.manifest import (
    ADAPTERS,
    LeafRecord,
    Manifest,
    adapter_manifest,
    check_digests,
)
from shared.checkpoint.scheme import TRANSPOSED
from shared.config import ConfigError, DecoderConfig
from shared.lora import LoraConfig
from shared.plan import insert
from shared.stores import CheckpointError, Leaf, Path
from shared.stores.folders import new_folder, read_json, write_json
from shared.stores.reading import read_whole
from shared.stores.safetensors import open_folder
from shared.stores.safetensors_writer import write_file
from shared.stores.store import path_text
from shared.stores.tree import array_leaf
from shared.trees import flatten

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
_BEFORE = "base_model.model."  # PEFT's own modules around the model
_PARTS = {"lora_a": "lora_A", "lora_b": "lora_B"}
# What else an adapter_config.json can ask for, and what of it we have.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
}


def save(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    adapters: Mapping[str, Any],
    options: LoraConfig,
) -> None:
    """Writes adapters, from whichever frontend; the folder appears when complete.

    Args:
      folder: new or empty.
      config: of the model.
      adapters: in the layout of `config.plan`.
      options: that they were made with.

    Raises:
      CheckpointError: `folder` is not empty, or the adapters do not fit.
    """
    check(config, adapters, options)
    leaves: dict[Path, Leaf] = {
        (native.PARAMS, *path): array_leaf(leaf) for path, leaf in flatten(adapters)
    }

    def describe(records: Mapping[str, LeafRecord]) -> Manifest:
        return adapter_manifest(config, options, records, source="save")

    native.write_checkpoint(folder, leaves, describe)


def load(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    verify: bool = True,
    **layout: Any,
) -> tuple[DecoderConfig, LoraConfig, dict[str, Any]]:
    """The model's config, and adapters with theirs, of a checkpoint of ours.

    Args:
      folder: that `save` wrote; or of a run that trained adapters.
      step: of a run; None: the latest.
      verify: whether to read them all first and compare them with the manifest.
      **layout: as `shared.checkpoint.load` takes it.

    Raises:
      CheckpointError: it is damaged, or holds no adapters.
    """
    store, manifest = native.open_checkpoint(folder, step)
    config = manifest.decoder_config()
    if manifest.tree != ADAPTERS:
        raise CheckpointError(
            f"{folder} holds a model, not adapters: shared.checkpoint.load reads it."
        )
    options = dict(manifest.origin["lora"])
    options["targets"] = tuple(options["targets"])
    if verify:
        only = [path for path in store.leaves if path[0] == native.PARAMS]
        check_digests(store, manifest, only=only)
    leaves = {
        path_text(p): leaf for p, leaf in store.under(native.PARAMS).leaves.items()
    }
    native.check_kept(leaves, store.path)
    adapters: dict[str, Any] = {}
    for text, leaf in leaves.items():
        array = jax.device_put(read_whole(leaf, text))
        insert(adapters, tuple(text.split("/")), array)
    new, adapters = lora.relayout(config, adapters, **layout)
    return new, LoraConfig(**options), adapters


def save_peft(
    folder: str | os.PathLike[str],
    config: DecoderConfig,
    adapters: Mapping[str, Any],
    options: LoraConfig,
    *,
    base_model: str | None = None,
    prefix: str = hf_names.PREFIX,
) -> None:
    """Writes adapters as PEFT does, layer by layer.

    Args:
      folder: new or empty.
      config: of the model.
      adapters: in the layout of `config.plan`.
      options: that they were made with.
      base_model: name or folder of the model that they are for.
      prefix: of the base's names, as `shared.checkpoint.save_hf` takes it.

    Raises:
      CheckpointError: `folder` is not empty, the adapters do not fit, or some are of
        weights that are no linear module there, as those of routed experts.
    """
    check(config, adapters, options)
    modules = _modules(config, hf_names.check_prefix(prefix))
    _, layers = lora.relayout(config, adapters, scan_layers=False)
    tensors, targets, problems = {}, set(), []
    for (layer, *path), leaf in flatten(layers):
        name, _, part = path[-1].rpartition("_lora_")
        if part == "scale":
            continue
        unit = path_text((*path[:-1], name)), int(layer.removeprefix("layers_"))
        if unit not in modules:
            problems.append(f"{unit[0]} of layer {unit[1]}")
            continue
        tensor = f"{_BEFORE}{modules[unit]}.{_PARTS[f'lora_{part}']}.weight"
        tensors[tensor] = array_leaf(np.asarray(leaf).T)
        targets.add(modules[unit].partition(f".{unit[1]}.")[2])
    if problems:
        raise CheckpointError(
            "PEFT adapts linear modules, which these are not: merge the adapters "
            "(shared.lora.merge), and save the model.",
            sorted(set(problems)),
        )
    data = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "inference_mode": True,
        **{name: values[0] for name, values in _PLAIN.items()},
    }
    with new_folder(pathlib.Path(folder).resolve()) as partial:
        write_json(partial / CONFIG_FILE, data)
        write_file(partial / TENSOR_FILE, tensors)


def load_peft(
    folder: str | os.PathLike[str], config: DecoderConfig
) -> tuple[LoraConfig, dict[str, Any]]:
    """Adapters that PEFT or `save_peft` wrote.

    Args:
      folder: with adapter_config.json and adapter_model.safetensors.
      config: of the model that they are for; the adapters get its layout.

    Raises:
      CheckpointError: they are of another kind or model, or of some layers of a scanned
        run only.
    """
    path = pathlib.Path(folder)
    options = _read_options(path)
    known = {
        f"{_BEFORE}{module}.{theirs}.weight": (leaf, layer, ours)
        for prefix in hf_names.PREFIXES
        for (leaf, layer), module in _modules(config, prefix).items()
        for ours, theirs in _PARTS.items()
    }
    layers: dict[str, Any] = {}
    names, problems = set(), []
    for (name,), tensor in open_folder(path).leaves.items():
        if name not in known:
            problems.append(str(name))
            continue
        leaf, layer, part = known[str(name)]
        own = f"layers_{layer}", *leaf.split("/")
        array = jnp.asarray(read_whole(tensor, str(name)).T)
        insert(layers, (*own[:-1], f"{own[-1]}_{part}"), array)
        scale = jnp.full((1,), options.scale, jnp.float32)
        insert(layers, (*own[:-1], f"{own[-1]}_lora_scale"), scale)
        names.add(leaf)
    if problems:
        raise CheckpointError(f"{folder} adapts what the model has not:", problems)
    options = dataclasses.replace(options, targets=tuple(sorted(names)))
    flat = config.replace(scan_layers=False)
    try:
        lora.check(flat, layers)
        _, adapters = lora.relayout(flat, layers, scan_layers=config.scan_layers)
    except ValueError as error:
        raise CheckpointError(
            f"The adapters of {folder} do not fit the config. Those of some layers "
            f"only need scan_layers=False. {error}"
        ) from None
    return options, adapters


def check(
    config: DecoderConfig, adapters: Mapping[str, Any], options: LoraConfig
) -> None:
    """Compares adapters with what `options` ask for.

    Raises:
      CheckpointError: lists everything that differs.
    """
    try:
        specs = dict(flatten(lora.check(config, adapters)))
        wanted = dict(flatten(lora.param_specs(config, options)))
    except (ConfigError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    problems = [f"missing: {path_text(path)}" for path in wanted.keys() - specs.keys()]
    problems += [f"unexpected: {path_text(p)}" for p in specs.keys() - wanted.keys()]
    for path, leaf in flatten(adapters):
        if path in wanted and leaf.shape != wanted[path].shape:
            problems.append(
                f"{path_text(path)} must be {wanted[path].shape}. Got {leaf.shape}"
            )
        if path[-1].endswith("_scale") and not np.allclose(leaf, options.scale):
            problems.append(
                f"{path_text(path)} must be alpha / rank = {options.scale}. "
                f"Got {np.asarray(leaf).ravel()[:3]}"
            )
    if problems:
        raise CheckpointError(
            "The adapters are not those of the options:", sorted(problems)
        )


def _modules(config: DecoderConfig, prefix: str) -> dict[tuple[str, int], str]:
    """Hugging Face's linear modules, by path in a layer and layer."""
    return {
        (tensor.row.leaves[0], tensor.layer): tensor.name.removesuffix(".weight")
        for tensor in hf_names.tensors(config, lambda name: False, prefix)
        if tensor.layer is not None
        and tensor.expert is None
        and tensor.row.layout == TRANSPOSED
        and tensor.name.endswith(".weight")
    }


def _read_options(folder: pathlib.Path) -> LoraConfig:
    """Of an adapter_config.json; which targets it has, its tensors say."""
    data = read_json(folder / CONFIG_FILE)
    problems = []
    if data.get("peft_type") != "LORA":
        problems.append(f"peft_type must be 'LORA'. Got {data.get('peft_type')!r}")
    for name, values in _PLAIN.items():
        if data.get(name, values[0]) not in values:
            problems.append(f"{name} must be {values[0]!r}. Got {data[name]!r}")
    if problems:
        raise CheckpointError(f"{folder} holds adapters that we do not have:", problems)
    try:
        return LoraConfig(data["r"], float(data["lora_alpha"]), ("?",))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} has no whole r and lora_alpha ({error!r})."
        ) from None
