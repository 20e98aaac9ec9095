import functools
from typing import NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from shared.ops.delta_rule import gated_delta_rule_stepwise
from shared.ops.delta_rule_chunked import (
    gated_delta_rule,
    gated_delta_rule_by_span,
    gated_delta_rule_chunked,
)
from tests.references import delta_rule as reference

# Pairwise different, four value heads to a key head: swapped axes and tiled heads show.
BATCH, KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 3, 12, 8, 5

# Largest error as a share of the largest value. Sums run over up to 130 tokens and 64
# places of a chunk; the worst errors seen are 2.5e-15 and 1.6e-6.
TOLERANCE = {np.float64: 3e-14, np.float32: 2e-5}


class Inputs(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    groups: np.ndarray
    real: np.ndarray


FLOATS = Inputs._fields[:6]


def draw_inputs(seed, time):
    generator = np.random.default_rng(seed)
    q, k = generator.normal(size=(2, BATCH, time, KEY_HEADS, KEY_WIDTH))
    return Inputs(
        q=unit(q) * KEY_WIDTH**-0.5,
        k=unit(k),
        v=generator.normal(size=(BATCH, time, VALUE_HEADS, VALUE_WIDTH)),
        log_decay=generator.uniform(-3, 0, (BATCH, time, VALUE_HEADS)),
        beta=generator.uniform(0, 1, (BATCH, time, VALUE_HEADS)),
        state=generator.normal(size=(BATCH, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH)),
        groups=np.zeros((BATCH, time), np.int32),
        real=np.ones((BATCH, time), bool),
    )


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def rule(floats, groups, real, chunk_size):
    """By chunks, by spans (chunk size, span size), or step by step for None."""
    if chunk_size is None:
        return gated_delta_rule_stepwise(*floats, groups, real)
    if isinstance(chunk_size, tuple):
        return gated_delta_rule_by_span(*floats, groups, real, *chunk_size)
    return gated_delta_rule_chunked(*floats, groups, real, chunk_size)


@functools.partial(jax.jit, static_argnames="chunk_size")
def outputs(floats, groups, real, chunk_size):
    return rule(floats, groups, real, chunk_size)


@functools.partial(jax.jit, static_argnames="chunk_size")
@functools.partial(jax.grad, has_aux=True)
def gradients(floats, groups, real, d_o, d_state, chunk_size):
    o, state = rule(floats, groups, real, chunk_size)
    return jnp.sum(o * d_o) + jnp.sum(state * d_state), (o, state)


def run(inputs, chunk_size, dtype=np.float64):
    """Outputs and final state."""
    if isinstance(chunk_size, int):
        chunk_size = min(chunk_size, inputs.q.shape[1])  # the same program: one compile
    with jax.enable_x64(dtype == np.float64):
        floats = [x.astype(dtype) for x in inputs[:6]]
        o, state = outputs(floats, inputs.groups, inputs.real, chunk_size=chunk_size)
        return np.asarray(o), np.asarray(state)


def run_with_gradients(inputs, chunk_size, dtype=np.float64):
    """Outputs, final state, and gradients of a weighted sum of both."""
    with jax.enable_x64(dtype == np.float64):
        floats = [x.astype(dtype) for x in inputs[:6]]
        weights = [x.astype(dtype) for x in output_weights(inputs)]
        slopes, (o, state) = gradients(
            floats, inputs.groups, inputs.real, *weights, chunk_size=chunk_size
        )
        return jax.tree.map(np.asarray, (o, state, Inputs(*slopes, None, None)))


def output_weights(inputs):
    generator = np.random.default_rng(7)
    return [generator.normal(size=x.shape) for x in (inputs.v, inputs.state)]


def assert_close(actual, expected, tolerance):
    assert np.all(np.isfinite(actual))
    error = np.max(np.abs(np.float64(actual) - expected), initial=0)
    assert error <= tolerance * np.max(np.abs(expected), initial=1e-300)


def assert_same(actual, expected, tolerance):
    """Outputs, states and gradients of two runs, each against its own scale."""
    assert_close(actual[0], expected[0], tolerance)
    assert_close(actual[1], expected[1], tolerance)
    for name in FLOATS:
        assert_close(getattr(actual[2], name), getattr(expected[2], name), tolerance)


def at(time, *, padding=(), groups=None):
    """The same inputs with padding and groups; padding takes the group before it."""
    inputs = draw_inputs(time, time)
    real = np.ones((BATCH, time), bool)
    real[:, list(padding)] = False
    numbers = np.zeros((BATCH, time), np.int32)
    if groups is not None:
        numbers[:] = groups
        for t in padding:
            numbers[:, t] = numbers[:, t - 1] if t else 0
    return inputs._replace(real=real, groups=numbers)


# --- step by step, against the loop -------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "inputs",
    [
        at(5),
        at(5, groups=[0, 1, 1, 2, 2]),
        at(5, groups=[1, 1, 2, 2, 3]),
        at(5, padding=[0, 2, 4], groups=[0, 1, 1, 2, 2]),
    ],
)
def test_step_by_step_matches_the_loop(inputs, dtype):
    o, state = run(inputs, None, dtype)
    expected_o, expected_state = reference.gated_delta_rule(*inputs)
    assert_close(o, expected_o, TOLERANCE[dtype])
    assert_close(state, expected_state, TOLERANCE[dtype])


def test_step_by_step_gradients_match_finite_differences():
    inputs = at(4, padding=[1], groups=[0, 0, 0, 1])
    d_o, d_state = output_weights(inputs)

    def loss(inputs):
        o, state = reference.gated_delta_rule(*inputs)
        return np.sum(o * d_o) + np.sum(state * d_state)

    _, _, slopes = run_with_gradients(inputs, None)
    step = 1e-5  # error step^2 from the curvature, 1e-16 / step from rounding: 1e-9
    for name in FLOATS:
        x = getattr(inputs, name)
        for place in np.random.default_rng(0).integers(x.size, size=12):
            shift = np.zeros(x.size)
            shift[place] = step
            shift = shift.reshape(x.shape)
            rise = loss(inputs._replace(**{name: x + shift}))
            rise -= loss(inputs._replace(**{name: x - shift}))
            actual = getattr(slopes, name).reshape(-1)[place]
            np.testing.assert_allclose(actual, rise / (2 * step), rtol=1e-6, atol=1e-7)


# --- chunks: outputs against the loop, gradients against those of step by step --------


@pytest.mark.parametrize("chunk_size", [4, 16, 64, (4, 8), (4, 10), (16, 16)])
@pytest.mark.parametrize("time", [1, 3, 4, 5, 9, 63, 64, 65, 130])
def test_chunks_match_step_by_step(time, chunk_size):
    inputs = draw_inputs(time, time)
    o, state = run(inputs, chunk_size)
    expected_o, expected_state = reference.gated_delta_rule(*inputs)
    assert_close(o, expected_o, TOLERANCE[np.float64])
    assert_close(state, expected_state, TOLERANCE[np.float64])


@pytest.mark.parametrize(
    "time, chunk_size, dtype",
    [
        (65, 16, np.float64),
        (65, (4, 22), np.float64),
        (130, 64, np.float64),
        (130, (16, 64), np.float32),
    ],
)
def test_gradients_of_chunks_match_step_by_step(time, chunk_size, dtype):
    inputs = draw_inputs(time, time)
    actual = run_with_gradients(inputs, chunk_size, dtype)
    assert_same(actual, run_with_gradients(inputs, None), TOLERANCE[dtype])
    assert actual[0].dtype == actual[1].dtype == dtype


def decays(kind, inputs):
    generator = np.random.default_rng(3)
    shape = inputs.log_decay.shape
    return {
        "none": np.zeros(shape),
        "-60": np.full(shape, -60.0),
        "-1e4": np.full(shape, -1e4),
        "-1e4 among -0.1": np.where(generator.random(shape) < 0.1, -1e4, -0.1),
        "of all sizes": -(10.0 ** generator.uniform(-6, 5, shape)),
    }[kind]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "kind", ["none", "-60", "-1e4", "-1e4 among -0.1", "of all sizes"]
)
def test_any_decay_keeps_its_digits(kind, dtype):
    inputs = draw_inputs(1, 130)
    inputs = inputs._replace(log_decay=decays(kind, inputs))
    actual = run_with_gradients(inputs, 64, dtype)
    assert_same(actual, run_with_gradients(inputs, None), TOLERANCE[dtype])
    o, state = reference.gated_delta_rule(*inputs)
    assert_close(actual[0], o, TOLERANCE[dtype])
    assert_close(actual[1], state, TOLERANCE[dtype])


def test_a_weak_decay_after_a_strong_one_keeps_its_digits():
    # Differences of float32 cumulative sums near -1e4 * 63 are off by 0.06.
    inputs = draw_inputs(2, 130)
    log_decay = np.full(inputs.log_decay.shape, -0.1)
    log_decay[:, :32] = log_decay[:, 64:100] = -1e4
    inputs = inputs._replace(log_decay=log_decay)
    actual = run_with_gradients(inputs, 64, np.float32)
    assert_same(actual, run_with_gradients(inputs, None), TOLERANCE[np.float32])


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3])
def test_alike_keys_keep_their_digits(spread, beta):
    inputs = draw_inputs(4, 130)
    k = inputs.k[:, :1] + spread * inputs.k
    signs = np.where(np.arange(130) % 3 == 0, -1, 1)[None, :, None, None]
    inputs = inputs._replace(
        k=unit(k) * signs,
        log_decay=inputs.log_decay * 1e-3,
        beta=np.full_like(inputs.beta, beta),
    )
    expected = run_with_gradients(inputs, None)
    for dtype in (np.float64, np.float32):
        actual = run_with_gradients(inputs, 64, dtype)
        assert_same(actual, expected, TOLERANCE[dtype])


# --- one row in pieces ---------------------------------------------------------------


def split(inputs, cut):
    """Before and after the cut; `state` of the second is to be filled in."""
    before = [x if n == "state" else x[:, :cut] for n, x in inputs._asdict().items()]
    after = [x if n == "state" else x[:, cut:] for n, x in inputs._asdict().items()]
    return Inputs(*before), Inputs(*after)


@pytest.mark.parametrize("chunk_size", [4, 64, (4, 8), None])
@pytest.mark.parametrize("time, cut", [(130, 65), (9, 4), (9, 5), (5, 4), (4, 1)])
def test_two_calls_equal_one(time, cut, chunk_size):
    inputs = draw_inputs(time, time)
    first, second = split(inputs, cut)
    o_first, state = run(first, chunk_size)
    o_second, state = run(second._replace(state=state), chunk_size)
    o, final = reference.gated_delta_rule(*inputs)
    assert_close(np.concatenate([o_first, o_second], 1), o, TOLERANCE[np.float64])
    assert_close(state, final, TOLERANCE[np.float64])


def test_a_prompt_at_once_equals_single_steps():
    inputs = draw_inputs(0, 9)
    state, steps = inputs.state, []
    for t in range(9):
        token = Inputs(*(x[:, t : t + 1] for x in inputs))._replace(state=state)
        o, state = run(token, None)
        steps.append(o)
    o, final = run(inputs, 4)
    assert_close(np.concatenate(steps, 1), o, TOLERANCE[np.float64])
    assert_close(state, final, TOLERANCE[np.float64])


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.integers(0, 65), st.integers(0, 2**32 - 1), st.sampled_from([4, (4, 16)])
)
def test_any_cut_gives_the_same(cut, seed, chunk_size):
    """Both calls have 65 places: what belongs to the other one is padding."""
    inputs = draw_inputs(seed, 65)
    before = np.broadcast_to(np.arange(65) < cut, inputs.real.shape)
    o_first, state = run(inputs._replace(real=before), chunk_size)
    second = inputs._replace(real=~before, state=state)
    o_second, state = run(second, chunk_size)
    o, final = reference.gated_delta_rule(*inputs)
    assert_close(o_first + o_second, o, TOLERANCE[np.float64])
    assert_close(state, final, TOLERANCE[np.float64])


# --- several sequences in a row, and padding -----------------------------------------


@st.composite
def packed_rows(draw):
    """Groups and padding of rows of 65 tokens."""
    groups = np.zeros((BATCH, 65), np.int32)
    real = np.ones((BATCH, 65), bool)
    for b in range(BATCH):
        starts = draw(st.sets(st.integers(0, 64), max_size=6))
        padding = draw(st.sets(st.integers(0, 64), max_size=40))
        group = current = 0
        for t in range(65):
            current += t in starts
            real[b, t] = t not in padding
            if real[b, t]:
                group = current
            groups[b, t] = group
    return groups, real


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    packed_rows(), st.integers(0, 2**32 - 1), st.sampled_from([16, (4, 16), None])
)
def test_packed_sequences_equal_separate_ones(rows, seed, chunk_size):
    groups, real = rows
    inputs = draw_inputs(seed, 65)._replace(groups=groups, real=real)
    o, state = run(inputs, chunk_size)
    assert np.all(np.isfinite(o))
    for b in range(BATCH):
        for group in np.unique(groups[b, real[b]]):
            places = np.flatnonzero(real[b] & (groups[b] == group))
            one = Inputs(
                *(x[b : b + 1] if n == "state" else x[b : b + 1, places]
                  for n, x in inputs._asdict().items())
            )  # fmt: skip
            if group:
                one = one._replace(state=np.zeros_like(one.state))
            one = one._replace(groups=np.zeros_like(one.groups))
            expected_o, expected_state = reference.gated_delta_rule(*one)
            assert_close(o[b : b + 1, places], expected_o, TOLERANCE[np.float64])
        if real[b].any():
            assert_close(state[b : b + 1], expected_state, TOLERANCE[np.float64])
        else:
            np.testing.assert_array_equal(state[b], inputs.state[b])


@hypothesis.settings(max_examples=15)
@hypothesis.given(packed_rows(), st.sampled_from([16, (4, 16)]))
def test_gradients_of_packed_rows_match_step_by_step(rows, chunk_size):
    groups, real = rows
    inputs = draw_inputs(11, 65)._replace(groups=groups, real=real)
    expected = run_with_gradients(inputs, None)
    actual = run_with_gradients(inputs, chunk_size)
    assert_same(actual, expected, TOLERANCE[np.float64])


HUGE = {"q": 1e30, "k": -1e30, "v": 1e38, "log_decay": 1e30, "beta": -1e30}


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    packed_rows(),
    st.sampled_from([(4, 16), None]),
    st.sampled_from([1.0, 1e-45, -0.0, np.inf, np.nan]),
)
def test_nothing_at_padding_counts(rows, chunk_size, factor):
    groups, real = rows
    inputs = draw_inputs(5, 65)._replace(groups=groups, real=real)
    other = {}
    for name, value in HUGE.items():
        x = getattr(inputs, name)
        place = real.reshape(real.shape + (1,) * (x.ndim - 2))
        other[name] = np.where(place, x, value * factor)
    actual = run_with_gradients(inputs._replace(**other), chunk_size)
    expected = run_with_gradients(inputs, chunk_size)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for name in HUGE:
        assert not np.any(getattr(actual[2], name)[~real])
    assert not np.any(actual[0][~real])


@pytest.mark.parametrize("chunk_size", [64, (4, 16), None])
@pytest.mark.parametrize("left", [0, 1, 60])
def test_a_padded_row_equals_the_unpadded_row(left, chunk_size):
    short = draw_inputs(6, 5)
    places = slice(left, left + 5)
    padded = draw_inputs(8, 65)
    real = np.zeros_like(padded.real)
    real[:, places] = True
    for name in ("q", "k", "v", "log_decay", "beta"):
        getattr(padded, name)[:, places] = getattr(short, name)
    padded = padded._replace(real=real, state=short.state)
    o, state = run(padded, chunk_size)
    expected_o, expected_state = reference.gated_delta_rule(*short)
    assert_close(o[:, places], expected_o, TOLERANCE[np.float64])
    assert_close(state, expected_state, TOLERANCE[np.float64])


@pytest.mark.parametrize("chunk_size", [16, (4, 16), None])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_row_of_padding_returns_its_state_to_the_bit(dtype, chunk_size):
    inputs = draw_inputs(9, 65)
    inputs.real[0] = False
    inputs.state[0, 0, 0] = -0.0
    inputs.state[0, 0, 1] = 1e-310  # 0 or subnormal, whichever the type makes of it
    _, state = run(inputs, chunk_size, dtype)
    assert state[0].tobytes() == inputs.state[0].astype(dtype).tobytes()
    _, _, slopes = run_with_gradients(inputs, chunk_size)
    np.testing.assert_array_equal(slopes.state[0], output_weights(inputs)[1][0])


# --- types and the chooser -----------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [4, (2, 4), None])
def test_bfloat16_is_computed_in_float32(chunk_size):
    inputs = draw_inputs(10, 9)
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:5]]
    low += [jnp.asarray(x) for x in (np.float32(inputs.state), *inputs[6:])]
    o, state = outputs(low[:6], *low[6:], chunk_size=chunk_size)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    rounded = [np.asarray(x, np.float64) for x in low[:6]]
    expected_o, expected_state = reference.gated_delta_rule(*rounded, *inputs[6:])
    assert_close(state, expected_state, TOLERANCE[np.float32])
    assert_close(np.float64(o), expected_o, 2**-8)  # half a unit of bfloat16


def test_a_token_takes_a_step_a_few_take_chunks_and_more_take_spans():
    def program(function, time):
        inputs = draw_inputs(0, time)
        inputs = *map(np.float32, inputs[:6]), *inputs[6:]
        return str(jax.make_jaxpr(function)(*inputs))

    sizes = {"chunk_size": 4, "span_size": 8}
    chosen = functools.partial(gated_delta_rule, **sizes)
    chunked = functools.partial(gated_delta_rule_chunked, chunk_size=4)
    by_span = functools.partial(gated_delta_rule_by_span, **sizes)
    assert program(chosen, 1) == program(gated_delta_rule_stepwise, 1)
    assert program(chosen, 8) == program(chunked, 8)
    assert program(chosen, 9) == program(by_span, 9)


def test_the_backward_pass_of_spans_holds_less():
    def temporary(function):
        inputs = draw_inputs(0, 256)
        inputs = *map(np.float32, inputs[:6]), *inputs[6:]
        loss = lambda *args: jnp.sum(function(*args)[0] ** 2)
        compiled = jax.jit(jax.grad(loss, argnums=range(6))).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    by_span = functools.partial(gated_delta_rule_by_span, chunk_size=16, span_size=32)
    chunked = functools.partial(gated_delta_rule_chunked, chunk_size=16)
    assert temporary(by_span) < 0.5 * temporary(chunked)
