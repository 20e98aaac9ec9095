"""What is called, and with which inputs: methods, modes, examples.

An example is what a module gets: an array, a tuple of positional arguments, `Args` with
keywords, or `Steps`, several of these in turn with state carried from one to the next.
Where an array may stand there may also be a `jax.ShapeDtypeStruct`, to be drawn, or
`Integers`, to be drawn below a limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from parity import trees
from parity.pairs.search import draw

_CALLS = "Calls must be parity.Call, a list of them, or a dict of keywords for both."
Mode = Literal["train", "eval"]


class CheckError(ValueError):
    """Modules, inputs or options that cannot be checked; the message says why."""


class Args:
    """Arguments of one call: `Args(x, mask=mask)`."""

    def __init__(self, *positional: Any, **keywords: Any):
        self.positional = positional
        self.keywords = keywords

    def __repr__(self) -> str:
        parts = [*map(repr, self.positional)]
        parts += [f"{name}={value!r}" for name, value in self.keywords.items()]
        return f"Args({', '.join(parts)})"


def _flatten(args: Args) -> tuple[list[tuple[Any, Any]], Any]:
    keys = jax.tree_util.SequenceKey, jax.tree_util.DictKey
    entries = [(keys[0](i), x) for i, x in enumerate(args.positional)]
    entries += [(keys[1](name), x) for name, x in args.keywords.items()]
    return entries, (len(args.positional), tuple(args.keywords))


def _unflatten(shape: Any, leaves: Iterable[Any]) -> Args:
    (count, names), children = shape, list(leaves)
    keywords = dict(zip(names, children[count:], strict=True))
    return Args(*children[:count], **keywords)


jax.tree_util.register_pytree_with_keys(Args, _flatten, _unflatten)


class Steps(tuple[Any, ...]):
    """Calls in turn; a cache or other state goes from each to the next.

    `Steps([first, second])`; each item has one of the forms of an example.
    """

    def __init__(self, steps: Any):
        """Checks that there are some."""
        if not self:
            raise CheckError("Steps needs at least one call. Got none.")


@dataclasses.dataclass(frozen=True)
class Integers:
    """Integers to be drawn, `low` to `high - 1`: token ids, labels, positions."""

    shape: tuple[int, ...]
    high: int
    low: int = 0
    dtype: Any = np.int32

    def __post_init__(self) -> None:
        """Checks that there is something to draw from."""
        if self.low >= self.high:
            raise CheckError(
                f"Integers draws from low to high - 1, but low is {self.low} and high "
                f"is {self.high}."
            )


@dataclasses.dataclass(frozen=True)
class Call:
    """One way to call both modules.

    Attributes:
      name: in reports.
      method: to call; a pair where the two have different names, Linen's first.
      linen: constant keywords for Linen, as `{"train": True}`.
      nnx: constant keywords for NNX.
      mode: "train" or "eval" puts the NNX module into that mode first; Linen is told
        by `linen`.
      gradient: whether to compare loss and gradients.
      inputs: for this call alone.
    """

    name: str = "call"
    method: str | tuple[str, str] = "__call__"
    linen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    nnx: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mode: Mode | None = None
    gradient: bool = True
    inputs: Any = None

    @property
    def methods(self) -> tuple[str, str]:
        """Names of the method in Linen and in NNX."""
        return self.method if isinstance(self.method, tuple) else (self.method,) * 2


def make_calls(
    call: Call | Mapping[str, Any] | Sequence[Call] | None,
    methods: Sequence[str] | Mapping[str, Any] | None,
    inputs: Any,
) -> tuple[Call, ...]:
    """The calls that are asked for, each with its inputs.

    Args:
      call: ready calls, or constant keywords for both frontends.
      methods: names of methods that both have; a mapping gives each its inputs.
      inputs: for calls that have none of their own.

    Raises:
      CheckError: no calls, two of one name, or one without inputs.
    """
    if isinstance(methods, str):
        methods = (methods,)
    if isinstance(call, Call):
        calls: list[Call] = [call]
    elif call is None or isinstance(call, Mapping):
        keywords = dict(call or {})
        own = methods if isinstance(methods, Mapping) else {}
        names = tuple(methods) if methods is not None else ("__call__",)
        calls = [
            Call(
                "call" if name == "__call__" else name,
                name,
                linen=keywords,
                nnx=keywords,
                inputs=own.get(name),
            )
            for name in names
        ]
    elif not isinstance(call, Sequence):
        raise CheckError(f"{_CALLS} Got {type(call).__name__}: {call!r}.")
    else:
        calls = list(call)
        odd = next((c for c in calls if not isinstance(c, Call)), None)
        if odd is not None:
            raise CheckError(f"{_CALLS} Got {type(odd).__name__} in a list: {odd!r}.")
    if methods is not None and (isinstance(call, Call) or _is_calls(call)):
        raise CheckError("Give either calls or methods: a call names its method.")
    calls = [
        dataclasses.replace(c, inputs=inputs) if c.inputs is None else c for c in calls
    ]
    _check(calls)
    return tuple(calls)


def _is_calls(call: Any) -> bool:
    return call is not None and not isinstance(call, Mapping)


def _check(calls: Sequence[Call]) -> None:
    if not calls:
        raise CheckError("There is nothing to call: give a method or a Call.")
    names = [call.name for call in calls]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise CheckError(f"Calls need names of their own. Twice: {', '.join(double)}.")
    lacking = [call.name for call in calls if call.inputs is None]
    if lacking:
        raise CheckError(
            f"No inputs for {', '.join(lacking)}: give `inputs`, or Call(inputs=…)."
        )
    empty = [call.name for call in calls if _is_empty(call.inputs)]
    if empty:
        raise CheckError(f"The list of inputs for {', '.join(empty)} is empty.")


def _is_empty(inputs: Any) -> bool:
    return isinstance(inputs, list) and not inputs


def is_strategy(inputs: Any) -> bool:
    """Whether examples are drawn by Hypothesis."""
    return isinstance(inputs, st.SearchStrategy)


def first_example(inputs: Any, seed: int = 0) -> tuple[Args, ...]:
    """The arguments of one example, step by step, as arrays."""
    return next(iter(examples(inputs, seed, 1)))


def examples(inputs: Any, seed: int, count: int) -> Iterator[tuple[Args, ...]]:
    """Examples from anything but a strategy: `count` where something is to be drawn.

    A list holds several; arrays are given once.
    """
    if is_strategy(inputs):
        found: list[Any] = []
        draw(inputs, found.append, seed=seed, count=1)
        yield as_arrays(found[0])
        return
    for entry in inputs if isinstance(inputs, list) else [inputs]:
        drawn = any(_is_abstract(leaf) for leaf in _leaves(entry))
        for i in range(count if drawn else 1):
            random = np.random.default_rng((seed, i))
            yield tuple(_draw(step, random) for step in steps(entry))


def as_arrays(example: Any) -> tuple[Args, ...]:
    """The steps of a drawn example, with arrays of JAX."""
    return tuple(jax.tree.map(jnp.asarray, step) for step in steps(example))


def steps(example: Any) -> tuple[Args, ...]:
    """An example of any form as arguments, call by call."""
    if isinstance(example, Steps):
        return tuple(_as_args(step) for step in example)
    return (_as_args(example),)


def abstract(inputs: Any) -> list[Args]:
    """Shapes and dtypes of every step of every example; of a strategy, of the first."""
    if is_strategy(inputs):
        inputs = Steps(first_example(inputs))
    entries = inputs if isinstance(inputs, list) else [inputs]
    return [trees.abstract(step) for entry in entries for step in steps(entry)]


def _as_args(example: Any) -> Args:
    if isinstance(example, Args):
        return example
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return Args(*example)
    return Args(example)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct | Integers)


def _leaves(example: Any) -> list[Any]:
    return [leaf for step in steps(example) for leaf in jax.tree.leaves(step)]


def _draw(args: Args, random: np.random.Generator) -> Args:
    return jax.tree.map(lambda leaf: _draw_leaf(leaf, random), args)


def _draw_leaf(leaf: Any, random: np.random.Generator) -> Any:
    if isinstance(leaf, Integers):
        values = random.integers(leaf.low, leaf.high, leaf.shape)
        return jnp.asarray(values.astype(leaf.dtype))
    if isinstance(leaf, str | bytes):
        raise CheckError(
            f"Inputs are arrays. Got {leaf!r}: constants belong to the call, as in "
            'Call(linen={"mode": "fast"}, nnx={"mode": "fast"}).'
        )
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key = jax.random.key(int(random.integers(2**31)))
        return jax.random.split(key, leaf.shape) if leaf.shape else key
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.asarray(random.standard_normal(leaf.shape), leaf.dtype)
    if leaf.dtype == np.bool_:
        return jnp.asarray(random.random(leaf.shape) < 0.5)
    raise CheckError(
        f"Cannot draw {leaf.dtype}{list(leaf.shape)}: which integers are valid is not "
        "known. Use parity.Integers(shape, high), an array, or a strategy."
    )
