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
    GOLDENS,
    NAMES,
    keys,
    read,
    tensor_shapes,
)


def table(config, fused_experts=False):
    tensors = hf_names.tensors(config, lambda name: fused_experts)
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    assert len(shapes) == len(tensors)
    return shapes


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_the_reference(name):
    assert table(DecoderConfig.from_hf(GOLDENS / name)) == keys(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_checkpoints_of_these_tests_are_like_the_reference(name):
    config = json.loads((GOLDENS / name / "config.json").read_text())
    assert tensor_shapes(config) == keys(name)


def test_fused_names_and_shapes_are_those_of_the_reference():
    folder = GOLDENS / "qwen3_next_8l" / "fused_experts"
    stored = {name: tensor.shape for name, tensor in read(folder).items()}
    assert table(DecoderConfig.from_hf(folder), fused_experts=True) == stored


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
        ("mtp.layers.0.input_layernorm.weight", None),
    ],
)
def test_layer_of_a_name(name, layer):
    assert hf_names.FAMILIES["qwen3_next"].layer_of(name) == layer
