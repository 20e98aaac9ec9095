"""Continuous batching: requests come and go while a fixed batch of slots decodes.

The four calls are those of serving loops: `prefill` reads a prompt into a cache of its
own, `insert` puts it into a slot, `generate` makes one token for every busy slot, and
`free` empties one. `run` is such a loop. What a request gets depends on itself alone,
not on its neighbours or the order of requests; between slots and numbers of slots the
rounding of matrix products may differ.

B slots, T time.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shared.generation.decoding import DecoderFunction, Params
from shared.generation.generate import Token, begin, go_on, tokens_of
from shared.generation.prompts import Batch, check_prompt, check_stop_tokens
from shared.generation.rows import Emitted, Rows, constrain_rows
from shared.generation.sampling import Sampling
from shared.layers.decoder_cache import init_cache, insert_row, reset_rows


class Request(NamedTuple):
    """What is asked of an engine.

    Attributes:
      prompt: token ids.
      max_new_tokens: at most so many are generated.
      sampling: settings for one row; None: greedy.
    """

    prompt: Any
    max_new_tokens: int
    sampling: Sampling | None = None


class Prefix(NamedTuple):
    """A prompt that was read, ready for a slot.

    Attributes:
      cache: of one row.
      rows: of one row, at its first generated token.
      first: that token, the only entry.
    """

    cache: Any
    rows: Rows
    first: Emitted


class Engine:
    """A batch of slots that decodes; see the module's docstring.

    Example usage::

      >>> import jax, shared, zoo_linen
      >>> from shared.generation import Engine, Request
      >>> config = shared.preset("qwen3-next-tiny")
      >>> params = shared.init_params(jax.random.key(0), config)
      >>> model = zoo_linen.as_function(zoo_linen.Decoder(config))
      >>> engine = Engine(model, params, slots=2, max_length=32)
      >>> requests = [Request([1, 2, 3], 4), Request([5], 2), Request([6, 7], 3)]
      >>> answers = {0: [], 1: [], 2: []}
      >>> for token in engine.run(requests):
      ...     answers[token.row].append(token.token)
      >>> [len(answer) for answer in answers.values()]
      [4, 2, 3]

    Args:
      model: the decoder, in either frontend.
      params: its parameters.
      slots: rows that decode together.
      max_length: positions of each slot's cache.
      stop_tokens: ids that end an answer, and stand in it; None: the config's.
      chunk_size: prompts are read in chunks of this size; None: each in one piece,
        filled up to a power of two.
      cache_dtype: see `shared.init_cache`.
      state_dtype: likewise.

    Raises:
      ValueError: a size is below 1, or a stop token is unknown.
    """

    def __init__(
        self,
        model: DecoderFunction,
        params: Params,
        *,
        slots: int,
        max_length: int,
        stop_tokens: Any = None,
        chunk_size: int | None = None,
        cache_dtype: Any = None,
        state_dtype: Any = None,
    ):
        self.model, self.params = model, params
        self.slots, self.max_length = slots, max_length
        self.chunk_size = chunk_size
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1. Got {chunk_size}.")
        self._stop = check_stop_tokens(model.config, stop_tokens)
        self._new_cache = functools.partial(
            init_cache,
            model.config,
            max_length=max_length,
            dtype=cache_dtype,
            state_dtype=state_dtype,
        )
        self.cache = self._new_cache(batch_size=slots)
        idle = _idle_rows(slots, model.config.vocab_size)
        self.rows = constrain_rows(model.config, idle)

    def prefill(self, request: Request) -> Prefix:
        """Reads a prompt and chooses the first token of its answer.

        Raises:
          ValueError: the prompt is empty, has ids outside the vocabulary, or does not
            fit with its answer into a slot; or the limit is below 1.
        """
        batch = Batch.create(
            self.model.config,
            [check_prompt(self.model.config, request.prompt)],
            request.max_new_tokens,
            sampling=request.sampling,
            stop_tokens=self._stop,
            max_length=self.max_length,
        )
        cache = self._new_cache(batch_size=1)
        cache, rows, first = begin(
            self.model, self.params, cache, batch, self.chunk_size
        )
        return Prefix(cache, rows, first)

    def insert(self, prefix: Prefix, slot: int) -> None:
        """Puts what was read into a slot, in place of all that the slot held.

        Raises:
          ValueError: there is no such slot, or it is busy.
        """
        self._check_slot(slot)
        if bool(self.rows.active[slot]):
            raise ValueError(f"Slot {slot} is busy: free it first, or take another.")
        self.cache, self.rows = _insert(
            self.model, self.cache, self.rows, prefix, np.int32(slot)
        )

    def generate(self) -> list[Token]:
        """One token for every busy slot; `row` of a token is its slot."""
        self.cache, self.rows, emitted = go_on(
            self.model, self.params, self.cache, self.rows, self._stop, 1
        )
        return list(tokens_of(emitted, self._stop))

    def free(self, slot: int) -> None:
        """Empties a slot, busy or not.

        Raises:
          ValueError: there is no such slot.
        """
        self._check_slot(slot)
        rows = np.arange(self.slots) == slot
        self.cache = _reset(self.model, self.cache, rows)
        self.rows = self.rows._replace(active=self.rows.active & ~rows)

    def run(self, requests: Iterable[Request]) -> Iterator[Token]:
        """Serves requests in order, as slots get free; `row` is the request's number.

        Requests are taken from the iterable when there is a slot for them. The engine's
        slots must be free; they are again when all is said. A slot that is freed on the
        way takes the next request, and the answer of its own ends there.

        Raises:
          ValueError: a slot is busy; or as `prefill`, once those that came before the
            bad request are served.
        """
        if np.any(self.rows.active):
            raise ValueError("run needs all slots free: free those that are busy.")
        waiting = enumerate(requests)
        free = collections.deque(range(self.slots))
        serves: dict[int, int] = {}
        more, error = True, None
        while True:
            while free and more:
                entry = next(waiting, None)
                if entry is None:
                    more = False
                    break
                number, request = entry
                try:
                    prefix = self.prefill(request)
                except ValueError as wrong:
                    more, error = False, wrong
                    break
                (token,) = tokens_of(prefix.first, self._stop)
                yield token._replace(row=number)
                if token.reason is None:
                    slot = free.popleft()
                    self.insert(prefix, slot)
                    serves[slot] = number
            active = np.asarray(self.rows.active)
            for slot in [slot for slot in serves if not active[slot]]:
                free.append(slot)
                del serves[slot]
            if not serves and not more:
                if error is not None:
                    raise error
                return
            for token in self.generate() if serves else ():
                yield token._replace(row=serves[token.row])
                if token.reason is not None:
                    free.append(token.row)
                    del serves[token.row]

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots:
            raise ValueError(
                f"There is no slot {slot}: slots are 0 to {self.slots - 1}."
            )


def _idle_rows(count: int, vocab_size: int) -> Rows:
    # Arrays of their own: all are donated.
    return Rows(
        token=jnp.zeros(count, jnp.int32),
        generated=jnp.zeros(count, jnp.int32),
        limit=jnp.zeros(count, jnp.int32),
        active=jnp.zeros(count, bool),
        seen=jnp.zeros((count, vocab_size), bool),
        sampling=Sampling.create(count),
    )


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("cache", "rows"))
def _insert(
    model: DecoderFunction, cache: Any, rows: Rows, prefix: Prefix, slot: Any
) -> tuple[Any, Rows]:
    cache = insert_row(model.config, cache, prefix.cache, slot)
    rows = jax.tree.map(lambda held, new: held.at[slot].set(new[0]), rows, prefix.rows)
    return cache, constrain_rows(model.config, rows)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _reset(model: DecoderFunction, cache: Any, rows: Any) -> Any:
    return reset_rows(model.config, cache, rows)
