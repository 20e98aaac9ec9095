import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared.ops.routing import RouterStats, load_balance_loss, route, router_stats
from tests.references import routing as reference

TOKENS, EXPERTS, CHOICES = 7, 5, 3

# Few values, so that ties are common; the subnormal is 0 on a machine that flushes.
# Otherwise probabilities differ by much more than a float32 softmax can be wrong.
LOGITS = hnp.arrays(
    np.float32,
    (TOKENS, EXPERTS),
    elements=st.sampled_from([0.0, -0.0, 0.5, -1.0, 3.0, 20.0, -1e30, 1e-45]),
)

route_ = jax.jit(route, static_argnames=("k", "normalize"))
router_stats_ = jax.jit(router_stats, static_argnames="k")


@functools.partial(jax.jit, static_argnames="k")
@jax.value_and_grad
def loss_(logits, real, k):
    return load_balance_loss(router_stats(logits, k, real))


@hypothesis.given(LOGITS, st.booleans())
def test_routing_matches_the_loop_ties_included(logits, normalize):
    logits = np.where(np.abs(logits) < 1e-30, np.float32(0), logits)
    routing = route_(logits, k=CHOICES, normalize=normalize)
    experts, weights = reference.route(logits, CHOICES, normalize)
    # Probabilities below the range of float32 are equal there, and not in the loop.
    told_apart = np.sort(np.unique(logits)).size < 2 or logits.min() > -1e30
    if told_apart:
        np.testing.assert_array_equal(routing.experts, experts)
    # A softmax of 5 values in float32: a few units in the last place.
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6, atol=1e-37)
    assert routing.experts.dtype == jnp.int32
    assert routing.weights.dtype == jnp.float32


def test_ties_go_to_the_lowest_index():
    routing = route_(np.zeros((2, EXPERTS), np.float32), k=CHOICES, normalize=True)
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(routing.weights, np.full((2, 3), np.float32(1 / 3)))


def test_near_values_are_told_apart_in_float32():
    """0.999, 1.0 and 1.001 are 1.0 in bfloat16."""
    logits = np.float32([[1.0, 0.999, 1.001, 0.9]])
    np.testing.assert_array_equal(route_(logits, k=2, normalize=True).experts, [[2, 0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_logits_are_routed_in_float32(dtype):
    logits = np.random.default_rng(0).normal(size=(TOKENS, EXPERTS))
    logits = jnp.asarray(logits, dtype)
    routing = route_(logits, k=CHOICES, normalize=True)
    experts, weights = reference.route(np.float64(logits), CHOICES, True)
    assert routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)


def test_float64_stays_float64():
    logits = np.random.default_rng(0).normal(size=(TOKENS, EXPERTS))
    with jax.enable_x64(True):
        routing = route_(logits, k=CHOICES, normalize=False)
        loss, _ = loss_(logits, np.ones(TOKENS, bool), k=CHOICES)
        assert routing.experts.dtype == jnp.int32
    experts, weights = reference.route(logits, CHOICES, False)
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=1e-14)
    expected = reference.load_balance_loss([logits], [np.ones(TOKENS, bool)], CHOICES)
    np.testing.assert_allclose(loss, expected, rtol=1e-14)


def test_the_softmax_is_applied_once():
    logits = np.float32([[4, 0, 0, 0]] * 8)
    real = np.ones(8, bool)

    # 4 e^4 / (e^4 + 3); a second softmax gives 1.83 and a third of the gradient.
    with jax.enable_x64(True):
        value, gradient = jax.tree.map(np.asarray, loss_(np.float64(logits), real, k=1))
    p = np.exp(4) / (np.exp(4) + 3)
    np.testing.assert_allclose(value, 4 * p, rtol=1e-14)
    assert round(float(value), 2) == 3.79
    np.testing.assert_allclose(np.sum(gradient, axis=0)[0], 4 * p * (1 - p), rtol=1e-12)


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_balanced_routing_costs_the_number_of_choices(choices):
    # Each token prefers `choices` neighbours, each expert is preferred equally often.
    logits = np.stack(
        [np.roll([9.0] * choices + [0.0] * 3, e) for e in range(choices + 3)]
    )
    real = np.ones(choices + 3, bool)
    loss, _ = loss_(np.float32(logits), real, k=choices)
    np.testing.assert_allclose(loss, choices, rtol=1e-6)


def layers(seed):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(3, TOKENS, EXPERTS)).astype(np.float32)
    return logits * 3, generator.random((3, TOKENS)) < 0.6


def stacked(logits, real):
    each = [
        router_stats_(x, k=CHOICES, real=r) for x, r in zip(logits, real, strict=True)
    ]
    return RouterStats(*(jnp.stack(leaves) for leaves in zip(*each, strict=True)))


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_the_loss_is_one_over_the_tokens_of_all_layers(seed):
    logits, real = layers(seed)
    loss = load_balance_loss(stacked(logits, real))
    expected = reference.load_balance_loss(logits, real, CHOICES)
    np.testing.assert_allclose(loss, expected, rtol=5e-6)


def test_layers_may_come_along_several_axes():
    stats = stacked(*layers(0))
    nested = jax.tree.map(lambda x: jnp.stack([x, x]), stats)
    np.testing.assert_allclose(
        load_balance_loss(nested), load_balance_loss(stats), rtol=1e-6
    )


def test_joint_loss_is_not_the_mean_of_the_losses():
    logits, real = layers(0)
    stats = stacked(logits, real)
    each = [
        load_balance_loss(jax.tree.map(lambda x, i=i: x[i], stats)) for i in range(3)
    ]
    assert abs(np.mean(each) - load_balance_loss(stats)) > 0.01


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
def test_padding_is_not_routed_and_gets_no_gradient(value):
    logits, real = layers(1)
    logits, real = logits[0], real[0]
    other = np.where(real[:, None], logits, np.float32(value))
    expected, slopes = loss_(logits, real, k=CHOICES)
    actual, other_slopes = loss_(other, real, k=CHOICES)
    slopes = np.asarray(slopes)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(other_slopes, slopes)
    assert not np.any(slopes[~real]) and np.all(np.any(slopes[real], axis=-1))
    only_real = reference.load_balance_loss([logits], [real], CHOICES)
    np.testing.assert_allclose(actual, only_real, rtol=5e-6)


def test_no_tokens_cost_nothing():
    logits, real = np.ones((TOKENS, EXPERTS), np.float32), np.zeros(TOKENS, bool)
    value, gradient = loss_(logits, real, k=CHOICES)
    assert value == 0 and not np.any(gradient)


def test_gradient_of_the_loss_matches_finite_differences():
    logits, real = layers(2)
    logits, real = np.float64(logits[0]), real[0]
    with jax.enable_x64(True):
        slopes = np.asarray(loss_(logits, real, k=CHOICES)[1])
    step = 1e-6  # far from any tie: the counts stay as they are
    for n, e in np.ndindex(*logits.shape):
        shift = np.zeros(logits.shape)
        shift[n, e] = step
        rise = reference.load_balance_loss([logits + shift], [real], CHOICES)
        rise -= reference.load_balance_loss([logits - shift], [real], CHOICES)
        np.testing.assert_allclose(slopes[n, e], rise / (2 * step), atol=1e-8)
