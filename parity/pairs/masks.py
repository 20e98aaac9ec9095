"""The same random keys for both frontends: masks of dropout that can be compared.

Linen derives a key from the path of the module that asks, NNX counts the draws of a
stream. Inside `shared_keys` both get `fold_in(base, n)` for the n-th request of a call,
so that modules which ask in the same order draw the same masks. The base is what the
scope or the stream holds: the key of the call, as transforms split it or do not. Hence
masks that one frontend shares along an axis and the other does not are not the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import flax.core
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.scope import LazyRng
from flax.linen import transforms
from jaxtyping import Array

# Streams for first values, and for the first carry of a recurrent cell, for which Linen
# asks nobody.
_LEFT_ALONE = ("params", "carry")
# Functions of NNX that ask a stream for the key of another stream.
_DERIVING = ("split", "fork", "broadcast", "split_rngs", "_split_stream", "reseed")

# `jit`, `remat` and `scan` keep what they have traced, with the numbers of its requests
# in it. A context with another value makes them trace again.
_tracing = jax.make_user_context(default_value=None)
_values = itertools.count()


class Requests:
    """The requests for keys that were seen while tracing one call.

    A transform may trace a body more than once; a request that comes from the same
    place in a later trace is the same request and gets the same number.

    Attributes:
      streams: names of the streams that Linen was asked for.
    """

    def __init__(self, contexts: contextlib.ExitStack):
        self.streams: set[str] = set()
        self._contexts = contexts
        self._places: dict[Any, int] = {}
        self._traces: list[tuple[Any, dict[Any, int]]] = []
        self._calls: tuple[Any, ...] = ()
        self._trace_anew()

    def __len__(self) -> int:
        return len(self._places)

    def answer(self, base: Array, place: Any = None) -> Array:
        """The key for a request from `place`, which None says nothing about."""
        if place is None:
            identity: Any = ("request", len(self._places))
        else:
            identity = self._calls, self._counted(place)
        if identity not in self._places:
            self._places[identity] = len(self._places)
            self._trace_anew()
        return jax.random.fold_in(base, self._places[identity])

    @contextlib.contextmanager
    def jitted(self, module: Any) -> Iterator[None]:
        """While a method under `nn.jit` is called, which is traced for each call."""
        outer = self._calls
        place = () if module.scope is None else module.scope.path
        self._calls = (*outer, self._counted(("jit", place)))
        try:
            yield
        finally:
            self._calls = outer

    def _counted(self, place: Any) -> tuple[Any, int]:
        counts = self._counts_of_this_trace()
        counts[place] = counts.get(place, 0) + 1
        return place, counts[place]

    def _counts_of_this_trace(self) -> dict[Any, int]:
        state = jax.extend.core.get_opaque_trace_state(convention="flax")
        for known, counts in self._traces:
            if known == state:
                return counts
        self._traces.append((state, {}))
        return self._traces[-1][1]

    def _trace_anew(self) -> None:
        self._contexts.enter_context(_tracing(next(_values)))


@contextlib.contextmanager
def shared_keys(key: Array) -> Iterator[Requests]:
    """Numbers the requests for random keys, but not those for first values.

    Args:
      key: for Linen streams that were given none. Give it to those that are known, and
        to NNX by `set_keys`: only what transforms know of can be split.
    """
    linen_own = flax.core.Scope.make_rng
    nnx_own = nnx.RngStream.__call__

    def make_rng(scope: flax.core.Scope, name: str = "params") -> Array:
        if name in _LEFT_ALONE:
            return linen_own(scope, name)
        requests.streams.add(name)
        return requests.answer(_linen_base(scope, name, key), scope.path)

    def stream(self: nnx.RngStream) -> Array:
        base = self.key[...]
        own = nnx_own(self)  # counts the draw
        if self.tag in _LEFT_ALONE or _is_carry(sys._getframe(1)):
            return own
        return base if _is_deriving(sys._getframe(1)) else requests.answer(base)

    with contextlib.ExitStack() as contexts:
        requests = Requests(contexts)
        for owner, name, ours in (
            (flax.core.Scope, "make_rng", make_rng),
            (nnx.RngStream, "__call__", stream),
            # It makes a request of its own for each stream.
            (transforms, "fork_rngs", requests.jitted),
        ):
            contexts.enter_context(mock.patch.object(owner, name, ours))
        yield requests


def set_keys(model: Any, key: Array) -> None:
    """Gives `key` to every stream of an NNX module, but not to those for first values.

    A stack of keys becomes a stack of splits, as Linen's `split_rngs` makes it. Along
    an axis on which all keys are one key they stay so.
    """
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.RngKey) and node.tag not in _LEFT_ALONE:
            node.set_value(_stacked(key, node.get_value()))


def stream_names(model: Any) -> tuple[str, ...]:
    """Names of the streams of an NNX module, but not of those for first values.

    Linen's `has_rng` should know these. `default`, which answers for any, is none.
    """
    names = {node.tag for _, node in nnx.iter_graph(model) if _is_stream(node)}
    return tuple(sorted(names.difference(_LEFT_ALONE, ("default",))))


def _is_stream(node: Any) -> bool:
    return isinstance(node, nnx.RngStream)


def _linen_base(scope: flax.core.Scope, name: str, key: Array) -> Array:
    """The key that a stream was given, without what Linen folds in for each module."""
    for stream in (name, "params", "dropout"):  # as Flax, then as good as can be
        if stream in scope.rngs:
            return LazyRng.create(scope.rngs[stream]).rng
    return key


def _stacked(key: Array, held: Any) -> Array:
    shared = _shared_axes(held)
    for axis, size in enumerate(held.shape):
        if axis in shared:
            key = jnp.broadcast_to(key[..., None], (*key.shape, size))
            continue
        split = functools.partial(jax.random.split, num=size)
        for _ in range(axis):
            split = jax.vmap(split)
        key = split(key)
    return key


def _shared_axes(held: Any) -> set[int]:
    """Axes along which all keys are the same; none where there are only shapes."""
    if not isinstance(held, jax.Array) or isinstance(held, jax.core.Tracer):
        return set()
    with jax.ensure_compile_time_eval():
        data = np.asarray(jax.random.key_data(held))
    return {
        axis
        for axis, size in enumerate(held.shape)
        if size > 1 and (data == data.take([0], axis)).all()
    }


def _is_carry(caller: types.FrameType) -> bool:
    """Whether a first carry is asked for: `nnx.Rngs(0)` has one tag for all."""
    return caller.f_code.co_name == "initialize_carry"


def _is_deriving(caller: types.FrameType) -> bool:
    """Whether a request is NNX's own, for another stream."""
    own = caller.f_globals.get("__name__") == nnx.rnglib.__name__
    return own and caller.f_code.co_name.endswith(_DERIVING)
