"""A config that describes no model is refused by name, values and way out."""

import dataclasses

import jax
import pytest

import shared
from shared.config import resolve_remat_policy

TINY = shared.preset("qwen3-next-tiny")


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("attention", {"num_heads": 5}, ("num_heads=5", "num_kv_heads=2", "multiple")),
        ("attention", {"head_dim": 2}, ("rotary_dim=4", "head_dim=2")),
        (
            "delta_net",
            {"num_value_heads": 3},
            ("num_value_heads=3", "num_key_heads=2", "multiple"),
        ),
        ("moe", {"experts_per_token": 9}, ("experts_per_token=9", "num_experts=8")),
        ("mlp", {"intermediate_size": 0}, ("intermediate_size", "0")),
    ],
)
def test_a_part_that_does_not_fit_names_field_and_both_values(part, changes, words):
    with pytest.raises(shared.ConfigError) as error:
        dataclasses.replace(getattr(TINY, part), **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": None}, ("attention=None",)),
        ({"hidden_size": 48}, ("hidden_size=32", "hidden_size=48")),
        ({"layers": ()}, ("layers", "empty")),
        ({"dtype": "int8"}, ("dtype", "int8", "bfloat16")),
        ({"dtype": "float16", "param_dtype": "bfloat16"}, ("float16", "bfloat16")),
        ({"param_scan_axis": 2}, ("param_scan_axis", "2")),
        ({"dropout_rate": 1.0}, ("dropout_rate", "1.0")),
        ({"remat_policy": "some"}, ("remat_policy='some'", "dots_saveable")),
        ({"attention_kernel": "flash"}, ("attention_kernel", "'flash'", "splash")),
        ({"expert_kernel": "gmm"}, ("expert_kernel", "'gmm'", "megablox")),
    ],
)
def test_a_model_that_does_not_fit_names_field_and_values(changes, words):
    with pytest.raises(shared.ConfigError) as error:
        TINY.replace(**changes)
    for word in words:
        assert word in str(error.value)


GEMMA, EXPERTS = shared.preset("gemma-4-e-tiny"), shared.preset("deepseek-v3-tiny")
SLIDING = shared.LayerKind("sliding_attention", "dense")
BORROWING = dataclasses.replace(SLIDING, borrows_keys=True)


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        (GEMMA.attention.rope, {"rotary_dim": 7}, ("rotary_dim", "7", "pairs")),
        (GEMMA.attention.rope, {"turning_pairs": 99}, ("turning_pairs", "99")),
        (GEMMA.attention.rope, {"sections": (1, 1, 0)}, ("sections", "(1, 1, 0)")),
        (GEMMA.sliding_attention, {"scale": 0.0}, ("scale", "0.0")),
        (EXPERTS.moe, {"num_groups": 3}, ("num_experts=8", "num_groups=3")),
        (EXPERTS.moe, {"num_groups": 8}, ("num_groups=8", "1 expert", "best two")),
        (EXPERTS.moe, {"groups_per_token": 5}, ("groups_per_token=5", "num_groups=4")),
        (
            EXPERTS.moe,
            {"experts_per_token": 5},
            ("experts_per_token=5", "4 experts", "groups_per_token=2"),
        ),
        (EXPERTS.attention, {"kv_lora_rank": 0}, ("kv_lora_rank", "0")),
        (EXPERTS.attention.rope.scaling, {"factor": -1.0}, ("factor", "-1.0")),
        (SLIDING, {"mixer": "linear_attention", "borrows_keys": True}, ("borrow",)),
    ],
)
def test_an_option_that_does_not_fit_names_field_and_values(part, changes, words):
    with pytest.raises(shared.ConfigError) as error:
        dataclasses.replace(part, **changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((SLIDING, BORROWING, SLIDING), ("last", "layer 1")),
        ((BORROWING,), ("layer 0", "sliding_attention", "keys of its own")),
        (
            (SLIDING, dataclasses.replace(BORROWING, mixer="full_attention")),
            ("layer 1", "full_attention"),
        ),
    ],
)
def test_layers_that_borrow_need_a_lender_and_come_last(layers, words):
    with pytest.raises(shared.ConfigError) as error:
        GEMMA.replace(layers=layers)
    for word in words:
        assert word in str(error.value)


def test_the_last_layer_with_keys_of_its_own_lends_them():
    """Layers 4 and 5 of 10: the full one, and the sliding one behind it."""
    assert GEMMA.lenders == {"full_attention": 4, "sliding_attention": 5}
    assert shared.preset("gemma-4-e2b").lenders == {
        "sliding_attention": 13,
        "full_attention": 14,
    }
    assert shared.preset("gemma-4-tiny").lenders == {}


def test_every_preset_is_a_valid_static_argument():
    for name in shared.presets():
        assert hash(shared.preset(name)) == hash(shared.preset(name))
    with pytest.raises(KeyError, match="qwen3-next-tiny"):
        shared.preset("qwen3-next")


def test_the_published_model_has_its_published_sizes():
    """Model card of Qwen3-Next-80B-A3B: 80 billion parameters, 3 active, 48 layers."""
    config = shared.preset("qwen3-next-80b-a3b")
    assert config.num_layers == 48
    assert config.plan.groups[0].repeats == 12
    active = shared.active_parameters(config)
    head_and_embedding = 2 * config.vocab_size * config.hidden_size
    assert 3.0e9 <= active - head_and_embedding <= 3.5e9


@pytest.mark.parametrize(
    "name", ["none", "full", "dots_saveable", "names:mixer_output"]
)
def test_known_rematerialisation_policies_resolve(name):
    policy = resolve_remat_policy(name)
    assert (policy is None) == (name in ("none", "full"))


def test_float64_without_x64_is_refused_not_narrowed():
    with pytest.raises(ValueError, match="float64.*jax_enable_x64"):
        shared.init_params(jax.random.key(0), TINY.replace(param_dtype="float64"))
