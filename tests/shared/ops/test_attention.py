"""Attention against loops in float64, forward and backward, in one block and many."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.ops import attention
from shared.ops.attention import Keys
from tests.references import attention as reference

B, T, N, K, H, HV = 2, 11, 6, 3, 4, 5
CACHED = 7
SCALE = 0.4

# Twelve softmax terms of normal numbers, in the accuracy of each type.
FLOAT64 = dict(rtol=0, atol=1e-13)
FLOAT32 = dict(rtol=0, atol=1e-5)

# In one piece, and in several blocks per source, of which the last leaves a rest.
each_block_size = pytest.mark.parametrize("block_size", [512, 3])
seeds = st.integers(0, 2**32 - 1)


@functools.partial(jax.jit, static_argnames=("window", "block_size"))
def attend(q, segment_ids, index, sources, window=None, block_size=512):
    return attention.attend(
        q,
        segment_ids,
        index,
        sources,
        scale=SCALE,
        window=window,
        block_size=block_size,
    )


@functools.partial(jax.jit, static_argnames=("window", "block_size"))
def attend_vjp(q, segment_ids, index, sources, y_grad, window=None, block_size=512):
    """The outputs; the gradients of q and of the keys and values of each source."""

    def function(q, pairs):
        parts = [
            Keys(*pair, *source[2:])
            for pair, source in zip(pairs, sources, strict=True)
        ]
        return attend(q, segment_ids, index, parts, window, block_size)

    pairs = [source[:2] for source in sources]
    y, vjp = jax.vjp(function, q, pairs)
    return y, vjp(y_grad)


def draw(seed, dtype=np.float32, batch=B, length=T):
    """Queries and two sources: a cache with empty slots, and the current tokens.

    Rows hold up to three sequences, cut anywhere, with padding anywhere.
    """
    rng = np.random.default_rng(seed)

    def ids(length):
        ids = np.sort(rng.integers(1, 4, (batch, length)), axis=1)
        return (ids * (rng.random((batch, length)) < 0.8)).astype(np.int32)

    def source(length, start):
        return Keys(
            rng.normal(size=(batch, length, K, H)).astype(dtype),
            rng.normal(size=(batch, length, K, HV)).astype(dtype),
            ids(length),
            np.tile(np.arange(start, start + length, dtype=np.int32), (batch, 1)),
        )

    q = rng.normal(size=(batch, length, N, H)).astype(dtype)
    cached, current = source(CACHED, 0), source(length, CACHED)
    return q, current.segment_ids, current.index, [cached, current]


def plain(seed, dtype=np.float32, batch=B, length=T):
    """One sequence per row, and nothing cached."""
    q, ids, index, (_, current) = draw(seed, dtype, batch, length)
    ids = np.ones_like(ids)
    return q, ids, index, [current._replace(segment_ids=ids)]


def joined(sources):
    return [np.concatenate(arrays, axis=1) for arrays in zip(*sources, strict=True)]


def on_device(args):
    return jax.tree.map(jnp.asarray, args)


@settings(max_examples=30)
@given(
    seeds,
    st.sampled_from([(512, None), (512, 4), (6, None), (3, 4)]),
    st.sampled_from([np.float64, np.float32]),
)
def test_matches_the_loop_forward_and_backward(seed, sizes, dtype):
    block_size, window = sizes
    tolerance = FLOAT64 if dtype == np.float64 else FLOAT32
    q, ids, index, sources = draw(seed, dtype)
    y_grad = np.random.default_rng(seed).normal(size=(B, T, N, HV)).astype(dtype)
    with jax.enable_x64(dtype == np.float64):
        args = on_device((q, ids, index, sources, y_grad))
        y, (q_grad, pairs) = attend_vjp(*args, window, block_size)
    assert y.dtype == q_grad.dtype == dtype

    keys = joined(sources)
    expected = reference.attend(q, ids, index, *keys, SCALE, window)
    np.testing.assert_allclose(y, expected, **tolerance)
    expected = reference.attend_gradients(q, ids, index, *keys, y_grad, SCALE, window)
    for grad, e in zip((q_grad, *joined(pairs)), expected, strict=True):
        np.testing.assert_allclose(grad, e, **tolerance)


@each_block_size
@pytest.mark.parametrize("cache_dtype", [jnp.bfloat16, np.float32])
def test_low_precision_costs_a_few_roundings(block_size, cache_dtype):
    q, ids, index, (cached, current) = draw(0, jnp.bfloat16)
    cached = cached._replace(
        keys=cached.keys.astype(cache_dtype), values=cached.values.astype(cache_dtype)
    )
    args = q, ids, index, [cached, current]
    y_grad = jnp.ones((B, T, N, HV), jnp.bfloat16)
    y, (q_grad, pairs) = attend_vjp(*on_device(args), y_grad, block_size=block_size)
    assert y.dtype == q_grad.dtype == jnp.bfloat16
    assert [x.dtype for pair in pairs for x in pair] == [cache_dtype] * 2 + [
        jnp.bfloat16
    ] * 2

    wide = lambda x: np.asarray(x, np.float64)
    keys = [wide(a) if a.ndim == 4 else a for a in joined(map(as_wide, args[3]))]
    expected = reference.attend(wide(q), ids, index, *keys, SCALE)
    # Weights and result are rounded to 8 bits once each; values reach 3.
    np.testing.assert_allclose(wide(y), expected, atol=2**-7, rtol=2**-7)
    expected = reference.attend_gradients(
        wide(q), ids, index, *keys, wide(y_grad), SCALE
    )
    actual = q_grad, *joined(map(as_wide, pairs))
    for a, e in zip(actual, expected, strict=True):
        # The output, rounded, enters the gradient; a key has up to 22 queries.
        np.testing.assert_allclose(wide(a), e, atol=0.06, rtol=2**-6)


def as_wide(source):
    return [np.asarray(x, np.float64) if x.ndim == 4 else x for x in source]


@each_block_size
def test_what_stands_at_padding_influences_nothing(block_size):
    args = q, ids, index, sources = draw(1)
    loud = lambda x, ids: np.where(ids[..., None, None] > 0, x, np.float32(3e38))
    loud_sources = [
        Keys(loud(k, key_ids), loud(v, key_ids), key_ids, key_index)
        for k, v, key_ids, key_index in sources
    ]
    y_grad = np.ones((B, T, N, HV), np.float32)
    quiet = attend_vjp(*on_device((*args, y_grad)), block_size=block_size)
    noisy = attend_vjp(
        *on_device((loud(q, ids), ids, index, loud_sources, loud(y_grad, ids))),
        block_size=block_size,
    )
    jax.tree.map(np.testing.assert_array_equal, noisy, quiet)
    y, (q_grad, pairs) = noisy
    assert not y[ids == 0].any() and not q_grad[ids == 0].any()
    for grads, source in zip(pairs, sources, strict=True):
        for grad in grads:
            assert np.isfinite(grad).all() and grad.any()
            assert not grad[source.segment_ids == 0].any()


@each_block_size
def test_a_query_that_sees_nothing_gives_zeros_and_has_no_gradient(block_size):
    q, ids, index, sources = plain(2)
    # Row 0 is all padding; row 1 has keys only after the query, or of another sequence.
    ids[0] = 0
    sources = [sources[0]._replace(segment_ids=ids, index=index + 1)]
    ids = ids.copy()
    ids[1, T // 2 :] = 2
    q_ids = ids[:, :1], index[:, :1]
    y_grad = jnp.ones((B, 1, N, HV))
    args = on_device((q[:, :1], *q_ids, sources))
    y, grads = attend_vjp(*args, y_grad, block_size=block_size)
    assert not y.any()
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(grads))


@each_block_size
@pytest.mark.parametrize("left, right", [(3, 0), (0, 4), (2, 2)])
def test_padding_on_either_side_changes_nothing(block_size, left, right):
    q, ids, index, (keys,) = plain(3)
    pad = lambda x: np.pad(
        x, ((0, 0), (left, right), *((0, 0),) * (x.ndim - 2)), constant_values=7
    )
    padded_ids = pad(ids) * (pad(np.zeros_like(ids)) == 0)
    padded = Keys(pad(keys.keys), pad(keys.values), padded_ids, pad(keys.index))
    y = attend(*on_device((pad(q), padded_ids, pad(index), [padded])), None, block_size)
    expected = attend(*on_device((q, ids, index, [keys])), None, block_size)
    np.testing.assert_allclose(y[:, left : left + T], expected, **FLOAT32)


@each_block_size
def test_packed_sequences_equal_each_alone(block_size):
    q, ids, index, (keys,) = plain(4)
    ids[:, 6:] = 2
    for restart in (False, True):
        if restart:
            index = index - 6 * (ids == 2)
        args = q, ids, index, [keys._replace(segment_ids=ids, index=index)]
        y = attend(*on_device(args), None, block_size)
        for part in (slice(0, 6), slice(6, T)):
            alone = jax.tree.map(lambda x, part=part: x[:, part], args)
            expected = attend(*on_device(alone), None, block_size)
            np.testing.assert_allclose(y[:, part], expected, **FLOAT32)


@each_block_size
def test_sources_equal_one_that_holds_them_all_in_any_order(block_size):
    q, ids, index, sources = on_device(draw(5))
    whole = Keys(*map(jnp.asarray, joined(sources)))
    order = np.random.default_rng(5).permutation(whole.index.shape[1])
    empty = jax.tree.map(lambda x: x[:, :0], whole)
    y = attend(q, ids, index, [whole], None, block_size)
    for others in (
        sources,
        sources[::-1],
        [jax.tree.map(lambda x: x[:, order], whole)],
    ):
        other = attend(q, ids, index, others, None, block_size)
        np.testing.assert_allclose(other, y, **FLOAT32)
    with_empty = attend(q, ids, index, [empty, whole, empty], None, block_size)
    np.testing.assert_array_equal(with_empty, y)
    nothing = attend(q, ids, index, [empty], None, block_size)
    np.testing.assert_array_equal(nothing, jnp.zeros((B, T, N, HV)))


@each_block_size
def test_a_token_sees_exactly_its_window(block_size):
    window = 4
    q, ids, index, (keys,) = plain(6)
    # Values that name their token: the output is the softmax itself.
    one_hot = np.tile(np.eye(T, dtype=np.float32)[None, :, None], (B, 1, K, 1))
    args = on_device((q, ids, index, [keys._replace(values=one_hot)]))
    y = attend(*args, window, block_size)
    behind = np.arange(T)[:, None] - np.arange(T)
    sees = (behind >= 0) & (behind < window)
    np.testing.assert_array_equal(y > 0, np.broadcast_to(sees[:, None], y.shape))


@each_block_size
def test_query_heads_read_key_heads_in_consecutive_groups(block_size):
    q, ids, index, (keys,) = plain(7)
    values = np.broadcast_to(
        np.arange(K, dtype=np.float32)[:, None], keys.values.shape
    ).copy()
    args = on_device((q, ids, index, [keys._replace(values=values)]))
    y = attend(*args, None, block_size)
    np.testing.assert_allclose(y[0, 0, :, 0], [0, 0, 1, 1, 2, 2], rtol=1e-6)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("block_size", [512, 2])
def test_decoding_token_by_token_equals_one_call(window, block_size):
    q, ids, index, (keys,) = on_device(plain(8))
    y = attend(q, ids, index, [keys], window)
    buffer = jax.tree.map(jnp.zeros_like, keys)
    for t in range(T):
        now = jax.tree.map(lambda x, t=t: x[:, t : t + 1], (q, ids, index, keys))
        step = attend(*now[:3], [buffer, now[3]], window, block_size)
        np.testing.assert_allclose(step, y[:, t : t + 1], **FLOAT32)
        buffer = jax.tree.map(
            lambda x, new, t=t: x.at[:, t].set(new[:, 0]), buffer, now[3]
        )


@each_block_size
def test_large_scores_pick_the_greatest_without_overflow(block_size):
    q, ids, index, (keys,) = plain(9)
    q, k = q * np.float32(1e4), keys.keys * np.float32(1e4)
    args = q, ids, index, [keys._replace(keys=k)]
    y, grads = attend_vjp(
        *on_device(args), jnp.ones((B, T, N, HV)), block_size=block_size
    )
    expected = reference.attend(q, ids, index, k, keys.values, ids, index, SCALE)
    np.testing.assert_allclose(y, expected, **FLOAT32)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


def test_vmapped_equals_one_at_a_time():
    draws = [on_device(draw(seed)) for seed in (10, 11)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *draws)
    y_grad = jnp.ones((2, B, T, N, HV))
    function = functools.partial(attend_vjp, block_size=3)
    together = jax.vmap(function)(*stacked, y_grad)
    for i, args in enumerate(draws):
        alone = function(*args, y_grad[0])
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, **FLOAT32),
            together,
            alone,
        )


def test_works_inside_a_scan_over_rematerialised_layers():
    q, ids, index, (keys,) = on_device(plain(12, batch=1, length=7))

    def layer(h, weight):
        source = keys._replace(keys=weight * h[:, :, :K])
        y = attend(h, ids, index, [source], block_size=3)
        return h + y[..., :H], None

    def scanned(weights):
        return jnp.square(jax.lax.scan(jax.checkpoint(layer), q, weights)[0]).sum()

    def unrolled(weights):
        h = q
        for weight in weights:
            h, _ = layer(h, weight)
        return jnp.square(h).sum()

    weights = jnp.asarray([0.5, 1.5])
    grad = jax.jit(jax.grad(scanned))(weights)
    expected = jax.jit(jax.grad(unrolled))(weights)
    np.testing.assert_allclose(grad, expected, rtol=1e-4)


def programs(length, block_size=512, batch=1):
    """The forward and the backward pass, and abstract arguments for them."""
    shape = lambda *sizes: jax.ShapeDtypeStruct((batch, length, *sizes), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def forward(q, k, v, ids, index):
        keys = Keys(k, v, ids, index)
        return attention.attend(
            q, ids, index, [keys], scale=SCALE, block_size=block_size
        )

    backward = jax.grad(lambda *args: forward(*args).sum(), (0, 1, 2))
    return (forward, backward), (shape(4, 8), shape(2, 8), shape(2, 8), ids, ids)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        parts = [
            p if isinstance(p, (list, tuple)) else [p] for p in equation.params.values()
        ]
        for part in itertools.chain(*parts):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from equations(part)


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_memory_does_not_grow_with_the_square_of_the_length(which):
    used = {}
    for length in (1024, 4096):
        passes, args = programs(length)
        compiled = jax.jit(passes[which]).lower(*args).compile()
        used[length] = compiled.memory_analysis().temp_size_in_bytes
    # Four times the length; the square would be sixteen.
    assert 0 < used[4096] <= 4.5 * used[1024]
    assert used[4096] < 4 * 4096 * 4096  # the scores of a single head


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_no_intermediate_has_a_place_for_every_pair_of_tokens(which):
    length = 4096
    passes, args = programs(length, block_size=128)
    found = list(equations(jax.make_jaxpr(passes[which])(*args).jaxpr))
    assert sum(e.primitive.name == "dot_general" for e in found) >= 2
    largest = max(v.aval.size for e in found for v in e.outvars)
    # q, of 4 heads of 8, is the largest there may be.
    assert largest <= length * 32 < length * length


@pytest.mark.parametrize("which", [0, 1], ids=["forward", "backward"])
def test_what_fits_in_one_block_is_computed_without_a_loop(which):
    passes, args = programs(length=16, batch=B)
    names = {
        e.primitive.name for e in equations(jax.make_jaxpr(passes[which])(*args).jaxpr)
    }
    assert "dot_general" in names
    assert not names & {
        "scan",
        "while",
        "cond",
        "dynamic_slice",
        "remat2",
        "checkpoint",
    }


def long_cache(length, used):
    """One row; only the first `used` places hold something."""
    random = np.random.default_rng(0)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    return Keys(
        jnp.asarray(random.normal(size=(1, length, K, H)), jnp.float32),
        jnp.asarray(random.normal(size=(1, length, K, HV)), jnp.float32),
        (place < used).astype(jnp.int32),
        place,
    )


def test_one_token_reads_a_cache_of_a_few_blocks_in_one_piece():
    q, one = jnp.zeros((1, 1, N, H)), jnp.ones((1, 1), jnp.int32)
    jaxpr = jax.make_jaxpr(attend)(q, one, 2000 * one, [long_cache(2000, 9)]).jaxpr
    assert not {e.primitive.name for e in equations(jaxpr)} & {"scan", "while", "cond"}


def test_one_token_does_not_read_the_blocks_that_hold_nothing():
    # What is read unseen must be finite; what is not read may be anything.
    length, used = 5000, 600  # blocks of 1667, and only the first holds something
    cache = long_cache(length, used)
    q, one = jnp.ones((1, 1, N, H)), jnp.ones((1, 1), jnp.int32)
    short = Keys(*(x[:, :used] for x in cache))
    expected = attend(q, one, used * one, [short], block_size=256)
    unread = jnp.arange(length)[None, :, None, None] >= 2048
    poisoned = cache._replace(
        keys=jnp.where(unread, jnp.nan, cache.keys),
        values=jnp.where(unread, jnp.nan, cache.values),
    )
    y = attend(q, one, used * one, [poisoned], block_size=256)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_the_last_block_of_a_cache_counts_no_key_twice():
    length = 5000  # three blocks of 1667: one place stands in two
    cache = long_cache(length, length)
    q, one = jnp.ones((1, 1, N, H)), jnp.ones((1, 1), jnp.int32)
    y = attend(q, one, length * one, [cache], block_size=256)
    pieces = [
        Keys(*(x[:, i : i + 1000] for x in cache)) for i in range(0, length, 1000)
    ]
    expected = attend(q, one, length * one, pieces)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
