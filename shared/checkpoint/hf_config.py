"""A Hugging Face config.json as a `DecoderConfig` and back; refuses what it cannot say.

Two spellings are read: the published one (`rope_theta`, `full_attention_interval`,
`torch_dtype`) and that of transformers 5 (`rope_parameters`, `layer_types`, `dtype`).
Of a multimodal model's config.json, the text model is read. What a family's fields are
says its table in `hf_families`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shared.checkpoint.hf_families import FAMILIES, WRAPPERS
from shared.checkpoint.hf_families.fields import ConfigTable
from shared.checkpoint.hf_families.source import Source
from shared.config import FLOAT_DTYPES, AttentionConfig, ConfigError, DecoderConfig
from shared.stores.folders import read_json

# Fields that change nothing in what the model computes, and why.
IGNORED = {
    "architectures": "names a class; model_type decides",
    "is_encoder_decoder": "model_type decides",
    "auto_map": "names code beside the weights; none is ever run",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "name_or_path": "where the file came from",
    "_commit_hash": "where the file came from",
    "_attn_implementation": "which kernel the reference runs",
    "attn_implementation": "which kernel the reference runs",
    "cache_implementation": "which cache the reference makes",
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

# The same, for those beside the text model's in a multimodal config.json.
NOT_TEXT = {
    "vision_config": "of the vision tower",
    "audio_config": "of the audio tower",
    "image_token_id": "stands for an image; text has none",
    "image_token_index": "stands for an image; text has none",
    "video_token_id": "stands for a video; text has none",
    "audio_token_id": "stands for a sound; text has none",
    "vision_start_token_id": "stands before an image",
    "vision_end_token_id": "stands behind an image",
    "boi_token_id": "stands before an image",
    "boi_token_index": "stands before an image",
    "eoi_token_id": "stands behind an image",
    "eoi_token_index": "stands behind an image",
    "boa_token_id": "stands before a sound",
    "eoa_token_id": "stands behind a sound",
    "eoa_token_index": "stands behind a sound",
    "mm_tokens_per_image": "how many tokens an image is",
    "vision_soft_tokens_per_image": "how many tokens an image is",
    "initializer_range": "of what is not the text model",
    "language_model_only": "which towers the reference makes",
}

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# How a model is run; config.json has no place for it.
_HOW_IT_RUNS = (
    "dropout_rate",
    "vocab_padding",
    "scan_layers",
    "scan_period",
    "param_scan_axis",
    "remat_policy",
    "block_form",
    "dtype",
    "axis_rules",
    "expert_chunks",
    "attention_kernel",
    "expert_kernel",
)


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
        return _read(Source(source, "config.json"))
    path = pathlib.Path(source)
    if path.is_dir() or not (path.is_file() or path.suffix == ".json"):
        path = path / "config.json"
    return _read(Source(read_json(path), str(path)))


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
    table = _table(config.family)
    data = {
        "architectures": [table.architecture],
        "model_type": config.family,
        "use_cache": True,
        **table.write(config, hub_style),
        table.hub_dtype if hub_style else "dtype": config.param_dtype,
    }
    for name in _TOKEN_IDS:
        value = getattr(config, name)
        data[name] = list(value) if isinstance(value, tuple) else value
    _check_written(config, data)
    return dict(sorted(data.items()))


def is_hub_style(data: Mapping[str, Any]) -> bool:
    """Whether a config.json that can be read is in the published spelling."""
    text = data["text_config"] if data["model_type"] in WRAPPERS else data
    return _table(from_hf(data).family).is_hub_style(text)


def rewritten(
    first: Mapping[str, Any], config: DecoderConfig, hub_style: bool
) -> dict[str, Any]:
    """A config.json as `to_hf` gives it, with all that is ignored in another one.

    Args:
      first: of a model of the same family; of a multimodal one, the text model's fields
        are replaced.
      config: of the model.
      hub_style: see `to_hf`.
    """
    data = to_hf(config, hub_style)
    ignored = _table(config.family).ignored
    is_wrapped = first["model_type"] in WRAPPERS
    text = first["text_config"] if is_wrapped else first
    data |= {name: text[name] for name in ignored if name in text}
    if not is_wrapped:
        return data
    data = {name: value for name, value in data.items() if name != "architectures"}
    above = {name: data[name] for name in _SHARED if name in data and name in first}
    dtype = {name: config.param_dtype for name in _DTYPES if name in first}
    return {**first, **above, **dtype, "text_config": data}


def _table(model_type: str) -> ConfigTable:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type must be one of {', '.join((*FAMILIES, *WRAPPERS))}: others "
            f"are not implemented. Got {model_type!r}."
        )
    return FAMILIES[model_type].config


def _read(source: Source) -> DecoderConfig:
    if source.any("quantization_config", None) is not None:
        raise source.error(
            "quantization_config is given, and quantised weights are not read: give a "
            "checkpoint in bfloat16, float16 or float32, or convert this one first."
        )
    model_type = source.get("model_type", None, str)
    if model_type in WRAPPERS:
        return _read(_text(source, WRAPPERS[model_type]))
    try:
        table = _table(model_type)
    except ConfigError as error:
        raise source.error(str(error)) from None
    values = table.read(source)
    dtype = _read_dtype(source)
    tokens = {
        name: _read_token_ids(source, name, table.tokens.get(name))
        for name in _TOKEN_IDS
    }
    unknown = source.unknown((*IGNORED, *table.ignored))
    if unknown:
        raise source.error(
            f"unknown fields {', '.join(unknown)}: a field that changes the model "
            f"would be lost. Remove those that do not; {__name__}.IGNORED lists the "
            "fields that are known not to."
        )
    try:
        return table.make(
            values, family=model_type, param_dtype=dtype, dtype=dtype, **tokens
        )
    except ConfigError as error:
        raise source.error(_in_their_words(str(error), table)) from None


# Fields that a multimodal config.json has above the text model's, too.
_DTYPES = ("dtype", "torch_dtype")
_SHARED = ("tie_word_embeddings", *_TOKEN_IDS)


def _text(source: Source, model_type: str) -> Source:
    """The fields of the text model in a multimodal config.json."""
    text = source.get("text_config", None, dict)
    if text is None:
        raise source.error("text_config is missing: it describes the text model.")
    inner = Source(text, f"{source.where}: text_config")
    inner.check("model_type", model_type, f"that is the text model of {source.where}")
    data = {**text, "model_type": model_type}
    tied = source.get("tie_word_embeddings", None, bool, type(None))
    if tied is not None:
        why = "so it is above text_config, and a model has one head; correct one"
        inner.check("tie_word_embeddings", tied, why)
        data["tie_word_embeddings"] = tied
    # The reference goes by what stands above; published files differ in these.
    dtype = _read_dtype(source, None)
    if dtype is not None:
        data["dtype"] = dtype
        data.pop("torch_dtype", None)
    for name in _TOKEN_IDS:
        value = source.any(name, None)
        data |= {name: value} if value is not None else {}
    if source.unknown((*IGNORED, *NOT_TEXT)):
        raise source.error(
            f"unknown fields {', '.join(source.unknown((*IGNORED, *NOT_TEXT)))}: a "
            "field that changes the text model would be lost. Remove those that do "
            f"not; {__name__}.NOT_TEXT lists the fields that are known not to."
        )
    return Source(data, inner.where)


def _in_their_words(message: str, table: ConfigTable) -> str:
    """Adds what the fields in an error message are called in config.json."""
    words = set(re.findall(r"\w+", message))
    names = table.in_their_words(words)
    return f"{message} (In config.json: {', '.join(names)}.)" if names else message


def _read_dtype(source: Source, default: str | None = "float32") -> str | None:
    """Under its present or its older name; under both only if they agree."""
    types = (str, type(None))
    older = source.get("torch_dtype", None, *types)
    dtype = source.get("dtype", older, *types)
    if "torch_dtype" in source and older != dtype:
        raise source.error(f"dtype={dtype!r} and torch_dtype={older!r}: keep one.")
    dtype = default if dtype is None else dtype
    if dtype not in (*FLOAT_DTYPES, default):
        raise source.error(f"dtype must be one of {FLOAT_DTYPES}. Got {dtype!r}.")
    return dtype


def _read_token_ids(
    source: Source, name: str, default: int | None
) -> int | tuple[int, ...] | None:
    types = (int, type(None)) + ((list,) if name == "eos_token_id" else ())
    value = source.get(name, default, *types)
    if not isinstance(value, list):
        return value
    if not all(type(token) is int for token in value):
        raise source.error(f"{name} must be integers. Got {value!r}.")
    return tuple(value)


def _check_written(config: DecoderConfig, data: Mapping[str, Any]) -> None:
    """What was written must be read back as it was."""
    try:
        again = from_hf(data)
    except ConfigError as error:
        raise ConfigError(
            f"A config.json of {config.family} has no place for this model ({error}) "
            "Change the config."
        ) from None
    ours, theirs = dict(_facts(config)), dict(_facts(again))
    lines = [
        f"{path} is {ours.get(path)}, and would be read back as {theirs.get(path)}"
        for path in ours | theirs
        if ours.get(path) != theirs.get(path)
    ]
    if lines:
        raise ConfigError(
            f"A config.json of {config.family} has no place for this model: "
            f"{'; '.join(lines)}. Change the config."
        )


def _facts(config: DecoderConfig) -> Iterator[tuple[str, Any]]:
    """Everything that a config.json should say, by path."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            for inner in dataclasses.fields(value):
                yield f"{field.name}.{inner.name}", _fact(value, inner.name)
        elif field.name == "router_aux_loss_coef" and config.moe is None:
            continue  # there is nothing that it weighs
        elif field.name not in _HOW_IT_RUNS:
            yield field.name, value


def _fact(part: Any, name: str) -> Any:
    if name in ("chunk_size", "span_size"):
        return None  # how it runs
    if name == "scale" and isinstance(part, AttentionConfig) and part.scale is None:
        return part.head_dim**-0.5
    return getattr(part, name)
