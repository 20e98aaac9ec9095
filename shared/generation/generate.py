"""Answers to prompts: all at once, or token by token as they come.

B rows, T time, N steps.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from shared.generation.decoding import DecoderFunction, Params, prefill
from shared.generation.prompts import Batch, bucket
from shared.generation.rows import (
    Emitted,
    Rows,
    advance_many,
    constrain_rows,
    everywhere,
    start,
)
from shared.generation.sampling import Sampling
from shared.layers.decoder_cache import init_cache


class Token(NamedTuple):
    """One generated token.

    Attributes:
      row: which prompt it answers.
      token: its id.
      log_prob: under the model's own softmax.
      reason: why the row ends with it: "stop" (a stop token) or "length" (its limit);
        None where it goes on.
    """

    row: int
    token: int
    log_prob: float
    reason: str | None


class Answer(NamedTuple):
    """All tokens generated for one prompt.

    Attributes:
      tokens: their ids, with the stop token if one came.
      log_probs: of each, under the model's own softmax.
      reason: "stop" or "length".
    """

    tokens: list[int]
    log_probs: list[float]
    reason: str


def generate(
    model: DecoderFunction, params: Params, prompts: Sequence[Any], **options: Any
) -> list[Answer]:
    """Continues prompts; all tokens are made on the device, in one call.

    Example usage::

      >>> import jax, shared, zoo_linen
      >>> from shared import generation
      >>> config = shared.preset("qwen3-next-tiny")
      >>> params = shared.init_params(jax.random.key(0), config)
      >>> model = zoo_linen.as_function(zoo_linen.Decoder(config))
      >>> prompts = [[1, 2, 3], [4]]
      >>> answers = generation.generate(model, params, prompts, max_new_tokens=2)
      >>> [len(answer.tokens) for answer in answers]
      [2, 2]

    Args:
      model: the decoder, in either frontend.
      params: its parameters.
      prompts: sequences of token ids, of any lengths.
      **options: of `stream`.

    Raises:
      ValueError: as `stream`.
    """
    options.setdefault("steps_per_call", None)
    answers = [Answer([], [], "length") for _ in prompts]
    for token in stream(model, params, prompts, **options):
        answer = answers[token.row]
        answer.tokens.append(token.token)
        answer.log_probs.append(token.log_prob)
        if token.reason is not None:
            answers[token.row] = answer._replace(reason=token.reason)
    return answers


def stream(
    model: DecoderFunction,
    params: Params,
    prompts: Sequence[Any],
    *,
    max_new_tokens: Any,
    sampling: Sampling | None = None,
    stop_tokens: Any = None,
    max_length: int | None = None,
    chunk_size: int | None = None,
    cache_dtype: Any = None,
    state_dtype: Any = None,
    steps_per_call: int | None = 1,
) -> Iterator[Token]:
    """Continues prompts and gives the tokens as they are made.

    What is wrong with the arguments is said at once, not by the first `next`.

    Args:
      model: the decoder, in either frontend.
      params: its parameters.
      prompts: sequences of token ids, of any lengths.
      max_new_tokens: for each answer, or one number for all.
      sampling: how tokens are chosen, an entry a row; None: greedily.
      stop_tokens: ids that end an answer, and stand in it; None: the config's.
      max_length: positions of the cache; None: what is needed, rounded up so that
        longer prompts seldom compile anew.
      chunk_size: see `prefill`.
      cache_dtype: see `shared.init_cache`.
      state_dtype: likewise.
      steps_per_call: tokens a row that are made before they are fetched, rounded up to
        a power of two; None: all.

    Raises:
      ValueError: a prompt is empty, has ids outside the vocabulary, or does not fit
        with its answer into `max_length`; a stop token is unknown; a limit is below 1.
    """
    batch = Batch.create(
        model.config,
        prompts,
        max_new_tokens,
        sampling=sampling,
        stop_tokens=stop_tokens,
        max_length=max_length,
    )
    if steps_per_call is not None and steps_per_call < 1:
        raise ValueError(f"steps_per_call must be at least 1. Got {steps_per_call}.")
    most = int(batch.limits.max()) - 1
    steps = most if steps_per_call is None else min(steps_per_call, most)
    cache = init_cache(
        model.config,
        len(prompts),
        batch.max_length,
        cache_dtype,
        state_dtype=state_dtype,
    )
    begun = begin(model, params, cache, batch, chunk_size)
    return _tokens(model, params, begun, batch.stop_tokens, bucket(max(steps, 1), 1))


def _tokens(
    model: DecoderFunction,
    params: Params,
    begun: tuple[Any, Rows, Emitted],
    stop: np.ndarray,
    steps: int,
) -> Iterator[Token]:
    cache, rows, first = begun
    yield from tokens_of(first, stop)
    while np.any(rows.active):
        cache, rows, emitted = go_on(model, params, cache, rows, stop, steps)
        yield from tokens_of(emitted, stop)


def tokens_of(emitted: Emitted, stop: np.ndarray) -> Iterator[Token]:
    """The tokens of one step [B], or of N [N, B] in order, row after row in each."""
    token, log_prob, new, last = map(np.atleast_2d, emitted)
    for step, row in zip(*np.nonzero(new), strict=True):
        value, reason = int(token[step, row]), None
        if last[step, row]:
            reason = "stop" if value in stop else "length"
        yield Token(int(row), value, float(log_prob[step, row]), reason)


@functools.partial(
    jax.jit, static_argnames=("model", "chunk_size"), donate_argnames="cache"
)
def begin(
    model: DecoderFunction,
    params: Params,
    cache: Any,
    batch: Batch,
    chunk_size: int | None,
) -> tuple[Any, Rows, Emitted]:
    """Reads a batch of prompts, and chooses the first tokens."""
    tokens, lengths = batch.tokens, batch.lengths
    step = prefill(model, params, tokens, cache, lengths=lengths, chunk_size=chunk_size)
    rows, emitted = start(step.logits, batch)
    rows = constrain_rows(model.config, rows)
    return step.cache, rows, everywhere(model.config, emitted)


go_on = jax.jit(
    advance_many, static_argnames=("model", "steps"), donate_argnames=("cache", "rows")
)
