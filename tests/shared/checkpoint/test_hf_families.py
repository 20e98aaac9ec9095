"""config.json of each family: defaults, what published files have, what is refused."""

import dataclasses
import json
import logging
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.checkpoint import hf_config
from shared.config import (
    ConfigError,
    DecoderConfig,
    LayerInputConfig,
    LinearScaling,
    MLPConfig,
    RopeConfig,
    YarnScaling,
)
from shared.presets import preset
from tests.shared.checkpoint.checkpoints import GOLDENS

# Every field as `Qwen3_5TextConfig()` and so on write it: transformers 5.24.
DEFAULTS = json.loads(pathlib.Path(__file__).with_name("hf_defaults.json").read_text())

WINDOWED = ["sliding_attention"] * 5 + ["full_attention"]


def golden(name):
    return json.loads((GOLDENS / name / "config.json").read_text())


def read(fields, **more):
    return DecoderConfig.from_hf({**fields, **more})


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_absent_fields_have_the_defaults_of_the_reference(model_type):
    assert read({"model_type": model_type}) == read(DEFAULTS[model_type])


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_written_back_as_the_reference_writes_them(model_type):
    expected = dict(DEFAULTS[model_type])
    for artefact in ("transformers_version", "_sliding_window_pattern"):
        expected.pop(artefact, None)
    written = read({"model_type": model_type}).to_hf()
    if model_type == "deepseek_v3":  # ours have no layer of multi-token prediction
        assert expected.pop("num_nextn_predict_layers") == 1
    if "mrope_section" in written["rope_parameters"]:  # the default, said
        assert written["rope_parameters"].pop("mrope_section") == [11, 11, 10]
        assert written["rope_parameters"].pop("mrope_interleaved") is True
    assert {name: written[name] for name in expected} == expected


# Published files, their facts.

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
PUBLISHED = {
    "qwen3.5-27b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "float32",
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_conv_kernel_dim": 4,
            "linear_num_value_heads": 48,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27},
        "vision_end_token_id": 248054,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "float32",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "image_size": 896},
    },
    "gemma-3-27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "gemma-3-1b": {
        "cache_implementation": "hybrid",
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "gemma-4-e2b": {
        "audio_config": {"model_type": "gemma4_audio"},
        "audio_token_id": 258881,
        "eoa_token_index": 258883,
        "model_type": "gemma4",
        "text_config": {
            "attention_k_eq_v": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 1536,
            "hidden_size_per_layer_input": 256,
            "intermediate_size": 6144,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_attention_heads": 8,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 512,
            "use_bidirectional_attention": "vision",
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 262144,
        },
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision"},
        "vision_soft_tokens_per_image": 280,
    },
    "gemma-4-26b-a4b": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "final_logit_softcapping": 30.0,
        "hidden_size": 2816,
        "hidden_size_per_layer_input": None,
        "intermediate_size": 2112,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": 704,
        "num_attention_heads": 16,
        "num_experts": 128,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
        "top_k_experts": 8,
    },
    "deepseek-v3": {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 1,
        "rope_scaling": YARN,
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_preset(name):
    assert comparable(read(PUBLISHED[name])) == comparable(preset(name))


def comparable(config):
    """The config with what config.json has no place for set to one value."""
    if config.delta_net is None:
        return config
    delta_net = dataclasses.replace(config.delta_net, chunk_size=1)
    return config.replace(delta_net=delta_net)


def test_both_spellings_of_scaled_positions_are_one():
    """A file may say both: the scaling below the kind, theta beside the rest."""
    both = PUBLISHED["gemma-3-27b"] | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_parameters": {
            "full_attention": {"factor": 8.0, "rope_type": "linear"},
            "sliding_attention": {"rope_type": "default"},
        },
    }
    assert read(both) == preset("gemma-3-27b")


@pytest.mark.parametrize("name", ["gemma4_dense", "gemma4_ple_kvshare"])
def test_heads_of_full_attention_layers(name):
    """`per_layer_config`, by numbers of layers, is the flat fields."""
    config = read(golden(name))
    ours, theirs = config.attention, config.sliding_attention
    assert (ours.head_dim, theirs.head_dim) == (16, 8)
    shared = name == "gemma4_ple_kvshare"
    assert (ours.num_kv_heads, theirs.num_kv_heads) == (2 if shared else 1, 2)
    assert ours.keys_are_values is not shared
    assert ours.rope == RopeConfig(1e6, 16, turning_pairs=2)
    assert theirs.rope == RopeConfig(1e4, 8)


def test_values_of_the_goldens():
    config = read(golden("gemma4_ple_kvshare"))
    assert [k.borrows_keys for k in config.layers] == [False] * 6 + [True] * 4
    assert config.lenders == {"sliding_attention": 5, "full_attention": 4}
    assert config.layer_inputs == LayerInputConfig(vocab_size=96, size=8)
    assert config.mlp.intermediate_size == 48
    assert config.borrower_mlp == MLPConfig(32, 96, activation="gelu_tanh")
    assert config.norm_eps == config.attention.norm_eps == 0.01
    assert (config.logit_softcap, config.attention.scale) == (30.0, 1.0)
    config = read(golden("gemma4_moe"))
    assert {k.feed_forward for k in config.layers} == {"dense_and_moe"}
    assert (config.moe.num_experts, config.moe.experts_per_token) == (8, 2)
    assert config.moe.per_expert_scale and config.moe.norm_router_input
    config = read(golden("gemma3_text"))
    assert config.attention.scale == config.sliding_attention.scale == 1 / 3
    assert config.attention.rope == RopeConfig(1e6, 12, scaling=LinearScaling(8.0))
    assert config.zero_centered_norms and config.attention.zero_centered_norms
    config = read(golden("deepseek_v3"))
    assert [k.feed_forward for k in config.layers] == ["dense"] + ["moe"] * 3
    assert config.attention.rope == RopeConfig(1e4, 8, interleaved=True)
    assert (config.attention.head_dim, config.attention.value_head_dim) == (16, 12)
    assert config.norm_eps == 0.01 != config.attention.latent_norm_eps
    assert (config.moe.num_groups, config.moe.groups_per_token) == (4, 2)
    assert (config.moe.scores, config.moe.scaling_factor) == ("sigmoid", 2.5)
    config = read(golden("qwen3_5_moe_8l"))
    assert config.attention.rope == RopeConfig(1e4, 8, sections=(2, 1, 1))
    assert config.delta_net.grouped_projections is False


def test_the_last_layer_of_gemma_4_has_full_attention(caplog):
    caplog.set_level(logging.INFO, "shared.checkpoint")
    fields = {"model_type": "gemma4_text", "num_hidden_layers": 8}
    config = read(fields)
    assert [k.is_global for k in config.layers] == [False] * 5 + [True, False, True]
    assert not caplog.text
    types = [*WINDOWED, "sliding_attention", "sliding_attention"]
    assert read(fields, layer_types=types) == config
    assert "layer_types ends with sliding_attention" in caplog.text


def test_sections_of_a_narrow_head_are_what_the_default_gives():
    """[11, 11, 10] in 8 pairs: t h w t h w t h."""
    config = read({"model_type": "qwen3_5_text", "head_dim": 64})
    assert config.attention.rope.sections == (3, 3, 2)


def test_experts_that_all_tokens_go_to_have_a_width_together():
    config = read(golden("deepseek_v3"), n_shared_experts=3)
    assert config.moe.shared_expert_size == 48
    assert config.to_hf()["n_shared_experts"] == 3
    assert read(golden("deepseek_v3"), n_shared_experts=None).moe.shared_expert is None


def test_layers_that_are_dense_may_be_named_one_by_one():
    types = ["dense", "sparse", "sparse", "sparse"]
    fields = golden("deepseek_v3")
    assert read(fields, mlp_layer_types=types) == read(fields)


# Multimodal files.


def wrapped(**above):
    return golden("qwen3_5_moe_vl_wrapper") | above


def inside(**fields):
    first = golden("qwen3_5_moe_vl_wrapper")
    return first | {"text_config": first["text_config"] | fields}


def test_the_text_model_of_a_multimodal_file_is_read():
    config = read(wrapped())
    assert config.family == "qwen3_5_moe_text"
    assert config == read(golden("qwen3_5_moe_8l"))


def test_what_stands_above_the_text_model_wins():
    """But for what a model can have only one of."""
    config = read(wrapped(dtype="bfloat16", eos_token_id=[3, 4]))
    assert (config.param_dtype, config.eos_token_id) == ("bfloat16", (3, 4))
    config = read(inside(torch_dtype="float32") | {"dtype": "bfloat16"})
    assert config.param_dtype == "bfloat16"
    first = golden("qwen3_5_moe_vl_wrapper")
    del first["tie_word_embeddings"]
    assert read(first) == read(wrapped())


def test_what_is_not_of_the_text_model_is_ignored_with_a_reason():
    assert all(hf_config.NOT_TEXT.values())
    more = dict.fromkeys(hf_config.NOT_TEXT.keys() | hf_config.IGNORED.keys(), "any")
    assert read(wrapped(**more)) == read(wrapped())


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            wrapped(tie_word_embeddings=True),
            "text_config: tie_word_embeddings is False, but must be True: .*above",
        ),
        (inside(logit_scale=2.0), "text_config: unknown fields logit_scale"),
        (wrapped(logit_scale=2.0), "unknown fields logit_scale: .*NOT_TEXT"),
        (inside(model_type="qwen3_next"), "model_type is 'qwen3_next', but must be"),
        ({"model_type": "gemma4"}, "text_config is missing"),
        (wrapped(quantization_config={"bits": 4}), "quantised weights are not read"),
        (inside(quantization_config={"bits": 4}), "quantised weights are not read"),
        (inside(vocab_size="3"), "text_config: vocab_size must be an integer"),
    ],
)
def test_a_multimodal_file_is_refused(fields, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read(fields)


# What is refused.


@pytest.mark.parametrize(
    "name, fields, message",
    [
        ("qwen3_5_dense_8l", {"attn_output_gate": False}, "attn_output_gate must be"),
        ("qwen3_5_dense_8l", {"num_experts": 8}, "unknown fields num_experts"),
        (
            "qwen3_5_dense_8l",
            {"rope_parameters": {"mrope_section": [3, 1, 1]}},
            r"three numbers.*Got \(3, 1, 1\).*sections is mrope_section",
        ),
        (
            "qwen3_5_dense_8l",
            {"rope_parameters": {"mrope_interleaved": False}},
            "mrope_interleaved must be true",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "must be None.*Got 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "Got True"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "must be positive. Got 0"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "rope_parameters.full_attention: rope_type must be 'default' or 'linear'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1e4}},
            "unknown fields rope_theta: there must be full_attention",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_scaling must be null or of type 'linear'.*dynamic",
        ),
        (
            "gemma3_text",
            {"rope_local_base_freq": 5e4},
            "rope_theta is 50000.0 and in rope_parameters 10000.0: keep one",
        ),
        ("gemma4_dense", {"use_bidirectional_attention": "all"}, "or 'vision'.*'all'"),
        ("gemma4_dense", {"hidden_activation": "gelu"}, "Got 'gelu'"),
        ("gemma4_dense", {"num_kv_shared_layers": 12}, "must be 0 to 11.*Got 12"),
        ("gemma4_dense", {"enable_moe_block": True}, "must be integers where enable"),
        (
            "gemma4_dense",
            {"per_layer_config": {"05": {"head_dim": 16}}},
            r"for layer 11.*\{'head_dim': 16\} is what such layers have",
        ),
        (
            "gemma4_dense",
            {"per_layer_config": {"00": {"head_dim": 16}}},
            "for layer 0, which is sliding_attention",
        ),
        (
            "gemma4_dense",
            {"per_layer_config": {"05": {"skip": ["mlp"]}}},
            "per_layer_config.05: unknown fields skip",
        ),
        ("gemma4_dense", {"per_layer_config": {"12": {}}}, "0 to 11. Got '12'"),
        (
            "gemma4_dense",
            {"global_head_dim": 32},
            "global_head_dim is 32 and in per_layer_config 16: keep one",
        ),
        (
            "gemma4_dense",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"partial_rotary_factor": 0.5},
                }
            },
            "sliding_attention: partial_rotary_factor must be 1.*Got 0.5",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "must be 'sigmoid'.*'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "must be 'noaux_tc'.*Got 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1.*Got 2"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "is 2, but must be 4"),
        ("deepseek_v3", {"qk_head_dim": 12}, "qk_head_dim is 12, but must be 16"),
        ("deepseek_v3", {"topk_group": 1}, "experts_per_token=3.*is num_experts_per"),
        (
            "deepseek_v3",
            {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            "dense layers first",
        ),
        (
            "deepseek_v3",
            {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
            "first_k_dense_replace is 1, but must be 2",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": None, "rope_scaling": YARN | {"mscale": 0}},
            "mscale and mscale_all_dim must both be positive",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": None, "rope_scaling": YARN | {"truncate": False}},
            "truncate is False, but must be True",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": None, "rope_scaling": {"type": "yarn"}},
            "factor is missing",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": None, "rope_scaling": YARN | {"rope_type": "linear"}},
            "rope_type='linear' and type='yarn': keep one",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantised weights are not read",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(name, fields, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        read(golden(name), **fields)


def changed(name, part, **fields):
    config = preset(name)
    return config.replace(
        **{part: dataclasses.replace(getattr(config, part), **fields)}
    )


@pytest.mark.parametrize(
    "config, message",
    [
        (
            changed("gemma-4-tiny", "attention", scale=0.5),
            "attention.scale is 0.5, and would be read back as 1.0",
        ),
        (changed("gemma-3-tiny", "attention", scale=0.5), "attention.scale"),
        (changed("gemma-3-tiny", "attention", gated=True), "attention.gated is True"),
        (
            changed("qwen3.5-tiny", "delta_net", grouped_projections=True),
            "delta_net.grouped_projections is True",
        ),
        (
            changed("gemma-4-e-tiny", "borrower_mlp", intermediate_size=41),
            "borrower_mlp.intermediate_size is 41, and would be read back as 80",
        ),
        (
            changed("deepseek-v3-tiny", "moe", shared_expert_size=24),
            "moe.shared_expert_size is 24, and would be read back as 16",
        ),
        (
            changed("deepseek-v3-tiny", "moe", scores="softmax"),
            "moe.scores is softmax, and would be read back as sigmoid",
        ),
        (
            changed("deepseek-v3-tiny", "attention", latent_norm_eps=0.1),
            "attention.latent_norm_eps is 0.1",
        ),
        (
            preset("gemma-4-tiny").replace(layers=preset("gemma-4-tiny").layers[:-1]),
            "no place for this model",
        ),
        (
            preset("gemma-4-tiny").replace(output_norms=False),
            "output_norms is False, and would be read back as True",
        ),
        (
            preset("deepseek-v3-tiny").replace(
                layers=preset("deepseek-v3-tiny").layers[::-1]
            ),
            "no place for this model.*layers is",
        ),
        (
            preset("qwen3-next-tiny").replace(zero_centered_norms=False),
            "zero_centered_norms is False",
        ),
    ],
)
def test_what_config_json_cannot_say_is_not_written(config, message):
    for hub_style in (False, True):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            config.to_hf(hub_style=hub_style)


def test_a_window_with_scaled_positions_has_only_one_spelling():
    sliding = preset("gemma-3-tiny").sliding_attention
    rope = dataclasses.replace(sliding.rope, scaling=LinearScaling(2.0))
    config = changed("gemma-3-tiny", "sliding_attention", rope=rope)
    assert DecoderConfig.from_hf(config.to_hf()) == config
    with pytest.raises(ConfigError, match="sliding_attention.rope is"):
        config.to_hf(hub_style=True)


# Any config that can be said comes back, in both spellings.

sizes = st.integers(1, 5)
even = st.integers(1, 8).map(lambda n: 2 * n)
positive = st.floats(1e-6, 1e6, exclude_min=True)
thetas = st.floats(2.0, 1e8)
token_ids = st.none() | st.integers(0, 9)


def fields(**more):
    """Fields that all families have, and some of the drawn family's own."""
    return st.fixed_dictionaries(
        {
            "vocab_size": st.integers(1, 99),
            "max_position_embeddings": st.integers(1, 99),
            "tie_word_embeddings": st.booleans(),
            "bos_token_id": token_ids,
            "eos_token_id": token_ids | st.tuples(st.integers(0, 9)),
            "pad_token_id": token_ids,
            "param_dtype": st.sampled_from(("float32", "bfloat16")),
            "scan_layers": st.booleans(),
            **more,
        }
    )


def kinds(*choices, **more):
    """Kinds of layers, in any order."""
    kind = st.builds(dict, mixer=st.sampled_from(choices), **more)
    return st.lists(kind, min_size=1, max_size=7)


def part(**strategies):
    return st.fixed_dictionaries(strategies)


def build(name, drawn, kinds, parts, rope):
    """The tiny config of a family, changed."""
    base = preset(name)
    layer = type(base.layers[0])
    changes = dict(drawn)
    changes["dtype"] = changes["param_dtype"]
    changes["layers"] = tuple(layer(**kind) for kind in kinds)
    for field, own in parts.items():
        if field in rope:
            old = getattr(base, field).rope
            own = {**own, "rope": dataclasses.replace(old, **rope[field])}
        changes[field] = dataclasses.replace(getattr(base, field), **own)
    return base.replace(**changes)


def assert_comes_back(config):
    for hub_style in (False, True):
        written = json.loads(json.dumps(config.to_hf(hub_style=hub_style)))
        again = DecoderConfig.from_hf(written).replace(scan_layers=config.scan_layers)
        assert comparable(again) == comparable(config)


@settings(max_examples=40)
@given(
    fields(norm_eps=positive),
    kinds("linear_attention", "full_attention"),
    part(num_kv_heads=sizes, groups=sizes, use_bias=st.booleans(), eps=st.just(0)),
    part(num_key_heads=sizes, more=sizes, conv_width=sizes, key_head_dim=sizes),
    st.integers(0, 8),
    thetas,
    st.booleans(),
)
def test_qwen3_5(drawn, kinds, heads, net, pairs, theta, is_moe):
    eps = {"norm_eps": drawn["norm_eps"]}
    kv_heads = heads["num_kv_heads"]
    moe = {"router_aux_loss_coef": 0.25} if is_moe else {}
    config = build(
        "qwen3.5-moe-tiny" if is_moe else "qwen3.5-tiny",
        drawn | moe,
        [kind | {"feed_forward": "moe" if is_moe else "dense"} for kind in kinds],
        {
            "attention": {
                **eps,
                "num_kv_heads": kv_heads,
                "num_heads": kv_heads * heads["groups"],
                "use_bias": heads["use_bias"],
            },
            "delta_net": {
                **eps,
                "num_key_heads": net["num_key_heads"],
                "num_value_heads": net["num_key_heads"] * net["more"],
                "conv_width": net["conv_width"],
                "key_head_dim": net["key_head_dim"],
            },
        },
        {
            "attention": {
                "theta": theta,
                "rotary_dim": 2 * pairs,
                "sections": (pairs - pairs // 2, pairs // 2, 0),
            }
        },
    )
    assert_comes_back(config)


@settings(max_examples=40)
@given(
    fields(norm_eps=positive, logit_softcap=st.none() | positive),
    kinds("sliding_attention", "full_attention"),
    part(num_kv_heads=sizes, groups=sizes, use_bias=st.booleans(), window=sizes),
    even,
    st.integers(1, 400) | positive,
    st.none() | positive,
    st.tuples(thetas, thetas),
)
def test_gemma_3(drawn, kinds, heads, width, scalar, factor, theta):
    own = {
        "norm_eps": drawn["norm_eps"],
        "num_kv_heads": heads["num_kv_heads"],
        "num_heads": heads["num_kv_heads"] * heads["groups"],
        "use_bias": heads["use_bias"],
        "head_dim": width,
        "scale": None if scalar == width else scalar**-0.5,
    }
    scaling = None if factor is None else LinearScaling(factor)
    config = build(
        "gemma-3-tiny",
        drawn,
        [kind | {"feed_forward": "dense"} for kind in kinds],
        {
            "attention": own,
            "sliding_attention": own | {"window": heads["window"]},
        },
        {
            "attention": {"theta": theta[0], "rotary_dim": width, "scaling": scaling},
            "sliding_attention": {"theta": theta[1], "rotary_dim": width},
        },
    )
    assert_comes_back(config)


@settings(max_examples=40)
@given(
    fields(logit_softcap=st.none() | positive),
    kinds("sliding_attention", "full_attention"),
    part(num_kv_heads=sizes, groups=sizes, window=sizes),
    part(width=even, full_width=even, turning=st.none() | st.integers(0, 8)),
    st.booleans(),
    st.sampled_from(["gemma-4-tiny", "gemma-4-moe-tiny"]),
    st.none() | part(vocab_size=st.integers(1, 99), size=sizes),
    st.tuples(thetas, thetas),
)
def test_gemma_4(drawn, kinds, heads, widths, keys_are_values, name, inputs, theta):
    kv_heads, groups = heads["num_kv_heads"], heads["groups"]
    kinds[-1]["mixer"] = "full_attention"
    feed_forward = "dense" if name == "gemma-4-tiny" else "dense_and_moe"
    turning = widths["turning"]
    if turning is not None:
        turning = min(turning, widths["full_width"] // 2)
    layer_inputs = None if inputs is None else LayerInputConfig(**inputs)
    config = build(
        name,
        drawn | {"layer_inputs": layer_inputs},
        [kind | {"feed_forward": feed_forward} for kind in kinds],
        {
            "attention": {
                "num_heads": kv_heads * groups,
                # The published spelling has heads of their own for K = V only.
                "num_kv_heads": 1 if keys_are_values else kv_heads,
                "keys_are_values": keys_are_values,
                "head_dim": widths["full_width"],
            },
            "sliding_attention": {
                "num_heads": kv_heads * groups,
                "num_kv_heads": kv_heads,
                "head_dim": widths["width"],
                "window": heads["window"],
            },
        },
        {
            "attention": {
                "theta": theta[0],
                "rotary_dim": widths["full_width"],
                "turning_pairs": turning,
            },
            "sliding_attention": {"theta": theta[1], "rotary_dim": widths["width"]},
        },
    )
    assert_comes_back(config)


@settings(max_examples=20)
@given(st.integers(1, 9), st.booleans())
def test_gemma_4_with_borrowers(borrowers, wide):
    config = preset("gemma-4-e-tiny")
    own = len(config.layers) - borrowers
    mixers = [kind.mixer for kind in config.layers]
    if own < 5:  # no full layer to borrow from
        mixers = ["full_attention"] * len(mixers)
    layers = tuple(
        type(config.layers[0])(mixer, "dense", borrows_keys=index >= own)
        for index, mixer in enumerate(mixers)
    )
    wide_mlp = config.borrower_mlp if wide else None
    assert_comes_back(config.replace(layers=layers, borrower_mlp=wide_mlp))


yarn = st.builds(
    dict,
    factor=st.floats(1.0, 64.0),
    original_length=st.integers(1, 4096),
    beta_fast=st.floats(2.0, 64.0),
    beta_slow=st.floats(0.5, 2.0),
    magnitudes=st.none() | st.tuples(st.floats(0.1, 2.0), st.floats(0.1, 2.0)),
)


@settings(max_examples=40)
@given(
    fields(norm_eps=positive),
    st.integers(1, 6),
    st.integers(0, 6),
    part(
        num_heads=sizes, kv_lora_rank=sizes, nope_head_dim=sizes, use_bias=st.booleans()
    ),
    st.none() | sizes,
    part(experts_per_token=st.integers(1, 4), scaling_factor=positive),
    st.integers(0, 3),
    st.none() | yarn,
    st.tuples(even, thetas, st.booleans()),
)
def test_deepseek_v3(drawn, count, dense, heads, rank, moe, shared, scaled, rope):
    if scaled is not None:
        magnitudes = scaled.pop("magnitudes") or (1.0, 0.0)
        names = ("mscale", "mscale_all_dim")
        scaled = YarnScaling(**scaled, **dict(zip(names, magnitudes, strict=True)))
    config = build(
        "deepseek-v3-tiny",
        drawn,
        [
            {
                "mixer": "full_attention",
                "feed_forward": "dense" if index < dense else "moe",
            }
            for index in range(count)
        ],
        {
            "attention": heads | {"q_lora_rank": rank},
            "moe": moe | {"shared_expert_size": 16 * shared},
        },
        {
            "attention": {
                "rotary_dim": rope[0],
                "theta": rope[1],
                "interleaved": rope[2],
                "scaling": scaled,
            }
        },
    )
    assert_comes_back(config)
