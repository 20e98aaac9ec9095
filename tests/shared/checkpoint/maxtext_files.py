"""What MaxText wrote (tests/maxtext), and conversions of whole trees."""

import functools

import numpy as np

from shared.checkpoint.scheme import Conversion, check_tensors, units
from shared.config import (
    AttentionConfig,
    DecoderConfig,
    GatedDeltaNetConfig,
    MoEConfig,
    RopeConfig,
)
from shared.presets import hybrid_layers
from shared.stores.reading import read_whole
from shared.stores.tree import array_leaf
from tests.shared.checkpoint.checkpoints import GOLDENS

MAXTEXT = GOLDENS.parent / "maxtext"


@functools.cache
def config_of(num_layers):
    """The config in tests/maxtext/README.md."""
    hidden = 32
    return DecoderConfig(
        family="qwen3_next",
        vocab_size=96,
        hidden_size=hidden,
        layers=hybrid_layers(num_layers),
        attention=AttentionConfig(
            hidden_size=hidden,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rope=RopeConfig(theta=1e7, rotary_dim=4),
        ),
        delta_net=GatedDeltaNetConfig(
            hidden_size=hidden,
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=8,
            value_head_dim=8,
        ),
        moe=MoEConfig(
            hidden_size=hidden,
            num_experts=4,
            experts_per_token=2,
            expert_size=16,
            shared_expert_size=16,
        ),
    )


@functools.cache
def load(name):
    with np.load(MAXTEXT / name) as file:
        return dict(file)


def shapes_of(arrays):
    return {name: array.shape for name, array in arrays.items()}


def convert(config, source, target, arrays):
    """All tensors of the target format."""
    leaves = {name: array_leaf(array) for name, array in arrays.items()}
    check_tensors(shapes_of(arrays), source)
    made = Conversion(source, target, units(config)).leaves(leaves)
    return {name: read_whole(leaf, name) for name, leaf in made.items()}


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype, name
        assert found[name].tobytes() == array.tobytes(), name
