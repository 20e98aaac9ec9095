"""Linen against NNX: one tree, one set of first values, the same bits.

Structure is compared for drawn configs under `jax.eval_shape`; numbers on a few
compiled configs with drawn seeds, tokens and segments. What is called equal is equal to
the bit, unless a tolerance stands beside it.

Scanned and unscanned layers are different programs. Measured on a CPU they give the
same logits and losses to the bit, and the same gradients but for one leaf of the
remainder, by 1e-8 of its largest entry; nothing promises that, so the test has a
tolerance. Padding moves logits and gradients by up to 1e-6.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import shared
import zoo_linen
import zoo_nnx
from parity import decoders, strategies
from parity.trees import compare_bytes, compare_structure
from shared.config import LayerKind
from shared.layers import decoder
from shared.params import child_key, map_specs
from shared.presets import hybrid_layers, qwen3_next_tiny
from shared.trees import flatten

# Tiny presets, which between them have every sort of layer that there is; Qwen3-Next,
# whose experts Qwen3.5 has, is in tests/parity/programs.
FAMILIES = (
    "qwen3.5-tiny",
    "gemma-4-moe-tiny",
    "gemma-4-e-tiny",
    "deepseek-v3-tiny",
)
BATCH, LENGTH, PADS = 2, 12, 5
REST = LENGTH - PADS
LINEAR = LayerKind("linear_attention", "dense")
FULL = LayerKind("full_attention", "dense")

# float32 rounding, amplified by the delta rule; relative to the largest of a leaf.
NOISE = 1e-5

# Compiled configs: a remainder and experts; the full layer first, tied, stacked along
# axis 1, rematerialised. `make` builds each once.
CONFIGS = {
    "experts": qwen3_next_tiny(5).replace(layers=hybrid_layers(5, period=2)),
    "tied": qwen3_next_tiny(4, tie_word_embeddings=True).replace(
        layers=(FULL, LINEAR) * 2, param_scan_axis=1, remat_policy="full"
    ),
}
SMALL = qwen3_next_tiny(2).replace(
    layers=(LayerKind("linear_attention", "moe"), FULL), scan_layers=False
)


@functools.cache
def params_of(config, seed=0):
    return jax.jit(shared.init_params, static_argnums=1)(jax.random.key(seed), config)


@functools.cache
def apply_of(frontend, config):
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    return zoo_nnx.as_function(zoo_nnx.from_params(config, params_of(config)))


@functools.cache
def measured(frontend, config):
    return decoders.measured(config, apply_of(frontend, config))


@functools.cache
def forward(frontend, config):
    return jax.jit(apply_of(frontend, config))


def example(seed, segment_ids=None, config=CONFIGS["experts"]):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, config.vocab_size, (BATCH, LENGTH), dtype=np.int32)
    if segment_ids is None:
        segment_ids = np.ones_like(tokens)
    return decoders.Example(tokens, tokens, np.asarray(segment_ids, np.int32))


def assert_same_bytes(left, right, **kwargs):
    compared = compare_bytes(left, right, **kwargs)
    assert compared.equal, compared.differences


def assert_near(left, right, tolerance=NOISE):
    """Leaf by leaf, relative to the largest number of the leaf but at least to 1e-3."""
    ours, theirs = dict(flatten(left)), dict(flatten(right))
    assert ours.keys() == theirs.keys()
    for path, mine in ours.items():
        mine, other = (np.asarray(x, np.float64) for x in (mine, theirs[path]))
        scale = max(np.max(np.abs(other)), 1e-3)
        np.testing.assert_allclose(
            mine, other, rtol=0, atol=tolerance * scale, err_msg="/".join(path)
        )


# One tree.


@settings(max_examples=12)
@given(strategies.decoder_configs(max_layers=4))
def test_trees_of_drawn_configs_are_identical_and_are_the_specs(config):
    pair = decoders.abstract_pair(config)
    tier = decoders.check_tree(pair)
    assert tier.status == "proved", (config, tier.differences)

    nnx_params = zoo_nnx.to_params(pair.nnx)
    specs = shared.abstract_params(config)
    for params in (pair.params, nnx_params):
        compared = compare_structure(params, specs)
        assert compared.equal, (config, compared.differences)
    assert all(
        len(axes) == len(spec.shape)
        for (_, axes), (_, spec) in zip(
            flatten(shared.logical_axes(config)), flatten(specs), strict=True
        )
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_one_program_in_both_frontends(name):
    """Forward, loss with gradients, prefill and step: equal for all inputs."""
    tier = decoders.check_program(decoders.abstract_pair(shared.preset(name)))
    assert tier.status == "proved", tier.details
    assert tier.compared.leaves == 4


@pytest.mark.parametrize("form", ["nested", "flat"])
def test_rematerialised_blocks_are_one_program_in_both_frontends(form):
    config = CONFIGS["experts"].replace(remat_policy="full", block_form=form)
    tier = decoders.check_program(decoders.abstract_pair(config))
    assert tier.status == "proved", tier.differences


@settings(max_examples=30)
@given(strategies.decoder_configs())
def test_specs_hold_every_layer_once_and_unstack_to_the_unscanned_tree(config):
    flat = config.replace(scan_layers=False, scan_period=None)
    stacked = map_specs(
        lambda spec: np.broadcast_to(np.float32(0), spec.shape),
        shared.param_specs(config),
    )
    layers = {
        f"layers_{i}": layer
        for i, layer in enumerate(config.plan.unstack(stacked, config.param_scan_axis))
    }
    shapes = {path: leaf.shape for path, leaf in flatten(layers)}
    outer = decoder.outer_specs(flat).keys()
    assert shapes == {
        path: leaf.shape
        for path, leaf in flatten(shared.abstract_params(flat))
        if path[0] not in outer
    }


# The same bytes from a seed.


@pytest.mark.parametrize(("name", "seed"), [("experts", 0), ("tied", 2**31 - 1)])
def test_first_values_do_not_depend_on_frontend_or_on_jit(name, seed):
    config = CONFIGS[name]
    tier = decoders.check_init(config, seed)  # both by their own way, jitted
    assert tier.status == "proved", tier.differences
    key = jax.random.key(seed)
    eager = shared.init_params(key, config)
    assert_same_bytes(eager, params_of(config, seed))
    model = zoo_nnx.Decoder(config, rngs=nnx.Rngs(params=key))
    assert_same_bytes(eager, zoo_nnx.to_params(model))


@settings(max_examples=3)
@given(strategies.seeds(), st.sampled_from(sorted(CONFIGS)))
def test_first_values_do_not_depend_on_scanning(seed, name):
    config = CONFIGS[name]
    flat = config.replace(scan_layers=False)
    scanned = params_of(config, seed)
    layers = config.plan.unstack(scanned, config.param_scan_axis)
    outer = {k: v for k, v in scanned.items() if not k.startswith("layers")}
    unstacked = outer | {f"layers_{i}": layer for i, layer in enumerate(layers)}
    assert_same_bytes(unstacked, params_of(flat, seed))


def test_linen_init_without_jit_gives_the_documented_bytes():
    tokens = jnp.zeros((1, 2), jnp.int32)
    variables = zoo_linen.Decoder(SMALL).init(jax.random.key(3), tokens)
    assert set(variables) == {"params"}
    assert_same_bytes(variables["params"], params_of(SMALL, 3))


@pytest.mark.parametrize(
    "make_rngs",
    [
        lambda: nnx.Rngs(7),
        lambda: nnx.Rngs(params=7),
        lambda: nnx.Rngs(default=7),
        lambda: nnx.Rngs(jax.random.key(7)),
        lambda: nnx.Rngs(params=jax.random.key(7)),
        lambda: nnx.Rngs(default=jax.random.key(7), dropout=1),
        lambda: nnx.Rngs(7, params=7),
    ],
    ids=["seed", "params", "default", "key", "params key", "default key", "both"],
)
def test_every_way_to_give_a_seed_gives_the_same_bytes(make_rngs):
    model = zoo_nnx.Decoder(SMALL, rngs=make_rngs())
    assert_same_bytes(zoo_nnx.to_params(model), params_of(SMALL, 7))


def test_the_constructor_consumes_one_count_of_the_params_stream():
    rngs = nnx.Rngs(params=0, dropout=0)
    zoo_nnx.Decoder(SMALL, rngs=rngs)
    assert rngs.params.count[...] == 1
    assert rngs.dropout.count[...] == 0


def test_two_decoders_in_one_linen_module_get_each_its_own_documented_bytes():
    class Two(nn.Module):
        def setup(self):
            self.first, self.second = (zoo_linen.Decoder(SMALL) for _ in range(2))

        def __call__(self, tokens):
            return self.first(tokens).logits + self.second(tokens).logits

    key, tokens = jax.random.key(11), jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(Two().init)(key, tokens)["params"]
    for name in ("first", "second"):
        expected = shared.init_params(child_key(key, name), SMALL)
        assert_same_bytes(params[name], expected)
    assert not np.array_equal(
        params["first"]["embed_tokens"], params["second"]["embed_tokens"]
    )


# The same bits out.


@settings(max_examples=15)
@given(st.data(), st.sampled_from(sorted(CONFIGS)))
def test_logits_losses_and_gradients_are_equal_to_the_bit(data, name):
    config = CONFIGS[name]
    params = params_of(config, data.draw(st.integers(0, 3)))
    tokens = data.draw(strategies.tokens(config.vocab_size, BATCH, LENGTH))
    segments = data.draw(strategies.segment_ids(BATCH, LENGTH))
    labels = np.where(tokens % 5 == 0, np.int32(-100), tokens)
    inputs = decoders.Example(tokens, labels, segments)
    linen = measured("linen", config)(params, inputs)
    assert_same_bytes(linen, measured("nnx", config)(params, inputs), finite=True)


def test_subnormal_huge_and_tied_router_logits_are_equal_to_the_bit():
    """The router's weights are set so that its logits are extreme, or all tied."""
    config = CONFIGS["experts"]
    draw = np.random.default_rng(0)
    for scale in (0.0, 1e-40, 1e4):
        params = jax.tree.map(lambda leaf: leaf, params_of(config))
        gate = params["layers"]["global_layer"]["mlp"]["gate"]
        rows = draw.integers(-1, 2, gate.shape).astype(np.float32)
        params["layers"]["global_layer"]["mlp"]["gate"] = rows * np.float32(scale)
        linen, other = (
            measured(frontend, config)(params, example(1))
            for frontend in ("linen", "nnx")
        )
        assert_same_bytes(linen, other, finite=True)


def test_scanned_equals_unscanned_within_rounding():
    config = CONFIGS["experts"]
    flat, inputs = config.replace(scan_layers=False), example(2)
    scanned = measured("linen", config)(params_of(config), inputs)
    for frontend in ("linen", "nnx"):
        one_by_one = measured(frontend, flat)(params_of(flat), inputs)
        gradient = dict(scanned["gradient"])
        layers = config.plan.unstack(
            {k: gradient.pop(k) for k in list(gradient) if k.startswith("layers")}
        )
        gradient |= {f"layers_{i}": layer for i, layer in enumerate(layers)}
        assert_near(scanned | {"gradient": gradient}, one_by_one)


def test_flat_blocks_equal_nested_ones_within_rounding():
    config, inputs = CONFIGS["tied"], example(3, config=CONFIGS["tied"])
    nested = measured("linen", config)(params_of(config), inputs)
    flat = config.replace(block_form="flat")
    sides = [measured(f, flat)(params_of(config), inputs) for f in ("linen", "nnx")]
    assert_same_bytes(*sides)
    assert_near(sides[0], nested)


# Padding, packing, order.

PAD_TOKEN = 0


def with_huge_pad(params):
    """Padding that would be seen anywhere: its embedding is a thousand times larger."""
    embedding = params["embed_tokens"]
    return params | {"embed_tokens": embedding.at[PAD_TOKEN].multiply(1e5)}


def rows_of(seed):
    """[BATCH, REST] real tokens, none of them the pad token."""
    random = np.random.default_rng(seed)
    vocab = CONFIGS["experts"].vocab_size
    return random.integers(1, vocab, (BATCH, REST), dtype=np.int32)


def pad(rows, side):
    width = ((0, 0), (PADS, 0)) if side == "left" else ((0, 0), (0, PADS))
    tokens = np.pad(rows, width, constant_values=PAD_TOKEN)
    return decoders.Example(tokens, tokens, np.pad(np.ones_like(rows), width))


@settings(max_examples=5)
@given(strategies.seeds())
def test_padding_on_either_side_changes_nothing(seed):
    config, rows = CONFIGS["experts"], rows_of(seed)
    params = with_huge_pad(params_of(config))
    ones = np.ones_like(rows)
    plain = measured("linen", config)(params, decoders.Example(rows, rows, ones))
    assert np.all(np.asarray(plain["gradient"]["embed_tokens"])[PAD_TOKEN] == 0)
    for side, real in (("left", slice(PADS, None)), ("right", slice(None, REST))):
        padded = measured("linen", config)(params, pad(rows, side))
        # Not even a rounding of what stands at padding comes through.
        assert np.all(np.asarray(padded["gradient"]["embed_tokens"])[PAD_TOKEN] == 0)
        for name in ("logits", "router_logits"):
            axis = {"logits": 1, "router_logits": 2}[name]
            index = (slice(None),) * axis + (real,)
            padded[name] = padded[name][index]
        assert_near(padded, plain)


@settings(max_examples=5)
@given(strategies.seeds())
def test_packed_sequences_equal_separate_ones(seed):
    config = CONFIGS["experts"]
    run = functools.partial(measured("linen", config), params_of(config))
    packed = example(seed)
    segments = np.where(np.arange(LENGTH) < PADS, 1, 2)[None].repeat(BATCH, 0)
    together = run(packed._replace(segment_ids=segments.astype(np.int32)))
    for segment in (1, 2):
        alone = run(packed._replace(segment_ids=np.int32(segments == segment)))
        real = segments[0] == segment
        assert_near(
            {"logits": together["logits"][:, real]},
            {"logits": alone["logits"][:, real]},
        )
    # And they would differ in one sequence, so that the test can fail.
    mixed = run(packed)["logits"]
    assert np.max(np.abs(mixed - together["logits"])[:, PADS:]) > 100 * NOISE


@settings(max_examples=5)
@given(strategies.seeds(), st.integers(1, LENGTH - 1))
def test_no_token_sees_a_later_one(seed, cut):
    config = CONFIGS["experts"]
    run = functools.partial(measured("linen", config), params_of(config))
    first, other = example(seed), example(seed + 1)
    tokens = np.where(np.arange(LENGTH)[None] < cut, first.tokens, other.tokens)
    before = {"logits": run(first)["logits"][:, :cut]}
    after = {"logits": run(first._replace(tokens=tokens))["logits"][:, :cut]}
    assert_near(after, before)


# Tied embeddings.


def test_tied_model_has_one_leaf_whose_gradient_is_the_sum_of_both_uses():
    tied = CONFIGS["tied"]
    untied = tied.replace(tie_word_embeddings=False)
    params, inputs = params_of(tied), example(5)
    model = zoo_nnx.from_params(tied, params)
    assert "lm_head" not in params
    assert not hasattr(model, "lm_head")

    both = measured("linen", tied)(params, inputs)
    split = measured("linen", untied)(
        params | {"lm_head": params["embed_tokens"].T}, inputs
    )
    gradient = dict(split["gradient"])
    gradient["embed_tokens"] += gradient.pop("lm_head").T
    assert_near(both | {"gradient": both["gradient"]}, split | {"gradient": gradient})


# Dtypes.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes_of_leaves_and_outputs(param_dtype, dtype):
    config = SMALL.replace(param_dtype=param_dtype, dtype=dtype)
    params = params_of(config)
    for path, leaf in flatten(params):
        wide = path[-1] in ("A_log", "dt_bias")
        assert leaf.dtype == ("float32" if wide else param_dtype), path
    outputs = []
    for frontend in ("linen", "nnx"):
        output = forward(frontend, config)(params, example(1).tokens)
        assert output.logits.dtype == jnp.float32
        assert output.router_logits.dtype == jnp.float32
        assert output.aux_loss.dtype == jnp.float32
        named = output._asdict()
        outputs.append({k: v for k, v in named.items() if v is not None})
    assert_same_bytes(*outputs, finite=True)
    assert_same_bytes(params, zoo_nnx.to_params(zoo_nnx.from_params(config, params)))


@pytest.mark.parametrize("frontend", ["linen", "nnx"])
def test_the_residual_stream_has_the_dtype_of_the_config(frontend):
    config = SMALL.replace(dtype="bfloat16")
    apply = apply_of(frontend, config)  # cached: not to be built while tracing
    tokens = jnp.zeros((1, 3), jnp.int32)
    output = jax.eval_shape(
        lambda params: apply(params, tokens, output_hidden_states=True),
        shared.abstract_params(config),
    )
    assert [leaf.dtype for leaf in output.hidden_states] == [jnp.bfloat16] * 3


# Caches.


def test_continuing_from_a_cache_equals_one_call_and_caches_are_equal_to_the_bit():
    config = CONFIGS["experts"]
    params, inputs, half = params_of(config), example(3), LENGTH // 2
    segments = np.array(inputs.segment_ids)
    segments[0, :2] = 0  # a row padded on the left
    inputs = inputs._replace(segment_ids=segments)
    whole = measured("linen", config)(params, inputs)["logits"]
    real = segments > 0
    found = {}
    for frontend in ("linen", "nnx"):
        cache, logits = shared.init_cache(config, BATCH, LENGTH), []
        for part in (slice(None, half), slice(half, None)):
            with jax.default_matmul_precision("highest"):
                output = forward(frontend, config)(
                    params,
                    inputs.tokens[:, part],
                    segment_ids=segments[:, part],
                    positions=np.arange(LENGTH, dtype=np.int32)[None, part].repeat(
                        BATCH, 0
                    ),
                    cache=cache,
                )
            chex.assert_trees_all_equal_structs(output.cache, cache)
            cache = output.cache
            logits.append(output.logits)
        joined = np.concatenate(logits, axis=1)
        assert_near({"logits": joined[real]}, {"logits": np.asarray(whole)[real]})
        leaves = jax.tree_util.tree_leaves_with_path(cache)
        found[frontend] = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        found[frontend]["logits"] = joined
    assert_same_bytes(found["linen"], found["nnx"], finite=True)


# One trace a shape, and no difference under jit but rounding.


@pytest.mark.parametrize("frontend", ["linen", "nnx"])
def test_a_second_call_traces_nothing(frontend):
    chex.clear_trace_counter()
    apply = apply_of(frontend, SMALL)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params, tokens):
        return apply(params, tokens).logits

    for seed in range(2):
        run(params_of(SMALL), example(seed).tokens)


class VariantsTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_device=True)
    def test_init_params(self):
        init = self.variant(lambda key: shared.init_params(key, SMALL))
        assert_same_bytes(init(jax.random.key(7)), params_of(SMALL, 7))

    @chex.variants(with_jit=True, without_jit=True)
    def test_linen_forward(self):
        self._check_forward("linen")

    @chex.variants(with_jit=True, without_jit=True)
    def test_nnx_forward(self):
        self._check_forward("nnx")

    def _check_forward(self, frontend):
        apply, tokens = apply_of(frontend, SMALL), jnp.asarray(example(1).tokens)
        run = self.variant(lambda p, t: apply(p, t).logits)
        expected = forward(frontend, SMALL)(params_of(SMALL), tokens).logits
        assert_near({"logits": run(params_of(SMALL), tokens)}, {"logits": expected})


# What a call may be given, and what it must refuse.


@functools.cache
def small_model():
    kinds = hybrid_layers(2, period=2, dense_layers=(0, 1))
    config = qwen3_next_tiny(2).replace(layers=kinds)
    params = shared.init_params(jax.random.key(0), config)
    # Larger weights than first values, so that a wrong answer is far off.
    params = jax.tree.map(lambda leaf: leaf * 5 if leaf.ndim > 2 else leaf, params)
    model = zoo_linen.Decoder(config)
    run = jax.jit(
        lambda params, *args, **kw: model.apply({"params": params}, *args, **kw)
    )
    return config, params, functools.partial(run, params)


def test_a_cache_knows_its_positions():
    """Also where rows are padded on the left, and no positions are given."""
    config, _, run = small_model()
    tokens = np.random.default_rng(0).integers(0, 96, (2, 8))
    whole = run(tokens).logits
    segments = np.ones((2, 5), np.int32)
    first = np.array(tokens[:, :5])
    first[1, 2:], segments[1, :2] = tokens[1, :3], 0
    out = run(first, segment_ids=segments, cache=shared.init_cache(config, 2, 8))
    rest = np.stack([tokens[0, 5:8], tokens[1, 3:6]])
    logits = run(rest, cache=out.cache).logits
    np.testing.assert_allclose(logits[0], whole[0, 5:8], atol=2e-6)
    np.testing.assert_allclose(logits[1], whole[1, 3:6], atol=2e-6)


@pytest.mark.parametrize("bad", [-1, 96, 1000, -100])
def test_a_token_outside_the_vocabulary_gives_nan_and_nothing_at_padding(bad):
    _, _, run = small_model()
    good = np.array([[7, 8, 9, 10, 11]])
    broken = np.array([[7, 8, 9, bad, bad]])
    segments = np.array([[1, 1, 1, 0, 0]])
    assert np.isnan(run(broken).logits[0, 3:]).all()
    np.testing.assert_array_equal(
        run(broken, segment_ids=segments).logits[0, :3],
        run(good, segment_ids=segments).logits[0, :3],
    )


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        (np.zeros((2, 0), np.int32), {}, ("batch, time", "(2, 0)")),
        (np.zeros(3, np.int32), {}, ("batch, time", "(3,)")),
        (
            np.zeros((2, 3), np.int32),
            {"segment_ids": np.ones((2, 4), np.int32)},
            ("segment_ids", "(2, 4)", "(2, 3)"),
        ),
        (
            np.zeros((2, 3), np.int32),
            {"positions": np.zeros((2, 2, 3), np.int32)},
            ("time, height and width", "(2, 2, 3)"),
        ),
        (
            np.zeros((2, 3), np.int32),
            {"positions": np.zeros((3, 2, 3), np.int32)},
            ("(3, 2, 3)", "sections=None"),
        ),
        (np.zeros((2, 3), np.int32), {"cache": (3, 8)}, ("3 rows", "2", "batch size")),
        (np.zeros((2, 9), np.int32), {"cache": (2, 8)}, ("9 tokens", "8 positions")),
        (np.zeros((2, 3), np.int32), {"cache": {}}, ("layout", "init_cache")),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_both_values(tokens, options, words):
    config, params, _ = small_model()
    if isinstance(options.get("cache"), tuple):
        options = {"cache": shared.init_cache(config, *options["cache"])}
    for call in (
        functools.partial(zoo_linen.Decoder(config).apply, {"params": params}),
        zoo_nnx.from_params(config, params),
    ):
        with pytest.raises(ValueError) as error:
            jax.eval_shape(functools.partial(call, **options), tokens)
        for word in words:
            assert word in str(error.value)


def test_labels_of_another_batch_are_refused():
    config, _, run = small_model()
    output = run(np.zeros((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(1, 3\)"):
        shared.decoder_loss(output, np.zeros((1, 3), np.int32), config)


@pytest.mark.parametrize("label", [-1, 96])
def test_a_label_outside_the_vocabulary_is_no_other_label(label):
    config, _, run = small_model()
    output = run(np.zeros((1, 3), np.int32))
    assert np.isnan(
        shared.decoder_loss(output, np.array([[0, label, 0]]), config).total
    )
