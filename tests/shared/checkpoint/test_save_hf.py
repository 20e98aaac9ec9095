"""Trees into checkpoints: HF to zoo to HF is the identity, byte for byte."""

import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from shared.checkpoint import CheckpointError, load_hf, save_hf
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.params import shapes as param_shapes
from shared.presets import preset
from shared.stores import safetensors as files
from shared.stores import safetensors_writer
from tests.shared.checkpoint.checkpoints import (
    ALL_THREES,
    GOLDENS,
    NAMES,
    read,
    tensor_shapes,
    unique_tensors,
    write,
)


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert tensor.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    "name", [*NAMES, "qwen3_next_8l/sharded", "qwen3_next_8l/fused_experts"]
)
@pytest.mark.parametrize("scan_layers", [True, False])
def test_a_golden_comes_back_byte_for_byte(tmp_path, name, scan_layers):
    config, params = load_hf(GOLDENS / name, scan_layers)
    fused = name.endswith("fused_experts")
    save_hf(tmp_path / "new", config, params, fused_experts=fused)
    assert_same_tensors(read(tmp_path / "new"), read(GOLDENS / name))
    assert DecoderConfig.from_hf(tmp_path / "new") == DecoderConfig.from_hf(
        GOLDENS / name
    )
    written = {path.name for path in (tmp_path / "new").iterdir()}
    assert written == {"config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_equal_axes_and_other_layouts_come_back(tmp_path, fused, axis, tied):
    given = ALL_THREES | {"attention_bias": True, "tie_word_embeddings": tied}
    tensors = unique_tensors(tensor_shapes(given, fused_experts=fused))
    folder = write(tmp_path / "old", given, tensors)
    config, params = load_hf(folder, param_scan_axis=axis)
    save_hf(tmp_path / "new", config, params, fused_experts=fused)
    assert_same_tensors(read(tmp_path / "new"), tensors)


def test_fused_and_single_experts_are_one_model(tmp_path):
    config, params = load_hf(GOLDENS / "qwen3_next_8l")
    save_hf(tmp_path / "fused", config, params, fused_experts=True)
    assert_same_tensors(
        read(tmp_path / "fused"), read(GOLDENS / "qwen3_next_8l" / "fused_experts")
    )


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("on_device", [True, False], ids=["jax", "numpy"])
def test_every_bit_pattern_survives(tmp_path, scan_layers, on_device):
    """NaN payloads, signalling or not, -0.0, infinities, subnormals, in all tensors."""
    tensors, numbers = {}, itertools.count(0, 257)
    patterns = {
        ml_dtypes.bfloat16: np.arange(2**16, dtype=np.uint16),
        np.float16: np.arange(2**16, dtype=np.uint16),
        np.float32: np.array(
            [0x7F800001, 0x7FC00123, 0xFFC00001, 0x80000000, 0x00000001, 0x7F800000],
            np.uint32,
        ),
    }
    for name, shape in tensor_shapes(ALL_THREES).items():
        dtype = ml_dtypes.bfloat16
        dtype = np.float32 if name.endswith("A_log") else dtype
        dtype = np.float16 if name.endswith("dt_bias") else dtype
        bits = np.roll(patterns[dtype], -next(numbers))
        tensors[name] = np.resize(bits, shape).view(dtype)
    folder = write(tmp_path / "old", ALL_THREES | {"dtype": "bfloat16"}, tensors)
    config, params = load_hf(folder, scan_layers)
    if not on_device:
        params = jax.tree.map(np.asarray, params)
    save_hf(tmp_path / "new", config, params)
    assert_same_tensors(read(tmp_path / "new"), tensors)


SAVE_FROM_FOUR_DEVICES = """
import sys, jax
from shared.checkpoint import load_hf, save_hf

config, params = load_hf(sys.argv[1])
sharding = jax.NamedSharding(jax.make_mesh((4,), ("all",)), jax.P())
params = jax.device_put(params, sharding)
assert len(params["norm"].devices()) == 4
save_hf(sys.argv[2], config, params)
"""


def test_leaves_on_several_devices_are_fetched_layer_by_layer(tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    subprocess.run(
        [
            sys.executable,
            "-c",
            SAVE_FROM_FOUR_DEVICES,
            GOLDENS / "qwen3_next_6l",
            tmp_path / "new",
        ],
        env=os.environ | {"XLA_FLAGS": flags},
        cwd=GOLDENS.parents[1],
        check=True,
    )
    assert_same_tensors(read(tmp_path / "new"), read(GOLDENS / "qwen3_next_6l"))


def test_leaves_in_any_memory_order_are_written_right(tmp_path):
    config = DecoderConfig.from_hf(ALL_THREES)
    specs = decoder.param_specs(config)
    numbers = itertools.count()

    def backwards(spec):
        return (
            (next(numbers) + np.arange(np.prod(spec.shape)))
            .reshape(spec.shape[::-1])
            .astype(np.float32)
            .T
        )

    params = jax.tree.map(backwards, specs)
    contiguous = jax.tree.map(np.ascontiguousarray, params)
    save_hf(tmp_path / "one", config, params)
    save_hf(tmp_path / "other", config, contiguous)
    stored = read(tmp_path / "one")
    assert_same_tensors(stored, read(tmp_path / "other"))
    np.testing.assert_array_equal(stored["lm_head.weight"], params["lm_head"].T)
    np.testing.assert_array_equal(
        stored["model.embed_tokens.weight"], params["embed_tokens"]
    )


def zeros(config):
    """A tree as `init_params` gives it, but for the values."""
    shapes = param_shapes(decoder.param_specs(config), config.param_dtype)
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def test_dtypes_of_a_new_model_come_back(tmp_path):
    config = preset("qwen3-next-tiny").replace(param_dtype="bfloat16")
    save_hf(tmp_path / "new", config, zeros(config))
    again, loaded = load_hf(tmp_path / "new")
    assert again.param_dtype == "bfloat16"
    expected = param_shapes(decoder.param_specs(config), "bfloat16")
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), loaded) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )


# -- shards ---------------------------------------------------------------------------


def tensor_bytes(folder):
    return {name: tensor.nbytes for name, tensor in read(folder).items()}


@pytest.mark.parametrize("limit", [1, 12288, 12289, 100_000, 784_319])
def test_every_tensor_is_in_one_shard(tmp_path, limit):
    """The largest tensor of the golden has 24576 bytes, its head 12288."""
    config, params = load_hf(GOLDENS / "qwen3_next_8l")
    save_hf(tmp_path / "new", config, params, max_shard_bytes=limit)
    index = json.loads((tmp_path / "new" / files.INDEX_FILE).read_text())
    sizes = tensor_bytes(GOLDENS / "qwen3_next_8l")
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert index["weight_map"].keys() == sizes.keys()

    shards = sorted(path.name for path in (tmp_path / "new").glob("*.safetensors"))
    assert shards == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    stored = []
    for shard in shards:
        with safe_open(tmp_path / "new" / shard, framework="numpy") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt"}
        assert all(index["weight_map"][name] == shard for name in names)
        assert len(names) == 1 or sum(sizes[name] for name in names) <= limit
        stored += names
    assert sorted(stored) == sorted(sizes)
    assert_same_tensors(read(tmp_path / "new"), read(GOLDENS / "qwen3_next_8l"))


def test_one_file_has_no_index(tmp_path):
    config, params = load_hf(GOLDENS / "qwen3_next_8l/sharded")
    save_hf(tmp_path / "new", config, params, max_shard_bytes=784_320)
    assert not (tmp_path / "new" / files.INDEX_FILE).exists()
    assert (tmp_path / "new" / files.SINGLE_FILE).exists()


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path):
    config = DecoderConfig.from_hf(ALL_THREES).replace(param_dtype="bfloat16")
    save_hf(tmp_path / "new", config, zeros(config))
    data = (tmp_path / "new" / files.SINGLE_FILE).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            size = {"F32": 4, "BF16": 2}[entry["dtype"]]
            assert (start + entry["data_offsets"][0]) % size == 0, name


# -- faults ---------------------------------------------------------------------------


@pytest.fixture
def model():
    config = DecoderConfig.from_hf(ALL_THREES)
    return config, zeros(config)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, model):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists. It has mine.txt. Give a new"):
        save_hf(tmp_path, *model)
    with pytest.raises(CheckpointError, match="exists. It is a file"):
        save_hf(tmp_path / "mine.txt", *model)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_empty_folder_and_absent_parents_are_fine(tmp_path, model):
    (tmp_path / "empty").mkdir()
    save_hf(tmp_path / "empty", *model)
    save_hf(tmp_path / "a" / "b", *model)
    assert load_hf(tmp_path / "empty") and load_hf(tmp_path / "a" / "b")


def test_a_write_that_fails_leaves_nothing(tmp_path, model, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors_writer, "write_file", fail)
    with pytest.raises(OSError, match="No space left"):
        save_hf(tmp_path / "new", *model)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_of_another_layout_is_refused(tmp_path, model):
    config, params = model
    with pytest.raises(
        CheckpointError, match="(?s)check scan_layers.*missing: layers_0/"
    ):
        save_hf(tmp_path / "new", config.replace(scan_layers=False), params)


def test_leaves_that_are_no_arrays_are_named(tmp_path, model):
    config, params = model
    params["norm"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    params["lm_head"] = params["lm_head"].astype(np.int32)
    with pytest.raises(CheckpointError) as error:
        save_hf(tmp_path / "new", config, params)
    assert "norm must be an array. Got <class 'jax" in str(error.value)
    assert (
        "lm_head must be one of float64, float32, float16, bfloat16. Got int32"
        in str(error.value)
    )
    assert list(tmp_path.iterdir()) == []


def test_fused_experts_of_two_dtypes_are_refused(tmp_path, model):
    config, params = model
    experts = params["layers"]["global_layer"]["mlp"]["experts"]
    experts["up_proj"] = experts["up_proj"].astype(ml_dtypes.bfloat16)
    with pytest.raises(CheckpointError, match="gate_up_proj has one dtype.*bfloat16"):
        save_hf(tmp_path / "new", config, params, fused_experts=True)
    save_hf(tmp_path / "new", config, params)
