"""What a frontend adds to a jitted call: ways of calling a decoder, timed in pairs.

The timed function gives the residual stream before the first layer. All else that the
decoder computes is dead code to the compiler, and every parameter is still passed
(`keep_unused`): the time left is that of the call itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

import shared
import zoo_nnx
from parity.decoders import Pair
from shared.layers import decoder
from shared.trees import flatten, path_text

PLAIN, USUAL, FLAT = "plain", "jit(apply), nnx.jit", "flattened once"


class Way(NamedTuple):
    """One way to call.

    Attributes:
      side: "plain" (no Flax), "linen" or "nnx".
      name: of the way.
      call: one call, to its end.
    """

    side: str
    name: str
    call: Callable[[], Any]


class Quartiles(NamedTuple):
    """Of a sample."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, sample: Any) -> Quartiles:
        """The quartiles of numbers."""
        return cls(
            *(float(q) for q in np.quantile(np.asarray(sample), (0.25, 0.5, 0.75)))
        )


class Timing(NamedTuple):
    """One way beside a baseline, measured in pairs.

    Attributes:
      microseconds: per call.
      baseline: microseconds per call of the baseline.
      ratio: of the two, pair by pair.
    """

    microseconds: Quartiles
    baseline: Quartiles
    ratio: Quartiles


def flatten_once(
    apply: Callable[..., Any], tree: Any, **jit_options: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """`apply(tree, ...)` as a jitted function of the tree's leaves, and those leaves.

    Nested dicts are flattened and sorted at every call, and an `nnx.State` in Python; a
    list costs what the arrays in it cost.

    Example usage::

      >>> import jax.numpy as jnp
      >>> forward, leaves = flatten_once(lambda p, x: p["a"] * x, {"a": jnp.ones(3)})
      >>> forward(leaves, 2.0).tolist()
      [2.0, 2.0, 2.0]
    """
    leaves, treedef = jax.tree.flatten(tree)

    def flat(leaves: list[Any], *args: Any, **kw: Any) -> Any:
        return apply(jax.tree.unflatten(treedef, leaves), *args, **kw)

    return jax.jit(flat, **jit_options), leaves


def plain_ways(pair: Pair, tokens: Array) -> list[Way]:
    """The same function without Flax, over a flat list and over a flat dict."""
    config = pair.config
    params = {path_text(path): leaf for path, leaf in flatten(pair.params)}
    names, leaves = list(params), list(params.values())

    def embed(weights: Mapping[str, Any], tokens: Array) -> Array:
        context = shared.Context.create(tokens.shape)
        return decoder.embed(weights, tokens, context, config)

    of_list = _jit(lambda leaves, x: embed(dict(zip(names, leaves, strict=True)), x))
    return [
        _way(PLAIN, "flat list", of_list, leaves, tokens),
        _way(PLAIN, "flat dict", _jit(embed), params, tokens),
    ]


def linen_ways(pair: Pair, tokens: Array) -> list[Way]:
    """Linen as its users call it, and over leaves flattened once."""
    model = pair.linen

    def first(variables: Mapping[str, Any], tokens: Array) -> Array:
        output = model.apply(variables, tokens, output_hidden_states=True)
        return _first(output)

    variables = {"params": pair.params}
    flat, leaves = flatten_once(first, variables, keep_unused=True)
    return [
        _way("linen", USUAL, _jit(first), variables, tokens),
        _way("linen", FLAT, flat, leaves, tokens),
    ]


def nnx_ways(pair: Pair, tokens: Array) -> list[Way]:
    """NNX with its parameters outside the module, and over leaves flattened once."""
    graphdef, state = nnx.split(pair.nnx)
    of_dict = zoo_nnx.as_function(pair.nnx)

    def first_of_dict(params: Mapping[str, Any], tokens: Array) -> Array:
        return _first(of_dict(params, tokens, output_hidden_states=True))

    def first(state: nnx.State, tokens: Array) -> Array:
        model = nnx.merge(graphdef, state)
        return _first(model(tokens, output_hidden_states=True))

    flat, leaves = flatten_once(first, state, keep_unused=True)
    return [
        _way("nnx", FLAT, flat, leaves, tokens),
        _way("nnx", "dict of parameters", _jit(first_of_dict), pair.params, tokens),
        _way("nnx", "split once", _jit(first), state, tokens),
    ]


def nnx_module_ways(pair: Pair, tokens: Array) -> list[Way]:
    """NNX with the module as an argument: each call takes it apart."""
    model = pair.nnx

    def first(model: Any, tokens: Array) -> Array:
        return _first(model(tokens, output_hidden_states=True))

    def of_split(graphdef: Any, state: nnx.State, tokens: Array) -> Array:
        return first(nnx.merge(graphdef, state), tokens)

    whole = nnx.jit(first, keep_unused=True)
    tree = nnx.jit(first, keep_unused=True, graph=False)
    cached = nnx.cached_partial(nnx.jit(first, keep_unused=True), model)
    split = jax.jit(of_split, static_argnums=0, keep_unused=True)
    return [
        _way("nnx", USUAL, whole, model, tokens),
        _way("nnx", "nnx.jit(graph=False)", tree, model, tokens),
        _way("nnx", "nnx.cached_partial", cached, tokens),
        Way(
            "nnx", "split at each call", lambda: _wait(split(*nnx.split(model), tokens))
        ),
    ]


def measure(way: Way, baseline: Way, *, rounds: int, calls: int) -> Timing:
    """Times two ways in turns.

    A round is `calls` calls of each, one after the other; its pair is the median of
    each. What slows the machine for a while slows both sides of a pair.
    """
    pairs = np.array(
        [_round(way.call, baseline.call, calls) for _ in range(rounds + 1)]
    )
    own, base = pairs[1:].T / 1e3  # the first round compiles
    return Timing(Quartiles.of(own), Quartiles.of(base), Quartiles.of(own / base))


def measure_all(
    ways: Iterable[Way], baseline: Way, *, rounds: int, calls: int
) -> dict[tuple[str, str], Timing]:
    """Timings by side and name of the way."""
    return {
        (way.side, way.name): measure(way, baseline, rounds=rounds, calls=calls)
        for way in ways
    }


def _round(
    left: Callable[[], Any], right: Callable[[], Any], calls: int
) -> tuple[float, float]:
    left(), right()  # compiled, and in the caches
    times: tuple[list[int], list[int]] = [], []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(calls):
            # Neither side always follows the other.
            for side in (0, 1) if i % 2 else (1, 0):
                call = (left, right)[side]
                start = time.perf_counter_ns()
                call()
                times[side].append(time.perf_counter_ns() - start)
    finally:
        if collecting:
            gc.enable()
    return float(np.median(times[0])), float(np.median(times[1]))


def _way(side: str, name: str, function: Callable[..., Any], *args: Any) -> Way:
    return Way(side, name, lambda: _wait(function(*args)))


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(function, keep_unused=True)


def _wait(x: Any) -> Any:
    return jax.block_until_ready(x)


def _first(output: Any) -> Array:
    return output.hidden_states.embedding
