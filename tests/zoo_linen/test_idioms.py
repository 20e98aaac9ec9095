"""The decoder does what Linen's users expect of a module, scanned or not."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import linen as nn

import shared
import zoo_linen
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


@functools.cache
def params_of(config):
    return shared.init_params(jax.random.key(0), config)


def assert_documented(params, config=SCANNED):
    compared = compare_bytes(params, params_of(config))
    assert compared.equal, compared.differences


def per_layer(config, tree):
    """One tree a layer; `tree` is stacked in front, as all but parameters are."""
    return config.plan.unstack(tree)


# The decoder as it is.


@families
def test_init_with_output_gives_the_real_output(config):
    model = zoo_linen.Decoder(config)
    init = jax.jit(model.init_with_output)
    output, variables = init(jax.random.key(0), TOKENS)
    assert_documented(variables["params"], config)
    expected = jax.jit(model.apply)({"params": params_of(config)}, TOKENS)
    np.testing.assert_array_equal(output.logits, expected.logits)
    assert np.std(output.logits) > 0.01


@families
def test_eval_shape_and_lazy_init_agree_with_init(config):
    model, key = zoo_linen.Decoder(config), jax.random.key(0)
    abstract = jax.eval_shape(model.init, key, TOKENS)["params"]
    expected = shared.abstract_params(config)
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), abstract, expected
        )
    )
    lazy = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    assert_documented(model.lazy_init(key, lazy)["params"], config)


@pytest.fixture
def unchecked_shapes():
    """`tabulate` puts descriptions in the place of arrays, also in our dataclasses."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@layouts
@pytest.mark.usefixtures("unchecked_shapes")
def test_tabulate_lists_every_parameter(config):
    text = zoo_linen.Decoder(config).tabulate(
        jax.random.key(0), TOKENS, console_kwargs={"width": 400}, depth=4
    )
    total = sum(leaf.size for _, leaf in flatten(shared.abstract_params(config)))
    assert f"{total:,}" in text
    for path in (group.name for group in config.plan.groups):
        assert path in text


@layouts
def test_interceptors_see_true_paths(config):
    seen = set()

    def note(call, args, kwargs, context):
        seen.add("/".join(context.module.path))
        return call(*args, **kwargs)

    model = zoo_linen.Decoder(config)
    with nn.intercept_methods(note):
        jax.eval_shape(model.apply, {"params": params_of(config)}, TOKENS)
    modules = {"/".join(path[:-1]) for path, _ in flatten(params_of(config))}
    assert modules <= seen
    if config.scan_layers:
        assert "layers/local_layers/linear_attn" in seen
        assert "layers/global_layer/self_attn" in seen
        assert "layers_remainder/local_layers/mlp" in seen


@layouts
def test_capture_intermediates_sees_inside_the_layers(config):
    model = zoo_linen.Decoder(config)

    def run(params):
        return model.apply(
            {"params": params},
            TOKENS,
            output_hidden_states=True,
            capture_intermediates=True,
        )

    output, state = jax.jit(run)(params_of(config))
    captured = state["intermediates"]
    outputs = [
        layer["__call__"][0][0]
        for layer in per_layer(
            config, {k: v for k, v in captured.items() if k.startswith("layers")}
        )
    ]
    np.testing.assert_array_equal(jnp.stack(outputs), output.hidden_states.layers)


@families
def test_nesting_keeps_the_tree_below_the_name(config):
    class Scorer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            logits = zoo_linen.Decoder(config, name="decoder")(tokens).logits
            return nn.Dense(1, name="score")(logits)

    model = Scorer()
    score, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    assert set(variables["params"]) == {"decoder", "score"}
    shapes = [
        jax.tree.map(jnp.shape, tree)
        for tree in (variables["params"]["decoder"], params_of(config))
    ]
    assert shapes[0] == shapes[1]
    again = jax.jit(model.apply)(variables, TOKENS)
    np.testing.assert_array_equal(score, again)


# A layer of the user's own: everything that Linen lifts, lifted.


class OwnLayer(nn.Module):
    """Dense, BatchNorm, a counter in `cache`, Dropout, perturb and sow."""

    config: shared.DecoderConfig
    kind: LayerKind

    @nn.compact
    def __call__(self, x, context, cache):
        y = nn.Dense(self.config.hidden_size, name="dense")(x)
        mean = self.variable(
            "batch_stats", "mean", jnp.zeros, (self.config.hidden_size,)
        )
        if not self.is_initializing() and self.is_mutable_collection("batch_stats"):
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(y, axis=(0, 1))
        calls = self.variable("cache", "calls", lambda: jnp.int32(0))
        if not self.is_initializing() and self.is_mutable_collection("cache"):
            calls.value += 1
        y = self.perturb("y", y)
        kept = nn.Dropout(0.5)(
            jnp.ones_like(y), deterministic=not self.has_rng("dropout")
        )
        self.sow("intermediates", "kept", kept)
        self.sow("intermediates", "index", context.layer_index)
        return x + 0.1 * y * kept, cache, LayerAux(None, None)


@functools.cache
def own_variables(config):
    model = zoo_linen.Decoder(config, OwnLayer)
    return jax.jit(model.init)(jax.random.key(0), TOKENS)


COLLECTIONS = ["batch_stats", "cache", "intermediates", "perturbations"]


@functools.cache
def own_run(config, dropout):
    model = zoo_linen.Decoder(config, OwnLayer)

    def run(variables, key):
        rngs = {"dropout": key} if dropout else None
        return model.apply(variables, TOKENS, rngs=rngs, mutable=COLLECTIONS)

    return jax.jit(run)


def layers_only(tree):
    return {k: v for k, v in tree.items() if k.startswith("layers")}


@layouts
def test_own_layers_have_stacked_parameters_and_variables(config):
    variables = own_variables(config)
    assert {"params", "batch_stats", "cache", "perturbations"} <= set(variables)
    hidden = config.hidden_size
    for name, (index, length) in {
        "params": (("dense", "kernel"), (hidden, hidden)),
        "batch_stats": (("mean",), (hidden,)),
        "cache": (("calls",), ()),
        "perturbations": (("y",), (*TOKENS.shape, hidden)),
    }.items():
        trees = per_layer(config, layers_only(variables[name]))
        assert len(trees) == config.num_layers
        for tree in trees:
            leaf = functools.reduce(lambda node, key: node[key], index, tree)
            assert leaf.shape == length, name
    if config.scan_layers:
        kernels = variables["params"]["layers"]["local_layers"]["dense"]["kernel"]
        assert kernels.shape == (2, 2, hidden, hidden)


def test_own_layers_start_equal_scanned_or_not():
    scanned, flat = (own_variables(config) for config in CONFIGS.values())
    trees = per_layer(SCANNED, layers_only(scanned["params"]))
    for i, tree in enumerate(trees):
        assert compare_bytes(tree, flat["params"][f"layers_{i}"]).equal
    kernels = [np.asarray(tree["dense"]["kernel"]) for tree in trees]
    assert not any(np.array_equal(kernels[0], other) for other in kernels[1:])


def test_own_layers_run_alike_scanned_or_not():
    found = {}
    for name, config in CONFIGS.items():
        variables = own_variables(config)
        output, state = own_run(config, False)(variables, None)
        output, state = own_run(config, False)({**variables, **state}, None)
        trees = [
            per_layer(config, layers_only(state[name])) for name in COLLECTIONS[:3]
        ]
        assert [int(tree["calls"]) for tree in trees[1]] == [2] * config.num_layers
        # Sown values accumulate as tuples, one entry a call.
        indices = [[int(x) for x in tree["index"]] for tree in trees[2]]
        assert indices == [[i, i] for i in range(config.num_layers)]
        found[name] = output.logits, jnp.stack([tree["mean"] for tree in trees[0]])
    for ours, theirs in zip(*found.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    assert np.all(np.any(found["scanned"][1] != 0, axis=1))


@layouts
def test_each_own_layer_draws_its_own_dropout_mask(config):
    _, state = own_run(config, True)(own_variables(config), jax.random.key(1))
    trees = per_layer(config, layers_only(state["intermediates"]))
    masks = [np.asarray(tree["kept"][-1]) for tree in trees]
    assert all(set(np.unique(mask)) == {0, 2} for mask in masks)
    assert len({mask.tobytes() for mask in masks}) == config.num_layers


@layouts
def test_perturbations_have_gradients_inside_the_scan(config):
    variables = own_variables(config)
    model = zoo_linen.Decoder(config, OwnLayer)

    def total(perturbations):
        variables_ = {**variables, "perturbations": perturbations}
        return jnp.sum(jnp.square(model.apply(variables_, TOKENS).logits))

    gradient = jax.jit(jax.grad(total))(variables["perturbations"])
    for tree in per_layer(config, layers_only(gradient)):
        assert np.any(np.asarray(tree["y"]) != 0)


# Dropout of the config; that it is NNX's is shown beside NNX.


@pytest.mark.parametrize("remat", ["none", "full"])
def test_dropout_masks_do_not_depend_on_scanning(remat):
    found = []
    for config in CONFIGS.values():
        config = config.replace(dropout_rate=0.5, remat_policy=remat)
        model = zoo_linen.Decoder(config)

        def run(params, key, model=model):
            return model.apply(
                {"params": params}, TOKENS, deterministic=False, rngs={"dropout": key}
            ).logits

        found.append(jax.jit(run)(params_of(config), jax.random.key(1)))
    # Another mask would move a logit by far more than rounding does.
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)
    plain = jax.jit(zoo_linen.Decoder(SCANNED).apply)(
        {"params": params_of(SCANNED)}, TOKENS
    )
    assert np.max(np.abs(found[0] - plain.logits)) > 1e-2


def test_dropout_without_a_key_is_an_error_that_says_how():
    model = zoo_linen.Decoder(SCANNED.replace(dropout_rate=0.5))
    variables = {"params": params_of(SCANNED)}
    with pytest.raises(ValueError, match="rngs={'dropout': key}"):
        jax.eval_shape(lambda: model.apply(variables, TOKENS, deterministic=False))
