"""Low-rank adapters: what they compute, that they alone are trained, both frontends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import partial_eval

import shared
import zoo_linen
import zoo_nnx
from parity.trees import compare_bytes
from shared import lora, training
from shared.layers import latent_attention
from shared.layers.linear import project
from shared.plan import insert, node_at
from shared.presets import qwen3_next_tiny
from shared.presets.qwen3_next import hybrid_layers
from shared.trees import flatten, path_text

# Two blocks of two layers and one, so that there are both stack axes.
SCANNED = qwen3_next_tiny(6).replace(
    layers=hybrid_layers(6, period=3, dense_layers=(0, 1, 3, 4))
)
# What is trained has no delta rule, which takes longest to compile.
TRAINED = SCANNED.replace(layers=hybrid_layers(4, period=1, dense_layers=(0, 2)))
UNSCANNED = SCANNED.replace(scan_layers=False)
OPTIONS = lora.LoraConfig(3, 8.0, ("q_proj", "o_proj", "mlp/gate", "up_proj"))
LORA = lora.LoraConfig(3, 8.0, (*OPTIONS.targets, "in_proj_qkvz", "out_proj"))
TOKENS = np.random.default_rng(0).integers(0, 96, (4, 9), np.int32)
merge = jax.jit(lora.merge, static_argnums=0)


def drawn(specs, seed=1, stddev=0.125):
    random, tree = np.random.default_rng(seed), {}
    for path, spec in flatten(specs):
        leaf = random.normal(scale=stddev, size=spec.shape)
        if path[-1].endswith("_lora_scale"):
            leaf = np.full(spec.shape, 8 / 3)
        insert(tree, path, jnp.asarray(leaf, jnp.float32))
    return tree


@functools.cache
def base(config=SCANNED):
    return drawn(shared.param_specs(config), seed=0, stddev=0.02)


@functools.cache
def adapters(seed=1):
    """As after some training: B is not zero."""
    return drawn(lora.param_specs(SCANNED, LORA), seed)


@functools.cache
def function_of(frontend, config=SCANNED):
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    model = nnx.eval_shape(lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0)))
    return zoo_nnx.as_function(model)


@functools.cache
def logits(config=SCANNED, frontend="linen"):
    return jax.jit(lambda params: function_of(frontend, config)(params, TOKENS).logits)


def take_step(frontend, optimizer, state, base):
    return training.train_step(
        function_of(frontend, TRAINED),
        optimizer,
        state,
        {"tokens": TOKENS},
        complete=functools.partial(lora.join, TRAINED, base),
    )


@functools.cache
def first_state():
    options = training.OptimizerConfig(learning_rate=1e-2)
    specs = lora.param_specs(TRAINED, OPTIONS)
    optimizer = training.make_optimizer(options, TRAINED, specs)
    first = lora.init(jax.random.key(1), TRAINED, OPTIONS)
    return optimizer, training.init_state(first, optimizer)


@functools.cache
def tuned(frontend):
    """Adapters after some steps on one batch, and the losses on the way."""
    optimizer, state = first_state()
    step, losses = jax.jit(functools.partial(take_step, frontend, optimizer)), []
    for _ in range(6):
        state, metrics = step(state, base(TRAINED))
        losses.append(metrics.loss)
    return state, np.stack(losses)


def test_a_projection_is_x_times_w_plus_scaled_a_b():
    random = np.random.default_rng(0)
    x, w, a, b = (
        random.normal(size=shape) for shape in ((2, 3, 5), (5, 7), (5, 2), (2, 7))
    )
    weights = {"up": w, "up_lora_a": a, "up_lora_b": b, "up_lora_scale": [0.75]}
    weights = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in weights.items()}
    y = project(jnp.asarray(x, jnp.float32), weights, "up")
    np.testing.assert_allclose(y, x @ (w + 0.75 * a @ b), rtol=0, atol=5e-6)
    # Qwix's have no scale, and Qwix adds them itself.
    del weights["up_lora_scale"]
    y = project(jnp.asarray(x, jnp.float32), weights, "up")
    np.testing.assert_allclose(y, x @ w, rtol=0, atol=5e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_merged_weights_are_w_plus_scaled_a_b_layer_by_layer(axis):
    config = SCANNED.replace(param_scan_axis=axis)
    plain = drawn(shared.param_specs(config), seed=2)
    own = drawn(lora.param_specs(config, LORA))
    merged = merge(config, plain, own)
    changed = 0
    for path, slot, _ in config.plan.places():
        at = (slice(None),) * axis + slot
        before, adapter, after = (
            {name: np.float64(leaf[at]) for name, leaf in flatten(node_at(tree, path))}
            for tree in (plain, own, merged)
        )
        assert before.keys() == after.keys()
        for name, w in before.items():
            beside = [(*name[:-1], f"{name[-1]}_lora_{ab}") for ab in "ab"]
            if beside[0] in adapter:
                a, b = (adapter[one] for one in beside)
                w = w + 8 / 3 * a @ b
                changed += 1
            np.testing.assert_allclose(after[name], w, rtol=0, atol=5e-7)
    assert changed == 4 * 3 + 2 * 5  # linear and dense, full and with experts


def test_an_adapted_model_is_the_merged_one():
    run, own = logits(), drawn(lora.param_specs(SCANNED, LORA), stddev=0.05)
    adapted = run(lora.join(SCANNED, base(), own))
    merged = run(merge(SCANNED, base(), own))
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=1e-6)
    assert np.abs(adapted - run(base())).max() > 0.03


def test_a_fine_tune_lowers_the_loss_and_equals_the_merged_model():
    state, losses = tuned("linen")
    assert np.all(np.diff(losses) < 0) and losses[-1] < losses[0] - 0.15
    run, plain, own = logits(TRAINED), base(TRAINED), state["params"]
    adapted = run(lora.join(TRAINED, plain, own))
    merged = run(lora.merge(TRAINED, plain, own))
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=1e-6)
    # New adapters change nothing, trained ones do.
    first = lora.join(TRAINED, plain, first_state()[1]["params"])
    np.testing.assert_array_equal(run(first), run(plain))
    assert np.abs(adapted - run(plain)).max() > 0.03


def test_adapters_alone_are_trained():
    state, first = tuned("linen")[0], first_state()[1]["params"]
    mu = dict(flatten(state["opt_state"][1][0].mu))
    assert mu.keys() == dict(flatten(first)).keys()
    for path, leaf in flatten(state["params"]):
        old = dict(flatten(first))[path]
        if path[-1].endswith("_scale"):
            np.testing.assert_array_equal(leaf, old)
            assert not np.any(mu[path])
            continue
        # Every layer, and of the experts every one that a token has chosen.
        moved = np.any(np.asarray(leaf) != old, axis=(-2, -1))
        assert moved.mean() > 0.5 if "experts" in path else moved.all(), path


def test_adapters_share_the_arrays_of_the_base():
    plain = dict(flatten(base()))
    trees = [lora.join(SCANNED, base(), adapters(seed)) for seed in (1, 2)]
    model = zoo_nnx.from_params(SCANNED, trees[0])
    for tree in (*trees, zoo_nnx.to_params(model)):
        own, back = lora.split(tree)
        own = dict(flatten(own))
        assert own.keys() == plain.keys()
        for path, leaf in own.items():
            pointers = leaf.unsafe_buffer_pointer(), plain[path].unsafe_buffer_pointer()
            assert pointers[0] == pointers[1], path
        assert jax.tree.structure(back) == jax.tree.structure(adapters())
    # What has no adapter is not copied for a merged model either.
    merged = lora.merge(SCANNED, base(), adapters())
    assert merged["embed_tokens"] is base()["embed_tokens"]


def test_frontends_train_alike_to_the_bit():
    (ours, losses), (theirs, others) = (tuned(f) for f in ("linen", "nnx"))
    np.testing.assert_array_equal(losses, others)
    assert compare_bytes(ours["params"], theirs["params"], finite=True).equal


def test_a_module_that_has_adapters_runs_as_one_that_is_given_them():
    joined = lora.join(SCANNED, base(), adapters())
    model = zoo_nnx.from_params(SCANNED, joined)
    texts = [
        jax.jit(lambda params, f=f: f(params, TOKENS).logits).lower(joined).as_text()
        for f in (function_of("nnx"), zoo_nnx.as_function(model))
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 1e4


def test_layouts_are_equal():
    _, plain = shared.relayout(SCANNED, base(), scan_layers=False)
    new, own = lora.relayout(SCANNED, adapters(), scan_layers=False)
    assert new == UNSCANNED
    joined = lora.join(UNSCANNED, plain, own)
    theirs, others = (logits(UNSCANNED, f)(joined) for f in ("linen", "nnx"))
    np.testing.assert_array_equal(theirs, others)
    ours = logits()(lora.join(SCANNED, base(), adapters()))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)

    first = lora.init(jax.random.key(3), SCANNED, LORA)
    _, relaid = lora.relayout(SCANNED, first, scan_layers=False)
    again = lora.init(jax.random.key(3), UNSCANNED, LORA)
    assert compare_bytes(relaid, again, finite=True).equal
    back = lora.relayout(UNSCANNED, again, scan_layers=True)[1]
    assert compare_bytes(first, back, finite=True).equal


def test_first_values_are_those_of_peft():
    """A uniform within 1 / sqrt(inputs), B zero, each layer its own."""
    first = lora.init(jax.random.key(0), SCANNED, LORA)
    specs = dict(flatten(lora.param_specs(SCANNED, LORA)))
    assert specs.keys() == dict(flatten(first)).keys()
    for path, leaf in flatten(first):
        assert leaf.shape == specs[path].shape and leaf.dtype == np.float32
        if path[-1].endswith("_b"):
            assert not np.any(leaf)
        elif path[-1].endswith("_a"):
            bound = leaf.shape[-2] ** -0.5
            assert 0.9 * bound < np.abs(leaf).max() <= bound
            matrices = np.asarray(leaf).reshape(-1, *leaf.shape[-2:])
            assert len({matrix.tobytes() for matrix in matrices}) == len(matrices)
        else:
            np.testing.assert_allclose(leaf, 8 / 3, rtol=1e-6)


def test_nnx_models_hold_adapters_as_lora_params():
    model = zoo_nnx.from_params(SCANNED, lora.join(SCANNED, base(), adapters()))
    trained = nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam))
    scales = [path for path, _ in flatten(adapters()) if path[-1].endswith("_scale")]
    wanted = {path for path, _ in flatten(adapters())} - set(scales)
    assert {path for path, _ in flatten(trained)} == wanted
    a = model.layers.local_layers.mlp.up_proj_lora_a
    assert a.get_metadata()["out_sharding"] == ("blocks", "layers", "embed", None)


CASES = [
    ("deepseek-v3-tiny", "nnx"),
    ("gemma-4-e-tiny", "linen"),
    ("gemma-4-moe-tiny", "nnx"),
    ("qwen3.5-moe-tiny", "linen"),
]


@pytest.mark.parametrize("name, frontend", CASES)
def test_no_adapter_is_left_out(name, frontend):
    """Every projection there is can have one, and the logits depend on each leaf."""
    config = shared.preset(name)
    options = lora.LoraConfig(2, 4.0, tuple(lora.targets(config)))
    function, params = function_of(frontend, config), shared.abstract_params(config)
    own = jax.eval_shape(lambda: lora.init(jax.random.key(0), config, options))
    traced = jax.make_jaxpr(
        lambda own, params: function(lora.join(config, params, own), TOKENS).logits
    )(own, params)
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    unused = [
        path_text(path)
        for (path, _), is_used in zip(flatten(own), used, strict=False)
        if not is_used
    ]
    assert not unused


def test_latent_attention_in_a_cache_sees_the_adapter():
    """There the weight is not applied to the residual stream."""
    config = shared.preset("deepseek-v3-tiny").attention
    specs = latent_attention.param_specs(config)
    random = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(random.normal(size=shape) / 8, jnp.float32)
    weights = {name: draw(spec.shape) for name, spec in specs.items()}
    inputs, outputs = specs["kv_b_proj"].shape
    a, b = draw((inputs, 2)), draw((2, outputs))
    own = {"lora_a": a, "lora_b": b, "lora_scale": jnp.full((1,), 2.0)}
    adapted = weights | {f"kv_b_proj_{name}": leaf for name, leaf in own.items()}
    change = 2 * np.float64(a) @ np.float64(b)
    merged = jnp.asarray(weights["kv_b_proj"] + change, jnp.float32)
    x = draw((2, 5, config.hidden_size))
    context = shared.Context.create((2, 5))
    cache = latent_attention.init_cache(config, 2, 8, x.dtype)
    apply = functools.partial(latent_attention.apply, config=config)
    run = jax.jit(lambda weights: apply(weights, x, context, cache)[0])
    expected = run(weights | {"kv_b_proj": merged})
    np.testing.assert_allclose(run(adapted), expected, rtol=0, atol=2e-6)
    assert np.abs(run(weights) - expected).max() > 1e-3


def test_what_does_not_fit_is_told():
    wrong = lora.LoraConfig(2, 4.0, ("q_proj", "qkv_proj"))
    with pytest.raises(shared.ConfigError, match="'qkv_proj', which is no .*q_proj"):
        lora.init(jax.random.key(0), SCANNED, wrong)
    with pytest.raises(ValueError, match="unexpected: layers/local_layers/linear_attn"):
        lora.join(UNSCANNED, {}, adapters())
    half = {path: leaf for path, leaf in flatten(adapters())}
    gone = ("layers", "global_layer", "self_attn", "q_proj_lora_b")
    tree = {}
    for path in half.keys() - {gone}:
        insert(tree, path, half[path])
    with pytest.raises(ValueError, match="missing: layers/global_layer.*q_proj_lora_b"):
        lora.join(SCANNED, base(), tree)
    for options, name in (
        ({"rank": 0}, "rank"),
        ({"alpha": -1.0}, "alpha"),
        ({"targets": ()}, "targets"),
        ({"targets": "q_proj"}, "targets"),
    ):
        given = {"rank": 2, "alpha": 4.0, "targets": ("q_proj",), **options}
        with pytest.raises(shared.ConfigError, match=name):
            lora.LoraConfig(**given)
