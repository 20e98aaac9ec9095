"""Batches of tokens, each a pure function of the run's seed and the step's number.

So there is no position in the data to save: a run that resumes at a step asks for the
batch of that step. B batch, T time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import operator
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Int, Integer

# The batch of a step, counted from 0: `tokens` [B, T].
Batches = Callable[[int], Mapping[str, np.ndarray]]

BINARY_DTYPES = ("uint16", "uint32")  # of tokens in a raw file, little-endian
_PIECE = 2**24  # tokens that are looked at together


class DataError(ValueError):
    """A file without the tokens that are asked for; the message says what it has."""


@dataclasses.dataclass(frozen=True)
class SyntheticTokens:
    """Uniform random tokens: other ones in each step, the same in each run.

    Example usage::

      >>> from shared.training import data
      >>> batches = data.SyntheticTokens(vocab_size=96, batch_size=2, length=8, seed=0)
      >>> batches(5)["tokens"].shape
      (2, 8)
      >>> bool((batches(5)["tokens"] == batches(5)["tokens"]).all())
      True
    """

    vocab_size: int
    batch_size: int
    length: int
    seed: int = 0

    def __post_init__(self):
        _check_shape(self.batch_size, self.length)

    def __call__(self, step: int) -> dict[str, Int[np.ndarray, "B T"]]:
        """The batch of a step."""
        seeds = np.random.SeedSequence((self.seed, step))
        random = np.random.Generator(np.random.Philox(seeds))
        shape = self.batch_size, self.length
        return {"tokens": random.integers(self.vocab_size, size=shape, dtype=np.int32)}


@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
    """The tokens of a file, of which only what is asked for is ever in memory.

    Attributes:
      path: of the file.
      tokens: all of them, in order, mapped from the disk.
      digest: SHA-256 of their bytes.
    """

    path: pathlib.Path
    tokens: Integer[np.ndarray, "tokens"]
    digest: str


def open_token_file(
    path: str | pathlib.Path, vocab_size: int, dtype: str | None = None
) -> TokenFile:
    """Opens a file of tokens, and reads it once to see that all are in the vocabulary.

    Args:
      path: `.npy`, one dimension of integers; or anything else: raw little-endian
        integers, nothing before, between or behind them.
      vocab_size: of the model.
      dtype: of `BINARY_DTYPES`, of a raw file; a `.npy` says it itself.

    Raises:
      DataError: the file is none of these, is empty, or has a token that the model has
        not.
      OSError: it cannot be read.
    """
    path = pathlib.Path(path)
    tokens = _map_npy(path, dtype) if path.suffix == ".npy" else _map_raw(path, dtype)
    digest = hashlib.sha256()
    for start in range(0, tokens.size, _PIECE):
        piece = np.ascontiguousarray(tokens[start : start + _PIECE])
        digest.update(piece.view(np.uint8).data)
        _check_tokens(piece, start, vocab_size, path)
    return TokenFile(path, tokens, digest.hexdigest())


@dataclasses.dataclass(frozen=True, eq=False)
class TokenWindows:
    """Rows of `length` tokens, one behind the other; a rest at the end is not used.

    Attributes:
      file: that they are read from.
      length: tokens of a row. The loss is of length - 1 of them: no row tells what
        the first token of the next is.
    """

    file: TokenFile
    length: int

    def __post_init__(self):
        _check_shape(1, self.length)
        if not len(self):
            raise DataError(
                f"{self.file.path} has {self.file.tokens.size} tokens, which make no "
                f"row of {self.length}: give a longer file, or a smaller length."
            )

    def __len__(self) -> int:
        return self.file.tokens.size // self.length

    def __getitem__(self, index: SupportsIndex) -> Int[np.ndarray, "T"]:
        start = operator.index(index) * self.length
        return self.file.tokens[start : start + self.length].astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class ShuffledBatches:
    """Batches of rows that are shuffled in each epoch: each row comes once in it.

    A batch at the end of an epoch is filled up from the next.
    """

    windows: TokenWindows
    batch_size: int
    seed: int = 0

    def __post_init__(self):
        _check_shape(self.batch_size, self.windows.length)

    def __call__(self, step: int) -> dict[str, Int[np.ndarray, "B T"]]:
        """The batch of a step."""
        count, first = len(self.windows), step * self.batch_size
        rows = []
        for place in range(first, first + self.batch_size):
            epoch, index = divmod(place, count)
            rows.append(self.windows[_order(self.seed, epoch, count)[index]])
        return {"tokens": np.stack(rows)}


class GrainBatches:
    """Batches of a Grain `MapDataset`, whose elements are found by their number, too.

    Needs the extra `grain`.

    Args:
      dataset: its elements are batches: `tokens` [B, T], or dicts that have them.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    @classmethod
    def shuffled(
        cls, windows: TokenWindows, batch_size: int, seed: int = 0
    ) -> GrainBatches:
        """As `ShuffledBatches`, in the order that Grain shuffles into.

        Raises:
          DataError: Grain is not installed.
        """
        _check_shape(batch_size, windows.length)
        try:
            import grain
        except ImportError as error:
            raise DataError(
                "Grain is not installed: pip install 'parity-zoo[grain]', or leave it "
                "out."
            ) from error
        rows = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
        return cls(rows.batch(batch_size))

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step."""
        batch = self._dataset[step]
        return dict(batch) if isinstance(batch, Mapping) else {"tokens": batch}


def _check_shape(batch_size: int, length: int) -> None:
    if batch_size < 1:
        raise DataError(f"A batch must have at least 1 row. Got {batch_size}.")
    if length < 2:
        raise DataError(
            f"A row must have at least 2 tokens, one to predict. Got {length}."
        )


@functools.lru_cache(maxsize=2)  # a batch may lie in two epochs
def _order(seed: int, epoch: int, count: int) -> Int[np.ndarray, "rows"]:
    seeds = np.random.SeedSequence((seed, epoch))
    return np.random.Generator(np.random.Philox(seeds)).permutation(count)


def _map_npy(path: pathlib.Path, dtype: str | None) -> np.ndarray:
    if dtype is not None:
        raise DataError(
            f"{path} says itself of which dtype its tokens are: leave dtype={dtype} "
            "out."
        )
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file: {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path} must have one dimension of integers. It has {tokens.dtype} of the "
            f"shape {tokens.shape}."
        )
    return _not_empty(tokens, path)


def _map_raw(path: pathlib.Path, dtype: str | None) -> np.ndarray:
    if dtype not in BINARY_DTYPES:
        raise DataError(
            f"{path} does not say of which dtype its tokens are: give one of "
            f"{', '.join(BINARY_DTYPES)}, little-endian. Got {dtype}."
        )
    width, size = np.dtype(dtype).itemsize, path.stat().st_size
    if size % width:
        raise DataError(
            f"{path} has {size} bytes, which are no whole number of {dtype} of {width} "
            "bytes: it is cut off, or of another dtype."
        )
    if not size:
        raise DataError(f"{path} is empty: it has no tokens.")
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), mode="r")


def _not_empty(tokens: np.ndarray, path: pathlib.Path) -> np.ndarray:
    if not tokens.size:
        raise DataError(f"{path} is empty: it has no tokens.")
    return tokens


def _check_tokens(
    tokens: np.ndarray, start: int, vocab_size: int, path: pathlib.Path
) -> None:
    bad = (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        place = int(bad.argmax())
        raise DataError(
            f"{path} has the token {tokens[place]} at place {start + place}, and the "
            f"vocabulary has {vocab_size} tokens, from 0 on: give the file of this "
            "model's tokenizer, or say its dtype."
        )
