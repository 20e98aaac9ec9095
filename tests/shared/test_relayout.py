"""The same parameters in other layouts: values do not depend on how layers stack."""

import functools

import jax
import pytest

import shared
from parity.trees import compare_bytes
from shared.config import ConfigError, LayerKind
from shared.plan import PlanError
from shared.presets import hybrid_layers, qwen3_next_tiny

PREFIX = (LayerKind("linear_attention", "dense"),)
CONFIGS = {
    "remainder": qwen3_next_tiny(5).replace(layers=hybrid_layers(5, period=2)),
    "prefix": qwen3_next_tiny(5).replace(layers=PREFIX + hybrid_layers(4, period=2)),
}
LAYOUTS = (
    {"scan_layers": False},
    {"scan_layers": True, "param_scan_axis": 1},
    {"scan_layers": True, "param_scan_axis": 0},
)


@functools.cache
def first_values(config):
    return jax.jit(shared.init_params, static_argnums=1)(jax.random.key(0), config)


@pytest.mark.parametrize("start", LAYOUTS)
@pytest.mark.parametrize("end", LAYOUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_relayout_gives_the_parameters_that_the_other_layout_draws(name, start, end):
    before = CONFIGS[name].replace(**start)
    config, params = shared.relayout(before, first_values(before), **end)
    assert config == before.replace(**end)
    compared = compare_bytes(params, first_values(config))
    assert compared.equal and compared.leaves, compared.differences


def test_a_layout_that_the_layers_contradict_is_refused():
    config = CONFIGS["prefix"]
    with pytest.raises((ConfigError, PlanError), match="scan_period=2"):
        shared.relayout(config, first_values(config), scan_period=2)
