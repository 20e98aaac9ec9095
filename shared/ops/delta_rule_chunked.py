"""Gated delta rule by chunks of time: matrix products instead of a step per token.

Letters: B batch, T time, Hk key heads, Hv value heads, Dk and Dv their widths, C places
of a chunk; in the einsums n chunk, b batch, h key head, r value head of a key head, i
and j (or c) places in a chunk, d key width, e value width.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), the
chunkwise form. Some of its printed masks lack the decay; the step by step rule decides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from shared.ops.delta_rule import gated_delta_rule_stepwise, mask_padding


def gated_delta_rule(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dk Dv"],
    groups: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    chunk_size: int,
    span_size: int,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dk Dv"]]:
    """The rule in its cheaper form: a step for a single token, chunks for more.

    All forms mean the same; see `gated_delta_rule_stepwise` for the formula and
    arguments, and `gated_delta_rule_by_span` for the sizes.
    """
    if q.shape[1] == 1:
        return gated_delta_rule_stepwise(q, k, v, log_decay, beta, state, groups, real)
    inputs = q, k, v, log_decay, beta, state, groups, real
    if q.shape[1] <= span_size:
        return gated_delta_rule_chunked(*inputs, chunk_size)
    return gated_delta_rule_by_span(*inputs, chunk_size, span_size)


def gated_delta_rule_by_span(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dk Dv"],
    groups: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    chunk_size: int,
    span_size: int,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dk Dv"]]:
    """`gated_delta_rule_chunked` for a span of tokens after the other.

    The backward pass has what the chunks of one span need (their matrices [C, C], the
    states before them), not of all: that is most of what a long row costs in memory. It
    computes them again from the state before the span.

    Args:
        q: As in `gated_delta_rule_stepwise`, as all that is not named here.
        k: Keys.
        v: Values.
        log_decay: Logarithm of the decay.
        beta: Writing strength.
        state: Before the first token.
        groups: Numbers of the sequences.
        real: False at padding.
        chunk_size: Tokens in a chunk.
        span_size: Tokens in a span.
    """
    batch, time = real.shape
    padding = -time % span_size

    def by_span(x, mode="constant"):
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(batch, -1, span_size, *x.shape[2:]), 1, 0)

    # In a span its first sequence, too, is number 0 where it continues the last one's.
    numbers = by_span(groups, "edge")
    before = jnp.pad(numbers[:-1, :, -1], ((1, 0), (0, 0)))
    numbers = numbers - before[..., None]

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def next_span(state, span):
        q, k, v, log_decay, beta, groups, real = span
        o, state = gated_delta_rule_chunked(
            q, k, v, log_decay, beta, state, groups, real, chunk_size
        )
        return state, o

    wide = state.astype(np.promote_types(v.dtype, np.float32))
    spans = *(by_span(x) for x in (q, k, v, log_decay, beta)), numbers, by_span(real)
    state, o = jax.lax.scan(next_span, wide, spans)
    o = jnp.moveaxis(o, 0, 1).reshape(batch, -1, *v.shape[2:])
    return o[:, :time], state


def gated_delta_rule_chunked(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dk Dv"],
    groups: Int[Array, "B T"],
    real: Bool[Array, "B T"],
    chunk_size: int,
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dk Dv"]]:
    """What `gated_delta_rule_stepwise` gives, for any length and any chunk size.

    Let D_ij = exp(sum of log_decay over j < l <= i) for j <= i, and d_i the same over
    all l <= i of the chunk; both are 0 where a new group starts in between. The values
    that a chunk writes, u, solve a unit lower triangular system, with S the state
    before the chunk, and all else is products::

        M_ij = beta_i (k_i . k_j) D_ij                                     for j < i
        u = (I + M)^-1 (beta (v - d (k S)))
        o_i = d_i (q_i S) + sum over j <= i of (q_i . k_j) D_ij u_j
        S <- d_last S + sum over j of k_j (D_last,j u_j)^T

    Only the last line, and u with it, goes from chunk to chunk.

    Args:
        q: Queries, L2-normalised and scaled by Dk ** -0.5.
        k: Keys, L2-normalised.
        v: Values.
        log_decay: Logarithm of the decay, at most 0.
        beta: Writing strength, in [0, 1].
        state: S before the first token.
        groups: As in `gated_delta_rule_stepwise`.
        real: As in `gated_delta_rule_stepwise`.
        chunk_size: Tokens in a chunk; changes the cost and the rounding only.
    """
    dtype = np.promote_types(v.dtype, np.float32)
    einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    batch, time, key_heads, _ = q.shape
    size = min(chunk_size, time)
    padding = -time % size

    def by_chunk(x):
        x = mask_padding(x, real, dtype)
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, -1, size, key_heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 3), (0, 2))  # n b h c ...

    def by_value_head(x):
        x = by_chunk(x.reshape(batch, time, key_heads, -1, *x.shape[3:]))
        return jnp.moveaxis(x, 4, 3)  # n b h r c ...

    q, k, values = by_chunk(q), by_chunk(k), by_value_head(v)
    beta, log_decay = by_value_head(beta), by_value_head(log_decay)
    state_decay, decay = _decays(log_decay, *_group_chunks(groups, size))

    products = einsum("nbhid,nbhjd->nbhij", k, k)[:, :, :, None]
    place = jnp.arange(size)
    strictly_before = (place[:, None] > place[None])[None, None, None, None]
    mixing = jnp.where(strictly_before, beta[..., None] * products * decay, 0)
    solve = _unit_lower_inverse(mixing) * beta[..., None, :]

    def next_chunk(state, chunk):
        k, values, solve, state_decay, decay_to_end = chunk
        read = state_decay[..., None] * einsum("bhcd,bhrde->bhrce", k, state)
        u = einsum("bhrij,bhrje->bhrie", solve, values - read)
        written = einsum("bhcd,bhrce->bhrde", k, decay_to_end[..., None] * u)
        return state_decay[..., -1, None, None] * state + written, (u, state)

    grouped = state.astype(dtype).reshape(batch, key_heads, -1, *state.shape[2:])
    chunks = (k, values, solve, state_decay, decay[..., -1, :])
    grouped, (u, states) = jax.lax.scan(next_chunk, grouped, chunks)

    attention = einsum("nbhid,nbhjd->nbhij", q, k)[:, :, :, None] * decay
    o = state_decay[..., None] * einsum("nbhcd,nbhrde->nbhrce", q, states)
    o = o + einsum("nbhrij,nbhrje->nbhrie", attention, u)
    o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(batch, -1, *v.shape[2:])
    # A row of padding gives back its state to the bit: -0.0 + 0.0 would be 0.0.
    some_real = jnp.any(real, axis=1)[:, None, None, None]
    new_state = jnp.where(some_real, grouped.reshape(state.shape), state.astype(dtype))
    return o[:, :time].astype(v.dtype), new_state


def _group_chunks(
    groups: Int[Array, "B T"], size: int
) -> tuple[Int[Array, "n B C"], Int[Array, "n B"]]:
    """Group numbers by chunk, and the number in force before each chunk."""
    batch, time = groups.shape
    groups = jnp.pad(groups, ((0, 0), (0, -time % size)), mode="edge")
    groups = jnp.moveaxis(groups.reshape(batch, -1, size), 1, 0)
    return groups, jnp.pad(groups[:-1, :, -1], ((1, 0), (0, 0)))


def _decays(
    log_decay: Float[Array, "n B Hk r C"],
    groups: Int[Array, "n B C"],
    group_before: Int[Array, "n B"],
) -> tuple[Float[Array, "n B Hk r C"], Float[Array, "n B Hk r C C"]]:
    """Decay from before the chunk to each place, and from place j to place i.

    Each sum is taken over its own terms: the difference of two long sums would lose the
    small terms next to a large one. Masks go in before `exp`, since the gradient of
    where(mask, exp(x), 0) is 0 times infinity where exp overflows.
    """
    place = jnp.arange(log_decay.shape[-1])
    after = (place[:, None] > place[None])[None, None, None, None]
    between = jnp.cumsum(jnp.where(after, log_decay[..., None], 0), axis=-2)
    same = groups[..., :, None] == groups[..., None, :]
    same = same & (place[:, None] >= place[None])[None, None]
    decay = jnp.exp(jnp.where(same[:, :, None, None], between, -jnp.inf))

    continues = (groups == group_before[..., None])[:, :, None, None]
    since_start = jnp.where(continues, jnp.cumsum(log_decay, axis=-1), -jnp.inf)
    return jnp.exp(since_start), decay


def _unit_lower_inverse(
    below: Float[Array, "*batch C C"],
) -> Float[Array, "*batch C C"]:
    """(I + below)^-1 for a strictly lower triangular matrix, by substitution.

    Substitution keeps its digits where keys are alike and beta is near 1. The product
    (I - M)(I + M^2)(I + M^4)... does not: the powers of M grow before they vanish.
    """
    identity = jnp.eye(below.shape[-1], dtype=below.dtype)
    identity = jnp.broadcast_to(identity, below.shape)
    return jax.lax.linalg.triangular_solve(
        below, identity, left_side=True, lower=True, unit_diagonal=True
    )
