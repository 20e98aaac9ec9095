"""Flat weights for vLLM are the tensors of Hugging Face, some one after the other."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from shared.checkpoint import load_hf
from shared.checkpoint.maxtext import MaxTextLayout, maxtext_scheme
from shared.checkpoint.scheme import Conversion, units, zoo_scheme
from shared.checkpoint.vllm import vllm_leaves, vllm_scheme, vllm_tensors
from shared.config import ConfigError, LayerKind
from shared.presets import preset, qwen3_next_tiny
from shared.stores import CheckpointError, Leaf
from shared.stores.reading import read_whole
from shared.stores.tree import array_leaf
from shared.trees import flatten, path_text
from tests.shared.checkpoint.checkpoints import GOLDENS, NAMES, read
from tests.shared.checkpoint.maxtext_files import (
    MAXTEXT,
    assert_same,
    config_of,
    convert,
    load,
)

FUSED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.shared_expert.gate_up_proj": ("gate_proj", "up_proj"),
}
EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


def expected(hf, num_layers, num_experts):
    """From Hugging Face's tensors, in plain NumPy."""
    made = {name: array for name, array in hf.items() if ".experts." not in name}
    for i in range(num_layers):
        for fused, parts in FUSED.items():
            above = f"model.layers.{i}.{fused.rpartition('.')[0]}"
            names = [f"{above}.{part}.weight" for part in parts]
            if names[0] in hf:
                rows = [made.pop(name) for name in names]
                made[f"model.layers.{i}.{fused}.weight"] = np.concatenate(rows)
        experts = f"model.layers.{i}.mlp.experts"
        if f"{experts}.0.up_proj.weight" not in hf:
            continue
        for fused, parts in EXPERTS.items():
            each = [
                np.concatenate([hf[f"{experts}.{e}.{p}.weight"] for p in parts])
                for e in range(num_experts)
            ]
            made[f"{experts}.{fused}"] = np.stack(each)
    return made


@functools.cache
def golden(name):
    return expected(read(GOLDENS / name), 6 if "6l" in name else 8, 8)


LAYOUTS = ({}, {"param_scan_axis": 1}, {"scan_layers": False})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_by_layer_are_those_of_hugging_face(name, layout):
    config, params = load_hf(GOLDENS / name, **layout)
    found = dict(vllm_tensors(config, params))
    assert_same(found, golden(name))


def test_a_tree_that_maxtext_wrote_goes_to_vllm_directly():
    config, hf = config_of(8), load_file(MAXTEXT / "scanned8_hf.safetensors")
    source = maxtext_scheme(config, MaxTextLayout("scanned"))
    found = convert(config, source, vllm_scheme(config), load("scanned8_params.npz"))
    assert_same(found, expected(hf, 8, 4))


def test_shapes_are_vllms():
    config = qwen3_next_tiny(4, dense_layers=(1,))
    shapes = vllm_scheme(config).shapes
    full, linear = "model.layers.3", "model.layers.0"
    # 4 heads of 16 with their gates, then 2 for keys and 2 for values.
    assert shapes[f"{full}.self_attn.qkv_proj.weight"] == (128 + 32 + 32, 32)
    assert shapes[f"{full}.self_attn.o_proj.weight"] == (32, 64)
    assert shapes[f"{full}.mlp.experts.w13_weight"] == (8, 2 * 16, 32)
    assert shapes[f"{full}.mlp.experts.w2_weight"] == (8, 32, 16)
    assert shapes[f"{full}.mlp.shared_expert.gate_up_proj.weight"] == (2 * 24, 32)
    assert shapes[f"{full}.mlp.shared_expert_gate.weight"] == (1, 32)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (2 * 40, 32)
    assert shapes[f"{linear}.linear_attn.conv1d.weight"] == (2 * 16 + 48, 1, 4)
    assert not any("q_proj" in name or "experts.0" in name for name in shapes)


def test_back_into_the_zoo():
    config, params = load_hf(GOLDENS / "qwen3_next_6l")
    leaves = {name: array_leaf(array) for name, array in vllm_tensors(config, params)}
    back = Conversion(vllm_scheme(config), zoo_scheme(config), units(config))
    found = {n: read_whole(leaf, n) for n, leaf in back.leaves(leaves).items()}
    wanted = {path_text(path): np.asarray(leaf) for path, leaf in flatten(params)}
    assert_same(found, wanted)


def test_bfloat16_and_a_padded_vocabulary():
    config, params = load_hf(GOLDENS / "qwen3_next_6l", scan_layers=False)
    params = {
        path_text(path): np.asarray(leaf).astype(ml_dtypes.bfloat16)
        for path, leaf in flatten(params)
    }
    params["embed_tokens"] = np.pad(params["embed_tokens"], ((0, 4), (0, 0)))
    params["lm_head"] = np.pad(params["lm_head"], ((0, 0), (0, 4)))
    found = dict(vllm_tensors(config.replace(vocab_padding=4), params))
    wanted = golden("qwen3_next_6l").items()
    assert_same(found, {n: array.astype(ml_dtypes.bfloat16) for n, array in wanted})


def test_nothing_is_read_before_it_is_asked_for():
    config, params = load_hf(GOLDENS / "qwen3_next_8l")
    opened = []

    def counted(name, leaf):
        def open_it():
            opened.append(name)
            return leaf.open()

        return leaf._replace(open=open_it)

    tree = {
        path_text(path): counted(path_text(path), array_leaf(leaf))
        for path, leaf in flatten(params)
    }
    leaves = vllm_leaves(config, tree)
    assert not opened
    assert all(isinstance(leaf, Leaf) for leaf in leaves.values())
    name = "model.layers.7.self_attn.qkv_proj.weight"
    array = read_whole(leaves[name], name)
    assert array.tobytes() == golden("qwen3_next_8l")[name].tobytes()
    above = "layers/global_layer/self_attn"
    assert set(opened) == {f"{above}/{p}" for p in ("q_proj", "k_proj", "v_proj")}


def test_the_head_of_a_tied_model_is_the_embedding():
    names = vllm_scheme(qwen3_next_tiny(4, tie_word_embeddings=True)).shapes.keys()
    assert vllm_scheme(qwen3_next_tiny(4)).shapes.keys() - names == {"lm_head.weight"}


# What is wrong is named.


def test_a_tree_that_does_not_fit():
    config, params = load_hf(GOLDENS / "qwen3_next_6l")
    tree = {path_text(path): leaf for path, leaf in flatten(params)}
    del tree["norm"]
    tree["norms"] = np.zeros(3)
    tree["layers/global_layer/self_attn/k_norm"] = np.zeros((2, 8), np.float32)
    with pytest.raises(CheckpointError) as error:
        vllm_leaves(config, tree)
    assert error.value.problems == (
        "missing: norm (48,)",
        "unexpected: norms (3,)",
        "wrong shape: layers/global_layer/self_attn/k_norm must be (1, 16). Got (2, 8)",
    )


def test_parts_of_different_dtypes_are_no_tensor():
    config, params = load_hf(GOLDENS / "qwen3_next_6l", scan_layers=False)
    tree = {path_text(path): leaf for path, leaf in flatten(params)}
    name = "layers_3/self_attn/k_proj"
    tree[name] = tree[name].astype(np.float16)
    with pytest.raises(CheckpointError) as error:
        vllm_leaves(config, tree)
    (problem,) = error.value.problems
    assert problem.startswith("model.layers.3.self_attn.qkv_proj.weight has one dtype")
    assert f"{name} float16" in problem


def test_models_that_vllm_does_not_have():
    config = qwen3_next_tiny(4)
    biased = dataclasses.replace(config.attention, use_bias=True)
    other = config.replace(
        layers=(*config.layers, LayerKind("sliding_attention", "moe")),
        attention=biased,
        sliding_attention=dataclasses.replace(config.attention, window=4),
    )
    with pytest.raises(CheckpointError) as error:
        vllm_scheme(other)
    sliding, bias = error.value.problems
    assert sliding.startswith("layer 4 is sliding_attention+moe")
    assert bias.startswith("attention.use_bias=True")
    with pytest.raises(ConfigError, match="other"):
        vllm_scheme(config.replace(family="other"))
    with pytest.raises(CheckpointError, match="family='qwen3_5_text': .*not known"):
        vllm_scheme(preset("qwen3.5-tiny"))
