"""Causal depthwise convolution over time, continued from a tail.

Letters: B batch, T time, C channels, W width of the convolution.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def causal_conv1d(
    x: Float[Array, "B T C"],
    weight: Float[Array, "W C"],
    tail: Float[Array, "B W-1 C"],
    groups: Int[Array, "B T"],
    real: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """Convolves every channel with its own filter and gives the tail to go on from.

    `y_t = sum_j weight_j * x_{t - (W-1) + j}`: the last tap multiplies the current
    token. A tap counts only if its source is real and belongs to the same sequence, so
    neither packed sequences nor padding mix. The tail stands directly before the first
    real token of its row: padding on the left does not come between them. A padding
    token inside a sequence counts as a zero input.

    Products and sums are in at least float32; `y` has the dtype of `x`.

    Args:
        x: The inputs. What stands at padding tokens influences nothing.
        weight: One filter per channel.
        tail: The last `W - 1` inputs before `x`, zeros where there were none.
        groups: Numbers the sequences of a row, non-decreasing: 0 continues the tail,
            1, 2, ... begin afresh. Padding tokens carry the number of the last real
            token before them (0 if there is none).
        real: False at padding tokens.

    Returns:
        The outputs, zero at padding tokens, and the new tail: the `W - 1` inputs that
        end at the row's last real token, with zeros for those of earlier sequences. A
        row without a real token gives its tail back bit for bit.
    """
    length, reach = x.shape[1], weight.shape[0] - 1
    wide = np.promote_types(x.dtype, np.float32)

    # The row with its tail put in front, and which sequence each entry belongs to: -1
    # is none, so that padding is never used.
    begin = jnp.where(real.any(1), jnp.argmax(real, axis=1), length)
    end = jnp.where(real.any(1), length - jnp.argmax(real[:, ::-1], axis=1), length)
    inputs = x.astype(np.promote_types(x.dtype, tail.dtype))
    inputs = jnp.pad(inputs, ((0, 0), (reach, 0), (0, 0)))
    inputs = jax.vmap(_write)(inputs, tail.astype(inputs.dtype), begin)
    labels = jnp.pad(
        jnp.where(real, groups, -1), ((0, 0), (reach, 0)), constant_values=-1
    )
    labels = jax.vmap(_write)(labels, jnp.zeros_like(labels[:, :reach]), begin)

    y = jnp.zeros(x.shape, wide)
    for tap in range(reach + 1):
        source = slice(tap, tap + length)
        same = (labels[:, source] == groups) & real
        value = jnp.where(same[:, :, None], inputs[:, source], 0).astype(wide)
        y += value * weight[tap].astype(wide)[None, None, :]

    last = jnp.take_along_axis(groups, jnp.maximum(end - 1, 0)[:, None], axis=1)
    last = jnp.where(real.any(1, keepdims=True), last, 0)
    new_tail, new_labels = jax.vmap(_read, (0, 0, 0, None))(inputs, labels, end, reach)
    new_tail = jnp.where((new_labels == last)[:, :, None], new_tail, 0)
    return y.astype(x.dtype), new_tail.astype(tail.dtype)


def _write(row: Array, part: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(row, part, start, axis=0)


def _read(row: Array, labels: Array, start: Array, size: int) -> tuple[Array, Array]:
    return (
        lax.dynamic_slice_in_dim(row, start, size, axis=0),
        lax.dynamic_slice_in_dim(labels, start, size, axis=0),
    )
