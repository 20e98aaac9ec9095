"""The same random keys for both frontends: masks of dropout that can be compared.

Linen derives a key from the path of the module that asks, NNX counts the draws of a
stream. Inside `shared_keys` both get `fold_in(key, n)` for the n-th request of a call,
so that modules which ask in the same order draw the same masks.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import flax.core
import jax
import jax.extend
from flax import nnx
from jaxtyping import Array

# Streams for first values, and for the first carry of a recurrent cell, for which Linen
# asks nobody.
_LEFT_ALONE = ("params", "carry")
# Functions of NNX that ask a stream for the key of another stream.
_DERIVING = ("split", "fork", "broadcast", "split_rngs")


class Requests:
    """The requests for keys that were seen while tracing one call.

    A transform may trace a body more than once; a request that comes from the same
    place in a later trace is the same request and gets the same key.
    """

    def __init__(self, key: Array):
        self._key = key
        self._places: dict[Any, int] = {}
        self._traces: list[tuple[Any, dict[Any, int]]] = []

    def __len__(self) -> int:
        return len(self._places)

    def answer(self, place: Any) -> Array:
        """The key for a request from `place`, which None says nothing about."""
        if place is None:
            identity: Any = ("request", len(self._places))
        else:
            counts = self._counts_of_this_trace()
            counts[place] = counts.get(place, 0) + 1
            identity = place, counts[place]
        index = self._places.setdefault(identity, len(self._places))
        return jax.random.fold_in(self._key, index)

    def _counts_of_this_trace(self) -> dict[Any, int]:
        state = jax.extend.core.get_opaque_trace_state(convention="flax")
        for known, counts in self._traces:
            if known == state:
                return counts
        self._traces.append((state, {}))
        return self._traces[-1][1]


@contextlib.contextmanager
def shared_keys(key: Array) -> Iterator[Requests]:
    """Answers requests for random keys from `key`, but not those for first values."""
    requests = Requests(key)
    linen_own = flax.core.Scope.make_rng
    nnx_own = nnx.RngStream.__call__

    def make_rng(scope: flax.core.Scope, name: str = "params") -> Array:
        if name in _LEFT_ALONE:
            return linen_own(scope, name)
        return requests.answer(scope.path)

    def stream(self: nnx.RngStream) -> Array:
        own = nnx_own(self)  # counts the draw
        if self.tag in _LEFT_ALONE or _is_housekeeping(sys._getframe(1)):
            return own
        return requests.answer(None)

    with (
        mock.patch.object(flax.core.Scope, "make_rng", make_rng),
        mock.patch.object(nnx.RngStream, "__call__", stream),
    ):
        yield requests


def _is_housekeeping(caller: types.FrameType) -> bool:
    """Whether a request is none of the model's: `nnx.Rngs(0)` has one tag for all."""
    name = caller.f_code.co_name
    if name == "initialize_carry":
        return True
    return caller.f_globals.get("__name__") == nnx.rnglib.__name__ and name.endswith(
        _DERIVING
    )
