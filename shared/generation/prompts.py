"""What a caller asks for, checked on the host before anything is compiled or run.

B rows, T time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shared.config import DecoderConfig
from shared.generation.sampling import Sampling

SMALLEST_BUCKET = 16
MOST_TOKENS = 2**30  # so that no sum of two lengths leaves int32


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "limits", "sampling", "stop_tokens"],
    meta_fields=["max_length"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Checked prompts, and how they are continued: NumPy arrays, traced within `jit`.

    Attributes:
      tokens: int32 [B, T], filled up on the right, `T` a bucket if it fits.
      lengths: [B], tokens of each prompt.
      limits: [B], at most so many new ones.
      sampling: an entry a row.
      stop_tokens: ids that end an answer.
      max_length: positions of the cache.
    """

    tokens: Any
    lengths: Any
    limits: Any
    sampling: Sampling
    stop_tokens: Any
    max_length: int

    @property
    def prompts(self) -> list[np.ndarray]:
        """The prompts as they were given."""
        rows = zip(self.tokens, self.lengths, strict=True)
        return [row[:length] for row, length in rows]

    @staticmethod
    def create(
        config: DecoderConfig,
        prompts: Sequence[Any],
        max_new_tokens: Any,
        *,
        sampling: Sampling | None = None,
        stop_tokens: Any = None,
        max_length: int | None = None,
    ) -> Batch:
        """A batch; the arguments are those of `generation.stream`.

        Raises:
          ValueError: one of them is no good, or they do not fit together.
        """
        read = check_prompts(config, prompts)
        limits = check_limits(max_new_tokens, len(read))
        stop_tokens = check_stop_tokens(config, stop_tokens)
        lengths = np.array([len(prompt) for prompt in read], np.int32)
        time = bucket(int(lengths.max()))
        if max_length is None:
            max_length = bucket(int(max(time, (lengths + limits - 1).max())))
        check_fits(lengths, limits, max_length)
        if sampling is None:
            sampling = Sampling.create(len(read))
        check_rows(sampling, len(read))
        tokens = pad_right(read, min(time, max_length))
        return Batch(tokens, lengths, limits, sampling, stop_tokens, int(max_length))


def check_prompts(config: DecoderConfig, prompts: Sequence[Any]) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
      ValueError: there is none, one is empty, holds no integers, or an id outside the
        vocabulary; names prompt, place and id.
    """
    if len(prompts) == 0:
        raise ValueError("There is no prompt: give at least one sequence of token ids.")
    return [check_prompt(config, p, f"prompt {i}") for i, p in enumerate(prompts)]


def check_prompt(config: DecoderConfig, prompt: Any, name: str = "prompt") -> Any:
    """One prompt as an int32 array; see `check_prompts`."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(
            f"{name} must be a sequence of at least one token id. Got an array of "
            f"shape {tokens.shape}."
        )
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"{name} must hold token ids, integers. Got {tokens.dtype}.")
    check_ids(config, tokens, name)
    return tokens.astype(np.int32)


def check_ids(config: DecoderConfig, ids: np.ndarray, name: str) -> None:
    """Whether all ids are in the vocabulary.

    Raises:
      ValueError: names the first that is not.
    """
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        raise ValueError(
            f"{name} has the id {ids[outside[0]]} at {outside[0]}, outside the "
            f"vocabulary of {config.vocab_size}."
        )


def check_stop_tokens(config: DecoderConfig, stop_tokens: Any) -> np.ndarray:
    """The ids that end a row; None: the config's `eos_token_id`, if it has one.

    Raises:
      ValueError: they are not integers, or one is outside the vocabulary.
    """
    if stop_tokens is None:
        stop_tokens = () if config.eos_token_id is None else config.eos_token_id
    ids = np.atleast_1d(np.asarray(stop_tokens))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"stop_tokens must be one token id or a flat list of them. Got "
            f"{stop_tokens!r}."
        )
    check_ids(config, ids, "stop_tokens")
    return ids.astype(np.int32)


def check_limits(max_new_tokens: Any, count: int) -> np.ndarray:
    """At most how many tokens each row gets: one number, or one a row.

    Raises:
      ValueError: one is out of range, or there are too many or too few.
    """
    limits = np.asarray(max_new_tokens)
    if limits.shape not in ((), (count,)) or limits.dtype.kind not in "iu":
        raise ValueError(
            f"max_new_tokens must be an integer, or one for each of {count} rows. Got "
            f"{max_new_tokens!r}."
        )
    if limits.min() < 1:
        raise ValueError(f"max_new_tokens must be at least 1. Got {limits.min()}.")
    if limits.max() > MOST_TOKENS:
        raise ValueError(
            f"max_new_tokens must be at most {MOST_TOKENS}. Got {limits.max()}."
        )
    return np.broadcast_to(limits, (count,)).astype(np.int32)


def check_fits(lengths: Any, limits: np.ndarray, max_length: int) -> None:
    """Whether every prompt and its answer fit into a cache.

    Raises:
      ValueError: names the row and its numbers.
    """
    for row, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        if length + limit - 1 > max_length:  # the last token is never read
            raise ValueError(
                f"Row {row} has a prompt of {length} tokens and may get {limit} more, "
                f"but the cache holds {max_length}: raise max_length or lower "
                "max_new_tokens."
            )


def check_rows(sampling: Sampling, count: int) -> None:
    """Whether there are settings for every row.

    Raises:
      ValueError: there are more or fewer.
    """
    given = sampling.temperature.shape
    if given != (count,):
        raise ValueError(
            f"sampling has settings for {given[0] if given else 'no'} rows, there are "
            f"{count} prompts: make it with Sampling.create({count}, ...)."
        )


def bucket(length: int, smallest: int = SMALLEST_BUCKET) -> int:
    """The least power of two that is not below `length` nor below `smallest`.

    Prompts are filled up to it, so that few lengths are ever compiled.
    """
    return max(smallest, 1 << (length - 1).bit_length())


def pad_right(prompts: Sequence[np.ndarray], length: int) -> np.ndarray:
    """The prompts as int32 [B, T] with zeros behind."""
    rows = [np.pad(prompt, (0, length - len(prompt))) for prompt in prompts]
    return np.stack(rows).astype(np.int32)
