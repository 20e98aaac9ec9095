"""512 tokens one by one against 512 in one call: rounding must not pile up.

Per layer the inputs are the same to the bit, so that only the layer's own rounding
shows. Whole models feed back what they computed; in bfloat16 they are far apart
whatever the way, so what another chunk size of the delta rule does is the measure.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shared
import zoo_linen
from shared.cache import GatedDeltaNetCache
from shared.config import LayerKind
from shared.context import Context
from shared.generation import decode
from shared.layers import decoder_layer, gated_delta_net, grouped_query_attention
from shared.params import draw_tree
from shared.presets import qwen3_next_tiny

LENGTH = 512
WINDOW = 16
MIXERS = ("linear_attention", "full_attention", "sliding_attention")

TINY = qwen3_next_tiny(4)
CONFIG = TINY.replace(
    layers=tuple(
        LayerKind(mixer, "moe" if mixer == "linear_attention" else "dense")
        for mixer in MIXERS
    )
    * 2,
    sliding_attention=dataclasses.replace(TINY.attention, window=WINDOW),
)


def louder(params):
    """First values, but so large that every part of a layer is heard."""
    keep = ("A_log", "dt_bias", "norm")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path[-1].key in keep else leaf * 8, params
    )


def relative(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.abs(actual - expected).max() / np.abs(expected).max()


# -------------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_layer_ends_in_the_same_state(mixer):
    """Its inputs are recorded in bfloat16, in which it runs."""
    kind = LayerKind(mixer, "dense")
    config = decoder_layer.mixer_part(CONFIG, kind)
    layer = gated_delta_net if mixer == "linear_attention" else grouped_query_attention
    weights = draw_tree(layer.param_specs(config), jax.random.key(1), "bfloat16")
    weights = louder(weights)
    x = jax.random.normal(
        jax.random.key(2), (1, LENGTH, CONFIG.hidden_size), jnp.bfloat16
    )
    empty = decoder_layer.init_cache(CONFIG, kind, 1, LENGTH, jnp.dtype("bfloat16"))

    def apply(weights, x, cache, position):
        time = position + jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        context = Context.create(x.shape[:2], positions=time)
        return layer.apply(weights, x, context, cache, config=config)

    @jax.jit
    def stepwise(weights, x, cache):
        def step(cache, inputs):
            x, position = inputs
            y, cache = apply(weights, x[None, None], cache, position)
            return cache, y[0, 0]

        return jax.lax.scan(step, cache, (x[0], jnp.arange(LENGTH, dtype=jnp.int32)))

    cache, y = stepwise(weights, x, empty)
    whole_y, whole = jax.jit(apply)(weights, x, empty, jnp.int32(0))

    names = (
        ("conv_tail", "state") if mixer == "linear_attention" else ("keys", "values")
    )
    for name in names:
        left, right = getattr(cache, name), getattr(whole, name)
        assert left.dtype == right.dtype
        assert np.abs(np.asarray(right, np.float32)).max() > 1e-2
        assert relative(left, right) <= 1e-2, name
    for name in {"segment_id", "segment_ids", "position"} & set(cache._fields):
        np.testing.assert_array_equal(getattr(cache, name), getattr(whole, name))
    if isinstance(cache, GatedDeltaNetCache):
        assert cache.state.dtype == jnp.float32
    # Of 8 bits: an output is rounded several times on its way.
    assert relative(y, whole_y[0]) <= 3e-2


# ----------------------------------------------------------------------- whole models


@functools.cache
def params_of():
    return louder(shared.init_params(jax.random.key(0), CONFIG))


def tokens_of():
    random = np.random.default_rng(0)
    return random.integers(0, CONFIG.vocab_size, LENGTH, dtype=np.int32)


def chunked(dtype, chunk_size):
    """Logits of one call, with another chunk size of the delta rule."""
    config = CONFIG.replace(
        dtype=dtype,
        delta_net=dataclasses.replace(CONFIG.delta_net, chunk_size=chunk_size),
    )
    model = zoo_linen.as_function(zoo_linen.Decoder(config))
    return jax.jit(model)(params_of(), tokens_of()[None]).logits[0]


def stepwise(dtype):
    config = CONFIG.replace(dtype=dtype)
    model = zoo_linen.as_function(zoo_linen.Decoder(config))

    @jax.jit
    def run(params, tokens, cache):
        def step(cache, token):
            logits, cache = decode(model, params, token[None], cache)
            return cache, logits[0]

        return jax.lax.scan(step, cache, tokens)[1]

    return run(params_of(), tokens_of(), shared.init_cache(config, 1, LENGTH))


def test_a_whole_model_in_float32_gives_the_same_logits():
    whole, one_by_one = chunked("float32", 16), stepwise("float32")
    assert np.abs(whole).max() > 1
    np.testing.assert_allclose(one_by_one, whole, rtol=0, atol=1e-3)


def test_in_bfloat16_steps_are_no_further_than_bfloat16_itself(record_property):
    """Root mean squares, relative to that of the logits.

    Another chunk size changes sums in float32 only, few of which round to another
    bfloat16. Attention rounds softmax weights to bfloat16, and those of one call and
    of single steps are relative to other maxima. So what bfloat16 costs at all is the
    measure, against float32.
    """
    whole = np.asarray(chunked("bfloat16", 16))

    def distance(other):
        error = np.sqrt(np.mean((np.asarray(other) - whole) ** 2))
        return float(error / np.sqrt(np.mean(whole**2)))

    figures = {
        "one by one": distance(stepwise("bfloat16")),
        "chunk size 64, not 16": distance(chunked("bfloat16", 64)),
        "float32": distance(chunked("float32", 16)),
    }
    for name, figure in figures.items():
        record_property(f"bfloat16 against {name}", figure)
        print(f"bfloat16 in one call against {name}: {figure:.2e}")
    assert 0 < figures["one by one"] <= 2 * figures["float32"]
