"""A Hugging Face config.json as a `DecoderConfig` and back; refuses what it cannot say.

Two spellings are read: the published one (`rope_theta`, `full_attention_interval`,
`torch_dtype`) and that of transformers 5 (`rope_parameters`, `layer_types`, `dtype`).
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from shared.config import (
    FLOAT_DTYPES,
    AttentionConfig,
    ConfigError,
    DecoderConfig,
    GatedDeltaNetConfig,
    LayerKind,
    Mixer,
    MLPConfig,
    MoEConfig,
    RopeConfig,
)
from shared.stores.folders import read_json

# Fields that change nothing in what the model computes, and why.
IGNORED = {
    "architectures": "names a class; model_type decides",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "_commit_hash": "where the file came from",
    "_attn_implementation": "which kernel the reference runs",
    "attn_implementation": "which kernel the reference runs",
    "use_cache": "whether the reference returns a cache; ours is an argument",
    "return_dict": "what the reference returns",
    "output_attentions": "what the reference returns",
    "output_hidden_states": "what the reference returns",
    "output_router_logits": "what the reference returns; ours always returns them",
    "chunk_size_feed_forward": "how the reference splits its work",
    "id2label": "of classifiers",
    "label2id": "of classifiers",
    "num_labels": "of classifiers",
    "problem_type": "of classifiers",
}

PARTS: dict[str, Any] = {
    "attention": AttentionConfig,
    "delta_net": GatedDeltaNetConfig,
    "mlp": MLPConfig,
    "moe": MoEConfig,
}


class Field(NamedTuple):
    """A field of config.json that is a field of ours.

    Attributes:
      name: in config.json.
      default: of the reference, where the field is absent; its type is the field's.
      paths: in `DecoderConfig`, "part.field" or "field"; all have the same value.
    """

    name: str
    default: int | float | bool
    paths: tuple[str, ...]


def _field(name: str, default: int | float | bool, *paths: str) -> Field:
    return Field(name, default, paths)


@dataclasses.dataclass(frozen=True)
class Family:
    """How a model type spells its config.

    Attributes:
      architecture: the class that the reference names.
      fields: those that are fields of ours as they are.
      fixed: fields that must have this value where they stand, since the layers have
        no other; those that `to_hf` writes.
      optional_fixed: the same, for fields that `to_hf` leaves out.
      rope_defaults: `rope_theta` and `partial_rotary_factor` of the reference.
      read_kinds: the kinds of the layers.
      write_kinds: the inverse, in the published spelling if told so.
    """

    architecture: str
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any]
    optional_fixed: Mapping[str, Any]
    rope_defaults: tuple[float, float]
    read_kinds: Callable[[_Source], tuple[LayerKind, ...]]
    write_kinds: Callable[[DecoderConfig, bool], dict[str, Any]]


def from_hf(source: str | os.PathLike[str] | Mapping[str, Any]) -> DecoderConfig:
    """Reads a config.json.

    Args:
      source: a folder that has one, its path, or its contents.

    Raises:
      CheckpointError: there is no file, or it is no JSON object.
      ConfigError: it has fields that are not known, values that we do not implement, or
        sizes that make no model.
    """
    if isinstance(source, Mapping):
        return _read(_Source(source, "config.json"))
    path = pathlib.Path(source)
    if path.is_dir() or not (path.is_file() or path.suffix == ".json"):
        path = path / "config.json"
    return _read(_Source(read_json(path), str(path)))


def to_hf(config: DecoderConfig, hub_style: bool = False) -> dict[str, Any]:
    """The contents of a config.json.

    How a model is run (scanning, rematerialisation, dropout, chunk size, the dtype of
    activations) has no place in it.

    Args:
      config: of the model.
      hub_style: the published spelling, else that of transformers 5.

    Raises:
      ConfigError: the format has no place for what the model is.
    """
    family = _family(config.family)
    data = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "use_cache": True,
        "output_router_logits": False,
        **family.fixed,
        **_write_fields(family.fields, config),
        **family.write_kinds(config, hub_style),
        **_write_rope(config, hub_style, family.rope_defaults),
        "torch_dtype" if hub_style else "dtype": config.param_dtype,
    }
    for name in _TOKEN_IDS:
        value = getattr(config, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    return dict(sorted(data.items()))


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class _Source:
    """The fields of a config.json; remembers which were asked for."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self._data = data
        self.where = where
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def get(self, name: str, default: Any, *types: type) -> Any:
        """The value of a field, which must be of one of `types`."""
        self.asked.add(name)
        value = self._data.get(name, default)
        if name in self._data and type(value) not in types:
            names = " or ".join(_JSON_NAMES[t] for t in types)
            raise self.error(f"{name} must be {names}. Got {value!r}.")
        return value

    def size(self, name: str, default: int) -> int:
        """An integer of at least 1."""
        value = self.get(name, default, int)
        if value < 1:
            raise self.error(f"{name} must be at least 1. Got {value}.")
        return value

    def unknown(self) -> list[str]:
        """Fields that nobody asked for and that are not on the list of ignored ones."""
        return sorted(self._data.keys() - self.asked - IGNORED.keys())

    def error(self, message: str) -> ConfigError:
        """An error that says where the trouble is."""
        return ConfigError(f"{self.where}: {message}")


_JSON_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def _family(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)}: others are not "
            f"implemented. Got {model_type!r}."
        )
    return FAMILIES[model_type]


def _read(source: _Source) -> DecoderConfig:
    model_type = source.get("model_type", None, str)
    try:
        family = _family(model_type)
    except ConfigError as error:
        raise source.error(str(error)) from None
    _check_fixed(source, {**family.fixed, **family.optional_fixed})
    given, values = _read_fields(family.fields, source)
    kinds = family.read_kinds(source)
    # The file has a number even where no layer has use for it; it is kept.
    used = {kind.mixer for kind in kinds} | {kind.feed_forward for kind in kinds}
    for part, needed in _USED_BY.items():
        if needed not in used and part not in given:
            values.pop(part)
    rope = _read_rope(source, family.rope_defaults, values.get("attention"))
    dtype = _read_either(source, "dtype", "torch_dtype", None, str, type(None))
    dtype = "float32" if dtype is None else dtype
    if dtype not in FLOAT_DTYPES:
        raise source.error(f"dtype must be one of {FLOAT_DTYPES}. Got {dtype!r}.")
    tokens: dict[str, Any] = {
        name: _read_token_ids(source, name) for name in _TOKEN_IDS
    }
    if source.unknown():
        raise source.error(
            f"unknown fields {', '.join(source.unknown())}: a field that changes the "
            "model would be lost. Remove those that do not; "
            f"{__name__}.IGNORED lists the fields that are known not to."
        )
    try:
        if rope is not None:
            values["attention"]["rope"] = RopeConfig(*rope)
        parts = {p: make(**values.pop(p)) for p, make in PARTS.items() if p in values}
        return DecoderConfig(
            family=model_type,
            layers=kinds,
            param_dtype=dtype,
            dtype=dtype,
            **values,
            **parts,
            **tokens,
        )
    except ConfigError as error:
        raise source.error(_in_their_words(str(error), family.fields)) from None


_USED_BY = {
    "attention": "full_attention",
    "delta_net": "linear_attention",
    "mlp": "dense",
    "moe": "moe",
}


def _in_their_words(message: str, fields: Iterable[Field]) -> str:
    """Adds what the fields in an error message are called in config.json."""
    words = set(re.findall(r"\w+", message))
    names = []
    for field in fields:
        ours = {path.rpartition(".")[2] for path in field.paths}
        if field.name not in ours:
            names += [f"{o} is {field.name}" for o in sorted(ours & words)]
    return f"{message} (In config.json: {', '.join(names)}.)" if names else message


def _check_fixed(source: _Source, fixed: Mapping[str, Any]) -> None:
    for name, value in fixed.items():
        given = source.get(name, value, *_JSON_NAMES)
        if given != value:
            raise source.error(
                f"{name} must be {value!r}: no other is implemented. Got {given!r}."
            )


def _read_fields(
    fields: Iterable[Field], source: _Source
) -> tuple[set[str], dict[str, Any]]:
    """The parts that the file speaks of, and values by field and by part."""
    given = set()
    values: dict[str, Any] = {part: {} for part in PARTS}
    for field in fields:
        types = (int, float) if isinstance(field.default, float) else ()
        value = source.get(field.name, field.default, type(field.default), *types)
        value = type(field.default)(value)
        for path in field.paths:
            part, _, name = path.rpartition(".")
            (values[part] if part else values)[name] = value
            if part and len(field.paths) == 1 and field.name in source:
                given.add(part)
    if values["moe"].get("num_experts") == 0:
        given.discard("moe")
    return given, values


def _write_fields(fields: Iterable[Field], config: DecoderConfig) -> dict[str, Any]:
    data = {}
    for field in fields:
        values = {}
        for path in field.paths:
            part, _, name = path.rpartition(".")
            owner = getattr(config, part) if part else config
            if owner is not None:
                values[path] = getattr(owner, name)
        if len(set(values.values())) > 1:
            raise ConfigError(
                f"config.json has one {field.name}, but the config has several: "
                + ", ".join(f"{path}={value}" for path, value in values.items())
                + ". Make them equal."
            )
        if values:
            data[field.name] = next(iter(values.values()))
    return data


def _read_either(
    source: _Source, name: str, older: str, default: Any, *types: type
) -> Any:
    """A field under its present or its older name; under both only if they agree."""
    value = source.get(older, default, *types)
    newer = source.get(name, value, *types)
    if older in source and newer != value:
        raise source.error(f"{name}={newer!r} and {older}={value!r}: keep one of them.")
    return newer


def _read_rope(
    source: _Source,
    defaults: tuple[float, float],
    attention: Mapping[str, Any] | None,
) -> tuple[float, int] | None:
    """Theta and the number of rotated components; None without attention."""
    if source.get("rope_scaling", None, type(None), dict) is not None:
        raise source.error(
            "rope_scaling must be null: scaled positions are not implemented. Got "
            f"{source.get('rope_scaling', None, dict)!r}."
        )
    given = source.get("rope_parameters", {}, type(None), dict)
    nested = _Source(given or {}, f"{source.where}: rope_parameters")
    for name in ("rope_type", "type"):
        rope_type = nested.get(name, "default", str)
        if rope_type != "default":
            raise nested.error(
                f"{name} must be 'default': no other is implemented. Got {rope_type!r}."
            )
    values = []
    for name, default in zip(
        ("rope_theta", "partial_rotary_factor"), defaults, strict=True
    ):
        top = source.get(name, default, int, float)
        value = nested.get(name, top, int, float)
        if name in source and value != top:
            raise source.error(
                f"{name} is {top} and in rope_parameters {value}: keep one of them."
            )
        values.append(float(value))
    if nested.unknown():
        raise nested.error(
            f"unknown fields {', '.join(nested.unknown())}: they would change the "
            "rotation; it is not implemented."
        )
    theta, factor = values
    if not 0 <= factor <= 1:
        raise source.error(
            f"partial_rotary_factor must be between 0 and 1. Got {factor}."
        )
    return None if attention is None else (theta, int(attention["head_dim"] * factor))


def _write_rope(
    config: DecoderConfig, hub_style: bool, defaults: tuple[float, float]
) -> dict[str, Any]:
    theta, factor = defaults
    if config.attention is not None:
        rope, width = config.attention.rope, config.attention.head_dim
        theta, factor = rope.theta, rope.rotary_dim / width
        if int(width * factor) != rope.rotary_dim:  # 49 * (1 / 49) is below 1
            factor = math.nextafter(factor, 1.0)
    values = {"rope_theta": theta, "partial_rotary_factor": factor}
    if hub_style:
        return {**values, "rope_scaling": None}
    return {"rope_parameters": {"rope_type": "default", **values}}


def _read_token_ids(source: _Source, name: str) -> int | tuple[int, ...] | None:
    types = (int, type(None)) + ((list,) if name == "eos_token_id" else ())
    value = source.get(name, None, *types)
    if not isinstance(value, list):
        return value
    if not all(type(token) is int for token in value):
        raise source.error(f"{name} must be integers. Got {value!r}.")
    return tuple(value)


def _read_mixers(source: _Source) -> list[Mixer]:
    """An explicit `layer_types`, or every n-th layer with full attention."""
    length = source.size("num_hidden_layers", 48)
    interval = source.size("full_attention_interval", 4)
    types = source.get("layer_types", None, list, type(None))
    if types is None:
        return [
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(length)
        ]
    if len(types) != length:
        raise source.error(
            f"layer_types has {len(types)} layers and num_hidden_layers={length}: make "
            "them equal."
        )
    for kind in types:
        if kind not in _MIXERS:
            raise source.error(f"layer_types must be of {_MIXERS}. Got {kind!r}.")
    return types


_MIXERS = ("linear_attention", "full_attention")


def _read_qwen3_next_kinds(source: _Source) -> tuple[LayerKind, ...]:
    mixers = _read_mixers(source)
    dense = source.get("mlp_only_layers", [], list)
    outside = [i for i in dense if type(i) is not int or not 0 <= i < len(mixers)]
    if outside:
        raise source.error(
            f"mlp_only_layers must be numbers of layers, 0 to {len(mixers) - 1}. "
            f"Got {outside}."
        )
    step = source.size("decoder_sparse_step", 1)
    experts = source.get("num_experts", 512, int)
    sparse = [
        i not in dense and experts > 0 and (i + 1) % step == 0
        for i in range(len(mixers))
    ]
    return tuple(
        LayerKind(mixer, "moe" if is_sparse else "dense")
        for mixer, is_sparse in zip(mixers, sparse, strict=True)
    )


def _write_qwen3_next_kinds(config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
    mixers: list[str] = [kind.mixer for kind in config.layers]
    data: dict[str, Any] = {
        "num_hidden_layers": len(mixers),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            i for i, kind in enumerate(config.layers) if kind.feed_forward == "dense"
        ],
    }
    if config.moe is None:
        data["num_experts"] = 0
    interval = _find_interval(mixers)
    if hub_style and interval is not None:
        return {**data, "full_attention_interval": interval}
    return {**data, "layer_types": mixers}


def _find_interval(mixers: list[str]) -> int | None:
    full = [i + 1 for i, mixer in enumerate(mixers) if mixer == "full_attention"]
    interval = full[0] if full else len(mixers) + 1
    regular = list(range(interval, len(mixers) + 1, interval))
    return interval if full == regular else None


FAMILIES = {
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        fields=(
            _field("vocab_size", 151936, "vocab_size"),
            _field(
                "hidden_size",
                2048,
                "hidden_size",
                *(f"{part}.hidden_size" for part in PARTS),
            ),
            _field(
                "initializer_range",
                0.02,
                "initializer_range",
                *(f"{part}.initializer_range" for part in PARTS),
            ),
            _field(
                "rms_norm_eps",
                1e-6,
                "norm_eps",
                "attention.norm_eps",
                "delta_net.norm_eps",
            ),
            _field("max_position_embeddings", 32768, "max_position_embeddings"),
            _field("tie_word_embeddings", False, "tie_word_embeddings"),
            _field("router_aux_loss_coef", 0.001, "router_aux_loss_coef"),
            _field("num_attention_heads", 16, "attention.num_heads"),
            _field("num_key_value_heads", 2, "attention.num_kv_heads"),
            _field("head_dim", 256, "attention.head_dim"),
            _field("attention_bias", False, "attention.use_bias"),
            _field("linear_num_key_heads", 16, "delta_net.num_key_heads"),
            _field("linear_num_value_heads", 32, "delta_net.num_value_heads"),
            _field("linear_key_head_dim", 128, "delta_net.key_head_dim"),
            _field("linear_value_head_dim", 128, "delta_net.value_head_dim"),
            _field("linear_conv_kernel_dim", 4, "delta_net.conv_width"),
            _field("intermediate_size", 5632, "mlp.intermediate_size"),
            _field("num_experts", 512, "moe.num_experts"),
            _field("num_experts_per_tok", 10, "moe.experts_per_token"),
            _field("moe_intermediate_size", 512, "moe.expert_size"),
            _field("shared_expert_intermediate_size", 512, "moe.shared_expert_size"),
            _field("norm_topk_prob", True, "moe.normalize_weights"),
        ),
        fixed={"hidden_act": "silu", "attention_dropout": 0.0},
        optional_fixed={"use_sliding_window": False, "sliding_window": None},
        rope_defaults=(10000.0, 0.25),
        read_kinds=_read_qwen3_next_kinds,
        write_kinds=_write_qwen3_next_kinds,
    ),
}
