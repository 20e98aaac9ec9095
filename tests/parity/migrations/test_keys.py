"""Keys, rules, ties and random state: faults that others met when they moved models."""

import flax.serialization
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen as nn
from flax import nnx

from parity import migration
from shared.stores import CheckpointError, from_tree, open_store
from tests.parity.migrations.checking import assert_same, digests, read
from tests.parity.migrations.models import (
    LAYERS,
    LIST,
    WIDTH,
    LinenList,
    NNXList,
    save_standard,
)

# Faults of others: numbers and texts as keys, and their order.


@pytest.fixture
def constant_list():
    """Variables of the list model in which layer i is full of i."""
    return {
        "params": {
            f"layers_{i}": {"kernel": jnp.full((WIDTH, WIDTH), float(i))}
            for i in range(LAYERS)
        }
    }


def test_a01_a_list_is_loaded_from_text_keys_and_each_layer_is_its_own(
    constant_list, tmp_path
):
    source = save_standard(constant_list, tmp_path / "linen")
    migration.plan(source, to="nnx", nnx=NNXList).write(tmp_path / "nnx")
    paths = open_store(tmp_path / "nnx").leaves
    assert ("layers", "10", "kernel", "value") in paths
    model = NNXList(nnx.Rngs(0))
    assert migration.load_into(model, tmp_path / "nnx").leaves == LAYERS
    for i, layer in enumerate(model.layers):
        assert np.array_equal(layer.kernel[...], np.full((WIDTH, WIDTH), i))


def test_a01_a_restored_plain_dict_with_text_keys_is_loaded(constant_list, tmp_path):
    """Orbax gives text keys without a target; Flax refuses them, or does nothing."""
    model = NNXList(nnx.Rngs(0))
    for i, layer in enumerate(model.layers):
        layer.kernel.set_value(jnp.full((WIDTH, WIDTH), float(i)))
    save_standard(nnx.to_pure_dict(nnx.state(model)), tmp_path / "dict")
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(tmp_path / "dict")
    assert {type(key) for key in plain["layers"]} == {str}
    fresh = NNXList(nnx.Rngs(1))
    assert migration.load_into(fresh, from_tree(plain)).leaves == LAYERS
    assert_same(nnx.state(fresh), nnx.state(model))


def test_a01_a_load_that_matches_nothing_is_an_error(tmp_path):
    source = save_standard({"a": jnp.ones(2)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="Not one leaf") as error:
        migration.load_into(NNXList(nnx.Rngs(0)), source)
    assert "layers/0/kernel" in str(error.value)
    assert "a." in str(error.value)


class Containers(nnx.Module):
    """Texts of digits as keys, beside a list."""

    def __init__(self, rngs):
        linear = lambda: nnx.Linear(2, 2, use_bias=False, rngs=rngs)
        self.d = nnx.Dict({"0": linear(), "1": linear()})
        self.l = nnx.List([linear(), linear()])


@pytest.mark.parametrize("form", ["state", "dict"])
def test_a02_a_dict_with_digits_and_a_list_both_come_back(form, tmp_path):
    model = Containers(nnx.Rngs(0))
    state = nnx.state(model)
    tree = state if form == "state" else nnx.to_pure_dict(state)
    save_standard(tree, tmp_path / "x")
    fresh = Containers(nnx.Rngs(1))
    assert migration.load_into(fresh, tmp_path / "x").leaves == 4
    assert_same(nnx.state(fresh), state)
    assert {type(key) for key in nnx.state(fresh)["d"]} == {str}
    assert {type(key) for key in nnx.state(fresh)["l"]} == {int}


def test_a02_a_dict_with_digits_keeps_its_rules(tmp_path):
    model = Containers(nnx.Rngs(0))
    save_standard(nnx.state(model), tmp_path / "x")
    rules = [
        {"linen": r"params/dict_(\d)/kernel", "nnx": r"params/d/'\1'/kernel"},
        {"linen": r"params/list_(\d)/kernel", "nnx": r"params/l/\1/kernel"},
    ]
    plan = migration.plan(tmp_path / "x", to="linen", nnx=Containers, rules=rules)
    assert plan.ok, plan.differences
    for name in ("dict_0", "dict_1", "list_0", "list_1"):
        assert ("params", name, "kernel") in plan.leaves
    got = read(plan, "params", "dict_1", "kernel")
    assert np.array_equal(got, model.d["1"].kernel[...])


def test_a02_a_number_and_its_text_in_one_node_are_never_one(tmp_path):
    tree = {"m": {0: {"w": np.ones(2)}, "0": {"w": np.zeros(2)}}}
    path = tmp_path / "both.msgpack"
    # JAX cannot sort such keys, and so Flax cannot write them; others can.
    pack = flax.serialization._msgpack_ext_pack
    path.write_bytes(msgpack.packb(tree, default=pack, strict_types=True))
    plan = migration.plan(path, to="linen")
    [difference] = plan.differences
    assert difference.what == "two sources"
    assert "('m', 0, 'w') and ('m', '0', 'w') become it" in difference.detail
    with pytest.raises(CheckpointError, match="nothing is written"):
        plan.write(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a03_the_index_is_a_number_from_ten_on(constant_list, tmp_path):
    """In NNX's list, in the optimizer's, and on the way back."""
    tx = optax.adam(1e-3)
    state = tx.init(constant_list["params"])
    state = (state[0]._replace(mu=constant_list["params"]), *state[1:])
    source = save_standard({**constant_list, "opt_state": state}, tmp_path / "x")
    plan = migration.plan(source, to="nnx", nnx=NNXList)
    for i in range(LAYERS):
        want = np.full((WIDTH, WIDTH), i, np.float32)
        path = ("layers", str(i), "kernel", "value")
        assert np.array_equal(read(plan, "model", *path), want)
        assert np.array_equal(read(plan, "opt_state", 0, "mu", *path), want)
    plan.write(tmp_path / "nnx")
    back = migration.plan(
        tmp_path / "nnx", to="linen", linen=LinenList(), inputs=LIST.inputs
    )
    for i in range(LAYERS):
        got = read(back, "params", f"layers_{i}", "kernel")
        assert got[0, 0] == i


def test_a04_msgpack_with_numbers_as_keys_is_read(tmp_path):
    """`to_bytes` of an NNX dict: Flax cannot read it back."""
    model = NNXList(nnx.Rngs(0), count=2)
    pure = nnx.to_pure_dict(nnx.state(model))
    assert set(pure["layers"]) == {0, 1}
    path = tmp_path / "x.msgpack"
    path.write_bytes(flax.serialization.msgpack_serialize(pure))
    fresh = NNXList(nnx.Rngs(1), count=2)
    migration.load_into(fresh, path)
    assert_same(nnx.state(fresh), nnx.state(model))
    plan = migration.plan(
        path, to="linen", linen=LinenList(count=2), inputs=LIST.inputs
    )
    assert plan.ok, plan.differences
    got = read(plan, "params", "layers_1", "kernel")
    assert np.array_equal(got, model.layers[1].kernel[...])


# RNG state.


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(2, 2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def noisy(seed=0):
    rngs = nnx.Rngs(seed, dropout=jax.random.key(seed + 5, impl="rbg"))
    model = Noisy(rngs)
    model.drop.rngs.count.set_value(jnp.uint32(17))
    return model


def test_a05_typed_keys_go_to_linen_and_back(tmp_path):
    model = noisy()
    save_standard(nnx.state(model), tmp_path / "x")
    plan = migration.plan(tmp_path / "x", to="linen", nnx=Noisy)
    assert plan.ok, plan.differences
    text = "\n".join(plan.describe())
    assert (
        "2 leaves of RNG state, which Linen does not keep, stand under nnx_rngs" in text
    )
    plan.write(tmp_path / "linen")
    migration.plan(tmp_path / "linen", to="nnx", nnx=Noisy).write(tmp_path / "nnx")
    assert digests(tmp_path / "x") == digests(tmp_path / "nnx")
    fresh = nnx.eval_shape(lambda: noisy(3))
    loaded = migration.load_into(fresh, tmp_path / "nnx", rngs=True)
    assert loaded.random == loaded.skipped == ()
    key = fresh.drop.rngs.key[...]
    assert jax.random.key_impl(key) == jax.random.key_impl(model.drop.rngs.key[...])
    assert_same(nnx.state(fresh), nnx.state(model))
    assert int(fresh.drop.rngs.count[...]) == 17


def test_a05_a_model_keeps_its_own_keys_and_that_is_told(tmp_path):
    save_standard(nnx.state(noisy()), tmp_path / "x")
    model = noisy(3)
    before = jax.random.key_data(model.drop.rngs.key[...])
    loaded = migration.load_into(model, tmp_path / "x")
    assert np.array_equal(jax.random.key_data(model.drop.rngs.key[...]), before)
    names = ("drop/rngs/count", "drop/rngs/key")
    assert loaded.random == loaded.skipped == names


def test_rng_state_is_left_out_by_a_rule_and_never_without(tmp_path):
    save_standard(nnx.state(noisy()), tmp_path / "x")
    rule = {"nnx": "nnx_rngs/.*", "reason": "a new run draws new masks"}
    plan = migration.plan(tmp_path / "x", to="linen", nnx=Noisy, rules=[rule])
    assert {path[0] for path in plan.leaves} == {"params"}
    assert [path[:3] for path in plan.ignored] == [
        ("drop", "rngs", "count"),
        ("drop", "rngs", "key"),
    ]
    assert any("a new run draws new masks" in line for line in plan.describe())


def test_a15_another_layout_of_rng_state_stops_nothing(tmp_path):
    """A Flax release put a level `streams` into `Rngs`."""
    tree = nnx.to_pure_dict(nnx.state(noisy()))
    moved = tree["drop"].pop("rngs")
    tree["drop"] = {"rngs": {"streams": {"default": moved}}}
    save_standard(tree, tmp_path / "x")
    model = noisy(3)
    loaded = migration.load_into(model, tmp_path / "x")
    assert np.array_equal(model.fc.kernel[...], tree["fc"]["kernel"])
    assert loaded.leaves == 2
    base = "drop/rngs/streams/default"
    assert loaded.skipped == (f"{base}/count", f"{base}/key")
    plan = migration.plan(tmp_path / "x", to="linen", nnx=Noisy)
    assert plan.ok, plan.differences
    assert ("nnx_rngs", "drop", "rngs", "streams", "default", "key") in plan.leaves


# Tied modules.


class LinenTied(nn.Module):
    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(8, 4, name="embed")
        return embed.attend(jnp.tanh(embed(ids)))


class NNXTied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = self.embed

    def __call__(self, ids):
        return self.head.attend(jnp.tanh(self.embed(ids)))


def test_a17_a_tied_leaf_is_one_leaf_and_stays_tied(tmp_path):
    ids = jnp.arange(6)
    variables = LinenTied().init(jax.random.key(0), ids)
    source = save_standard(variables, tmp_path / "linen")
    plan = migration.plan(source, to="nnx", nnx=NNXTied)
    assert list(plan.leaves) == [("embed", "embedding", "value")]
    plan.write(tmp_path / "nnx")
    model = NNXTied(nnx.Rngs(1))
    assert migration.load_into(model, tmp_path / "nnx").leaves == 1
    assert model.head.embedding is model.embed.embedding
    want = LinenTied().apply(variables, ids)
    assert np.asarray(model(ids)).tobytes() == np.asarray(want).tobytes()
    model.embed.embedding.set_value(jnp.zeros((8, 4)))
    assert not np.any(model.head.embedding[...])
    back = migration.plan(tmp_path / "nnx", to="linen", nnx=NNXTied)
    assert digests(back.store) == digests(source)
