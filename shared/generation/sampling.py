"""The next token of each row: greedy or drawn, with settings of the row's own.

All settings are arrays with one entry a row, so one compiled step serves rows with
different ones, and what a row gets depends on that row alone.

Letters: B batch, V vocabulary, T tokens.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt32

# One number for all rows, or one a row.
PerRow = ArrayLike | Sequence[Any]

_MAX = float(np.finfo(np.float32).max)
# Below it float32 is subnormal, which many machines take for 0.
_TINY = float(np.finfo(np.float32).tiny)


class _Range(NamedTuple):
    """What a setting may be, the bounds included, and in words."""

    kind: type
    dtype: Any
    low: float
    high: float
    text: str


_REAL, _WHOLE = numbers.Real, numbers.Integral
_RANGES = {
    "temperature": _Range(
        _REAL, np.float32, 0, _MAX, "at least 0 and finite in float32"
    ),
    "top_k": _Range(_WHOLE, np.int32, 0, 2**31 - 1, "an integer from 0 to 2147483647"),
    "top_p": _Range(_REAL, np.float32, _TINY, 1, "above 0 in float32 and at most 1"),
    "min_p": _Range(_REAL, np.float32, 0, 1, "from 0 to 1"),
    "repetition_penalty": _Range(
        _REAL, np.float32, _TINY, _MAX, "above 0 and finite in float32"
    ),
    "seed": _Range(_WHOLE, np.uint32, 0, 2**32 - 1, "an integer from 0 to 4294967295"),
}


class Sampling(NamedTuple):
    """How each row chooses its tokens. `Sampling.create` checks the values.

    Attributes:
      temperature: [B]; the logits are divided by it; 0 takes the arg-max instead.
      top_k: [B]; only the k greatest logits are kept, with all that equal the k-th;
        0 keeps all.
      top_p: [B]; only the smallest set of most probable tokens whose probabilities sum
        to at least p is kept (Holtzman et al., arXiv:1904.09751); 1 keeps all.
      min_p: [B]; only tokens at least `min_p` times as probable as the most probable
        one are kept (Nguyen et al., arXiv:2407.01082); 0 keeps all.
      repetition_penalty: [B]; logits of seen tokens are divided by it where positive
        and multiplied elsewhere (Keskar et al., arXiv:1909.05858); 1 changes nothing.
      seed: [B]; where the random numbers of a row start.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    seed: UInt32[Array, " B"]

    @staticmethod
    def create(
        batch_size: int,
        *,
        temperature: PerRow = 0.0,
        top_k: PerRow = 0,
        top_p: PerRow = 1.0,
        min_p: PerRow = 0.0,
        repetition_penalty: PerRow = 1.0,
        seed: PerRow = 0,
    ) -> Sampling:
        """Settings for `batch_size` rows, each given as one number or as one a row.

        Floats are kept in float32. Call it outside `jit`: values are checked here.

        Args:
          batch_size: B.
          temperature: finite, at least 0.
          top_k: an integer, at least 0; more than V is as V.
          top_p: above 0, at most 1.
          min_p: from 0 to 1.
          repetition_penalty: finite, above 0.
          seed: an integer from 0 to 2**32 - 1. One number s gives row b the seed
            (s + b) mod 2**32, so rows differ; neighbouring s then share rows' seeds.

        Raises:
          ValueError: a value is out of its range, or there is not one for each row.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1. Got {batch_size}.")
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
        }
        values = {
            name: _checked(name, value, batch_size) for name, value in given.items()
        }
        if values["seed"].ndim == 0:
            values["seed"] = (values["seed"] + np.arange(batch_size)) % 2**32
        fields = {}
        for name, each in values.items():
            rows = np.broadcast_to(each, (batch_size,))
            fields[name] = jnp.asarray(rows.astype(_RANGES[name].dtype))
        return Sampling(**fields)


class Sampled(NamedTuple):
    """The token that each row got.

    Attributes:
      tokens: [B], int32.
      log_probs: [B], at least float32; the log softmax of the model's own logits at the
        token, before penalty, temperature and filters.
    """

    tokens: Int[Array, " B"]
    log_probs: Float[Array, " B"]


def sample(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    index: Int[Array, " B"],
    seen: Bool[Array, "B V"],
) -> Sampled:
    """The next token of each row.

    Token number `index` of a row is drawn with the key fold_in(key(seed), index) of
    threefry2x32. So it depends on the row's logits, settings, seed and index only: not
    on the row's place, its neighbours, B, or how a loop over tokens is cut. Rows of
    temperature 0 draw nothing: they take the greatest logit after the penalty, and the
    lowest id among equals. A batch of such rows costs no sort and no random numbers.

    A row with NaN among its logits takes the place of the first NaN, else a row with
    +inf that of the first +inf; the log-probability is NaN in both cases.

    Args:
      logits: of the model; computed with in at least float32.
      sampling: the settings of each row.
      index: how many tokens each row has generated before this one.
      seen: which ids stand in each row's prompt or answer, for the repetition penalty.
    """
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    penalized = _penalize(logits, sampling, seen)
    tokens = jax.lax.cond(
        jnp.any(_draws(sampling)),
        lambda: _argmax(_filter(penalized, sampling) + _noise(logits, sampling, index)),
        lambda: _argmax(penalized),
    )
    return Sampled(tokens, _log_probs(logits, tokens))


def filtered_logits(
    logits: Float[Array, "B V"], sampling: Sampling, seen: Bool[Array, "B V"]
) -> Float[Array, "B V"]:
    """What `sample` draws from: its softmax is each row's distribution.

    The order is that of Hugging Face `generate`: penalty, temperature, top-k, top-p,
    min-p. Removed tokens have -inf, and a row of temperature 0 keeps its arg-max alone.
    Where top-p leaves room for some of several equal tokens only, the lowest ids stay.
    Rows are shifted: the greatest logit is 0.

    Source: transformers 5.24, `generation/logits_process.py`, which leaves open which
    of equal tokens top-p keeps.
    """
    logits = logits.astype(np.promote_types(logits.dtype, np.float32))
    return _filter(_penalize(logits, sampling, seen), sampling)


def mark_seen(
    seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], real: Bool[Array, "B T"]
) -> Bool[Array, "B V"]:
    """`seen` with the real ones of the given tokens; ids outside [0, V) are ignored."""
    batch_size, vocab_size = seen.shape
    at = jnp.where(real & (tokens >= 0), tokens, vocab_size)
    rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    return seen.at[rows, at].set(True, mode="drop")


def _penalize(logits: Array, sampling: Sampling, seen: Array) -> Array:
    penalty = sampling.repetition_penalty.astype(logits.dtype)[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, penalized, logits)


def _filter(logits: Array, sampling: Sampling) -> Array:
    draws = _draws(sampling)[:, None]
    temperature = sampling.temperature.astype(logits.dtype)[:, None]
    top = jnp.max(logits, axis=-1, keepdims=True)
    # Without the shift, a low temperature overflows.
    shift = jnp.where(jnp.isfinite(top), top, 0)
    scale = lambda logits: (logits - shift) / jnp.where(draws, temperature, 1)

    uses_sort = (sampling.top_k > 0) | (sampling.top_p < 1)
    removed = jax.lax.cond(
        jnp.any(_draws(sampling) & uses_sort),
        lambda: _outside_top(logits, scale, sampling),
        lambda: jnp.zeros(logits.shape, bool),
    )
    scaled = scale(logits)
    log_min_p = jnp.log(sampling.min_p.astype(logits.dtype))[:, None]
    drawn = jnp.where(removed | (scaled < log_min_p), -jnp.inf, scaled)

    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    greedy = jnp.where(ids == _argmax(logits)[:, None], scaled, -jnp.inf)
    return jnp.where(draws, drawn, greedy)


def _outside_top(logits: Array, scale: Any, sampling: Sampling) -> Array:
    """Which tokens top-k and top-p remove.

    Logits are compared before they are scaled, since rounding may make them equal.
    """
    vocab_size = logits.shape[-1]
    top_k, top_p = sampling.top_k[:, None], sampling.top_p.astype(logits.dtype)[:, None]
    ordered = jnp.sort(logits, axis=-1, descending=True)

    last = jnp.clip(top_k, 1, vocab_size) - 1
    kth = jnp.take_along_axis(ordered, last, axis=-1)
    outside_k = (top_k > 0) & (ordered < kth)

    weights = jnp.where(outside_k, 0, jnp.exp(scale(ordered)))
    mass = jax.lax.associative_scan(jnp.add, weights, axis=1)
    before = jnp.pad(mass[:, :-1], ((0, 0), (1, 0)))
    # Sums are rounded: p = 1 would lose the last tokens.
    outside_p = (top_p < 1) & (before >= top_p * mass[:, -1:])

    kept = jnp.sum(~(outside_k | outside_p), axis=-1, keepdims=True, dtype=jnp.int32)
    least = jnp.take_along_axis(ordered, jnp.maximum(kept, 1) - 1, axis=-1)
    equal = logits == least
    room = kept - jnp.sum(logits > least, axis=-1, keepdims=True, dtype=jnp.int32)
    return (logits < least) | (equal & (jnp.cumsum(equal, 1, dtype=jnp.int32) > room))


def _noise(logits: Array, sampling: Sampling, index: Array) -> Array:
    """Gumbel noise: the arg-max of logits and it is a draw from their softmax."""

    def one_row(seed: Array, index: Array) -> Array:
        # With threefry, unlike rbg, a row's numbers are the same under any vmap.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), index)
        # The default, "low", has so few values near its end that draws from a large
        # vocabulary tie, and ties go to low ids.
        return jax.random.gumbel(key, logits.shape[1:], logits.dtype, mode="high")

    return jax.vmap(one_row)(sampling.seed, index)


def _log_probs(logits: Array, tokens: Array) -> Array:
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    at_tokens = jnp.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0]
    return at_tokens - jnp.log(_row_sums(jnp.exp(shifted)))


def _row_sums(x: Array) -> Array:
    """The sum of each row, in one order: that of XLA's own sum depends on B."""
    while x.shape[1] > 1:
        x = jnp.pad(x, ((0, 0), (0, x.shape[1] % 2)))
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _draws(sampling: Sampling) -> Array:
    return sampling.temperature >= _TINY


def _argmax(logits: Array) -> Array:
    return jax.lax.argmax(logits, 1, np.int32)


def _checked(name: str, value: PerRow, batch_size: int) -> np.ndarray:
    """The value or values as Python numbers, each within the field's range."""
    listed = isinstance(value, list | tuple)
    values = np.array(value if listed else np.asarray(value), dtype=object)
    if values.shape not in ((), (batch_size,)):
        raise ValueError(
            f"{name} must be one number or one for each of the {batch_size} rows. "
            f"Got the shape {values.shape}."
        )
    allowed = _RANGES[name]
    for row, entry in enumerate(values.flat):
        number = isinstance(entry, allowed.kind) and not isinstance(entry, bool)
        if not (number and allowed.low <= entry <= allowed.high):
            where = f"in row {row}" if values.ndim else "for all rows"
            raise ValueError(f"{name} must be {allowed.text}. Got {entry!r} {where}.")
    return values
