"""Optimizer state: what optax makes of NNX's parameters is where Linen's must go."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from parity import migration
from tests.parity.migrations.checking import assert_same, digests, read
from tests.parity.migrations.models import (
    LinenPair,
    NNXPair,
    filled,
    restore,
    save_standard,
)


def is_kernel(params):
    def last(path, _):
        keys = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        return "kernel" in keys

    return jax.tree_util.tree_map_with_path(last, params)


def labels(params):
    return jax.tree.map(lambda kernel: "k" if kernel else "b", is_kernel(params))


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-3),
    "chain": optax.chain(
        optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3)), optax.scale(1.0)
    ),
    "masked": optax.chain(optax.masked(optax.adam(1e-3), is_kernel), optax.scale(0.5)),
    "several": optax.multi_transform(
        {"k": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.5)}, labels
    ),
    "frozen": optax.multi_transform(
        {"k": optax.adam(1e-3), "b": optax.set_to_zero()}, labels
    ),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 4),
    "ema": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_what_optax_makes_for_nnx(name, tmp_path):
    tx = OPTIMIZERS[name]
    params = LinenPair().init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    opt_state = tx.init(params)
    leaves, treedef = jax.tree.flatten(opt_state)
    opt_state = treedef.unflatten([filled(x, i) for i, x in enumerate(leaves)])
    tree = {"params": params, "opt_state": opt_state, "step": jnp.int32(3)}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXPair)
    assert plan.ok, plan.differences
    plan.write(tmp_path / "nnx")
    state = nnx.state(nnx.eval_shape(lambda: NNXPair(nnx.Rngs(0))), nnx.Param)
    like = {
        "model": state,
        "opt_state": jax.eval_shape(tx.init, state),
        "step": jnp.int32(0),
    }
    found = restore(tmp_path / "nnx", like)
    # Sorted by path, layers_0 and layers/0 are in one order.
    assert len(jax.tree.leaves(found["opt_state"])) == len(leaves)
    for a, b in zip(
        *map(jax.tree.leaves, (found["opt_state"], opt_state)), strict=True
    ):
        assert np.array_equal(a, b)
        assert a.dtype == b.dtype
    migration.plan(tmp_path / "nnx", to="linen").write(tmp_path / "back")
    assert_same(restore(tmp_path / "back", tree), tree)


def test_averaged_weights_follow_the_parameters(tmp_path):
    params = LinenPair().init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    ema = jax.tree.map(lambda x: x + 1, params)
    tree = {"params": params, "ema_params": ema, "step": jnp.int32(3)}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXPair)
    assert [str(f) for f in plan.followers] == ["ema_params (4 leaves)"]
    got = read(plan, "ema_params", "layers", "1", "bias", "value")
    assert np.array_equal(got, ema["layers_1"]["bias"])


def test_an_nnx_optimizer_of_someone_else_gets_its_empty_states_back(tmp_path):
    """It drops them, and a tuple of optax needs them."""
    tx = optax.chain(optax.clip(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    model = NNXPair(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(
        source, to="linen", linen=LinenPair(), inputs=jnp.ones((1, 3))
    )
    assert plan.ok, plan.differences
    assert plan.empty == {("opt_state", 0): "None", ("opt_state", 1, 1): "None"}
    plan.write(tmp_path / "linen")
    params = {
        f"layers_{i}": nnx.to_pure_dict(nnx.state(model.layers[i])) for i in range(2)
    }
    like = {"params": params, "opt_state": tx.init(params), "step": jnp.uint32(0)}
    found = restore(tmp_path / "linen", like)
    assert_same(found["params"], params)


@pytest.mark.parametrize("optimizer", ["optax", "nnx"])
def test_an_nnx_optimizer_is_loaded_from_either_form(optimizer, tmp_path):
    tx = OPTIMIZERS["chain"]
    params = LinenPair().init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    leaves, treedef = jax.tree.flatten(tx.init(params))
    opt_state = treedef.unflatten([filled(x, i) for i, x in enumerate(leaves)])
    tree = {"params": params, "opt_state": opt_state, "step": jnp.int32(41)}
    source = save_standard(tree, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXPair, optimizer=optimizer)
    plan.write(tmp_path / "nnx")
    model = NNXPair(nnx.Rngs(0))
    loaded = nnx.Optimizer(model, tx, wrt=nnx.Param)
    migration.load_into(model, tmp_path / "nnx")
    assert migration.load_into(loaded, tmp_path / "nnx").leaves == len(leaves) + 1
    assert int(loaded.step[...]) == 41
    mine = jax.tree.leaves(nnx.state(loaded)["opt_state"])
    for a, b in zip(mine, jax.tree.leaves(opt_state), strict=True):
        assert np.array_equal(a, b)
    migration.plan(tmp_path / "nnx", to="linen").write(tmp_path / "back")
    assert_same(restore(tmp_path / "back", tree), tree)


def test_a_train_state_of_nnx_goes_to_linen_and_back(tmp_path):
    tx = OPTIMIZERS["chain"]
    model = NNXPair(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for i, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(optimizer))):
        variable.set_value(filled(variable.get_value(), i))
    tree = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    source = save_standard(tree, tmp_path / "x")
    linen = {"linen": LinenPair(), "inputs": jnp.ones((1, 3))}
    migration.plan(source, to="linen", **linen).write(tmp_path / "linen")
    plan = migration.plan(
        tmp_path / "linen", to="nnx", nnx=NNXPair, **linen, optimizer="nnx"
    )
    assert plan.ok, plan.differences
    assert digests(plan.store) == digests(source)
    plan.write(tmp_path / "back")
    assert_same(restore(tmp_path / "back", tree), tree)
