"""The mixture layer of every family against loops in float64 and published numbers."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import zoo_linen
import zoo_nnx
from shared.config import MoEConfig
from shared.context import Context
from shared.layers import experts, mlp, sparse_moe
from shared.params import draw_tree
from tests.references import experts as expert_loop
from tests.references import routing as routing_loop

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "deepseek_v3"
B, T, D = 2, 7, 8

QWEN = MoEConfig(D, 6, 2, expert_size=5, shared_expert_size=4)
DEEPSEEK = MoEConfig(
    D,
    8,
    3,
    expert_size=5,
    shared_expert_size=6,
    shared_expert_gated=False,
    scores="sigmoid",
    correction_bias=True,
    num_groups=4,
    groups_per_token=2,
    scaling_factor=2.5,
)
GEMMA = MoEConfig(
    D,
    6,
    2,
    expert_size=5,
    shared_expert_size=0,
    per_expert_scale=True,
    norm_router_input=True,
    router_norm_eps=1e-2,
    activation="gelu_tanh",
)
CONFIGS = {"qwen": QWEN, "deepseek": DEEPSEEK, "gemma": GEMMA}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def specs(config):
    tree = {
        **sparse_moe.param_specs(config),
        "experts": experts.param_specs(config),
    }
    if config.shared_expert is not None:
        tree["shared_expert"] = mlp.param_specs(config.shared_expert)
    return tree


def draw_weights(config, dtype=np.float64):
    """Every parameter is random, so none stands where it does nothing."""
    random = np.random.default_rng(0)
    draw = lambda spec: random.normal(size=spec.shape).astype(dtype)
    return jax.tree.map(draw, specs(config))


def draw_inputs(dtype=np.float64):
    x, router_input = np.random.default_rng(1).normal(size=(2, B, T, D)).astype(dtype)
    ids = np.ones((B, T), np.int32)
    ids[0, :2] = ids[1, 4:] = 0
    return x, router_input, ids


@functools.partial(jax.jit, static_argnames="config")
def apply(weights, x, router_input, ids, config):
    own = {name: weights[name] for name in sparse_moe.param_specs(config)}
    shared = None
    if config.shared_expert is not None:
        shared = functools.partial(
            mlp.apply, weights["shared_expert"], config=config.shared_expert
        )
    return sparse_moe.apply(
        own,
        x,
        Context.create(x.shape[:2], segment_ids=ids),
        router_input=router_input,
        experts=functools.partial(experts.apply, weights["experts"], config=config),
        shared_expert=shared,
        config=config,
    )


def route_by_hand(weights, seen, config):
    """[n, A] experts and weights, and the router's logits."""
    if config.norm_router_input:
        size = np.sqrt(np.mean(seen**2, -1, keepdims=True) + config.router_norm_eps)
        seen = seen / size * weights["router_scale"] / np.sqrt(D)
    logits, k = seen @ weights["gate"], config.experts_per_token
    if config.scores == "sigmoid":
        routed = routing_loop.route_by_groups(
            logits,
            k,
            weights["e_score_correction_bias"],
            config.num_groups,
            config.groups_per_token,
            config.scaling_factor,
        )
    else:
        scale = weights.get("per_expert_scale", np.ones(config.num_experts))
        routed = routing_loop.route_scaled(logits, k, scale)
    return *routed, logits


def apply_by_hand(weights, x, router_input, ids, config):
    tokens, real = x.reshape(-1, D), ids.reshape(-1) > 0
    seen = tokens if router_input is None else router_input.reshape(-1, D)
    chosen, share, logits = route_by_hand(weights, seen, config)
    names = "gate_proj", "up_proj", "down_proj"
    projections = [weights["experts"][name] for name in names]
    y = expert_loop.expert_mlp(
        tokens, chosen, share, *projections, real, config.activation
    )
    if config.shared_expert is not None:
        gate, up, down = (weights["shared_expert"][name] for name in names)
        opened, _ = expert_loop.ACTIVATIONS[config.activation](tokens @ gate)
        extra = (opened * (tokens @ up)) @ down
        if config.shared_expert_gated:
            extra *= expert_loop.sigmoid(tokens @ weights["shared_expert_gate"])
        y += extra
    counts = np.bincount(chosen[real].ravel(), minlength=config.num_experts)
    return y.reshape(x.shape), logits.reshape(B, T, -1), counts


@each
@pytest.mark.parametrize("own_input", [False, True])
def test_the_layer_matches_the_loop(config, own_input):
    weights, (x, router_input, ids) = draw_weights(config), draw_inputs()
    if not own_input:
        router_input = None
    y, logits, counts = apply_by_hand(weights, x, router_input, ids, config)
    with jax.enable_x64(True):
        result = apply(weights, x, router_input, ids, config)
        actual, aux = jax.tree.map(np.asarray, result)
    real = ids > 0  # a shared expert works on padding, too: nobody reads that
    np.testing.assert_allclose(actual[real], y[real], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(aux.logits, logits, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(aux.stats.counts, counts)
    np.testing.assert_allclose(np.sum(aux.stats.probabilities), real.sum(), rtol=1e-12)
    assert aux.stats.tokens == real.sum()


@each
def test_what_the_router_sees_is_x_unless_told(config):
    weights, (x, _, ids) = draw_weights(config, np.float32), draw_inputs(np.float32)
    told, not_told = (apply(weights, x, seen, ids, config) for seen in (x, None))
    jax.tree.map(np.testing.assert_array_equal, told, not_told)


@each
def test_every_parameter_has_a_gradient_but_the_correction_bias(config):
    weights, (x, seen, ids) = draw_weights(config, np.float32), draw_inputs(np.float32)
    loss = lambda weights: jnp.sum(apply(weights, x, seen, ids, config)[0] ** 2)
    slopes = jax.jit(jax.grad(loss))(weights)
    assert not np.any(slopes.pop("e_score_correction_bias", 0))
    assert all(np.any(slope) for slope in jax.tree.leaves(slopes))


def test_parameters_are_there_only_where_they_are_used():
    shapes = {
        name: {k: spec.shape for k, spec in sparse_moe.param_specs(config).items()}
        for name, config in CONFIGS.items()
    }
    assert shapes == {
        "qwen": {"gate": (D, 6), "shared_expert_gate": (D, 1)},
        "deepseek": {"gate": (D, 8), "e_score_correction_bias": (8,)},
        "gemma": {"gate": (D, 6), "router_scale": (D,), "per_expert_scale": (6,)},
    }
    without = dataclasses.replace(QWEN, shared_expert_size=0)
    assert list(sparse_moe.param_specs(without)) == ["gate"]


def test_first_values_change_nothing():
    for config in (DEEPSEEK, GEMMA):
        first = draw_tree(specs(config), jax.random.key(0), "bfloat16")
        assert first["gate"].dtype == jnp.bfloat16
        for name, value in (
            ("e_score_correction_bias", 0),
            ("router_scale", 1),
            ("per_expert_scale", 1),
        ):
            assert np.all(np.asarray(first.get(name, value)) == value)
        bias = first.get("e_score_correction_bias", jnp.float32(0))
        assert bias.dtype == jnp.float32


def test_a_router_of_bfloat16_is_normalised_in_float32():
    weights, (x, seen, ids) = draw_weights(GEMMA, np.float32), draw_inputs(np.float32)
    low = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), weights)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), low)
    seen = jnp.asarray(seen, jnp.bfloat16)
    _, aux = apply(low, jnp.asarray(x, jnp.bfloat16), seen, ids, GEMMA)
    *_, logits = route_by_hand(wide, np.float64(seen).reshape(-1, D), GEMMA)
    assert aux.logits.dtype == jnp.float32
    np.testing.assert_allclose(aux.logits.reshape(-1, 6), logits, rtol=1e-5, atol=1e-6)


@each
def test_both_frontends_give_the_same_bits(config):
    x, seen, ids = map(jnp.asarray, draw_inputs(np.float32))
    linen = zoo_linen.SparseMoE(config)
    layer = zoo_nnx.SparseMoE(config, rngs=nnx.Rngs(params=jax.random.key(3)))
    graphdef, state = nnx.split(layer)

    def in_linen(params):
        context = Context.create((B, T), segment_ids=ids)
        return linen.apply({"params": params}, x, context, seen)

    def in_nnx(state):
        context = Context.create((B, T), segment_ids=ids)
        return nnx.merge(graphdef, state)(x, context, seen)

    first = linen.init(jax.random.key(3), x, Context.create((B, T)), seen)["params"]
    own = nnx.to_pure_dict(state)
    assert jax.tree.structure(own) == jax.tree.structure(specs(config))
    assert jax.tree.structure(own) == jax.tree.structure(first)
    jax.tree.map(np.testing.assert_array_equal, own, first)

    random = draw_weights(config, np.float32)
    nnx.replace_by_pure_dict(state, random)
    results = jax.jit(in_linen)(random), jax.jit(in_nnx)(state)
    jax.tree.map(np.testing.assert_array_equal, *results)


# --- DeepSeek-V3 as transformers computes it -----------------------------------------

PUBLISHED = MoEConfig(
    hidden_size=32,
    num_experts=8,
    experts_per_token=3,
    expert_size=16,
    shared_expert_size=16,
    shared_expert_gated=False,
    scores="sigmoid",
    correction_bias=True,
    num_groups=4,
    groups_per_token=2,
    scaling_factor=2.5,
)


@functools.cache
def golden():
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    return tensors, np.load(GOLDEN / "golden.npz")


def published_layer(i):
    tensors, _ = golden()
    get = lambda name: tensors[f"model.layers.{i}.mlp.{name}.weight"].T
    names = "gate_proj", "up_proj", "down_proj"
    bias = tensors[f"model.layers.{i}.mlp.gate.e_score_correction_bias"]
    return {
        "gate": get("gate"),
        "e_score_correction_bias": bias,
        "experts": {
            name: np.stack([get(f"experts.{e}.{name}") for e in range(8)])
            for name in names
        },
        "shared_expert": {name: get(f"shared_experts.{name}") for name in names},
    }


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_layer_of_deepseek_v3_matches_the_reference(layer):
    tensors, arrays = golden()
    stream = arrays[f"hidden5/layer_{layer - 1}"] + arrays[f"hidden5/mixer_{layer}"]
    size = np.sqrt(np.mean(stream**2, axis=-1, keepdims=True) + 0.01)
    norm = tensors[f"model.layers.{layer}.post_attention_layernorm.weight"]
    x = np.float32(stream / size * norm)
    y, _ = apply(
        published_layer(layer), x, None, np.ones(x.shape[:2], np.int32), PUBLISHED
    )
    np.testing.assert_allclose(y, arrays[f"hidden5/mlp_{layer}"], atol=1e-5)
