"""Boxed parameters: the same model, with axis names on every leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

import shared
import zoo_linen
from parity.trees import compare_bytes
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny

LINEAR = LayerKind("linear_attention", "moe")
FULL = LayerKind("full_attention", "dense")
TOKENS = jnp.array([[3, 1, 2]])


@pytest.mark.parametrize("axis", [0, 1])
def test_apply_takes_boxed_parameters(axis):
    config = qwen3_next_tiny(5).replace(
        layers=(LINEAR, FULL, LINEAR, FULL, LINEAR), param_scan_axis=axis
    )
    params = shared.init_params(jax.random.key(0), config)
    boxed = zoo_linen.partitioning.box(params, config)
    assert compare_bytes(zoo_linen.partitioning.unbox(boxed), params).equal

    run = jax.jit(lambda p: zoo_linen.Decoder(config).apply({"params": p}, TOKENS))
    np.testing.assert_array_equal(run(boxed).logits, run(params).logits)


def test_the_names_are_those_of_logical_axes_and_give_partition_specs():
    config = shared.preset("qwen3-next-tiny")
    params = shared.abstract_params(config)
    specs = nn.get_partition_spec(zoo_linen.partitioning.box(params, config))
    assert specs["layers"]["local_layers"]["mlp"]["experts"][
        "up_proj"
    ] == PartitionSpec("blocks", "layers", "expert", "embed", "mlp")
    assert specs["layers"]["global_layer"]["self_attn"]["o_proj"] == PartitionSpec(
        "blocks", "heads", "embed"
    )
    assert specs["lm_head"] == PartitionSpec("embed", "vocab")
