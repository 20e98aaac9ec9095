"""Compiling for a TPU that is not there: both frontends need the same memory."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

import shared
import zoo_linen
import zoo_nnx
from parity import decoders
from parity.programs import topology

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.skipif(HAS_LIBTPU, reason="libtpu is installed")
def test_a_missing_libtpu_is_named_with_the_way_out():
    with pytest.raises(topology.TopologyError, match="libtpu.*pip install"):
        topology.topology("v5p:2x2x1")


def test_compiled_memory_of_this_machine():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    device = jax.devices()[0]
    found = topology.compiled_memory(
        topology.compile_for(device, lambda x, y: x @ y, x, x)
    )
    assert (found.arguments, found.outputs) == (2 * 4 * 256**2, 4 * 256**2)


@pytest.mark.skipif(not HAS_LIBTPU, reason='needs libtpu: pip install -e ".[tpu]"')
def test_both_frontends_need_the_same_memory_on_a_tpu():
    device, *others = topology.topology("v5p:2x2x1")
    assert len(others) == 3
    config = shared.preset("qwen3-next-tiny")
    params, pair = shared.abstract_params(config), decoders.abstract_pair(config)
    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    found = [
        topology.compiled_memory(topology.compile_for(device, apply, params, tokens))
        for apply in (zoo_linen.as_function(pair.linen), zoo_nnx.as_function(pair.nnx))
    ]
    assert found[0] == found[1]
    assert min(found[0]) > 0
