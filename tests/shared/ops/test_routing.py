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


@functools.partial(jax.jit, static_argnames="k")
def router_stats_(logits, real, k):
    return router_stats(logits, route(logits, k, normalize=True).experts, real)


@functools.partial(jax.jit, static_argnames="k")
@jax.value_and_grad
def loss_(logits, real, k):
    return load_balance_loss(router_stats_(logits, real, k))


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
    each = [router_stats_(x, r, k=CHOICES) for x, r in zip(logits, real, strict=True)]
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


# --- sigmoid scores, correction bias, groups of experts, scales ----------------------

GROUPS, GROUP_SIZE, KEPT, FACTOR = 4, 3, 2, 2.5
BIAS = np.float32([0.4, -0.3, 0, 0.2, 0, 0, -0.6, 0, 0.1, 0.5, 0, -0.2])


@functools.partial(jax.jit, static_argnames=("k", "normalize"))
def route_by_groups(logits, bias, k=CHOICES, normalize=True):
    return route(
        logits,
        k,
        normalize=normalize,
        scores="sigmoid",
        correction_bias=bias,
        num_groups=GROUPS,
        groups_per_token=KEPT,
        scaling_factor=FACTOR,
    )


def draw_logits(seed, tokens=40):
    shape = tokens, GROUPS * GROUP_SIZE
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0, 3, width=32))
def test_routing_by_groups_matches_the_loop(seed, strength):
    logits, bias = draw_logits(seed), BIAS * np.float32(strength)
    expected = reference.route_by_groups(logits, CHOICES, bias, GROUPS, KEPT, FACTOR)
    with jax.enable_x64(True):
        routing = route_by_groups(np.float64(logits), bias)
    np.testing.assert_array_equal(routing.experts, expected[0])
    np.testing.assert_allclose(routing.weights, expected[1], rtol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_routing_by_groups_is_in_float32(dtype):
    logits = jnp.asarray(draw_logits(0), dtype)
    routing = route_by_groups(logits, jnp.asarray(BIAS))
    expected = reference.route_by_groups(
        np.float64(logits), CHOICES, BIAS, GROUPS, KEPT, FACTOR
    )
    assert routing.weights.dtype == jnp.float32
    np.testing.assert_array_equal(routing.experts, expected[0])
    np.testing.assert_allclose(routing.weights, expected[1], rtol=1e-6)


def test_ties_of_groups_and_experts_go_to_the_lowest_index():
    routing = route_by_groups(np.zeros((1, 12), np.float32), np.zeros(12, np.float32))
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]])
    # Group 3 has the best two, groups 1 and 2 have equal sums.
    logits = np.float32([[0, 0, 0, 1, -1, 2, 2, -1, 1, 2, 2, -9]])
    routing = route_by_groups(logits, np.zeros(12, np.float32), k=4)
    np.testing.assert_array_equal(routing.experts, [[5, 9, 10, 3]])


def test_a_group_is_judged_by_two_and_not_by_its_best():
    logits = np.full((1, 12), -4, np.float32)
    logits[0, [0, 3, 4, 6, 7]] = [5, 1, 1, 2, 2]  # sigmoids: .99; .73 twice; .88 twice
    routing = route_by_groups(logits, np.zeros(12, np.float32))
    assert set(np.asarray(routing.experts)[0]) == {6, 7, 3}


def test_the_bias_chooses_but_does_not_weigh_and_has_no_gradient():
    logits = np.zeros((1, 12), np.float32)
    bias = np.zeros(12, np.float32)
    bias[[7, 10, 8]] = 3, 2, 1
    routing = route_by_groups(logits, bias, normalize=False)
    np.testing.assert_array_equal(routing.experts, [[7, 10, 8]])
    np.testing.assert_array_equal(routing.weights, np.full((1, 3), FACTOR / 2))

    total = lambda logits, bias: jnp.sum(route_by_groups(logits, bias).weights ** 2)
    to_logits, to_bias = jax.jit(jax.grad(total, argnums=(0, 1)))(draw_logits(1), BIAS)
    assert np.any(to_logits) and not np.any(to_bias)


def test_gradients_of_weights_by_groups_match_finite_differences():
    logits = np.float64(draw_logits(2, tokens=3))
    mix = np.random.default_rng(3).normal(size=(3, CHOICES))
    with jax.enable_x64(True):
        loss = lambda x: jnp.sum(route_by_groups(x, BIAS).weights * mix)
        slopes = np.asarray(jax.jit(jax.grad(loss))(logits))
    step = 1e-6
    for n, e in np.ndindex(*logits.shape):
        shift = np.zeros(logits.shape)
        shift[n, e] = step
        low, high = (
            reference.route_by_groups(x, CHOICES, BIAS, GROUPS, KEPT, FACTOR)[1]
            for x in (logits - shift, logits + shift)
        )
        rise = np.sum((high - low) * mix) / (2 * step)
        np.testing.assert_allclose(slopes[n, e], rise, atol=1e-8)


def test_sigmoids_that_are_all_zero_are_not_divided_by_zero():
    logits = np.full((1, 12), -200, np.float32)
    routing = route_by_groups(logits, np.zeros(12, np.float32))
    np.testing.assert_array_equal(routing.weights, np.zeros((1, 3), np.float32))


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(0, 2**32 - 1))
def test_each_experts_own_scale_multiplies_what_is_normalised(seed):
    logits = draw_logits(seed)
    scale = np.random.default_rng(seed).uniform(0.2, 3, 12).astype(np.float32)
    routing = route_scaled(logits, scale)
    experts, weights = reference.route_scaled(logits, CHOICES, scale)
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=2e-6)


@jax.jit
def route_scaled(logits, scale):
    return route(logits, CHOICES, normalize=True, per_expert_scale=scale)


def test_stats_of_sigmoids_count_who_was_chosen_and_sum_to_one_a_token():
    logits, real = draw_logits(4), np.random.default_rng(4).random(40) < 0.6
    experts, _ = reference.route_by_groups(logits, CHOICES, BIAS, GROUPS, KEPT, FACTOR)
    stats = jax.jit(functools.partial(router_stats, scores="sigmoid"))(
        logits, np.int32(experts), real
    )
    np.testing.assert_array_equal(stats.tokens, real.sum())
    np.testing.assert_array_equal(
        stats.counts, np.bincount(experts[real].ravel(), minlength=12)
    )
    shares = [score / score.sum() for score in reference.sigmoid(logits)[real]]
    np.testing.assert_allclose(stats.probabilities, np.sum(shares, 0), rtol=1e-6)
