"""The table of names against the reference's own list of tensors."""

import json

import numpy as np
import pytest

from shared.checkpoint import hf_names
from shared.config import ConfigError, DecoderConfig
from shared.presets import preset, presets
from shared.stores.reading import read_whole
from shared.stores.store import constant
from tests.shared.checkpoint.checkpoints import (
    ALL_THREES,
    FAMILIES,
    GOLDENS,
    NAMES,
    keys,
    read,
    tensor_shapes,
)


def table(config, fused_experts=False, prefix=hf_names.PREFIX):
    tensors = hf_names.tensors(config, lambda name: fused_experts, prefix)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    assert len(shapes) == len(tensors)
    return shapes


@pytest.mark.parametrize("name", [*NAMES, *FAMILIES])
def test_names_and_shapes_are_those_of_the_reference(name):
    config, expected = DecoderConfig.from_hf(GOLDENS / name), keys(name)
    prefix = hf_names.find_prefix(expected)
    wrapped = name == "qwen3_5_moe_vl_wrapper"
    assert prefix == ("model.language_model." if wrapped else "model.")
    ignored = hf_names.ignored(config, expected)
    assert {n for n in expected if n.startswith(("mtp.", "model.visual."))} == set(
        ignored
    )
    expected = {n: shape for n, shape in expected.items() if n not in ignored}
    assert table(config, prefix=prefix) == expected


def test_names_in_a_multimodal_file_of_before_have_another_beginning():
    """Where the head stands in the language model, as Gemma 3's is published."""
    config = preset("gemma-3-tiny").replace(tie_word_embeddings=False)
    plain, prefix = table(config), "language_model.model."
    renamed = {
        f"language_model.{name}": shape
        for name, shape in plain.items()  # model.norm.weight, lm_head.weight
    }
    assert table(config, prefix=prefix) == renamed
    assert hf_names.find_prefix(renamed) == prefix
    tower = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    assert set(hf_names.ignored(config, [*renamed, tower])) == {tower}


def test_a_prefix_that_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="must be one of.*Got 'decoder.'"):
        hf_names.check_prefix("decoder.")


def test_layers_of_multi_token_prediction_are_told_by_their_names():
    config = preset("deepseek-v3-tiny")
    names = [
        "model.layers.3.input_layernorm.weight",
        "model.layers.4.eh_proj.weight",
        "model.layers.4.mlp.experts.0.up_proj.weight",
        "model.layers.5.input_layernorm.weight",
    ]
    assert set(hf_names.ignored(config, names)) == set(names[1:3])
    assert not hf_names.ignored(preset("gemma-4-tiny"), names)


def test_keys_that_a_borrowing_layer_has_in_the_file_are_ignored():
    config = preset("gemma-4-e-tiny")
    names = [
        f"{prefix}layers.{layer}.self_attn.{leaf}.weight"
        for prefix in ("model.", "model.language_model.")
        for layer in (5, 6)
        for leaf in ("k_proj", "v_proj", "k_norm", "q_norm")
    ]
    ignored = hf_names.ignored(config, names)
    assert set(ignored) == {n for n in names if ".6." in n and "q_norm" not in n}
    assert {why.sort for why in ignored.values()} == {"of keys and values"}


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoints_of_these_tests_are_like_the_reference(name):
    config = json.loads((GOLDENS / name / "config.json").read_text())
    assert tensor_shapes(config) == keys(name)


@pytest.mark.parametrize(
    "folder",
    [
        "qwen3_next_8l/fused_experts",
        "qwen3_5_moe_8l/fused_experts",
        "qwen3_5_moe_vl_wrapper/hub_layout",
    ],
)
def test_fused_names_and_shapes_are_those_of_the_reference(folder):
    config = DecoderConfig.from_hf(GOLDENS / folder)
    stored = {name: tensor.shape for name, tensor in read(GOLDENS / folder).items()}
    for name in hf_names.ignored(config, stored):
        del stored[name]
    prefix = hf_names.find_prefix(stored)
    assert table(config, fused_experts=True, prefix=prefix) == stored


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_variants(fused, bias, tied):
    given = ALL_THREES | {"attention_bias": bias, "tie_word_embeddings": tied}
    expected = tensor_shapes(given, fused_experts=fused)
    assert table(DecoderConfig.from_hf(given), fused) == expected


@pytest.mark.parametrize("name", presets())
def test_every_parameter_of_a_preset_has_a_name(name):
    assert table(preset(name))


def test_a_family_without_table_is_refused():
    config = preset("qwen3-next-tiny").replace(family="nobody")
    with pytest.raises(ConfigError, match="family='nobody'.*qwen3_next"):
        hf_names.family(config)


@pytest.mark.parametrize(
    "layout", [hf_names.AS_IS, hf_names.TRANSPOSED, hf_names.CONVOLUTION]
)
def test_layouts_are_undone_by_their_inverse(layout):
    shape = (5, 1, 4) if layout is hf_names.CONVOLUTION else (5, 4)
    tensor = np.arange(20).reshape(shape)
    unit = (5, 4) if layout is hf_names.AS_IS else (4, 5)
    leaf = layout.to_unit(constant(tensor), unit)
    assert leaf.shape == unit and layout.tensor_shape(unit) == shape
    expected = tensor if layout is hf_names.AS_IS else tensor.reshape(5, 4).T
    np.testing.assert_array_equal(read_whole(leaf, "it"), expected)
    again = layout.to_tensor(leaf)
    np.testing.assert_array_equal(read_whole(again, "it"), tensor)


@pytest.mark.parametrize(
    "name, layer",
    [
        ("model.layers.10.input_layernorm.weight", 10),
        ("model.layers.2.mlp.experts.11.up_proj.weight", 2),
        ("model.norm.weight", None),
        ("model.language_model.layers.7.layer_scalar", 7),
        ("language_model.model.layers.8.self_attn.q_norm.weight", 8),
        ("mtp.layers.0.input_layernorm.weight", None),
    ],
)
def test_layer_of_a_name(name, layer):
    assert hf_names.FAMILIES["qwen3_next"].layer_of(name) == layer
