"""Gated delta rule, one token after another: the form every other one is held to.

Letters: B batch, T time, Hk key heads, Hv value heads, Dk and Dv their widths. Value
head h reads key head h // r, where r = Hv / Hk.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), the gated
delta rule.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int


def gated_delta_rule_stepwise(
    q: Float[Array, "B T Hk Dk"],
    k: Float[Array, "B T Hk Dk"],
    v: Float[Array, "B T Hv Dv"],
    log_decay: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv Dk Dv"],
    groups: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T Hv Dv"], Float[Array, "B Hv Dk Dv"]]:
    """Reads and writes an associative memory S, token by token; gives outputs and S.

    For each value head::

        S <- exp(log_decay_t) S
        S <- S + k_t (beta_t (v_t - S^T k_t))^T
        o_t = S^T q_t

    The rule runs in at least float32 and the state stays in that type; outputs have the
    type of `v`.

    Args:
        q: Queries, L2-normalised and scaled by Dk ** -0.5.
        k: Keys, L2-normalised.
        v: Values.
        log_decay: Logarithm of the decay, at most 0.
        beta: Writing strength, in [0, 1].
        state: S before the first token.
        groups: Number of the sequence a token belongs to, non-decreasing in a row.
            Group 0 continues `state`; every new number starts from S = 0. A padding
            token has the number of the last real token before it, 0 if there is none.
        real: False at padding, which neither changes S nor is read: its values count
            for nothing, whatever they are, and its output is 0.
    """
    dtype = np.promote_types(v.dtype, np.float32)
    precision = jax.lax.Precision.HIGHEST
    batch, _, key_heads, _ = q.shape
    before = jnp.pad(groups, ((0, 0), (1, 0)))[:, :-1]

    def step(state, token):
        q, k, v, log_decay, beta, starts, real = token
        decayed = jnp.exp(log_decay)[..., None, None] * state
        decayed = jnp.where(starts, 0, decayed)
        # A key for each value head, or the product would first transpose the state.
        q, k = (jnp.broadcast_to(x[:, :, None], state.shape[:-1]) for x in (q, k))
        read = jnp.einsum("bhrd,bhrde->bhre", k, decayed, precision=precision)
        delta = beta[..., None] * (v - read)
        written = decayed + k[..., None] * delta[..., None, :]
        o = jnp.einsum("bhrd,bhrde->bhre", q, written, precision=precision)
        return jnp.where(real, written, state), o

    def over_time(x):
        return jnp.moveaxis(x, 1, 0)

    def by_key_head(x):
        return x.reshape(*x.shape[:2], key_heads, -1, *x.shape[3:])

    tokens = (
        over_time(mask_padding(q, real, dtype)),
        over_time(mask_padding(k, real, dtype)),
        over_time(by_key_head(mask_padding(v, real, dtype))),
        over_time(by_key_head(mask_padding(log_decay, real, dtype))),
        over_time(by_key_head(mask_padding(beta, real, dtype))),
        over_time(groups != before)[..., None, None, None, None],
        over_time(real)[..., None, None, None, None],
    )
    grouped = state.astype(dtype).reshape(batch, key_heads, -1, *state.shape[2:])
    if q.shape[1] == 1:
        grouped, o = step(grouped, jax.tree.map(lambda x: x[0], tokens))
        o = o[None]
    else:
        grouped, o = jax.lax.scan(step, grouped, tokens)
    return over_time(o).reshape(v.shape).astype(v.dtype), grouped.reshape(state.shape)


def mask_padding(
    x: Float[Array, "B T ..."], real: Bool[Array, "B T"], dtype: DTypeLike
) -> Float[Array, "B T ..."]:
    """`x` as `dtype`, zero at padding, so that nothing there reaches a gradient."""
    return jnp.where(jnp.expand_dims(real, range(2, x.ndim)), x, 0).astype(dtype)
