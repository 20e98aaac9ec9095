"""config.json in both spellings, and what is refused."""

import dataclasses
import json

import pytest

from shared.checkpoint import CheckpointError, hf_config
from shared.config import ConfigError, DecoderConfig
from shared.presets import preset, presets
from tests.shared.checkpoint.checkpoints import (
    ALL_THREES,
    FAMILIES,
    GOLDENS,
    NAMES,
)

SPELLED_TWICE = [
    name
    for name in (*NAMES, *FAMILIES)
    if (GOLDENS / name / "config_hub_style.json").is_file()
]
# What the reference adds of its own, and no model is made of.
ARTEFACTS = ("transformers_version", "_sliding_window_pattern")


def golden(name, file="config.json"):
    return json.loads((GOLDENS / name / file).read_text())


def without_execution(config):
    """The config with what config.json has no place for set to one value."""
    config = config.replace(scan_layers=True, dtype="float32")
    if config.delta_net is None:
        return config
    delta_net = dataclasses.replace(config.delta_net, chunk_size=1)
    return config.replace(delta_net=delta_net)


@pytest.mark.parametrize("name", SPELLED_TWICE)
def test_both_spellings_are_the_same_model(name):
    published = DecoderConfig.from_hf(GOLDENS / name / "config_hub_style.json")
    assert published == DecoderConfig.from_hf(GOLDENS / name)


@pytest.mark.parametrize(
    ("name", "hub_style"),
    [(name, False) for name in (*NAMES, *FAMILIES)]
    + [(name, True) for name in SPELLED_TWICE],
)
def test_to_hf_writes_the_reference_file_back(name, hub_style):
    file = "config_hub_style.json" if hub_style else "config.json"
    first = golden(name, file)
    expected = dict(first.get("text_config", first))
    for artefact in ARTEFACTS:
        expected.pop(artefact, None)
    written = DecoderConfig.from_hf(first).to_hf(hub_style=hub_style)
    if "text_config" in first:  # has them above
        written = {n: v for n, v in written.items() if n not in first}
        expected = {n: v for n, v in expected.items() if n not in first}
        written.pop("model_type", None)
    if hub_style and expected.get("rope_scaling"):
        scaling = expected["rope_scaling"]
        assert written["rope_scaling"].pop("type") == scaling["rope_type"]
    assert written == expected


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("hub_style", [False, True])
def test_a_preset_survives_being_written(name, hub_style):
    config = preset(name)
    again = DecoderConfig.from_hf(config.to_hf(hub_style=hub_style))
    assert without_execution(again) == without_execution(config)


def test_values_of_a_golden():
    config = DecoderConfig.from_hf(GOLDENS / "qwen3_next_dense_mix")
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (96, 32, 8)
    assert [k.mixer[:4] for k in config.layers] == (["line"] * 3 + ["full"]) * 2
    dense = [i for i, k in enumerate(config.layers) if k.feed_forward == "dense"]
    assert dense == [0, 5]
    assert config.norm_eps == 0.01 == config.attention.norm_eps
    assert config.delta_net.norm_eps == 0.01
    assert (config.attention.num_heads, config.attention.num_kv_heads) == (4, 2)
    assert (config.attention.rope.theta, config.attention.rope.rotary_dim) == (1e4, 4)
    assert config.delta_net.conv_dim == 2 * 2 * 8 + 4 * 8
    assert config.moe.normalize_weights is False
    assert (config.moe.expert_size, config.moe.shared_expert_size) == (16, 24)
    assert config.mlp.intermediate_size == 40
    assert config.family == "qwen3_next"


def test_absent_fields_have_the_defaults_of_the_reference():
    given = {"model_type": "qwen3_next", "mlp_only_layers": [0]}
    config = DecoderConfig.from_hf(given)
    published = preset("qwen3-next-80b-a3b")
    assert config.layers[1:] == published.layers[1:]
    assert config.moe == published.moe
    rope = config.attention.rope
    assert config.attention == dataclasses.replace(published.attention, rope=rope)
    assert config.attention.rope.theta == 10000.0
    assert config.attention.rope.rotary_dim == 64
    assert config.mlp.intermediate_size == 5632
    assert config.max_position_embeddings == 32768
    assert config.param_dtype == config.dtype == "float32"


def test_a_part_that_neither_layers_nor_file_speak_of_is_absent():
    config = DecoderConfig.from_hf({"model_type": "qwen3_next"})
    assert config.mlp is None
    assert "intermediate_size" not in config.to_hf()


def test_the_published_80b_file_is_the_preset():
    published = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "intermediate_size": 5120,
        "max_position_embeddings": 262144,
        "num_hidden_layers": 48,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
    }
    expected = preset("qwen3-next-80b-a3b").replace(
        param_dtype="bfloat16", dtype="bfloat16"
    )
    assert DecoderConfig.from_hf(published) == expected


def test_explicit_layer_types_win_over_the_interval():
    types = ["full_attention", "linear_attention", "linear_attention"]
    given = ALL_THREES | {"num_hidden_layers": 3, "layer_types": types}
    config = DecoderConfig.from_hf(given | {"full_attention_interval": 2})
    assert [kind.mixer for kind in config.layers] == types
    written = config.to_hf(hub_style=True)
    assert written["layer_types"] == types
    assert "full_attention_interval" not in written


@pytest.mark.parametrize(
    "fields, dense",
    [
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
        ({"num_experts": 0}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_only_layers": [0, 5]}, [0, 5]),
    ],
)
def test_which_layers_are_dense(fields, dense):
    config = DecoderConfig.from_hf(ALL_THREES | {"num_hidden_layers": 6} | fields)
    found = [i for i, kind in enumerate(config.layers) if kind.feed_forward == "dense"]
    assert found == dense
    assert DecoderConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("width", [3, 49, 98, 103, 256])
def test_the_rotary_width_survives_the_factor(width):
    """Also where width * (rotary / width) is below rotary in floating point."""
    given = ALL_THREES | {"head_dim": width, "partial_rotary_factor": 0.0}
    config = DecoderConfig.from_hf(given)
    for rotary in range(0, width + 1, 2):
        rope = dataclasses.replace(config.attention.rope, rotary_dim=rotary)
        attention = dataclasses.replace(config.attention, rope=rope)
        config = config.replace(attention=attention)
        assert DecoderConfig.from_hf(config.to_hf()) == config


def test_token_ids_are_kept():
    given = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    config = DecoderConfig.from_hf(ALL_THREES | given)
    assert config.eos_token_id == (2, 3)
    assert {name: config.to_hf()[name] for name in given} == given


def test_unknown_fields_are_all_named():
    with pytest.raises(
        ConfigError, match="unknown fields logit_scale, window.*IGNORED"
    ):
        DecoderConfig.from_hf(ALL_THREES | {"window": 3, "logit_scale": 2.0})


def test_every_ignored_field_has_a_reason_and_is_ignored():
    assert all(hf_config.IGNORED.values())
    given = ALL_THREES | dict.fromkeys(hf_config.IGNORED, "anything")
    assert DecoderConfig.from_hf(given) == DecoderConfig.from_hf(ALL_THREES)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "llama"}, "model_type must be one of qwen3_next.*Got 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'.*Got 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0.0.*Got 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window must be False.*Got True"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling must be null.*yarn"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "must be 'default'.*Got 'yarn'"),
        ({"rope_parameters": {"factor": 4.0}}, "unknown fields factor"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}},
            "rope_theta is 10000.0 and in rope_parameters 1000000.0: keep one",
        ),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "'float32'.*'bfloat16'"),
        ({"dtype": "int8"}, "dtype must be one of .*Got 'int8'"),
        ({"vocab_size": "3"}, "vocab_size must be an integer. Got '3'"),
        ({"vocab_size": 3.0}, "vocab_size must be an integer. Got 3.0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false. Got 1"),
        ({"layer_types": ["full_attention"]}, "has 1 layers and num_hidden_layers=12"),
        ({"layer_types": ["mamba"] * 12}, "layer_types must be of .*Got 'mamba'"),
        ({"full_attention_interval": 0}, "must be at least 1. Got 0"),
        (
            {"num_key_value_heads": 2},
            "Got num_heads=3 and num_kv_heads=2: .*change one of the two"
            ".*num_kv_heads is num_key_value_heads",
        ),
        (
            {"linear_num_value_heads": 4},
            "num_value_heads=4 and num_key_heads=3.*is linear_num_value_heads",
        ),
        ({"num_experts_per_tok": 4}, "experts_per_token=4 is larger.*num_experts=3"),
        ({"partial_rotary_factor": 1.5}, "between 0 and 1. Got 1.5"),
        ({"partial_rotary_factor": 0.4}, "rotary_dim must be even.*Got 1"),
    ],
)
def test_what_is_not_implemented_is_refused(fields, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        DecoderConfig.from_hf(ALL_THREES | fields)


@pytest.mark.parametrize(
    "how",
    [
        {"axis_rules": (("batch", "data"),)},
        {"expert_chunks": 2},
        {"attention_kernel": "splash"},
        {"expert_kernel": "megablox"},
        {"remat_policy": "full"},
        {"scan_layers": False},
    ],
    ids=lambda how: next(iter(how)),
)
def test_how_a_model_is_run_is_no_part_of_its_file(how):
    config = preset("qwen3-next-tiny")
    assert hf_config.to_hf(config.replace(**how)) == hf_config.to_hf(config)


def test_a_config_of_two_opinions_is_not_written():
    config = DecoderConfig.from_hf(ALL_THREES)
    attention = dataclasses.replace(config.attention, norm_eps=1e-3)
    message = "one rms_norm_eps.*norm_eps=1e-06.*attention.norm_eps=0.001"
    with pytest.raises(ConfigError, match=message):
        config.replace(attention=attention).to_hf()


def test_a_folder_without_config_says_what_it_has(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json in .*It is empty"):
        DecoderConfig.from_hf(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="It has pytorch_model.bin. Give"):
        DecoderConfig.from_hf(tmp_path)
    with pytest.raises(CheckpointError, match="There is no such folder"):
        DecoderConfig.from_hf(tmp_path / "absent")


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"a": 1', "is not JSON"),
        ("[1]", "must hold a JSON object. Got list"),
        ('{"a": 1, "a": 2}', "has keys twice: a"),
    ],
)
def test_a_damaged_config_is_reported(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.from_hf(tmp_path / "config.json")
