import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from shared.ops.losses import next_token_loss
from tests.references import losses as reference

BATCH, TIME, VOCABULARY = 3, 6, 11

value_and_grad = jax.jit(jax.value_and_grad(next_token_loss, has_aux=True))

labels_ = st.lists(
    st.sampled_from([-100, *range(VOCABULARY)]),
    min_size=BATCH * TIME,
    max_size=BATCH * TIME,
)
segments_ = st.lists(st.integers(0, 2), min_size=BATCH * TIME, max_size=BATCH * TIME)


def draw_logits(seed, scale=3.0):
    shape = BATCH, TIME, VOCABULARY
    return np.random.default_rng(seed).normal(size=shape) * scale


def rows(values):
    return np.asarray(values, np.int32).reshape(BATCH, TIME)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@hypothesis.settings(max_examples=30)
@hypothesis.given(labels_, st.none() | segments_, st.integers(0, 2**32 - 1))
def test_loss_and_gradient_match_the_loop(dtype, labels, segments, seed):
    labels = rows(labels)
    segments = None if segments is None else rows(segments)
    logits = draw_logits(seed)
    with jax.enable_x64(dtype == np.float64):
        (loss, count), gradient = jax.tree.map(
            np.asarray, value_and_grad(logits.astype(dtype), labels, segments)
        )
    assert loss.dtype == count.dtype == gradient.dtype == dtype
    expected, pairs, slopes = reference.next_token_loss(logits, labels, segments)
    # Rounding of scores up to 15 in float32, and of 11 exponentials.
    tolerance = {np.float64: 1e-13, np.float32: 5e-6}[dtype]
    np.testing.assert_allclose(loss, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(gradient, slopes, rtol=0, atol=tolerance)
    assert count == pairs


def test_a_token_is_predicted_from_the_one_before():
    labels = rows(np.arange(BATCH * TIME) % VOCABULARY)
    right = np.full((BATCH, TIME, VOCABULARY), -50.0)
    for b, t in np.ndindex(BATCH, TIME - 1):
        right[b, t, labels[b, t + 1]] = 50
    (loss, count), _ = value_and_grad(np.float32(right), labels, None)
    assert loss < 1e-6 and count == BATCH * (TIME - 1)


def test_sequences_of_a_row_do_not_predict_each_other():
    labels, logits = rows(np.arange(BATCH * TIME) % VOCABULARY), draw_logits(0)
    segments = rows([1, 1, 2, 2, 2, 0] * BATCH)
    (_, count), gradient = value_and_grad(np.float32(logits), labels, segments)
    assert count == BATCH * 3
    assert not np.any(gradient[:, [1, 4, 5]]) and np.all(gradient[:, [0, 2, 3]])


@pytest.mark.parametrize("labels", [-100, 3])
def test_nothing_to_predict_costs_nothing(labels):
    labels = np.full((BATCH, TIME), labels, np.int32)
    (loss, count), gradient = value_and_grad(
        np.float32(draw_logits(0)), labels, np.zeros((BATCH, TIME), np.int32)
    )
    assert loss == 0 and count == 0 and not np.any(gradient)


def test_a_single_token_costs_nothing():
    scores, labels = np.ones((2, 1, 5), np.float32), np.zeros((2, 1), np.int32)
    (loss, count), _ = value_and_grad(scores, labels, None)
    assert loss == 0 and count == 0


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_scores_stay_finite(size):
    labels = rows(np.arange(BATCH * TIME) % VOCABULARY)
    (loss, _), gradient = value_and_grad(np.float32(draw_logits(1, size)), labels, None)
    assert np.isfinite(loss) and np.all(np.isfinite(gradient))


def test_bfloat16_scores_are_summed_in_float32():
    labels = rows(np.arange(BATCH * TIME) % VOCABULARY)
    logits = jnp.asarray(draw_logits(2), jnp.bfloat16)
    (loss, _), gradient = value_and_grad(logits, labels, None)
    expected, _, _ = reference.next_token_loss(np.float64(logits), labels)
    assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(loss, expected, rtol=5e-6)


def test_forward_keeps_nothing_of_the_size_of_the_scores():
    scores = jax.ShapeDtypeStruct((2, 64, 4096), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    memory = (
        jax.jit(next_token_loss).lower(scores, ids, ids).compile().memory_analysis()
    )
    assert memory.temp_size_in_bytes < 0.1 * 4 * 2 * 64 * 4096
