"""Latent attention: made of heads, absorbed into latents, and as published."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from shared.config import LatentAttentionConfig, RopeConfig, YarnScaling
from shared.context import Context
from shared.layers import latent_attention
from shared.params import shapes
from tests.references import latent_attention as reference
from tests.references import rope as rope_loop
from zoo_linen.latent_attention import LatentAttention as InLinen
from zoo_nnx.latent_attention import LatentAttention as InNNX

GOLDEN = pathlib.Path(__file__).parents[1] / "goldens" / "deepseek_v3"
B, T, D, ROTARY, EPS = 3, 9, 8, 4, 1e-2
YARN = YarnScaling(
    8.0, 64, beta_fast=8.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=0.9
)


def make_config(q_lora_rank, rope, **options):
    return LatentAttentionConfig(
        hidden_size=D,
        num_heads=3,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=6,
        nope_head_dim=5,
        value_head_dim=7,
        rope=rope,
        latent_norm_eps=EPS,
        **options,
    )


CONFIGS = {
    "deepseek": make_config(10, RopeConfig(1e4, ROTARY, interleaved=True)),
    "no latent of queries": make_config(None, RopeConfig(1e4, ROTARY)),
    "yarn": make_config(10, RopeConfig(1e4, ROTARY, scaling=YARN)),
    "biases": make_config(10, RopeConfig(1e4, ROTARY), use_bias=True),
}
each = pytest.mark.parametrize("name", CONFIGS)

# Sequences of a row that follow each other, and padding before, between and behind.
IDS = np.int32([[1] * 9, [0, 0, 1, 0, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 0, 2, 3, 3]])
POSITIONS = np.int32(
    [range(9), [0, 0, 0, 1, 1, 2, 3, 3, 3], [0, 1, 2, 0, 1, 1, 2, 0, 1]]
)
REAL = IDS > 0
WAYS = {
    "one call": (9,),
    "chunks": (4, 3, 2),
    "one call and steps": (4, 1, 1, 1, 1, 1),
    "steps": (1,) * 9,
}


@functools.cache
def weights_of(name):
    random = np.random.default_rng(0)
    return {
        leaf: random.normal(size=spec.shape)
        for leaf, spec in latent_attention.param_specs(CONFIGS[name]).items()
    }


@functools.cache
def inputs():
    return np.random.default_rng(1).normal(size=(B, T, D))


@functools.cache
def by_hand(name):
    config = CONFIGS[name]
    pairs = range(ROTARY // 2)
    frequencies = [rope_loop.frequency(j, ROTARY, 1e4) for j in pairs]
    scale, magnitude = (5 + ROTARY) ** -0.5, 1.0
    if config.rope.scaling is YARN:
        frequencies = [
            rope_loop.yarn_frequency(j, ROTARY, 1e4, 8.0, 64, 8, 2) for j in pairs
        ]
        scale *= (0.09 * np.log(8) + 1) ** 2
        magnitude = (0.07 * np.log(8) + 1) / (0.09 * np.log(8) + 1)
    return reference.attend(
        weights_of(name),
        inputs(),
        POSITIONS,
        IDS,
        heads=3,
        nope=5,
        latent_width=6,
        eps=EPS,
        scale=scale,
        frequencies=frequencies,
        interleaved=config.rope.interleaved,
        magnitude=magnitude,
    )


@functools.partial(jax.jit, static_argnames="config")
def call(weights, x, ids, positions, cache, slot=(), *, config):
    context = Context.create(x.shape[:2], positions=positions, segment_ids=ids)
    context = context.at_layer(0, slot)
    return latent_attention.apply(weights, x, context, cache, config=config)


def run(name, way=(T,), room=T, dtype=np.float64, cache_dtype=None):
    """Output and cache over calls of the lengths in `way`."""
    config, start, outputs = CONFIGS[name], 0, []
    with jax.enable_x64(dtype == np.float64):
        weights = {k: v.astype(dtype) for k, v in weights_of(name).items()}
        cache = latent_attention.init_cache(
            config, B, room, jnp.dtype(cache_dtype or dtype)
        )
        for length in way:
            part = slice(start, start + length)
            x = inputs()[:, part].astype(dtype)
            y, cache = call(
                weights, x, IDS[:, part], POSITIONS[:, part], cache, config=config
            )
            assert y.dtype == dtype
            outputs.append(np.asarray(y))
            start += length
        return np.concatenate(outputs, axis=1), jax.tree.map(np.asarray, cache)


@each
def test_the_plain_form_matches_the_loop(name):
    expected, _ = by_hand(name)
    y, cache = run(name, room=0)
    assert np.abs(expected[REAL]).max() > 1
    np.testing.assert_allclose(y[REAL], expected[REAL], rtol=1e-12, atol=1e-12)
    assert cache.keys.size == cache.values.size == 0


@each
@pytest.mark.parametrize("way", WAYS)
def test_the_absorbed_form_gives_the_same_in_any_number_of_calls(name, way):
    plain, _ = run(name, room=0)
    y, cache = run(name, WAYS[way])
    np.testing.assert_allclose(y[REAL], plain[REAL], rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(cache.position, REAL.sum(axis=1))


@each
def test_the_cache_holds_a_latent_and_one_rotated_key_a_token(name):
    _, joint = by_hand(name)
    _, cache = run(name, WAYS["chunks"])
    assert cache.keys.shape == (B, T, 1, 6 + ROTARY)
    assert cache.values.shape == (B, T, 1, 0)
    for b in range(B):
        count = REAL[b].sum()
        np.testing.assert_allclose(cache.keys[b, :count, 0], joint[b, REAL[b]], 1e-12)
        np.testing.assert_array_equal(cache.segment_ids[b, :count], IDS[b, REAL[b]])
        assert not np.any(cache.keys[b, count:])


def test_a_token_sees_itself_as_it_is_and_not_as_the_cache_rounds_it():
    low = {"dtype": np.float32, "cache_dtype": "bfloat16"}
    alone, first_of_two = (
        run("deepseek", way, **low)[0][0, 7] for way in ((7, 1), (7, 2))
    )
    np.testing.assert_allclose(alone, first_of_two, atol=1e-5)
    wide = run("deepseek", (7, 1), dtype=np.float32)[0][0, 7]
    assert np.abs(alone - wide).max() > 1e-3  # so much does rounding change


@pytest.mark.parametrize("room", [0, T])
def test_bfloat16_stays_bfloat16(room):
    y, cache = run("deepseek", room=room, dtype=jnp.bfloat16)
    assert cache.keys.dtype == jnp.bfloat16
    expected, _ = by_hand("deepseek")
    error = np.abs(np.float64(y) - expected)[REAL]
    assert error.max() < 0.05 * np.abs(expected[REAL]).max()


@pytest.mark.parametrize("way", ["one call", "steps"])
def test_a_row_that_does_not_fit_gives_nan_and_no_other_does(way):
    # Rows of 9, 4 and 8 tokens.
    y, cache = run("deepseek", WAYS[way], room=7)
    plain, _ = run("deepseek", room=0)
    np.testing.assert_array_equal(cache.position, REAL.sum(axis=1))
    np.testing.assert_allclose(y[1][REAL[1]], plain[1][REAL[1]], rtol=1e-9)
    assert np.all(np.isnan(y[[0, 2], -1]))
    if way == "steps":
        np.testing.assert_allclose(y[0, :7], plain[0, :7], rtol=1e-9)


@pytest.mark.parametrize("length", [1, 3])
def test_in_a_stack_one_layer_changes_and_no_other(length):
    config = CONFIGS["deepseek"]
    weights = {k: np.float32(v) for k, v in weights_of("deepseek").items()}
    alone = latent_attention.init_cache(config, B, T, jnp.dtype("float32"))
    rng = np.random.default_rng(5)
    keys = rng.normal(size=(2, 3, *alone.keys.shape)).astype(np.float32)
    ids = np.broadcast_to(np.int32([1, 1, 0, 0, 0, 0, 0, 0, 0]), (2, 3, B, T))
    stacked = alone._replace(
        keys=keys,
        values=np.zeros((*keys.shape[:-1], 0), np.float32),
        segment_ids=np.array(ids),
        position=np.full((2, 3, B), 2, np.int32),
    )
    args = weights, np.float32(inputs()[:, :length])
    args += np.ones((B, length), np.int32), POSITIONS[:, :length]
    slot = np.int32(1), np.int32(2)
    y, after = call(*args, stacked, slot, config=config)
    wanted, layer = call(
        *args, jax.tree.map(lambda leaf: leaf[slot], stacked), config=config
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    for new, old, own in zip(after, stacked, layer, strict=True):
        expected = np.array(old)
        expected[slot] = own
        np.testing.assert_allclose(new, expected, rtol=1e-6)


def test_a_step_copies_no_cache():
    """One array is keys and values; a step writes into it and reads it where it is."""
    config = dataclasses.replace(CONFIGS["deepseek"], kv_lora_rank=64)
    abstract = jax.ShapeDtypeStruct
    cache = jax.eval_shape(
        lambda: latent_attention.init_cache(config, 1, 32768, jnp.dtype("float32"))
    )
    args = (
        shapes(latent_attention.param_specs(config), "float32"),
        abstract((1, 1, D), jnp.float32),
        abstract((1, 1), jnp.int32),
        abstract((1, 1), jnp.int32),
        cache,
    )
    step = jax.jit(functools.partial(call, config=config), donate_argnums=4)
    memory = step.lower(*args).compile().memory_analysis()
    held = 4 * cache.keys.size
    assert memory.alias_size_in_bytes >= held
    # What there is are scores and a block of latents, a sixteenth of the cache.
    assert memory.temp_size_in_bytes < held / 4


@each
def test_every_parameter_has_a_gradient_and_both_forms_the_same(name):
    config, weights = CONFIGS[name], weights_of(name)
    mix = np.random.default_rng(2).normal(size=(B, T, D)) * REAL[..., None]

    def loss(weights, x, cache):
        return jnp.sum(call(weights, x, IDS, POSITIONS, cache, config=config)[0] * mix)

    with jax.enable_x64(True):
        slopes = [
            jax.tree.map(
                np.asarray,
                jax.jit(jax.grad(loss, argnums=(0, 1)))(
                    weights,
                    inputs(),
                    latent_attention.init_cache(config, B, room, jnp.dtype("float64")),
                ),
            )
            for room in (0, T)
        ]
    assert all(np.any(slope) for slope in slopes[0][0].values())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-8, atol=1e-9)
    jax.tree.map(close, *slopes)


def test_parameters_and_their_axes():
    axes = {
        name: {k: (s.shape, s.axes) for k, s in latent_attention.param_specs(c).items()}
        for name, c in CONFIGS.items()
    }
    shared = {
        "kv_a_proj_with_mqa": ((D, 10), ("embed", None)),
        "kv_a_layernorm": ((6,), (None,)),
        "kv_b_proj": ((6, 36), (None, "heads")),
        "o_proj": ((21, D), ("heads", "embed")),
    }
    assert axes["deepseek"] == shared | {
        "q_a_proj": ((D, 10), ("embed", None)),
        "q_a_layernorm": ((10,), (None,)),
        "q_b_proj": ((10, 27), (None, "heads")),
    }
    assert axes["no latent of queries"] == shared | {
        "q_proj": ((D, 27), ("embed", "heads"))
    }
    assert axes["biases"] == axes["deepseek"] | {
        "q_a_proj_bias": ((10,), (None,)),
        "kv_a_proj_with_mqa_bias": ((10,), (None,)),
        "o_proj_bias": ((D,), ("embed",)),
    }


@each
@pytest.mark.parametrize("room", [0, T])
def test_both_frontends_give_the_same_bits(name, room):
    config = CONFIGS[name]
    linen, layer = InLinen(config), InNNX(config, rngs=nnx.Rngs(params=seed()))
    graphdef, state = nnx.split(layer)
    x = jnp.asarray(inputs(), jnp.float32)
    cache = latent_attention.init_cache(config, B, room, x.dtype)
    make = functools.partial(
        Context.create, (B, T), positions=POSITIONS, segment_ids=IDS
    )
    first = linen.init(seed(), x, make(), cache)["params"]
    own = nnx.to_pure_dict(state)
    assert jax.tree.structure(own) == jax.tree.structure(first)
    jax.tree.map(np.testing.assert_array_equal, own, first)

    random = {k: v.astype(np.float32) for k, v in weights_of(name).items()}
    nnx.replace_by_pure_dict(state, random)
    in_linen = lambda params: linen.apply({"params": params}, x, make(), cache)
    in_nnx = lambda state: nnx.merge(graphdef, state)(x, make(), cache)
    results = jax.jit(in_linen)(random), jax.jit(in_nnx)(state)
    jax.tree.map(np.testing.assert_array_equal, *results)


def seed():
    return jax.random.key(3)


# --- DeepSeek-V3 as transformers computes it -----------------------------------------

PUBLISHED = LatentAttentionConfig(
    hidden_size=32,
    num_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    nope_head_dim=8,
    value_head_dim=12,
    rope=RopeConfig(1e4, 8, interleaved=True),
)


@functools.cache
def golden():
    tensors = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
    return tensors, np.load(GOLDEN / "golden.npz")


def published_layer(i):
    tensors, _ = golden()
    return {
        name: np.ascontiguousarray(
            tensors[f"model.layers.{i}.self_attn.{name}.weight"].T
        )
        for name in latent_attention.param_specs(PUBLISHED)
    }


def normalised(stream, i):
    """What layer `i` attends to; its norm has eps 0.01, those of latents have not."""
    tensors, _ = golden()
    size = np.sqrt(np.mean(np.float64(stream) ** 2, axis=-1, keepdims=True) + 0.01)
    return np.float32(
        stream / size * tensors[f"model.layers.{i}.input_layernorm.weight"]
    )


def call_published(i, stream, room):
    x = normalised(stream, i)
    rows, length, _ = x.shape
    cache = latent_attention.init_cache(PUBLISHED, rows, room, x.dtype)
    ids = np.ones((rows, length), np.int32)
    positions = np.arange(length, dtype=np.int32)[None].repeat(rows, 0)
    return call(published_layer(i), x, ids, positions, cache, config=PUBLISHED)


@pytest.mark.parametrize("room", [0, 8])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_a_layer_of_deepseek_v3_matches_the_reference(layer, room):
    _, arrays = golden()
    before = "embed" if layer == 0 else f"layer_{layer - 1}"
    y, _ = call_published(layer, arrays[f"hidden5/{before}"], room)
    np.testing.assert_allclose(y, arrays[f"hidden5/mixer_{layer}"], atol=1e-5)


def test_the_first_cache_of_deepseek_v3_matches_the_reference():
    tensors, arrays = golden()
    embedded = tensors["model.embed_tokens.weight"][arrays["gen61/input_ids"]]
    _, cache = call_published(0, embedded, 61)
    latent, turned = np.split(cache.keys[:, :, 0], [16], axis=-1)
    held = "gen61/cache_after_prefill/0/"
    np.testing.assert_allclose(latent, arrays[held + "keys"][:, 0], atol=2e-6)
    np.testing.assert_allclose(turned, arrays[held + "values"][:, 0], atol=2e-5)
