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
    ],
)
def test_a_model_that_does_not_fit_names_field_and_values(changes, words):
    with pytest.raises(shared.ConfigError) as error:
        TINY.replace(**changes)
    for word in words:
        assert word in str(error.value)


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
