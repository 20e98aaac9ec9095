"""Attention of a call's tokens to themselves: which kernel computes it.

B batch, T time, N query heads, H and Hv widths of a query and of a value.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from shared.context import Context
from shared.ops import attention, attention_kernels
from shared.ops.attention import Keys
from shared.sharding import as_tuple


def attend_to_own(
    q: Float[Array, "B T N H"],
    context: Context,
    own: Keys,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "B T N Hv"]:
    """`attention.attend` to the tokens' own keys, by `context.attention_kernel`.

    What a kernel cannot, the reference op does: see `attention_kernels.splash_fits` and
    `dot_product_fits`. Splash attention also wants to know where rows and heads stand:
    it is not used on a mesh that rules say nothing of, or that spreads rows by length.

    Args:
      q: the queries.
      context: segments, mesh and the kernel's name.
      own: the same tokens' keys and values.
      scale: of the scores.
      window: how many tokens are seen, itself included; None: all before.
    """
    ids, kernel = context.segment_ids, context.attention_kernel
    places = context.activation_spec(own.keys, "batch", "length", "heads", None)
    options = attention_kernels.Options(scale, window, places)
    splash = attention_kernels.splash_fits(q, own) and _whole_rows(places)
    match kernel:
        case "auto" if splash:
            return attention_kernels.by_platform(options, q, ids, own.index, own)
        case "splash" | "splash_interpreted" if splash:
            interpret = kernel == "splash_interpreted"
            return attention_kernels.splash(options, q, ids, own, interpret=interpret)
        case "dot_product" | "cudnn" if attention_kernels.dot_product_fits(q, own):
            cudnn = kernel == "cudnn"
            return attention_kernels.dot_product(options, q, ids, own, cudnn=cudnn)
    return attention.attend(q, ids, own.index, [own], scale=scale, window=window)


def _whole_rows(places: PartitionSpec | None) -> bool:
    """Whether every device is known to have whole rows."""
    mesh = jax.sharding.get_abstract_mesh()
    if places is None:
        return mesh.empty or mesh.size == 1
    return math.prod(mesh.shape[axis] for axis in as_tuple(places[1])) == 1
