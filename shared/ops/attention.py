"""Causal grouped-query attention whose memory grows linearly with the length.

Queries and keys are cut into blocks. For a block of queries the softmax is gathered
from one block of keys after the other (Milakov and Gimelshein, arXiv:1805.02867); the
backward pass computes the scores again, from the logarithms of the softmax sums (Dao,
arXiv:2307.08691). What fits in one block is computed in one piece, by the same lines,
without a loop.

Letters: B batch; T, S queries in time and keys; N query heads, K key and value heads,
G = N / K queries per key head; H, Hv widths of a query and of a value. Lowercase q and
s count queries and keys within a block, i and j the blocks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Blocks of keys for few queries, in block sizes: longer ones read more that is empty.
MOST_KEY_BLOCKS = 8

_Carry = TypeVar("_Carry")


class Keys(NamedTuple):
    """One source of keys and values: a cache, or the current tokens.

    `segment_ids` is 0 where there is nothing to see: padding, or an empty slot.
    """

    keys: Float[Array, "B S K H"]
    values: Float[Array, "B S K Hv"]
    segment_ids: Int[Array, "B S"]
    index: Int[Array, "B S"]  # type: ignore[assignment]  # hides tuple.index


def attend(
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    index: Int[Array, "B T"],
    sources: Sequence[Keys],
    *,
    scale: float,
    window: int | None = None,
    block_size: int = 256,
) -> Float[Array, "B T N Hv"]:
    """Attends from every query to the keys that it sees, in all `sources` together.

    `y_t = sum_s p_ts v_s` with `p_t = softmax_s(scale * q_t . k_s)` over the `s` that
    have the segment id of `t`, an id above 0, and an index not above that of `t`. Query
    head `n` reads key head `n // (N // K)`. A query that sees nothing gives zeros and
    has no gradient. Scores, softmax and sums are in at least float32; `y` has the dtype
    of `q`.

    What stands at padding and in empty slots influences nothing, as long as it is
    finite.

    Args:
        q: The queries.
        segment_ids: 0 at padding; equal positive ids are one sequence.
        index: The order of the tokens within their sequence.
        sources: Where the keys are. The order of sources and of keys does not matter.
        scale: What the scores are multiplied by, usually `H ** -0.5`.
        window: How many tokens a query sees, itself included; `None`: all before it.
        block_size: At most `block_size ** 2` scores per head are held at a time. Where
            queries are few the blocks of keys are longer. Blocks in which no query sees
            anything are not read: past the first block a token costs what its cache
            holds, not its size.
    """
    live = _live(sources)
    if not live:
        return jnp.zeros((*q.shape[:3], sources[0].values.shape[3]), q.dtype)
    options = _Options(scale, window, block_size)
    ids, order = (jnp.asarray(x, jnp.int32) for x in (segment_ids, index))
    y = _attend(options, _group(q, live), ids, order, live)
    return y.reshape(*q.shape[:3], y.shape[-1])


def forward(
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    index: Int[Array, "B T"],
    source: Keys,
    *,
    scale: float,
    window: int | None,
    block_size: int = 256,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """`attend` to one source, for a gradient of the caller's own (see `gradients`).

    Returns:
        The outputs, and the logarithm of each softmax sum: inf where nothing is seen.
    """
    options = _Options(scale, window, block_size)
    grouped = _group(q, (source,))
    y, log_total = _forward(options, grouped, segment_ids, index, (source,))
    return y.reshape(*q.shape[:3], y.shape[-1]), log_total.reshape(q.shape[:3])


def gradients(
    q: Float[Array, "B T N H"],
    segment_ids: Int[Array, "B T"],
    index: Int[Array, "B T"],
    source: Keys,
    y: Float[Array, "B T N Hv"],
    log_total: Float[Array, "B T N"],
    y_grad: Float[Array, "B T N Hv"],
    *,
    scale: float,
    window: int | None,
    block_size: int = 256,
) -> tuple[Array, Array, Array]:
    """Gradients to queries, keys and values, from what `forward` took and gave."""
    options = _Options(scale, window, block_size)
    sources = (source,)
    y, y_grad, log_total = (_group(x, sources) for x in (y, y_grad, log_total))
    residuals = _group(q, sources), segment_ids, index, sources, y, log_total
    q_grad, (grads,) = _backward(options, residuals, y_grad)
    return q_grad.reshape(q.shape), grads.keys, grads.values


def _live(sources: Sequence[Keys]) -> tuple[Keys, ...]:
    """The sources that hold anything."""
    int32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    return tuple(
        Keys(keys, values, int32(ids), int32(order))
        for keys, values, ids, order in sources
        if keys.shape[1]
    )


def _group(x: Array, sources: tuple[Keys, ...]) -> Array:
    """[B, T, N, ...] as [B, T, K, G, ...]."""
    key_heads = sources[0].keys.shape[2]
    return x.reshape(*x.shape[:2], key_heads, x.shape[2] // key_heads, *x.shape[3:])


class _Options(NamedTuple):
    scale: float
    window: int | None
    block_size: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options,
    q: Float[Array, "B T K G H"],
    segment_ids: Int[Array, "B T"],
    index: Int[Array, "B T"],
    sources: tuple[Keys, ...],
) -> Float[Array, "B T K G Hv"]:
    return _forward(options, q, segment_ids, index, sources)[0]


def _attend_forward(options, q, segment_ids, index, sources):
    y, log_total = _forward(options, q, segment_ids, index, sources)
    return y, (q, segment_ids, index, sources, y, log_total)


def _attend_backward(options, residuals, y_grad):
    q_grad, source_grads = _backward(options, residuals, y_grad)
    return q_grad, None, None, source_grads


_attend.defvjp(_attend_forward, _attend_backward)


class _Blocks(NamedTuple):
    """Arrays cut along axis 1 into `number` blocks of `size`, filled up with zeros."""

    arrays: tuple[Array, ...]
    number: int
    size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.arrays[0].shape[0], self.number * self.size

    def at(self, i: int | Array) -> tuple[Array, ...]:
        return tuple(self.take(x, i) for x in self.arrays)

    def take(self, x: Array, i: int | Array) -> Array:
        if self.number == 1:
            return x
        return lax.dynamic_slice_in_dim(x, i * self.size, self.size, axis=1)

    def put(self, x: Array, block: Array, i: int | Array) -> Array:
        if self.number == 1:
            return block
        return lax.dynamic_update_slice_in_dim(x, block, i * self.size, axis=1)


def _cut(arrays: tuple[Array, ...], limit: int) -> _Blocks:
    """Cuts into as few blocks of at most `limit` as there can be, all of one size."""
    length = arrays[0].shape[1]
    number = -(-length // limit)
    size = -(-length // number)
    fill = number * size - length
    padded = tuple(
        jnp.pad(x, ((0, 0), (0, fill), *((0, 0),) * (x.ndim - 2))) for x in arrays
    )
    return _Blocks(padded if fill else arrays, number, size)


def _queries_in_blocks(options: _Options, *arrays: Array) -> _Blocks:
    return _cut(arrays, options.block_size)


class _KeyBlocks(NamedTuple):
    """A source cut along axis 1 into `number` blocks of `size`, without copying it.

    The last block may begin within the one before it, and leaves out what that has.
    """

    source: Keys
    number: int
    size: int

    def at(self, i: int | Array) -> tuple[Array, ...]:
        if self.number == 1:
            return tuple(self.source)
        length = self.source.keys.shape[1]
        start = jnp.minimum(jnp.int32(i) * self.size, length - self.size)
        keys, values, ids, index = (
            lax.dynamic_slice_in_dim(x, start, self.size, axis=1) for x in self.source
        )
        own = start + jnp.arange(self.size, dtype=jnp.int32) >= jnp.int32(i) * self.size
        return keys, values, jnp.where(own[None], ids, 0), index


def _most_keys(options: _Options, queries: _Blocks) -> int:
    """Keys in a block: more where queries are few, so that there are fewer blocks."""
    limit = max(options.block_size, options.block_size**2 // queries.size)
    return min(limit, MOST_KEY_BLOCKS * options.block_size)


def _keys_in_blocks(
    options: _Options, queries: _Blocks, source: Keys
) -> tuple[_KeyBlocks, Bool[Array, "i j"]]:
    """The blocks of a source, and which blocks of queries may see which of them."""
    cut = _cut((source.segment_ids, source.index), _most_keys(options, queries))
    blocks = _KeyBlocks(source, cut.number, cut.size)
    return blocks, _near(options, queries, cut.arrays, cut.number)


def _padded_keys_in_blocks(
    options: _Options, queries: _Blocks, source: Keys
) -> tuple[_Blocks, Bool[Array, "i j"]]:
    """The same in blocks that do not overlap, to be written, too."""
    cut = _cut(tuple(source), _most_keys(options, queries))
    return cut, _near(options, queries, cut.arrays[2:], cut.number)


def _near(
    options: _Options, queries: _Blocks, keys: tuple[Array, ...], number: int
) -> Bool[Array, "i j"]:
    """Which blocks of queries may see which blocks of keys, from ids and index."""
    low, high, first, last = _extents(
        queries.arrays[1], queries.arrays[2], queries.number
    )
    key_low, key_high, key_first, key_last = _extents(keys[0], keys[1], number)
    near = (key_low[:, None, :] <= high[:, :, None]) & (
        low[:, :, None] <= key_high[:, None, :]
    )
    near &= key_first[:, None, :] <= last[:, :, None]
    if options.window is not None:
        near &= first[:, :, None] - key_last[:, None, :] < options.window
    return near.any(0)


def _extents(
    ids: Int[Array, "B T"], index: Int[Array, "B T"], number: int
) -> tuple[Array, Array, Array, Array]:
    """Of each block, without padding: least and greatest segment id, then index."""
    ids, index = (x.reshape(x.shape[0], number, -1) for x in (ids, index))
    real, bounds = ids > 0, np.iinfo(np.int32)
    return (
        jnp.where(real, ids, bounds.max).min(-1),
        jnp.where(real, ids, bounds.min).max(-1),
        jnp.where(real, index, bounds.max).min(-1),
        jnp.where(real, index, bounds.min).max(-1),
    )


def _repeat(
    count: int, body: Callable[[int | Array, _Carry], _Carry], carry: _Carry
) -> _Carry:
    return body(0, carry) if count == 1 else lax.fori_loop(0, count, body, carry)


def _if_near(
    near: Bool[Array, "i j"],
    i: int | Array,
    j: int | Array,
    step: Callable[[_Carry], _Carry],
    carry: _Carry,
) -> _Carry:
    """One step, left out if no query of block `i` sees a key of block `j`."""
    if near.size == 1:
        return step(carry)
    return lax.cond(near[i, j], step, lambda carry: carry, carry)


def _forward(
    options: _Options, q: Array, segment_ids: Array, index: Array, sources: tuple
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B T K G"]]:
    """The outputs, and the logarithm of each softmax sum: inf where nothing is seen."""
    dtype = _accumulator(q, sources)
    queries = _queries_in_blocks(options, q, segment_ids, index)
    blocked = [_keys_in_blocks(options, queries, source) for source in sources]
    shape = (q.shape[0], q.shape[2], queries.size, q.shape[3])  # B K q G
    value_width = sources[0].values.shape[3]

    def block_of_queries(i, buffers):
        softmax = _Softmax(
            greatest=jnp.full(shape, -jnp.inf, dtype),
            total=jnp.zeros(shape, dtype),
            weighted=jnp.zeros((*shape, value_width), dtype),
        )
        for keys, near in blocked:
            softmax = _gather(options, queries.at(i), keys, near, i, softmax)
        y, log_total = (jnp.moveaxis(x, 2, 1) for x in softmax.result())
        return (
            queries.put(buffers[0], y.astype(q.dtype), i),
            queries.put(buffers[1], log_total, i),
        )

    y = jnp.zeros((*queries.shape, *q.shape[2:4], value_width), q.dtype)
    log_total = jnp.zeros((*queries.shape, *q.shape[2:4]), dtype)
    y, log_total = _repeat(queries.number, block_of_queries, (y, log_total))
    return y[:, : q.shape[1]], log_total[:, : q.shape[1]]


class _Softmax(NamedTuple):
    """A softmax-weighted sum under way, relative to the greatest score so far."""

    greatest: Float[Array, "B K q G"]
    total: Float[Array, "B K q G"]
    weighted: Float[Array, "B K q G Hv"]

    def result(self) -> tuple[Array, Array]:
        seen = self.total > 0
        total = jnp.where(seen, self.total, 1)
        y = jnp.where(seen[..., None], self.weighted / total[..., None], 0)
        return y, jnp.where(seen, self.greatest + jnp.log(total), jnp.inf)


def _gather(
    options: _Options,
    query: tuple,
    keys: _KeyBlocks,
    near: Array,
    i: int | Array,
    softmax: _Softmax,
) -> _Softmax:
    """Adds all blocks of one source to the softmax of the block `i` of queries."""

    def block_of_keys(j, softmax):
        # A block is cut out where it is used: one that nobody sees costs nothing.
        add = lambda softmax: _add(options, query, keys.at(j), softmax)
        return _if_near(near, i, j, add, softmax)

    return _repeat(keys.number, block_of_keys, softmax)


def _add(options: _Options, query: tuple, source: tuple, softmax: _Softmax) -> _Softmax:
    """Adds one block of keys to the softmax of one block of queries."""
    values = source[1]
    scores = _scores(options, query, source, softmax.total.dtype)
    greatest = jnp.maximum(softmax.greatest, scores.max(-1))
    # A query that has seen nothing yet must not compute inf - inf.
    base = jnp.where(greatest == -jnp.inf, 0, greatest)
    shrink = jnp.exp(softmax.greatest - base)
    weights = jnp.exp(scores - base[..., None])
    weighted = _contract("bkqgs,bskv->bkqgv", weights.astype(values.dtype), values)
    return _Softmax(
        greatest=greatest,
        total=softmax.total * shrink + weights.sum(-1),
        weighted=softmax.weighted * shrink[..., None] + weighted.astype(shrink.dtype),
    )


def _backward(
    options: _Options, residuals: tuple, y_grad: Float[Array, "B T K G Hv"]
) -> tuple[Array, tuple[Keys, ...]]:
    q, segment_ids, index, sources, y, log_total = residuals
    dtype = log_total.dtype
    inner = jnp.einsum("btkgv,btkgv->btkg", y.astype(dtype), y_grad.astype(dtype))
    queries = _queries_in_blocks(
        options, q, segment_ids, index, y_grad, log_total, inner
    )
    q_grad = jnp.zeros((*queries.shape, *q.shape[2:]), dtype)
    grads = []
    for source in sources:
        keys, near = _padded_keys_in_blocks(options, queries, source)
        q_grad, *parts = _source_gradients(options, queries, keys, near, q_grad)
        # Integers have no gradient.
        k_grad, v_grad = (x[:, : source.keys.shape[1]] for x in parts)
        grads.append(Keys(k_grad, v_grad, None, None))  # type: ignore[arg-type]
    return q_grad[:, : q.shape[1]].astype(q.dtype), tuple(grads)


def _source_gradients(
    options: _Options, queries: _Blocks, keys: _Blocks, near: Array, q_grad: Array
) -> tuple[Array, Array, Array]:
    """Adds what one source gives to `q_grad`; the gradients of its keys and values."""

    def block_of_keys(j, carry):
        source = keys.at(j)

        def block_of_queries(i, carry):
            q_grad, *block_grads = carry
            # Only the block goes through the condition, which might copy the whole.
            grads = queries.take(q_grad, i), *block_grads
            add = functools.partial(_add_gradients, options, queries.at(i), source)
            grad, *block_grads = _if_near(near, i, j, add, grads)
            return queries.put(q_grad, grad, i), *block_grads

        q_grad, keys_grad, values_grad = carry
        zeros = [jnp.zeros(x.shape, q_grad.dtype) for x in source[:2]]
        q_grad, key_grad, value_grad = _repeat(
            queries.number, block_of_queries, (q_grad, *zeros)
        )
        return (
            q_grad,
            keys.put(keys_grad, key_grad.astype(keys_grad.dtype), j),
            keys.put(values_grad, value_grad.astype(values_grad.dtype), j),
        )

    grads = q_grad, jnp.zeros_like(keys.arrays[0]), jnp.zeros_like(keys.arrays[1])
    return _repeat(keys.number, block_of_keys, grads)


def _add_gradients(
    options: _Options, query: tuple, source: tuple, grads: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Adds what one block of queries and one of keys give to each other's gradients."""
    q, _, _, y_grad, log_total, inner = query
    keys, values, *_ = source
    dtype = log_total.dtype
    by_key_head = lambda x: jnp.moveaxis(x, 1, 2)[..., None]

    scores = _scores(options, query, source, dtype)
    weights = jnp.exp(scores - by_key_head(log_total))
    weight_grad = _contract("bqkgv,bskv->bkqgs", y_grad, values).astype(dtype)
    score_grad = weights * (weight_grad - by_key_head(inner)) * options.scale
    # Unseen products may be infinite, and 0 * inf is not 0.
    score_grad = jnp.where(scores == -jnp.inf, 0, score_grad)

    # Spelled so that products come out as they lie: `einsum` would otherwise transpose
    # the scores, and take three times as long on a CPU.
    q_part = _contract("bkqgs,bskh->bkqgh", score_grad.astype(keys.dtype), keys)
    key_part = _contract("bqkgh,bkqgs->bkhs", q, score_grad.astype(q.dtype))
    value_part = _contract("bqkgv,bkqgs->bkvs", y_grad, weights.astype(y_grad.dtype))
    q_grad, key_grad, value_grad = grads
    return (
        q_grad + jnp.moveaxis(q_part, 2, 1).astype(dtype),
        key_grad + jnp.moveaxis(key_part, 3, 1).astype(dtype),
        value_grad + jnp.moveaxis(value_part, 3, 1).astype(dtype),
    )


def _scores(
    options: _Options, query: tuple, source: tuple, dtype: np.dtype
) -> Float[Array, "B K q G s"]:
    """The scaled products of a block of queries and one of keys; -inf where unseen."""
    q, q_ids, q_index, *_ = query
    keys, _, ids, index = source
    scores = _contract("bqkgh,bskh->bkqgs", q, keys).astype(dtype) * options.scale
    visible = _visible(q_ids, q_index, ids, index, options.window)
    return jnp.where(visible[:, None, :, None, :], scores, -jnp.inf)


def _visible(
    q_ids: Int[Array, "B q"],
    q_index: Int[Array, "B q"],
    ids: Int[Array, "B s"],
    index: Int[Array, "B s"],
    window: int | None,
) -> Bool[Array, "B q s"]:
    behind = q_index[:, :, None] - index[:, None, :]
    visible = (q_ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None, :]
    visible &= behind >= 0
    return visible if window is None else visible & (behind < window)


def _contract(spec: str, a: Array, b: Array) -> Array:
    """`einsum` with factors as they are and sums in at least float32."""
    dtype = np.promote_types(a.dtype, b.dtype)
    return jnp.einsum(
        spec,
        a.astype(dtype),
        b.astype(dtype),
        preferred_element_type=np.promote_types(dtype, np.float32),
    )


def _accumulator(q: Array, sources: tuple[Keys, ...]) -> np.dtype:
    arrays = [q, *(x for source in sources for x in source[:2])]
    return functools.reduce(
        np.promote_types, (x.dtype for x in arrays), np.dtype(np.float32)
    )
