"""Models are built with a mesh at hand or without one, and are the same.

Since Flax 0.12 a Variable with axis names wants a mesh when it is made, and takes the
names for the mesh's own (flip 4844, google/flax#5112).
"""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shared
import zoo_nnx
from shared import sharding
from shared.config import LayerKind
from shared.presets import qwen3_next_tiny
from shared.trees import flatten

CONFIG = qwen3_next_tiny(1).replace(layers=(LayerKind("full_attention", "dense"),))


def mesh():
    return sharding.make_mesh({"fsdp": 1, "tensor": 1}, jax.devices()[:1])


def build(config):
    return zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))


def described(model):
    """Of every Variable its kind, shape, dtype and metadata."""
    return {
        path: (type(v), v.shape, v.dtype, dict(v.get_metadata()))
        for path, v in nnx.to_flat_state(nnx.state(model))
    }


@pytest.mark.parametrize("name", [n for n in shared.presets() if n.endswith("tiny")])
def test_the_tree_and_its_names_do_not_depend_on_a_mesh(name):
    config = shared.preset(name)
    plain = described(nnx.eval_shape(functools.partial(build, config)))
    with jax.set_mesh(mesh()):
        abstract = nnx.eval_shape(functools.partial(build, config), graph_updates=False)
    assert described(abstract) == plain
    axes = dict(flatten(shared.logical_axes(config)))
    params = {p: d for p, d in plain.items() if issubclass(d[0], nnx.Param)}
    assert {p: d[3]["out_sharding"] for p, d in params.items()} == axes


def test_a_model_is_built_and_taken_apart_with_a_mesh_at_hand():
    """Values, metadata and an optimizer's Variables are those without one."""
    plain = nnx.jit(build, static_argnums=0)(CONFIG)
    with jax.set_mesh(mesh()):
        model = nnx.jit(build, static_argnums=0)(CONFIG)
        params = zoo_nnx.to_params(model)
        again = nnx.merge(*nnx.split(zoo_nnx.from_params(CONFIG, params)))
        optimizer = nnx.Optimizer(again, optax.adamw(0.1), wrt=nnx.Param)
    assert described(model) == described(plain)
    assert described(again).keys() == described(plain).keys()
    for path, leaf in flatten(zoo_nnx.to_params(plain)):
        np.testing.assert_array_equal(dict(flatten(params))[path], leaf)
    kept = nnx.Optimizer(plain, optax.adamw(0.1), wrt=nnx.Param)
    assert described(optimizer) == described(kept)
