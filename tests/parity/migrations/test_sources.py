"""Where in a checkpoint the model is, and what is a box, a collection, or neither."""

import tempfile

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parity import migration
from shared.stores import CheckpointError, from_tree, open_store, path_text
from tests.parity.migrations.checking import digests, read
from tests.parity.migrations.models import (
    LIST,
    TINY,
    LinenList,
    LinenTiny,
    NNXList,
    NNXTiny,
    save_standard,
)

# Where the model is, and what it is called.


@pytest.mark.parametrize(
    ("tree", "path", "target"),
    [
        (TINY, "(root)", ("fc",)),
        ({"params": TINY}, "params", ("fc",)),
        ({"params": TINY, "step": np.int32(1)}, "params", ("model", "fc")),
        ({"params": {"params": TINY}}, "params/params", ("fc",)),
        ({"state": {"params": TINY, "step": np.int32(1)}}, "state/params", None),
        (
            {"model": TINY, "opt_state": {}, "step": np.int32(1)},
            "model",
            ("model", "fc"),
        ),
        ({"target": TINY, "step": np.int32(1)}, "target", ("model", "fc")),
    ],
)
def test_the_parameters_of_linen_are_found(tree, path, target, tmp_path):
    plan = migration.plan(save_standard(tree, tmp_path / "x"), to="nnx", nnx=NNXTiny)
    assert plan.ok, plan.differences
    assert any(line.startswith(f"parameters at {path}:") for line in plan.describe())
    where = target or ("state", "model", "fc")
    got = read(plan, *where, "kernel", "value")
    assert np.array_equal(got, TINY["fc"]["kernel"])


BOXED = {"fc": {"kernel": {"value": TINY["fc"]["kernel"]}}}


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        (BOXED, "(root)"),
        (TINY, "(root)"),
        ({"model": BOXED}, "model"),
        ({"model": BOXED, "step": np.int32(1)}, "model"),
        ({"params": BOXED, "opt_state": {"count": np.int32(1)}}, "params"),
        ({"run": {"model": BOXED, "step": np.int32(1)}}, "run/model"),
    ],
)
def test_the_state_of_nnx_is_found(tree, path, tmp_path):
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(
        source, to="linen", linen=LinenTiny(), inputs=jnp.ones((1, 2))
    )
    assert plan.ok, plan.differences
    assert any(line.startswith(f"parameters at {path}:") for line in plan.describe())
    [where] = [p for p in plan.leaves if "kernel" in p]
    assert where[-3:] == ("params", "fc", "kernel")
    assert np.array_equal(read(plan, *where), TINY["fc"]["kernel"])


def test_the_place_can_be_given(tmp_path):
    tree = {
        "teacher": {"params": TINY},
        "student": {"params": {"fc": {"b": np.ones(2)}}},
    }
    source = save_standard(tree, tmp_path / "x")
    with pytest.raises(CheckpointError, match="several nodes `params`") as error:
        migration.plan(source, to="nnx")
    assert "teacher/params" in str(error.value)
    assert "student/params" in str(error.value)
    plan = migration.plan(source, to="nnx", params="teacher/params")
    assert ("teacher", "model", "fc", "kernel", "value") in plan.leaves
    assert ("student", "params", "fc", "b") in plan.leaves
    with pytest.raises(CheckpointError, match="no node 'nobody'"):
        migration.plan(source, to="nnx", params="nobody")


def test_a_train_state_without_a_model_is_asked_about(tmp_path):
    tree = {"weights": TINY, "step": np.int32(1)}
    source = save_standard(tree, tmp_path / "x")
    with pytest.raises(CheckpointError, match="--params=weights"):
        migration.plan(source, to="nnx")
    assert migration.plan(source, to="nnx", params="weights", nnx=NNXTiny).ok


def test_a_parameter_called_value_is_no_box(tmp_path):
    """Told by the module, by its siblings, or by the user."""

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("value", nn.initializers.ones, (2,))[None]

    class Both(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Linen(name="a")(nn.Dense(2, name="fc")(x))

    class NNXLinen(nnx.Module):
        def __init__(self):
            self.value = nnx.Param(jnp.ones(2))

    class NNXBoth(nnx.Module):
        def __init__(self, rngs):
            self.a = NNXLinen()
            self.fc = nnx.Linear(2, 2, rngs=rngs)

    variables = Both().init(jax.random.key(0), jnp.ones((1, 2)))
    source = save_standard(variables, tmp_path / "x")
    known = migration.plan(
        source, to="nnx", linen=Both(), inputs=jnp.ones((1, 2)), nnx=NNXBoth
    )
    assert known.ok, known.differences
    assert ("a", "value", "value") in known.leaves
    told = migration.plan(source, to="nnx", nnx=NNXBoth, boxes=False)
    assert told.ok, told.differences
    guess = migration.plan(source, to="nnx")
    assert any("--noboxes" in line for line in guess.describe())
    known.write(tmp_path / "nnx")
    back = migration.plan(tmp_path / "nnx", to="linen", nnx=NNXBoth)
    assert digests(back.store) == digests(source)
    model = NNXBoth(nnx.Rngs(0))
    assert migration.load_into(model, tmp_path / "nnx").leaves == 3


def test_a_module_saved_as_an_object_is_read(tmp_path):
    model = NNXList(nnx.Rngs(0))
    source = save_standard(model, tmp_path / "x")
    assert any("_pytree__state" in path for path in open_store(source).empty)
    plan = migration.plan(source, to="linen", linen=LinenList(), inputs=LIST.inputs)
    assert plan.ok, plan.differences
    assert plan.empty == {}
    got = read(plan, "params", "layers_11", "kernel")
    assert np.array_equal(got, model.layers[11].kernel[...])


def test_a_frozen_dict_is_a_dict(tmp_path):
    variables = flax.core.freeze({"params": TINY})
    path = tmp_path / "x.msgpack"
    path.write_bytes(flax.serialization.to_bytes(variables))
    assert migration.plan(path, to="nnx", nnx=NNXTiny).ok


def test_collections_of_ones_own_are_named(tmp_path):
    tree = {
        "params": TINY,
        "quant": {"fc": {"scale": np.ones(3, np.float32)}},
        "step": np.int32(3),
    }
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="nnx")
    assert "as it is: quant/fc/scale, step" in plan.describe()
    named = migration.plan(source, to="nnx", collection_names=["quant"])
    assert ("model", "fc", "scale", "value") in named.leaves
    named.write(tmp_path / "nnx")
    back = migration.plan(tmp_path / "nnx", to="linen")
    assert digests(back.store) == digests(source)


# Any tree, whatever its names are.

NAMES = [
    "a",
    "b",
    "value",
    "0",
    "10",
    "01",
    "params",
    "model",
    "step",
    "mu",
    "opt_state",
]
NAMES += [
    "batch_stats",
    "count",
    "rngs",
    "key",
    "c/d",
    "a.b",
    "it's",
    "(x,y)",
    "-1",
    "é ",
]

arrays = st.builds(
    lambda number, shape: np.full(shape, number, np.float32),
    st.integers(0, 9),
    st.sampled_from([(), (2,), (3, 2)]),
)
trees = st.dictionaries(
    st.sampled_from(NAMES),
    st.recursive(
        arrays,
        lambda inner: st.dictionaries(
            st.sampled_from(NAMES), inner, min_size=1, max_size=3
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


def bare(params):
    return params


def variables(params):
    return {"params": params, "batch_stats": {"q": {"z": np.ones(1, np.float32)}}}


def train_state(params):
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.scale(1.0))
    opt_state = jax.tree.map(np.asarray, tx.init(params))
    return {"params": params, "opt_state": opt_state, "step": np.int32(3)}


def state_of_variables(params):
    return train_state(variables(params))


@given(
    trees,
    st.sampled_from([bare, variables, train_state, state_of_variables]),
    st.sampled_from(["optax", "nnx"]),
    st.sampled_from(["state", "dict"]),
)
@settings(max_examples=40)
def test_any_tree_goes_there_and_back_or_is_refused(params, make, optimizer, form):
    source = from_tree(make(params))
    with tempfile.TemporaryDirectory() as folder:
        try:
            plan = migration.plan(source, to="nnx", optimizer=optimizer, form=form)
            plan.write(f"{folder}/nnx")
        except CheckpointError:
            assume(False)
        assert {path for move in plan.moves for path in move.sources} == {
            *source.leaves
        }
        back = migration.plan(f"{folder}/nnx", to="linen")
        assert back.ok, back.differences
        assert digests(back.store) == digests(source)
        empty = [{path_text(path) for path in x.empty} for x in (source, back)]
        assert empty[0] == empty[1] or make is bare
