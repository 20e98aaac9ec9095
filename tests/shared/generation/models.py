"""A model of one linear and one full layer for the tests of generation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import shared
import zoo_linen
import zoo_nnx
from shared.presets import hybrid_layers, qwen3_next_tiny

SMALL = qwen3_next_tiny(2).replace(
    layers=hybrid_layers(2, period=2, dense_layers=(0, 1)), scan_layers=False
)
# Positions of every cache, and the one length at which whole sequences are compared.
PLACES = 32

# float32 rounding of logits near 1, in programs of other shapes.
LOGITS_ATOL = 2e-5
# A choice between tokens that are nearer proves nothing.
LEAST_GAP = 100 * LOGITS_ATOL


@functools.cache
def weights(config=SMALL):
    """Random parameters, large enough that an answer depends on all of its prompt."""
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(generator.normal(0, 0.3, leaf.shape), leaf.dtype),
        shared.abstract_params(config),
    )


@functools.cache
def model_of(frontend="linen", config=SMALL):
    """The decoder as a function, one for all tests: it compiles once a shape."""
    if frontend == "linen":
        return zoo_linen.as_function(zoo_linen.Decoder(config))
    build = lambda: zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
    return zoo_nnx.as_function(nnx.eval_shape(build))


@jax.jit
def _forward(params, tokens):
    return model_of()(params, tokens).logits


def forward(tokens):
    """Logits [T, V] of a plain forward pass, without padding or cache.

    What stands behind the sequence, to fill it up to one length, no token sees.
    """
    filled = np.pad(np.asarray(tokens, np.int32), (0, PLACES - len(tokens)))
    return np.asarray(_forward(weights(), filled[None])[0, : len(tokens)])


@functools.cache
def greedy(prompt, count):
    """The arg-max of a plain forward over the growing prefix, `count` times."""
    tokens = list(prompt)
    for _ in range(count):
        *_, second, best = np.sort(logits := forward(tokens)[-1])
        assert best - second > LEAST_GAP, "Too near a tie: take another prompt."
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


def prompt(length, seed=0):
    """A tuple of random token ids."""
    random = np.random.default_rng([seed, length])
    return tuple(random.integers(0, SMALL.vocab_size, length).tolist())


def row_of(cache, row):
    """A copy of a row of every leaf of an unscanned cache, by path."""
    return {
        jax.tree_util.keystr(path): np.array(leaf[row])
        for path, leaf in jax.tree_util.tree_leaves_with_path(cache)
    }


def assert_same_rows(left, right):
    """Equal to the bit, leaf by leaf."""
    assert left.keys() == right.keys()
    assert left
    for path in left:
        assert left[path].tobytes() == right[path].tobytes(), path
