"""Checkpoints of every family: into trees and back, byte for byte, with all they have.

What a leaf is of a checkpoint's tensors is said here by hand, in plain NumPy.
"""

import functools
import json
import logging
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import shared
from shared.checkpoint import CheckpointError, hf_config, load_hf, save_hf
from shared.checkpoint.convert import Target, convert, plan_conversion
from shared.checkpoint.source import open_source
from shared.config import ConfigError, DecoderConfig
from shared.trees import flatten, path_text
from tests.shared.checkpoint.checkpoints import FAMILIES, GOLDENS, copy_golden, read

WRAPPED = "qwen3_5_moe_vl_wrapper"
VARIANTS = (*FAMILIES, "qwen3_5_moe_8l/fused_experts", f"{WRAPPED}/hub_layout")
NOT_THE_DECODER = ("mtp.", "model.visual.")

AS_THEY_ARE = {
    "layer_scalar": "layer_scalar",
    "linear_attn/A_log": "linear_attn.A_log",
    "linear_attn/dt_bias": "linear_attn.dt_bias",
    "mlp/e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    "moe/router_scale": "router.scale",
    "moe/per_expert_scale": "router.per_expert_scale",
}
OTHER_NAMES = {"moe/gate": "router.proj.weight"}


@functools.cache
def stored(variant):
    return read(GOLDENS / variant)


@functools.cache
def loaded(variant, scan_layers=True):
    return load_hf(GOLDENS / variant, scan_layers)


def decoders(tensors):
    """Those of the decoder, under the names that a text model has."""
    return {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith(NOT_THE_DECODER)
    }


def expected_leaf(tensors, layer, leaf):
    """What a leaf of a layer must be."""

    def tensor(name):
        return tensors[f"model.layers.{layer}.{name}"]

    if leaf in AS_THEY_ARE:
        return tensor(AS_THEY_ARE[leaf])
    if leaf == "linear_attn/conv1d":
        return np.transpose(tensor("linear_attn.conv1d.weight")[:, 0, :])
    if "/experts/" in leaf:
        return np.swapaxes(experts(tensors, layer, *leaf.split("/experts/")), 1, 2)
    name = OTHER_NAMES.get(leaf, leaf.replace("/", ".") + ".weight")
    if f"model.layers.{layer}.{name}" not in tensors:  # DeepSeek has the plural
        name = name.replace("shared_expert", "shared_experts")
    value = tensor(name)
    return np.transpose(value) if value.ndim == 2 else value


def experts(tensors, layer, module, projection):
    """Stacked, still as the file orients them."""
    above = f"model.layers.{layer}." + ("mlp.experts" if module == "mlp" else "experts")
    fused = tensors.get(f"{above}.gate_up_proj")
    if fused is None:
        pattern = re.compile(rf"{re.escape(above)}\.(\d+)\.{projection}\.weight")
        found = {int(m[1]): tensors[n] for n in tensors if (m := pattern.fullmatch(n))}
        return np.stack([found[i] for i in range(len(found))])
    half = fused.shape[1] // 2
    return {
        "gate_proj": fused[:, :half],
        "up_proj": fused[:, half:],
        "down_proj": tensors[f"{above}.down_proj"],
    }[projection]


def expected_outer(tensors, leaf):
    if leaf == "lm_head":
        return np.transpose(tensors["lm_head.weight"])
    value = tensors[f"model.{leaf}.weight"]
    return np.transpose(value) if leaf == "per_layer_model_projection" else value


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_leaf_is_its_tensor(variant):
    tensors = decoders(stored(variant))
    _, params = loaded(variant, scan_layers=False)
    seen = 0
    for path, leaf in flatten(params):
        text = path_text(path)
        found = re.fullmatch(r"layers_(\d+)/(.*)", text)
        expected = (
            expected_leaf(tensors, int(found[1]), found[2])
            if found
            else expected_outer(tensors, text)
        )
        np.testing.assert_array_equal(leaf, expected, err_msg=text)
        seen += leaf.size
    assert seen == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize("variant", FAMILIES)
def test_scanned_layers_are_the_unscanned_ones_stacked(variant):
    _, flat = loaded(variant, scan_layers=False)
    config, params = loaded(variant)
    layers = config.plan.unstack(jax.tree.map(np.asarray, params))
    for index, layer in enumerate(layers):
        expected = dict(flatten(flat[f"layers_{index}"]))
        assert dict(flatten(layer)).keys() == expected.keys()
        for path, leaf in flatten(layer):
            np.testing.assert_array_equal(leaf, expected[path])


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert tensor.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_golden_comes_back_byte_for_byte(tmp_path, variant, scan_layers):
    config, params = loaded(variant, scan_layers)
    prefix = "model.language_model." if WRAPPED in variant else "model."
    fused = variant.endswith(("fused_experts", "hub_layout"))
    save_hf(tmp_path / "new", config, params, fused_experts=fused, prefix=prefix)
    expected = {
        name: tensor
        for name, tensor in stored(variant).items()
        if not name.startswith(NOT_THE_DECODER)
    }
    assert_same_tensors(read(tmp_path / "new"), expected)
    again = DecoderConfig.from_hf(tmp_path / "new")
    assert again == DecoderConfig.from_hf(GOLDENS / variant)


def test_gemma_4_has_fused_experts_whatever_is_asked(tmp_path):
    config, params = loaded("gemma4_moe")
    save_hf(tmp_path / "new", config, params, fused_experts=True)
    assert_same_tensors(read(tmp_path / "new"), stored("gemma4_moe"))


def test_another_prefix_than_there_are_is_refused(tmp_path):
    config, params = loaded("gemma4_dense")
    with pytest.raises(ConfigError, match="prefix must be one of"):
        save_hf(tmp_path / "new", config, params, prefix="decoder.")


# Conversion.


def run(source, folder, target):
    convert(plan_conversion(open_source(source), target), folder)
    return folder


def assert_same_files(folder, other):
    assert_same_tensors(read(folder), read(other))
    texts = [json.loads((f / "config.json").read_text()) for f in (folder, other)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hugging_face_comes_back_byte_for_byte(tmp_path, variant):
    """Names, experts and config.json as the source had them, with all that it had."""
    zoo = run(GOLDENS / variant, tmp_path / "zoo", Target("zoo", carry=True))
    config, params = shared.checkpoint.load(zoo)
    assert config == DecoderConfig.from_hf(GOLDENS / variant)
    again = run(zoo, tmp_path / "hf", Target("hf", carry=True))
    assert_same_files(again, GOLDENS / variant)


@pytest.mark.parametrize(
    "name, hub_style",
    [("gemma3_text", True), ("gemma4_dense", False), ("deepseek_v3", True)],
)
def test_the_spelling_of_config_json(tmp_path, name, hub_style):
    """The reference's two files of one model, by name of their fields."""
    folder = copy_golden(name, tmp_path / "it")
    files = ("config.json", "config_hub_style.json")
    first, wanted = (folder / file for file in (files if hub_style else files[::-1]))
    texts = [path.read_text() for path in (first, wanted)]
    (folder / "config.json").write_text(texts[0])
    assert hf_config.is_hub_style(json.loads(texts[0])) is not hub_style
    assert hf_config.is_hub_style(json.loads(texts[1])) is hub_style
    new = run(folder, tmp_path / "hf", Target("hf", hub_style=hub_style))
    written = json.loads((new / "config.json").read_text())
    artefacts = {"transformers_version", "_sliding_window_pattern"}
    assert written.keys() - artefacts == json.loads(texts[1]).keys() - artefacts
    as_it_was = run(folder, tmp_path / "same", Target("hf"))
    assert json.loads((as_it_was / "config.json").read_text()) == json.loads(texts[0])


def test_a_cast_shows_in_a_multimodal_config_json_and_nothing_else_changes(tmp_path):
    first = GOLDENS / WRAPPED
    new = run(first, tmp_path / "hf", Target("hf", param_dtype="bfloat16"))
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (first, new)
    )
    assert after["dtype"] == "bfloat16" == after["text_config"].pop("dtype")
    assert after["text_config"] == before["text_config"]
    assert after | {"dtype": "float32"} == before
    name = "model.language_model.layers.0.mlp.gate.weight"
    assert read(new)[name].dtype == ml_dtypes.bfloat16
    assert DecoderConfig.from_hf(new).param_dtype == "bfloat16"


def with_more(name, tmp_path, extra, **fields):
    """A golden with more tensors."""
    folder = copy_golden(name, tmp_path / "more")
    save_file({**stored(name), **extra}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def borrowed_keys():
    return {
        f"model.layers.{layer}.self_attn.{leaf}.weight": np.ones((2, 3), np.float32)
        for layer in (6, 7, 8, 9)
        for leaf in ("k_proj", "v_proj", "k_norm")
    }


def draft_layer():
    above = "model.layers.4."
    return {
        f"{above}eh_proj.weight": np.ones((32, 64), np.float32),
        f"{above}shared_head.head.weight": np.ones((96, 32), np.float32),
        f"{above}self_attn.kv_b_proj.weight": np.ones((80, 16), np.float32),
    }


@pytest.mark.parametrize(
    "name, extra, fields, line",
    [
        (
            "gemma4_ple_kvshare",
            borrowed_keys(),
            {},
            "Ignored 12 tensors of keys and values of 288 bytes: their layers attend",
        ),
        (
            "deepseek_v3",
            draft_layer(),
            {"num_nextn_predict_layers": 1},
            "Ignored 3 tensors of layer 4 of 25600 bytes: multi-token prediction",
        ),
    ],
)
def test_what_is_no_part_of_the_decoder_is_told_and_carried_when_asked(
    tmp_path, caplog, name, extra, fields, line
):
    caplog.set_level(logging.INFO, "shared")
    folder = with_more(name, tmp_path, extra, **fields)
    for (path, leaf), (_, other) in zip(
        flatten(load_hf(folder)[1]), flatten(loaded(name)[1]), strict=True
    ):
        np.testing.assert_array_equal(leaf, other, err_msg=path_text(path))
    assert line in caplog.text
    zoo = run(folder, tmp_path / "zoo", Target("zoo", carry=True))
    assert_same_files(run(zoo, tmp_path / "hf", Target("hf", carry=True)), folder)
    without = run(folder, tmp_path / "without", Target("hf"))
    assert_same_tensors(read(without), stored(name))


def test_layers_beyond_the_last_that_are_no_drafts_are_unexpected(tmp_path):
    extra = draft_layer()
    del extra["model.layers.4.eh_proj.weight"]
    folder = with_more("deepseek_v3", tmp_path, extra)
    with pytest.raises(CheckpointError, match="2 unexpected") as error:
        load_hf(folder)
    assert "num_hidden_layers=4, the files have 5 layers" in str(error.value)


def test_a_spelling_keeps_what_is_ignored(tmp_path):
    """That the folder has a draft, for one: it may be carried."""
    folder = with_more(
        "deepseek_v3", tmp_path, draft_layer(), num_nextn_predict_layers=1
    )
    new = run(folder, tmp_path / "hf", Target("hf", hub_style=True, carry=True))
    written = json.loads((new / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1
    assert written["rope_scaling"] is None


def test_borrowing_layers_are_hinted_at(tmp_path):
    folder = with_more("gemma4_ple_kvshare", tmp_path, {}, num_kv_shared_layers=2)
    with pytest.raises(CheckpointError) as error:
        load_hf(folder)
    assert "missing: model.layers.6.self_attn.k_proj.weight" in str(error.value)
