"""The decoder does what NNX's users expect of a module, scanned or not."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shared
import zoo_linen
import zoo_nnx
from parity.trees import compare_bytes
from shared.config import LayerKind
from shared.layers.decoder_layer import LayerAux
from shared.presets import qwen3_next_tiny
from shared.presets.qwen3_5 import qwen3_5_tiny
from shared.trees import flatten

LINEAR = LayerKind("linear_attention", "dense")
FULL = LayerKind("full_attention", "dense")
TOKENS = jnp.array([[3, 1, 2], [5, 5, 4]])

# Two blocks of two local layers and a full one, and a remainder: layers 0 to 6.
SCANNED = qwen3_next_tiny(7).replace(layers=(LINEAR, LINEAR, FULL) * 2 + (LINEAR,))
CONFIGS = {"scanned": SCANNED, "unscanned": SCANNED.replace(scan_layers=False)}
# The same of another family.
QWEN3_5 = qwen3_5_tiny(7).replace(layers=SCANNED.layers)
ALL = {**CONFIGS, "qwen3_5": QWEN3_5}
layouts = pytest.mark.parametrize("config", ALL.values(), ids=ALL)
families = pytest.mark.parametrize("config", (SCANNED, QWEN3_5), ids=lambda c: c.family)
TRACES = []


@functools.cache
def params_of(config):
    return shared.init_params(jax.random.key(0), config)


def build(config=SCANNED, **kwargs):
    return zoo_nnx.from_params(config, params_of(config), **kwargs)


def loss_of(model, tokens):
    output = model(tokens)
    return shared.decoder_loss(output, tokens, model.config).total


# The decoder as it is.


@families
def test_nnx_jit_and_value_and_grad_see_every_parameter(config):
    model = build(config)
    logits = nnx.jit(lambda model, tokens: model(tokens).logits)(model, TOKENS)
    assert logits.shape == (*TOKENS.shape, config.vocab_size)
    loss, gradient = nnx.jit(nnx.value_and_grad(loss_of))(model, TOKENS)
    assert np.isfinite(loss)
    shapes = jax.tree.map(jnp.shape, nnx.to_pure_dict(gradient))
    assert shapes == jax.tree.map(jnp.shape, params_of(config))
    for path, leaf in flatten(nnx.to_pure_dict(gradient)):
        assert np.any(np.asarray(leaf) != 0), path


class Adapter(nnx.Param):
    """Parameters of which a user wants to train no others."""


@nnx.jit
def train_step(model, optimizer, tokens):
    argument = nnx.DiffState(0, optimizer.wrt)
    loss, gradient = nnx.value_and_grad(loss_of, argnums=argument)(model, tokens)
    optimizer.update(model, gradient)
    return loss


@families
def test_optimizer_of_all_parameters_lowers_the_loss(config):
    model = build(config)
    optimizer = nnx.Optimizer(model, optax.sgd(jnp.float32(0.5)), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, TOKENS)) for _ in range(3)]
    assert losses[2] < losses[0]


@families
def test_optimizer_of_a_subclass_changes_nothing_else(config):
    model = build(config)
    before = jax.tree.map(np.asarray, zoo_nnx.to_params(model))
    model.norm = Adapter(model.norm.get_value())
    mlp = model.layers.local_layers.mlp
    mlp.up_proj = Adapter(mlp.up_proj.get_value())
    optimizer = nnx.Optimizer(model, optax.sgd(jnp.float32(0.5)), wrt=Adapter)
    train_step(model, optimizer, TOKENS)
    changed = compare_bytes(before, zoo_nnx.to_params(model)).differences
    assert {d.path for d in changed} == {"norm", "layers/local_layers/mlp/up_proj"}


@families
def test_state_filters_and_axis_names(config):
    model = build(config.replace(dropout_rate=0.5), rngs=nnx.Rngs(dropout=0))
    params, rngs, rest = nnx.state(model, nnx.Param, nnx.RngState, ...)
    assert compare_bytes(nnx.to_pure_dict(params), params_of(config)).equal
    assert len(jax.tree.leaves(rngs)) == 2
    assert not jax.tree.leaves(rest)
    for path, variable in nnx.to_flat_state(params):
        assert len(variable.out_sharding) == variable.get_value().ndim, path
    moe = nnx.state(model, nnx.All(nnx.Param, nnx.PathContains("mlp")))
    assert all("mlp" in path for path, _ in nnx.to_flat_state(moe))


@families
def test_a_clone_is_a_model_of_its_own(config):
    model = build(config)
    twin = nnx.clone(model)
    assert compare_bytes(zoo_nnx.to_params(twin), params_of(config)).equal
    twin.norm.set_value(twin.norm.get_value() + 1)
    assert compare_bytes(zoo_nnx.to_params(model), params_of(config)).equal


@families
def test_eval_shape_makes_no_array(config):
    model = nnx.eval_shape(lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert len(leaves) == len(list(flatten(params_of(config))))


@families
def test_display_shows_the_tree(config, capsys):
    nnx.display(build(config))
    shown = capsys.readouterr().out
    weights = params_of(config)["layers"]["local_layers"]["linear_attn"]
    assert any(name.startswith("in_proj_qkv") for name in weights)
    for name in ("local_layers", "global_layer", "layers_remainder", *weights):
        assert name in shown


def test_a_layer_can_be_swapped_after_construction():
    class Half(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.scale = nnx.Param(jnp.full((2, 2), 0.5))  # of the stacked run

        def __call__(self, x):
            scale = self.scale.get_value().astype(x.dtype)
            return self.inner(x) * jnp.broadcast_to(scale, x.shape)

    model = build()
    before = model(TOKENS).logits
    run = model.layers.local_layers
    run.mlp = Half(run.mlp)
    halved = model(TOKENS).logits
    assert "scale" in zoo_nnx.to_params(model)["layers"]["local_layers"]["mlp"]
    run.mlp.inner.down_proj.set_value(2 * run.mlp.inner.down_proj.get_value())
    np.testing.assert_allclose(model(TOKENS).logits, before, rtol=0, atol=1e-6)
    assert np.max(np.abs(halved - before)) > 1e-4

    # A single layer, by another of the same kind.
    other = zoo_nnx.MLP(SCANNED.mlp, rngs=nnx.Rngs(9))
    flat = build(CONFIGS["unscanned"])
    flat.layers_3.mlp = other
    got = zoo_nnx.to_params(flat)["layers_3"]["mlp"]
    assert compare_bytes(got, zoo_nnx.to_params(other)).equal
    assert np.max(np.abs(flat(TOKENS).logits - before)) > 1e-4


# Dropout of the config.


@functools.cache
def linen_dropout(config):
    model = zoo_linen.Decoder(config)

    def run(params, key):
        rngs = {"dropout": key}
        return model.apply(
            {"params": params}, TOKENS, deterministic=False, rngs=rngs
        ).logits

    return jax.jit(run)(params_of(config), jax.random.key(5))


def nnx_dropout(config):
    model = build(config, rngs=nnx.Rngs(dropout=jax.random.key(5)))
    model.train()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, rest):
        return nnx.merge(graphdef, params, rest)(TOKENS).logits

    return jax.jit(run)(params, rest)


@pytest.mark.parametrize("remat", ["none", "full"])
@layouts
def test_dropout_masks_are_those_of_linen(config, remat):
    config = config.replace(dropout_rate=0.5, remat_policy=remat)
    np.testing.assert_array_equal(nnx_dropout(config), linen_dropout(config))
    # Another mask would move a logit by far more than rounding does.
    scanned = config.replace(scan_layers=True, remat_policy="none")
    np.testing.assert_allclose(
        linen_dropout(config), linen_dropout(scanned), rtol=0, atol=1e-5
    )


def test_train_and_eval_switch_dropout():
    model = build(SCANNED.replace(dropout_rate=0.5), rngs=nnx.Rngs(dropout=0))
    plain = model(TOKENS).logits
    model.train()
    first, second = model(TOKENS).logits, model(TOKENS).logits
    assert model.rngs.dropout.count[...] == 2
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(model(TOKENS, deterministic=True).logits, plain)
    model.eval()
    np.testing.assert_array_equal(model(TOKENS).logits, plain)
    again = model(TOKENS, deterministic=False, rngs=nnx.Rngs(dropout=0)).logits
    np.testing.assert_array_equal(again, first)


def test_dropout_without_a_key_is_an_error_that_says_how():
    model = build(SCANNED.replace(dropout_rate=0.5))
    with pytest.raises(ValueError, match="rngs=nnx.Rngs"):
        nnx.eval_shape(lambda: model(TOKENS, deterministic=False).logits)


# A layer of the user's own: every sort of Variable, sliced and stacked again.


class OwnLayer(nnx.Module):
    """Linear, BatchStat, Cache and Dropout."""

    def __init__(self, config, kind, *, rngs):
        size = config.hidden_size
        self.dense = nnx.Linear(size, size, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(size))
        self.calls = nnx.Cache(jnp.int32(0))

    def __call__(self, x, context, cache):
        TRACES.append(0)
        y = self.dense(x)
        self.mean.set_value(
            0.5 * self.mean.get_value() + 0.5 * jnp.mean(y, axis=(0, 1))
        )
        self.calls.set_value(self.calls.get_value() + 1)
        kept = self.dropout(jnp.ones_like(y))
        self.note(kept, context.layer_index)
        return x + 0.1 * y * kept, cache, LayerAux(None, None)

    def note(self, kept, index):
        pass


class SowingLayer(OwnLayer):
    """For calls under `nnx.capture`."""

    def note(self, kept, index):
        self.sow(nnx.Intermediate, "kept", kept)
        self.sow(nnx.Intermediate, "index", index)


def own_model(config, layer=OwnLayer):
    rngs = nnx.Rngs(params=0, dropout=1)
    return zoo_nnx.Decoder(config, layer=layer, rngs=rngs)


def per_layer(model, kind, state=None):
    """One nested dict a layer of the Variables of a kind, stacked in front."""
    tree = nnx.to_pure_dict(nnx.state(model, kind) if state is None else state)
    layers = {k: v for k, v in tree.items() if k.startswith("layers")}
    axis = model.config.param_scan_axis if kind is nnx.Param else 0
    return model.config.plan.unstack(layers, axis)


@layouts
def test_own_layers_have_one_slice_a_layer(config):
    model = own_model(config)
    size = config.hidden_size
    for kind, name, shape in (
        (nnx.Param, "dense", None),
        (nnx.BatchStat, "mean", (size,)),
        (nnx.Cache, "calls", ()),
    ):
        trees = per_layer(model, kind)
        assert len(trees) == config.num_layers
        if shape is not None:
            assert all(tree[name].shape == shape for tree in trees)
    kernels = {
        np.asarray(tree["dense"]["kernel"]).tobytes()
        for tree in per_layer(model, nnx.Param)
    }
    assert len(kernels) == config.num_layers


def test_own_layers_run_alike_scanned_or_not():
    found = []
    for config in CONFIGS.values():
        model = own_model(config, SowingLayer)
        run = nnx.capture(model, nnx.Intermediate)
        structure = jax.tree.structure(nnx.state(model))
        for call in (1, 2):
            output, sown = run(TOKENS)
            sown = per_layer(model, nnx.Intermediate, sown)
            assert all(tree["calls"] == call for tree in per_layer(model, nnx.Cache))
            # Each call leaves its count, and a layer its own mask.
            for tree in per_layer(model, nnx.RngCount):
                assert tree["dropout"]["rngs"]["count"] == call
            indices = [int(*tree["index"]) for tree in sown]
            assert indices == list(range(config.num_layers))
            masks = [np.asarray(*tree["kept"]) for tree in sown]
            assert len({mask.tobytes() for mask in masks}) == config.num_layers
            assert all(set(np.unique(mask)) == {0, 2} for mask in masks)
            assert jax.tree.structure(nnx.state(model)) == structure
        means = np.stack([tree["mean"] for tree in per_layer(model, nnx.BatchStat)])
        assert np.all(np.any(means != 0, axis=1))
        found.append((output.logits, means, np.stack(masks)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@layouts
def test_outputs_of_methods_can_be_captured_inside_the_layers(config):
    model = build(config)
    run = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)
    output, captured = run(TOKENS, output_hidden_states=True)
    layers = per_layer(model, nnx.Intermediate, captured)
    outputs = np.stack([layer["__call__"][0][0] for layer in layers])
    np.testing.assert_array_equal(outputs, output.hidden_states.layers)


@layouts
def test_a_second_eager_call_traces_nothing(config):
    model = own_model(config)
    model(TOKENS)
    before = len(TRACES)
    model(TOKENS)
    assert len(TRACES) == before


def test_a_second_jitted_call_traces_nothing():
    chex.clear_trace_counter()
    graphdef, state = nnx.split(build())

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(state, tokens):
        return nnx.merge(graphdef, state)(tokens).logits

    run(state, TOKENS)
    run(state, TOKENS + 1)


def test_gradients_reach_own_layers_under_nnx_grad():
    model = own_model(SCANNED)
    _, gradient = nnx.jit(nnx.value_and_grad(loss_of))(model, TOKENS)
    kernels = nnx.to_pure_dict(gradient)["layers"]["local_layers"]["dense"]["kernel"]
    assert kernels.shape[:2] == (2, 2)
    assert np.all(np.any(np.asarray(kernels) != 0, axis=(2, 3)))
    # What the layers keep has moved on, also under the gradient.
    assert all(tree["calls"] == 1 for tree in per_layer(model, nnx.Cache))


def test_user_modules_may_hold_the_decoder_in_a_list():
    class Ensemble(nnx.Module):
        def __init__(self, *, rngs):
            self.members = nnx.List(
                [own_model(SCANNED), zoo_nnx.MLP(SCANNED.mlp, rngs=rngs)]
            )

        def __call__(self, tokens):
            return self.members[0](tokens).logits

    logits = nnx.jit(Ensemble.__call__)(Ensemble(rngs=nnx.Rngs(0)), TOKENS)
    assert logits.shape == (*TOKENS.shape, SCANNED.vocab_size)
