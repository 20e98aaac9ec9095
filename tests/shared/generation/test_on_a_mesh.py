"""On eight virtual devices answers are those of one.

In MaxText the output gate was multiplied before the attention's output was said to
stand anywhere, and a module built in one mode ran that mode's branch in the other
(AI-Hypercomputer/maxtext, PR 2672 and PR 4634). Here rules are those of a call.
"""

import functools

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import shared
import zoo_linen
from shared import generation, sharding
from shared.sharding import AXIS_RULES, decode_rules, partition_spec
from shared.trees import flatten
from tests.eight_devices import results_of
from tests.shared.generation import eight_devices as script
from tests.shared.generation import models


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return results_of(script, tmp_path_factory.mktemp("mesh"))


@pytest.mark.parametrize("name", script.CONFIGS)
def test_prefill_and_steps_on_a_mesh_give_the_logits_of_one_device(results, name):
    whole, ours = results[f"{name}/whole"], results[f"{name}/linen"]
    assert len(whole) == 1 + script.STEPS
    for call, logits in whole.items():
        np.testing.assert_allclose(
            ours[call], logits, rtol=0, atol=models.LOGITS_ATOL, err_msg=call
        )
        assert logits.std() > 0.1


@pytest.mark.parametrize("name", script.CONFIGS)
def test_a_cache_stays_where_it_was_made(results, name):
    """Of `init_cache`, of prefill and of every step, which therefore compile once."""
    places = results[f"{name}/linen"]["in place"]
    assert places.shape == (2 + script.STEPS,) and places.all()


def test_frontends_decode_to_the_same_bits_on_a_mesh(results):
    linen, nnx = (results[f"qwen3-next/{name}"] for name in ("linen", "nnx"))
    assert linen.keys() == nnx.keys() and any(n.startswith("cache") for n in linen)
    for name, leaf in linen.items():
        np.testing.assert_array_equal(leaf, nnx[name], err_msg=name)


def test_answers_are_the_arg_max_of_plain_calls_on_one_device(results):
    """Of an engine: prompts are read one by one, put into slots, and go on together."""
    served, expected = results["answers"]["served"], results["greedy"]["greedy"]
    np.testing.assert_array_equal(served, expected)


def test_nothing_is_compiled_while_answers_grow(results):
    """One step for all of them: its arrays end where they began."""
    assert results["answers"]["compiled"] == 1


# Without devices.

MESH = AbstractMesh(
    (2, 2, 2, 2),
    ("data", "expert", "tensor", "context"),
    axis_types=(AxisType.Auto,) * 4,
)


def test_rows_get_the_axes_of_the_length_in_a_step():
    names = ("batch", "length", "heads", None)
    spec = functools.partial(partition_spec, names, mesh_axes=MESH.axis_names)
    rows = ("data", "expert")
    assert spec(AXIS_RULES) == PartitionSpec(rows, "context", "tensor", None)
    step = PartitionSpec((*rows, "context"), None, "tensor", None)
    assert spec(decode_rules(AXIS_RULES)) == step
    # Where another rule has the freed axis first, rows keep their own.
    held = (("positions", "context"), *AXIS_RULES)
    cached = partition_spec(("batch", "positions"), decode_rules(held), MESH.axis_names)
    assert cached == PartitionSpec(rows, "context")
    assert decode_rules(()) == ()
    # Parameters stand where they stood.
    for _, axes in flatten(shared.logical_axes(script.CONFIGS["qwen3-next"])):
        train, step = (
            partition_spec(axes, rules, MESH.axis_names)
            for rules in (AXIS_RULES, decode_rules(AXIS_RULES))
        )
        assert train == step


def expected_places(tensor):
    """By field, of caches of 8 rows; heads over `tensor` where they divide."""
    rows = ("data", "expert", "context")
    return {
        "keys": (rows, None, tensor, None),
        "values": (rows, None, tensor, None),
        "segment_ids": (rows, None),
        "segment_id": (rows,),
        "position": (rows,),
        "conv_tail": (rows, None, "tensor"),
        "state": (rows, "tensor", None, None),
    }


@pytest.mark.parametrize(
    "name", ["qwen3-next-tiny", "qwen3.5-tiny", "gemma-4-e-tiny", "deepseek-v3-tiny"]
)
def test_caches_are_spread_over_rows_and_heads(name):
    """Rings, states, tails, lenders' and borrowers' caches; a latent has one head."""
    config = shared.preset(name)
    cache = jax.eval_shape(functools.partial(shared.init_cache, config, 8, 16))
    places = shared.cache_shardings(config, cache, MESH)
    assert jax.tree.structure(places) == jax.tree.structure(cache)
    expected = expected_places(None if name == "deepseek-v3-tiny" else "tensor")
    found = jax.tree_util.tree_leaves_with_path(places)
    for (path, place), leaf in zip(found, jax.tree.leaves(cache), strict=True):
        tail = expected[path[-1].name]
        stack = (None,) * (leaf.ndim - len(tail))
        assert place == NamedSharding(MESH, PartitionSpec(*stack, *tail)), path
    # A row alone is spread over heads only.
    alone = jax.eval_shape(functools.partial(shared.init_cache, config, 1, 16))
    for place in jax.tree.leaves(shared.cache_shardings(config, alone, MESH)):
        axes = {axis for entry in place.spec for axis in sharding.as_tuple(entry)}
        assert axes <= {"tensor"}


def constraints(jaxpr, told):
    """Sharding constraints of a jaxpr and those in it: shape, spec, and who uses it."""
    used_by = {}
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if not hasattr(variable, "val"):
                used_by.setdefault(variable, []).append(equation)
    for equation in jaxpr.eqns:
        if equation.primitive.name == "sharding_constraint":
            (out,) = equation.outvars
            spec = equation.params["sharding"].spec
            told.append((out.aval.shape, spec, used_by.get(out, [])))
        for inner in jaxprs_in_params(equation.params):
            constraints(inner, told)
    return told


def test_the_gate_is_multiplied_where_the_attentions_output_was_said_to_stand():
    """In prefill and in a step, with one model: the axes are those of the call."""
    config = script.ONE.replace(axis_rules=AXIS_RULES)
    model = zoo_linen.as_function(zoo_linen.Decoder(config))
    params = shared.abstract_params(config)
    heads = (config.attention.num_heads, config.attention.head_dim)
    cache = jax.eval_shape(functools.partial(shared.init_cache, config, 8, 16))
    calls = {
        "prefill": (
            functools.partial(generation.prefill, model),
            jax.ShapeDtypeStruct((8, 4), "int32"),
            (("data", "expert"), "context", "tensor", None),
        ),
        "decode": (
            functools.partial(generation.decode, model),
            jax.ShapeDtypeStruct((8,), "int32"),
            (("data", "expert", "context"), None, "tensor", None),
        ),
    }
    for name, (call, tokens, axes) in calls.items():
        with jax.sharding.use_abstract_mesh(MESH):
            jaxpr = jax.make_jaxpr(call)(params, tokens, cache)
        of_heads = [
            (spec, users)
            for shape, spec, users in constraints(jaxpr.jaxpr, [])
            if shape[-2:] == heads
        ]
        ((spec, (product,)),) = of_heads
        assert spec == PartitionSpec(*axes), name
        assert product.primitive.name == "mul", name
