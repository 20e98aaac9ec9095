"""Checkpoints into trees: every value in its place, every fault named, little memory.

Tensors are numbered through, so that no two elements of a checkpoint are equal.
"""

import contextlib
import json
import logging
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from shared.checkpoint import CheckpointError, load_hf
from shared.checkpoint.hf import hf_leaves
from shared.config import ConfigError, DecoderConfig
from shared.layers import decoder
from shared.plan import PlanError
from shared.stores import safetensors
from shared.stores.reading import read_whole
from shared.trees import check_same_paths, flatten, path_text
from tests.shared.checkpoint.checkpoints import (
    ALL_THREES,
    GOLDENS,
    NAMES,
    copy_golden,
    read,
    tensor_shapes,
    unique_tensors,
    write,
)

# What a leaf is of a layer's tensors, in plain NumPy.
AS_THEY_ARE = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "linear_attn/A_log": "linear_attn.A_log",
    "linear_attn/dt_bias": "linear_attn.dt_bias",
    "linear_attn/norm": "linear_attn.norm.weight",
    "self_attn/q_norm": "self_attn.q_norm.weight",
    "self_attn/k_norm": "self_attn.k_norm.weight",
    "self_attn/q_proj_bias": "self_attn.q_proj.bias",
    "self_attn/k_proj_bias": "self_attn.k_proj.bias",
    "self_attn/v_proj_bias": "self_attn.v_proj.bias",
    "self_attn/o_proj_bias": "self_attn.o_proj.bias",
}
TRANSPOSED = {
    "linear_attn/in_proj_qkvz": "linear_attn.in_proj_qkvz.weight",
    "linear_attn/in_proj_ba": "linear_attn.in_proj_ba.weight",
    "linear_attn/out_proj": "linear_attn.out_proj.weight",
    "self_attn/q_proj": "self_attn.q_proj.weight",
    "self_attn/k_proj": "self_attn.k_proj.weight",
    "self_attn/v_proj": "self_attn.v_proj.weight",
    "self_attn/o_proj": "self_attn.o_proj.weight",
    "mlp/gate_proj": "mlp.gate_proj.weight",
    "mlp/up_proj": "mlp.up_proj.weight",
    "mlp/down_proj": "mlp.down_proj.weight",
    "mlp/gate": "mlp.gate.weight",
    "mlp/shared_expert_gate": "mlp.shared_expert_gate.weight",
    "mlp/shared_expert/gate_proj": "mlp.shared_expert.gate_proj.weight",
    "mlp/shared_expert/up_proj": "mlp.shared_expert.up_proj.weight",
    "mlp/shared_expert/down_proj": "mlp.shared_expert.down_proj.weight",
}


def expected_leaf(tensors, layer, leaf, num_experts):
    def tensor(name):
        return tensors[f"model.layers.{layer}.{name}"]

    if leaf in AS_THEY_ARE:
        return tensor(AS_THEY_ARE[leaf])
    if leaf in TRANSPOSED:
        return np.transpose(tensor(TRANSPOSED[leaf]))
    if leaf == "linear_attn/conv1d":
        return np.transpose(tensor("linear_attn.conv1d.weight")[:, 0, :])
    assert leaf.startswith("mlp/experts/")
    name = leaf.removeprefix("mlp/experts/")
    fused = f"model.layers.{layer}.mlp.experts.gate_up_proj"
    if fused not in tensors:
        each = [tensor(f"mlp.experts.{e}.{name}.weight") for e in range(num_experts)]
    elif name == "down_proj":
        each = tensor("mlp.experts.down_proj")
    else:
        both, half = tensors[fused], tensors[fused].shape[1] // 2
        each = both[:, :half] if name == "gate_proj" else both[:, half:]
    return np.stack([np.transpose(expert) for expert in each])


def leaves_below(node):
    return [(path_text(path), np.asarray(leaf)) for path, leaf in flatten(node)]


def assert_outer(params, tensors):
    embedding, head = (
        tensors[f"{n}.weight"] for n in ("model.embed_tokens", "lm_head")
    )
    np.testing.assert_array_equal(params["embed_tokens"], embedding)
    np.testing.assert_array_equal(params["lm_head"], np.transpose(head))
    np.testing.assert_array_equal(params["norm"], tensors["model.norm.weight"])


@pytest.fixture(params=[False, True], ids=["each_expert", "fused"])
def threes(request, tmp_path):
    given = ALL_THREES | {"attention_bias": True}
    tensors = unique_tensors(tensor_shapes(given, fused_experts=request.param))
    return write(tmp_path / "threes", given, tensors), tensors


def test_every_leaf_of_every_layer_unscanned(threes):
    folder, tensors = threes
    config, params = load_hf(folder, scan_layers=False)
    assert not config.scan_layers
    assert_outer(params, tensors)
    for layer in range(12):
        leaves = leaves_below(params[f"layers_{layer}"])
        assert len(leaves) == (17 if (layer + 1) % 4 else 20)
        for leaf, value in leaves:
            expected = expected_leaf(tensors, layer, leaf, 3)
            np.testing.assert_array_equal(value, expected, err_msg=leaf)


def test_every_leaf_of_every_layer_scanned_though_all_axes_are_equal(threes):
    folder, tensors = threes
    config, params = load_hf(folder)
    assert set(params) == {"embed_tokens", "norm", "lm_head", "layers"}
    assert_outer(params, tensors)
    for leaf, value in leaves_below(params["layers"]["local_layers"]):
        for block in range(3):
            for local in range(3):
                expected = expected_leaf(tensors, 4 * block + local, leaf, 3)
                np.testing.assert_array_equal(value[block, local], expected)
    for leaf, value in leaves_below(params["layers"]["global_layer"]):
        for block in range(3):
            expected = expected_leaf(tensors, 4 * block + 3, leaf, 3)
            np.testing.assert_array_equal(value[block], expected)


def test_stack_axes_second(threes):
    folder, tensors = threes
    _, params = load_hf(folder, param_scan_axis=1)
    local, single = params["layers"]["local_layers"], params["layers"]["global_layer"]
    for block in range(3):
        for leaf, value in leaves_below(single):
            expected = expected_leaf(tensors, 4 * block + 3, leaf, 3)
            np.testing.assert_array_equal(value[:, block], expected)
        for i in range(3):
            for leaf, value in leaves_below(local):
                expected = expected_leaf(tensors, 4 * block + i, leaf, 3)
                np.testing.assert_array_equal(value[:, block, i], expected)


def test_more_than_ten_layers_stay_in_numeric_order(tmp_path):
    given = ALL_THREES | {"num_hidden_layers": 14}
    tensors = {
        name: np.full(
            shape, int(name.split(".")[2]) if ".layers." in name else -1, "f4"
        )
        for name, shape in tensor_shapes(given).items()
    }
    config, params = load_hf(write(tmp_path / "it", given, tensors))
    blocks = params["layers"]
    norms = blocks["local_layers"]["input_layernorm"][..., 0]
    np.testing.assert_array_equal(norms, [[0, 1, 2], [4, 5, 6], [8, 9, 10]])
    norms = blocks["global_layer"]["input_layernorm"][..., 0]
    np.testing.assert_array_equal(norms, [3, 7, 11])
    norms = params["layers_remainder"]["local_layers"]["input_layernorm"][..., 0]
    np.testing.assert_array_equal(norms, [12, 13])


@pytest.mark.parametrize("heads, width", [(2, 3), (2, 4)])
def test_query_and_gate_stay_interleaved_per_head(tmp_path, heads, width):
    given = ALL_THREES | {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "full_attention_interval": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width,
        "partial_rotary_factor": 0.0,
    }
    tensors = unique_tensors(tensor_shapes(given))
    # Row of head h: 100 h + 0 … for the query, 100 h + 10 … for the gate.
    rows = [
        100 * h + 10 * g + i for h in range(heads) for g in (0, 1) for i in range(width)
    ]
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = np.repeat(np.array(rows, "f4")[:, None], 3, axis=1)
    _, params = load_hf(write(tmp_path / "it", given, tensors), scan_layers=False)
    q_proj = np.asarray(params["layers_0"]["self_attn"]["q_proj"])
    by_head = q_proj.reshape(3, heads, 2, width)
    for h in range(heads):
        np.testing.assert_array_equal(by_head[0, h, 0], 100 * h + np.arange(width))
        np.testing.assert_array_equal(by_head[0, h, 1], 100 * h + 10 + np.arange(width))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_golden_fits_the_specs(name, scan_layers):
    config, params = load_hf(GOLDENS / name, scan_layers)
    check_same_paths(decoder.param_specs(config), params)
    assert all(isinstance(leaf, jax.Array) for _, leaf in flatten(params))
    assert {leaf.dtype.name for _, leaf in flatten(params)} == {"float32"}


@pytest.mark.parametrize("copy", ["sharded", "fused_experts"])
def test_shards_and_fused_experts_give_the_same_bytes(copy):
    _, one = load_hf(GOLDENS / "qwen3_next_8l")
    _, other = load_hf(GOLDENS / "qwen3_next_8l" / copy)
    one, other = dict(flatten(one)), dict(flatten(other))
    assert one.keys() == other.keys()
    for path in one:
        assert np.asarray(one[path]).tobytes() == np.asarray(other[path]).tobytes()


# -- dtypes ---------------------------------------------------------------------------


def mixed(dtype=ml_dtypes.bfloat16, **changes):
    """Everything in `dtype` but A_log, which is float32 and not a bfloat16 number."""
    given = ALL_THREES | {"dtype": "bfloat16"} | changes
    shapes = tensor_shapes(given)
    tensors = {name: t.astype(dtype) for name, t in unique_tensors(shapes).items()}
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = np.full(shapes[name], 1.3713, np.float32)
    return given, tensors


def test_dtypes_stay_as_they_are_in_the_file(tmp_path):
    config, params = load_hf(write(tmp_path / "it", *mixed()))
    assert config.param_dtype == config.dtype == "bfloat16"
    for path, leaf in flatten(params):
        expected = "float32" if path[-1] == "A_log" else "bfloat16"
        assert leaf.dtype.name == expected, path


def test_a_cast_leaves_the_documented_ones_in_float32(tmp_path, caplog):
    caplog.set_level(logging.INFO, "shared")
    folder = write(tmp_path / "it", *mixed(np.float32))
    config, params = load_hf(folder, param_dtype=jnp.bfloat16)
    assert config.param_dtype == "bfloat16"
    for path, leaf in flatten(params):
        wide = path[-1] in ("A_log", "dt_bias")
        assert leaf.dtype.name == ("float32" if wide else "bfloat16"), path
    a_log = params["layers"]["local_layers"]["linear_attn"]["A_log"]
    assert np.asarray(a_log).flat[0] == np.float32(1.3713)
    tensors = len(tensor_shapes(ALL_THREES)) - 2 * 9
    assert f"Cast {tensors} tensors from float32 to bfloat16." in caplog.text


def test_a_file_that_contradicts_the_dtype_of_its_config_is_kept_and_told(
    tmp_path, caplog
):
    given, tensors = mixed(np.float16)
    _, params = load_hf(write(tmp_path / "it", given, tensors))
    assert params["norm"].dtype == jnp.float16
    assert "config.json says bfloat16, but" in caplog.text


def test_layers_of_different_dtypes_are_not_stacked_silently(tmp_path):
    given, tensors = mixed()
    name = "model.layers.4.input_layernorm.weight"
    tensors[name] = tensors[name].astype(np.float32)
    folder = write(tmp_path / "it", given, tensors)
    message = "pass param_dtype.*local_layers/input_layernorm.*BF16 .*F32 .*layers.4"
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        load_hf(folder)
    _, params = load_hf(folder, scan_layers=False)
    assert params["layers_4"]["input_layernorm"].dtype == jnp.float32
    load_hf(folder, param_dtype="bfloat16")


@pytest.mark.parametrize(
    "dtype, name",
    [
        (np.int64, "I64"),
        (np.bool_, "BOOL"),
        (np.uint8, "U8"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_what_is_no_plain_float_is_refused_by_name(tmp_path, dtype, name):
    given, tensors = mixed()
    tensors["model.norm.weight"] = np.ones(3, dtype)
    message = f"model.norm.weight must be one of F64, F32, F16, BF16. Got {name}"
    with pytest.raises(CheckpointError, match=message):
        load_hf(write(tmp_path / "it", given, tensors))


def test_float64_is_not_narrowed_silently(tmp_path):
    folder = write(
        tmp_path / "it", ALL_THREES, unique_tensors(tensor_shapes(ALL_THREES))
    )
    with pytest.raises(CheckpointError, match="float64.*jax_enable_x64 is off"):
        load_hf(folder, param_dtype="float64")
    with pytest.raises(ConfigError, match="param_dtype must be one of .*Got 'int8'"):
        load_hf(folder, param_dtype="int8")


@pytest.mark.parametrize("rows", [16, 4096], ids=["small", "above 1 MiB"])
def test_bfloat16_keeps_every_bit_pattern(tmp_path, rows):
    given = ALL_THREES | {"vocab_size": rows * 16, "hidden_size": 16}
    tensors = unique_tensors(tensor_shapes(given), ml_dtypes.bfloat16)
    bits = np.arange(rows * 16 * 16).astype(np.uint16).reshape(rows * 16, 16)
    tensors["model.embed_tokens.weight"] = bits.view(ml_dtypes.bfloat16)
    _, params = load_hf(write(tmp_path / "it", given, tensors))
    assert params["embed_tokens"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(params["embed_tokens"]).view("u2"), bits)


# -- heads ----------------------------------------------------------------------------


@pytest.fixture
def tied():
    given = ALL_THREES | {"tie_word_embeddings": True}
    return given, unique_tensors(tensor_shapes(given))


def test_a_tied_head_may_be_absent(tmp_path, tied):
    _, params = load_hf(write(tmp_path / "it", *tied))
    assert "lm_head" not in params


def test_a_tied_head_may_be_a_copy_of_the_embedding(tmp_path, tied, caplog):
    caplog.set_level(logging.INFO, "shared")
    given, tensors = tied
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _, params = load_hf(write(tmp_path / "it", given, tensors))
    assert "lm_head" not in params
    assert "lm_head.weight equals model.embed_tokens.weight" in caplog.text


def test_a_tied_head_of_other_values_is_refused(tmp_path, tied):
    given, tensors = tied
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][2, 1] += 1
    message = "differs from model.embed_tokens.weight, first in row 2.*=true.*false"
    with pytest.raises(CheckpointError, match=message):
        load_hf(write(tmp_path / "it", given, tensors))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.float16)
    with pytest.raises(CheckpointError, match=r"is F16 \(3, 3\) and .*is F32 \(3, 3\)"):
        load_hf(write(tmp_path / "it", given, tensors))


def test_a_missing_head_hints_at_tying(tmp_path):
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="tie_word_embeddings=true. It is false"):
        load_hf(write(tmp_path / "it", ALL_THREES, tensors))


# -- faults ---------------------------------------------------------------------------


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path):
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    del tensors["model.layers.7.self_attn.k_norm.weight"]
    tensors["model.layers.7.self_attn.z_norm.weight"] = np.ones(3, "f4")
    tensors["model.layers.3.self_attn.q_proj.weight"] = np.ones((9, 3), "f4")
    with pytest.raises(CheckpointError) as error:
        load_hf(write(tmp_path / "it", ALL_THREES, tensors))
    text = str(error.value)
    assert "1 missing, 1 unexpected, 1 wrong shape" in text
    assert "missing: model.layers.7.self_attn.k_norm.weight (3,)" in text
    assert (
        "unexpected: model.layers.7.self_attn.z_norm.weight (3,) in model.safe" in text
    )
    assert (
        "model.layers.3.self_attn.q_proj.weight must be (18, 3) by "
        "num_attention_heads, num_key_value_heads, head_dim, hidden_size. Got (9, 3)"
    ) in text
    assert len(error.value.problems) >= 3


@pytest.mark.parametrize("asked, sort", [(16, "missing"), (8, "unexpected")])
def test_another_number_of_layers_is_refused(tmp_path, asked, sort):
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    folder = write(tmp_path / "it", ALL_THREES | {"num_hidden_layers": asked}, tensors)
    with pytest.raises(CheckpointError) as error:
        load_hf(folder)
    for layer in range(min(asked, 12), max(asked, 12)):
        assert f"{sort}: model.layers.{layer}.mlp.gate.weight" in str(error.value)
    assert f"num_hidden_layers={asked}, the files have 12 layers" in str(error.value)


def test_other_kinds_of_layers_are_hinted_at(tmp_path):
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    given = ALL_THREES | {"full_attention_interval": 3}
    with pytest.raises(
        CheckpointError, match="check layer_types or full_attention_int"
    ):
        load_hf(write(tmp_path / "it", given, tensors))


def test_draft_model_and_vision_tower_are_ignored_and_reported(tmp_path, caplog):
    caplog.set_level(logging.INFO, "shared")
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    tensors["mtp.fc.weight"] = np.ones((6, 3), "f4")
    tensors["mtp.layers.0.mlp.gate.weight"] = np.ones((3, 3), ml_dtypes.bfloat16)
    tensors["model.visual.patch_embed.proj.weight"] = np.ones((2, 2), "i8")
    load_hf(write(tmp_path / "it", ALL_THREES, tensors))
    assert "Ignored 2 tensors mtp.* of 90 bytes" in caplog.text
    assert "Ignored 1 tensors model.visual.* of 32 bytes" in caplog.text


def test_both_forms_of_experts_in_one_layer_are_refused(tmp_path):
    fused = tensor_shapes(ALL_THREES, fused_experts=True)
    tensors = unique_tensors(fused | tensor_shapes(ALL_THREES))
    with pytest.raises(
        CheckpointError, match="unexpected: .*experts.0.gate_proj.weight"
    ):
        load_hf(write(tmp_path / "it", ALL_THREES, tensors))


def test_a_missing_fused_tensor_is_called_by_its_name(tmp_path):
    tensors = unique_tensors(tensor_shapes(ALL_THREES, fused_experts=True))
    del tensors["model.layers.3.mlp.experts.down_proj"]
    with pytest.raises(CheckpointError) as error:
        load_hf(write(tmp_path / "it", ALL_THREES, tensors))
    assert error.value.problems == (
        "missing: model.layers.3.mlp.experts.down_proj (3, 3, 3)",
    )


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json in .*It is empty. Give"):
        load_hf(tmp_path)


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(ALL_THREES))
    (tmp_path / "pytorch_model.bin").touch()
    message = "neither model.safetensors.index.json nor.*It has config.json, pytorch_m"
    with pytest.raises(CheckpointError, match=message):
        load_hf(tmp_path)


def test_a_contradicting_explicit_period_is_refused():
    message = "scan_period=3 contradicts the layers: layer 3 .*Give another period"
    with pytest.raises(PlanError, match=message):
        load_hf(GOLDENS / "qwen3_next_8l", scan_period=3)


SHARD = "model-00003-of-00007.safetensors"


@pytest.fixture
def sharded(tmp_path):
    return copy_golden("qwen3_next_8l/sharded", tmp_path / "sharded")


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_missing_shards_are_named_with_their_tensors(sharded):
    listed = json.loads((sharded / "model.safetensors.index.json").read_text())
    lost = [n for n, file in listed["weight_map"].items() if file == SHARD]
    (sharded / SHARD).unlink()
    (sharded / SHARD.replace("3", "5", 1)).unlink()
    with pytest.raises(CheckpointError) as error:
        load_hf(sharded)
    assert "2 of 7 files" in str(error.value)
    assert f"{SHARD}, where the index has {lost[0]}, " in str(error.value)
    assert "fetch them again" in str(error.value)


@pytest.mark.parametrize("size", [-100, 2000, 8, 3, 0])
def test_a_truncated_shard_is_named(sharded, size):
    data = (sharded / SHARD).read_bytes()
    last = list(read_header(data))[-1]
    (sharded / SHARD).write_bytes(data[:size])
    with pytest.raises(CheckpointError, match=SHARD) as error:
        load_hf(sharded)
    if size == -100:
        assert f"has {len(data) - 100} bytes and should have {len(data)}" in str(
            error.value
        )
        assert f"incomplete: {last}" in str(error.value)


def read_header(data):
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


def test_a_file_that_is_something_else_is_named(sharded):
    (sharded / SHARD).write_bytes(b"<html>Access denied</html>" * 1000)
    with pytest.raises(CheckpointError, match=SHARD):
        load_hf(sharded)


def test_a_tensor_that_is_not_where_the_index_says(sharded):
    name = "model.norm.weight"
    edit_index(sharded, lambda weight_map: weight_map.update({name: SHARD}))
    message = f"{name} is not in {SHARD}, where the index has it, but in model-0000"
    with pytest.raises(CheckpointError, match=message):
        load_hf(sharded)


def test_a_tensor_in_two_shards(sharded):
    name, extra = "model.norm.weight", {"model.norm.weight": np.ones(32, "f4")}
    shard = read_file(sharded / SHARD)
    save_file(shard | extra, sharded / SHARD)
    with pytest.raises(CheckpointError, match=f"{name} is in model-0.* and in {SHARD}"):
        load_hf(sharded)


def read_file(path):
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def test_a_tensor_that_the_index_does_not_list(sharded):
    edit_index(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(CheckpointError) as error:
        load_hf(sharded)
    assert "missing: model.norm.weight (32,) (not listed in the index)" in str(
        error.value
    )


def test_the_index_wins_over_stray_files(sharded, caplog):
    wrong = {name: 0 * t for name, t in read(GOLDENS / "qwen3_next_8l").items()}
    save_file(wrong, sharded / "model.safetensors")
    save_file(wrong, sharded / "stray.safetensors")
    (sharded / "original").mkdir()
    save_file(wrong, sharded / "original" / "model.safetensors")
    _, params = load_hf(sharded)
    _, expected = load_hf(GOLDENS / "qwen3_next_8l")
    np.testing.assert_array_equal(params["norm"], expected["norm"])
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "model.safetensors, stray.safetensors" in warnings[0]


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", 3])
def test_an_index_cannot_point_out_of_its_folder(sharded, file):
    edit_index(
        sharded, lambda weight_map: weight_map.update({"model.norm.weight": file})
    )
    with pytest.raises(CheckpointError, match="must name files of its own folder"):
        load_hf(sharded)


def test_an_index_with_a_name_twice(sharded):
    path = sharded / "model.safetensors.index.json"
    text = path.read_text()
    path.write_text(text.replace('"model.norm.weight"', '"lm_head.weight"'))
    with pytest.raises(CheckpointError, match="has keys twice: lm_head.weight"):
        load_hf(sharded)


# -- memory ---------------------------------------------------------------------------

LARGE = ALL_THREES | {
    "hidden_size": 64,
    "vocab_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 8,
}


class WatchedReader(safetensors.Reader):
    """Hands tensors out and counts the arrays read that are still alive."""

    alive = most_alive = largest = 0

    def leaf(self, name):
        leaf = super().leaf(name)

        @contextlib.contextmanager
        def opened():
            with leaf.open() as read:
                yield lambda part: self._watch(read(part))

        return leaf._replace(open=opened)

    def _watch(self, array):
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        self.largest = max(self.largest, array.nbytes)
        weakref.finalize(array, self._forget)
        return array

    def _forget(self):
        self.alive -= 1


@pytest.mark.parametrize("fused", [False, True])
def test_one_leaf_and_one_tensor_are_in_memory(tmp_path, fused):
    tensors = unique_tensors(tensor_shapes(LARGE, fused_experts=fused))
    reader = WatchedReader(write(tmp_path / "it", LARGE, tensors))
    total = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    leaves = hf_leaves(reader, DecoderConfig.from_hf(LARGE))
    tracemalloc.start()
    largest, peaks = 0, []
    for path, leaf in leaves.items():
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        largest = max(largest, read_whole(leaf, path).nbytes)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000  # by what checks the types in these tests
    assert reader.most_alive == 1
    assert max(peaks) < largest + reader.largest + 50_000
    assert largest + reader.largest + 50_000 < total / 2


def test_streaming_gives_the_bytes_that_loading_gives():
    folder = GOLDENS / "qwen3_next_6l"
    config, params = load_hf(folder)
    streamed = hf_leaves(safetensors.Reader(folder), config)
    loaded = {"/".join(path): leaf for path, leaf in flatten(params)}
    assert streamed.keys() == loaded.keys()
    for path, leaf in streamed.items():
        read = read_whole(leaf, path)
        assert read.tobytes() == np.asarray(loaded[path]).tobytes()


def test_nothing_is_read_before_everything_is_checked(tmp_path):
    tensors = unique_tensors(tensor_shapes(ALL_THREES))
    del tensors["model.norm.weight"]
    reader = WatchedReader(write(tmp_path / "it", ALL_THREES, tensors))
    with pytest.raises(CheckpointError):
        hf_leaves(reader, DecoderConfig.from_hf(ALL_THREES))
    assert reader.most_alive == 0
