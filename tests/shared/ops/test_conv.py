"""The causal convolution against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ops import conv
from tests.references import conv as reference

# B, T, C, W: also shorter than the filter, one token, a filter of one tap.
SHAPES = [(2, 7, 3, 4), (3, 2, 5, 4), (2, 1, 3, 4), (2, 6, 3, 1)]
seeds = st.integers(0, 2**32 - 1)

# With the emitters that users have (see conftest.py): others round lengths apart.
EMITTERS = {"xla_cpu_use_fusion_emitters": True}
causal_conv1d = jax.jit(
    conv.causal_conv1d,
    compiler_options=EMITTERS if jax.__version_info__ < (0, 11) else None,
)


def draw(seed, shape, dtype=np.float32):
    """x, weight, tail, groups, real: sequences of any lengths with padding anywhere."""
    batch, length, channels, width = shape
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, length, channels)).astype(dtype)
    weight = rng.normal(size=(width, channels)).astype(dtype)
    tail = rng.normal(size=(batch, width - 1, channels)).astype(dtype)
    real = rng.random((batch, length)) < rng.choice([0.5, 0.8, 1.0])
    begins = (rng.random((batch, length)) < 0.3) & real
    return x, weight, tail, np.cumsum(begins, 1).astype(np.int32), real


def call(*args):
    return causal_conv1d(*map(jnp.asarray, args))


def check(actual, expected, **tolerance):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), e, **tolerance)


def plain(x, weight, tail):
    """One sequence per row, no padding."""
    shape = x.shape[:2]
    return call(x, weight, tail, np.zeros(shape, np.int32), np.ones(shape, bool))


@given(seeds, st.sampled_from(SHAPES))
def test_matches_the_loop(seed, shape):
    args = draw(seed, shape)
    expected = reference.causal_conv1d(*args)
    # Sums of four products of normal numbers.
    check(call(*args), expected, rtol=0, atol=3e-6)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in args[:3]]
        check(call(*wide, *args[3:]), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_differences_of_the_loop(shape):
    # The convolution is linear in each argument, so differences are exact.
    args = draw(1, shape, np.float64)
    rng = np.random.default_rng(2)
    weights = [rng.normal(size=y.shape) for y in reference.causal_conv1d(*args)]

    def expected_loss(*args):
        pairs = zip(weights, reference.causal_conv1d(*args), strict=True)
        return sum((w * y).sum() for w, y in pairs)

    with jax.enable_x64(True):

        def loss(x, weight, tail):
            y, new_tail = conv.causal_conv1d(
                x, weight, tail, *map(jnp.asarray, args[3:])
            )
            return (weights[0] * y).sum() + (weights[1] * new_tail).sum()

        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*map(jnp.asarray, args[:3]))
    for which, grad in enumerate(grads):
        for place in np.ndindex(grad.shape):
            moved = [x.copy() for x in args]
            moved[which][place] += 1
            difference = expected_loss(*moved) - expected_loss(*args)
            np.testing.assert_allclose(grad[place], difference, atol=1e-12)


@given(seeds, st.sampled_from(SHAPES), st.sampled_from([3e38, -3e38, np.inf, np.nan]))
def test_what_stands_at_padding_influences_nothing(seed, shape, value):
    x, *others, real = draw(seed, shape)
    loud = np.where(real[..., None], x, np.float32(value))
    both = call(loud, *others, real), call(x, *others, real)
    for actual, expected in zip(*both, strict=True):
        assert np.isfinite(actual).all()
        np.testing.assert_array_equal(actual, expected)


def test_gradients_at_and_through_padding_are_zero():
    x, weight, tail, groups, _ = map(jnp.asarray, draw(3, (2, 7, 3, 4)))
    real = jnp.asarray([[0, 0, 1, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 1]], bool)
    loud = jnp.where(real[..., None], x, 3e38)

    def loss(x, weight, tail):
        y, new_tail = conv.causal_conv1d(x, weight, tail, groups, real)
        return y.sum() + new_tail.sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    quiet_grads, grads = (gradients(x, weight, tail) for x in (x, loud))
    for grad, quiet in zip(grads, quiet_grads, strict=True):
        np.testing.assert_array_equal(grad, quiet)
    assert not grads[0][~real].any()
    assert grads[0][real].any()


@given(seeds, st.integers(1, 6))
def test_two_calls_equal_one(seed, split):
    x, weight, tail, *_ = draw(seed, (2, 7, 3, 4))
    y, new_tail = plain(x, weight, tail)
    first, between = plain(x[:, :split], weight, tail)
    second, last = plain(x[:, split:], weight, between)
    np.testing.assert_array_equal(np.concatenate([first, second], 1), y)
    np.testing.assert_array_equal(last, new_tail)


@pytest.mark.parametrize("left", [0, 1, 3, 5])
@pytest.mark.parametrize("right", [0, 2])
def test_padding_on_either_side_changes_nothing_even_with_a_tail(left, right):
    x, weight, tail, *_ = draw(4, (2, 4, 3, 4))
    y, new_tail = plain(x, weight, tail)
    sides = (0, 0), (left, right)
    padded = np.pad(x, (*sides, (0, 0)), constant_values=9.0)
    real = np.pad(np.ones((2, 4), bool), sides)
    padded_y, padded_tail = call(padded, weight, tail, 0 * real.astype(int), real)
    np.testing.assert_array_equal(padded_y[:, left : left + 4], y)
    assert not padded_y[~real].any()
    np.testing.assert_array_equal(padded_tail, new_tail)


def test_packed_sequences_equal_each_alone():
    x, weight, tail, *_ = draw(5, (1, 9, 3, 4))
    nothing = np.zeros_like(tail)
    # Four tokens continue the tail, two stand alone, padding, two more.
    groups = np.asarray([[0, 0, 0, 0, 1, 1, 1, 2, 2]], np.int32)
    real = np.asarray([[1, 1, 1, 1, 1, 1, 0, 1, 1]], bool)
    y, new_tail = call(x, weight, tail, groups, real)
    for part, before in [
        (slice(0, 4), tail),
        (slice(4, 6), nothing),
        (slice(7, 9), nothing),
    ]:
        alone, alone_tail = plain(x[:, part], weight, before)
        np.testing.assert_array_equal(alone, y[:, part])
    np.testing.assert_array_equal(new_tail, alone_tail)
    assert not new_tail[0, 0].any()


def test_a_new_sequence_in_the_first_place_ignores_the_tail():
    x, weight, tail, *_ = draw(6, (2, 5, 3, 4))
    everywhere = np.ones((2, 5), bool)
    y, _ = call(x, weight, 1e30 * tail, everywhere.astype(int), everywhere)
    np.testing.assert_array_equal(y, plain(x, weight, 0 * tail)[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_a_row_without_a_token_gives_its_tail_back_bit_for_bit(dtype):
    x, weight, tail, groups, real = draw(7, (2, 2, 5, 4))
    tail[0, 0] = [-0.0, 1e-42, np.inf, np.nan, 3e38]
    tail = tail.astype(dtype)
    real[:] = [[False, False], [True, True]]
    _, new_tail = call(x, weight, tail, 0 * groups, real)
    assert new_tail.dtype == dtype
    assert np.asarray(new_tail)[0].tobytes() == tail[0].tobytes()
    assert np.asarray(new_tail)[1].tobytes() != tail[1].tobytes()


@pytest.mark.parametrize("tail_dtype", [jnp.bfloat16, np.float32])
def test_low_precision_costs_one_rounding(tail_dtype):
    args = list(draw(8, (2, 7, 3, 4), jnp.bfloat16))
    args[2] = args[2].astype(tail_dtype)
    y, new_tail = call(*args)
    assert y.dtype == jnp.bfloat16 and new_tail.dtype == tail_dtype
    expected, expected_tail = reference.causal_conv1d(*args)
    # Half a unit in the last of 8 places, and a float32 sum that may cancel.
    check([y], [expected], rtol=2.0**-8, atol=2e-6)
    np.testing.assert_array_equal(np.asarray(new_tail, np.float64), expected_tail)


def test_vmapped_equals_one_at_a_time():
    pairs = [draw(seed, (2, 7, 3, 4)) for seed in (9, 10, 11)]
    stacked = [jnp.stack(list(map(jnp.asarray, x))) for x in zip(*pairs, strict=True)]
    ys, tails = jax.jit(jax.vmap(conv.causal_conv1d))(*stacked)
    for args, y, tail in zip(pairs, ys, tails, strict=True):
        check((y, tail), call(*args), rtol=0, atol=1e-6)


def test_there_is_no_loop_over_time():
    args = map(jnp.asarray, draw(12, (2, 7, 3, 4)))
    program = str(jax.make_jaxpr(conv.causal_conv1d)(*args))
    assert "scan[" not in program and "while[" not in program
