"""A Linen and an NNX module of anyone's as pure functions with one signature.

Both sides are called with values by path and give results by path, in Linen's naming:
the correspondence of the two trees is applied on the way into the NNX module and on the
way out. Where it only renames, it leaves no trace in the program.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from parity.mapping.correspondence import Correspondence
from parity.mapping.leaves import (
    Leaf,
    NNXLeaves,
    linen_leaves,
    nnx_leaves,
    read_linen,
    read_nnx,
    write_linen,
    write_nnx,
)
from parity.pairs.calls import Args, Call, CheckError
from parity.pairs.masks import shared_keys

Values = Mapping[str, Array]
Loss = Callable[[Any], Array]
SOWN = "intermediates"


class Outcome(NamedTuple):
    """What one call of a module gives.

    Attributes:
      outputs: any pytree.
      state: everything but random state afterwards, by own path; no parameters where a
        call cannot change them.
      leaves: of the module afterwards.
      requests: how many random keys were asked for.
      touched: own paths of values that are not just those the call was given.
    """

    outputs: Any
    state: dict[str, Any]
    leaves: Any
    requests: int
    touched: frozenset[str] = frozenset()


class Side(Protocol):
    """A module as a function of its values."""

    name: str
    leaves: Any
    values: dict[str, Any]

    def apply(self, values: Values, call: Call, args: Args, key: Array) -> Outcome:
        """Calls the module with `values` in place, by own path."""


class LinenSide:
    """A Linen module with its variables."""

    name = "linen"

    def __init__(self, module: nn.Module, variables: Mapping[str, Any]):
        self.module = module
        self._variables = {k: v for k, v in variables.items() if k != SOWN}
        self.leaves: tuple[Leaf, ...] = linen_leaves(self._variables)
        self.values = read_linen(self._variables)

    def apply(self, values: Values, call: Call, args: Args, key: Array) -> Outcome:
        """Calls the module with `values` in place, by own path."""
        with shared_keys(key) as requests:
            outputs, mutated = self.module.apply(
                write_linen(self._variables, values),
                *args.positional,
                rngs={"dropout": key},
                mutable=flax.core.DenyList("params"),
                method=call.methods[0],
                **args.keywords,
                **call.linen,
            )
        leaves = linen_leaves(mutated)
        return Outcome(outputs, read_linen(mutated), leaves, len(requests))


class NNXSide:
    """An NNX module with the values it holds."""

    name = "nnx"

    def __init__(self, module: nnx.Module):
        declared = nnx_leaves(module)  # a copy has forgotten the order
        kept = tuple(x for x in declared.leaves if x.collection != SOWN)
        self.leaves: NNXLeaves = dataclasses.replace(declared, leaves=kept)
        module = nnx.clone(module)
        nnx.pop(module, nnx.Intermediate)  # of earlier calls
        self._graphdef, self._state = nnx.split(module)
        self.values = read_nnx(module)
        self.abstract = is_abstract(self.values)

    def apply(self, values: Values, call: Call, args: Args, key: Array) -> Outcome:
        """Calls a copy of the module with `values` in place, by own path."""
        model = nnx.merge(self._graphdef, write_nnx(self._state, values))
        if call.mode is not None:
            getattr(model, call.mode)()
        with shared_keys(key) as requests, warnings.catch_warnings():
            # What a module sows is read from it here, as Linen's is.
            warnings.filterwarnings("ignore", r"Using 'Module\.(sow|perturb)", Warning)
            outputs = getattr(model, call.methods[1])(
                *args.positional, **args.keywords, **call.nnx
            )
        state = read_nnx(model)
        touched = frozenset(t for t, x in values.items() if state.get(t) is not x)
        return Outcome(outputs, state, nnx_leaves(model), len(requests), touched)


class Functions(NamedTuple):
    """One frontend's call, as functions of values in Linen's naming.

    Each is called as `f(values, args, key)` and gives a flat dict by path.

    Attributes:
      forward: outputs and state.
      gradient: loss, and its gradients by parameter and by input; None: not asked for.
      parameters: after the call.
    """

    forward: Callable[..., dict[str, Any]]
    gradient: Callable[..., dict[str, Any]] | None
    parameters: Callable[..., dict[str, Any]]


def make_linen(
    linen: Any,
    variables: Mapping[str, Any] | None,
    call: Call,
    args: Args,
    seed: int,
) -> LinenSide:
    """The Linen side, from a module or a (module, variables) pair.

    Without variables the module is initialised by its first call, under `jit`; from
    abstract arguments it becomes abstract.

    Raises:
      CheckError: it is no Linen module, or it cannot be initialised.
    """
    if isinstance(linen, tuple) and len(linen) == 2:
        linen, own = linen
        if variables is not None:
            raise CheckError(
                "Variables came twice: with the Linen module and as `variables`."
            )
        variables = own
    if isinstance(linen, type) and issubclass(linen, nn.Module):
        linen = linen()
    if not isinstance(linen, nn.Module):
        raise CheckError(
            "The Linen side must be a flax.linen.Module, such a class, or "
            f"(module, variables). Got {_describe(linen)}{_swapped(linen, nnx.Module)}."
        )
    if variables is None:
        variables = _initialise(linen, call, args, seed)
    return LinenSide(linen, variables)


def make_nnx(module: Any, seed: int) -> NNXSide:
    """The NNX side, from a module or from a function that makes one.

    A function may take `rngs`.

    Raises:
      CheckError: it is no NNX module.
    """
    if isinstance(module, tuple) and len(module) == 2:
        module, state = module
        nnx.update(module, state)
    linen = isinstance(module, type) and issubclass(module, nn.Module)
    if callable(module) and not isinstance(module, nnx.Module | nn.Module) | linen:
        module = _build(module, seed)
    if not isinstance(module, nnx.Module):
        raise CheckError(
            "The NNX side must be a flax.nnx.Module or a function that makes one. "
            f"Got {_describe(module)}{_swapped(module, nn.Module)}."
        )
    return NNXSide(module)


def linen_functions(
    side: LinenSide, call: Call, loss: Loss, trees: Correspondence
) -> Functions:
    """The Linen side of `call`; its naming is the one that both use."""
    left_out = set(trees.ignored.get("linen", ()))

    def compared(values: Values) -> dict[str, Any]:
        return {path: x for path, x in values.items() if path not in left_out}

    params = {path for path in side.values if path.startswith("params/")}
    return _functions(side, call, loss, dict, compared, params)


def nnx_functions(
    side: NNXSide, call: Call, loss: Loss, trees: Correspondence
) -> Functions:
    """The NNX side of `call`, in Linen's naming."""
    params = nnx_parameters(trees)
    return _functions(side, call, loss, trees.to_nnx, trees.to_linen, params)


def nnx_parameters(trees: Correspondence) -> set[str]:
    """Own paths of what Linen calls parameters, whatever type of Variable they are."""
    return {
        path
        for entry in trees.entries
        for path in entry.nnx
        if entry.linen[0].startswith("params/")
    }


def probe(side: Side, call: Call, args: Args, key: Array) -> Outcome:
    """Calls a side without computing anything: all arrays are abstract.

    Raises:
      CheckError: the module raises; its message is in ours.
    """
    seen: list[Outcome] = []

    def run(values: Values, args: Args, key: Array) -> Any:
        outcome = side.apply(values, call, args, key)
        seen.append(outcome)
        return outcome.outputs, outcome.state

    try:
        outputs, state = jax.eval_shape(run, side.values, args, key)
    except Exception as error:
        method = call.methods[side.name == "nnx"]
        raise CheckError(
            f"{side.name}: {method} of call {call.name!r} raises "
            f"{type(error).__name__}: {error}"
        ) from error
    return seen[-1]._replace(outputs=outputs, state=state)


def default_loss(outputs: Any) -> Array:
    """The sum of all floats of the outputs, weighted by cos(0), cos(1) and so on."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(outputs):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        real = leaf.ravel()
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            real = jnp.concatenate([jnp.real(real), jnp.imag(real)])
        dtype = _at_least_float32(real.dtype)
        weights = jnp.cos(jnp.arange(real.size, dtype=dtype))
        part = jnp.sum(real.astype(dtype) * weights)
        widest = max(total.dtype, part.dtype, key=lambda dtype: dtype.itemsize)
        total = total.astype(widest) + part.astype(widest)
    return total


def _at_least_float32(dtype: Any) -> Any:
    """As `promote_types`, which refuses to mix widths under strict promotion."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def flat(tree: Any, prefix: str) -> dict[str, Any]:
    """Leaves of a pytree by path: `outputs/0/logits`."""
    return {
        "/".join([prefix, *(_token(key) for key in path)]): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def is_float(leaf: Any) -> bool:
    """Whether there is a gradient by it."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_abstract(values: Mapping[str, Any]) -> bool:
    """Whether there are shapes instead of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in values.values())


def _functions(
    side: Side,
    call: Call,
    loss: Loss,
    to_own: Callable[[Values], dict[str, Any]],
    from_own: Callable[[Values], dict[str, Any]],
    param_paths: set[str],
) -> Functions:
    def forward(values: Values, args: Args, key: Array) -> dict[str, Any]:
        outcome = side.apply(to_own(values), call, args, key)
        state = {k: x for k, x in outcome.state.items() if k not in param_paths}
        return {
            **flat(outcome.outputs, "outputs"),
            **{f"state/{path}": x for path, x in from_own(state).items()},
        }

    def parameters(values: Values, args: Args, key: Array) -> dict[str, Any]:
        outcome = side.apply(to_own(values), call, args, key)
        return from_own({k: x for k, x in outcome.state.items() if k in param_paths})

    def gradient(values: Values, args: Args, key: Array) -> dict[str, Any]:
        own = to_own(values)
        params = {k: v for k, v in own.items() if k in param_paths and is_float(v)}
        leaves, treedef = jax.tree.flatten(args)
        floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

        def total(params: Values, floats: Mapping[int, Array]) -> Array:
            merged = [floats.get(i, leaf) for i, leaf in enumerate(leaves)]
            args = jax.tree.unflatten(treedef, merged)
            return loss(side.apply({**own, **params}, call, args, key).outputs)

        differentiate = jax.value_and_grad(total, argnums=(0, 1))
        try:
            value, (by_param, by_input) = differentiate(params, floats)
        except Exception as error:
            raise CheckError(
                f"{side.name}: the gradient of call {call.name!r} raises "
                f"{type(error).__name__}: {error}\nWhere there is none, compare "
                "without: Call(gradient=False)."
            ) from error
        # Named like the arguments they belong to.
        inputs = flat(jax.tree.unflatten(treedef, range(len(leaves))), "input_gradient")
        return {
            "loss": value,
            **{f"gradient/{path}": x for path, x in from_own(by_param).items()},
            **{path: by_input[i] for path, i in inputs.items() if i in by_input},
        }

    return Functions(forward, gradient if call.gradient else None, parameters)


def _initialise(
    module: nn.Module, call: Call, args: Args, seed: int
) -> Mapping[str, Any]:
    def init(key: Array, args: Args) -> Mapping[str, Any]:
        keys = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        return module.init(
            keys,
            *args.positional,
            method=call.methods[0],
            **args.keywords,
            **call.linen,
        )

    abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))
    run = jax.eval_shape if abstract else lambda f, *a: jax.jit(f)(*a)
    try:
        return run(init, jax.random.key(seed), args)
    except Exception as error:
        raise CheckError(
            f"linen: init by call {call.name!r} raises {type(error).__name__}: {error}"
        ) from error


def _build(make: Callable[..., Any], seed: int) -> Any:
    keywords = {"rngs": nnx.Rngs(seed)} if _takes_rngs(make) else {}
    try:
        return make(**keywords)
    except Exception as error:
        raise CheckError(
            f"nnx: making the module raises {type(error).__name__}: {error}"
        ) from error


def _takes_rngs(make: Any) -> bool:
    while isinstance(make, functools.partial):
        if "rngs" in make.keywords:
            return False
        make = make.func
    # A class of NNX has a metaclass that hides what its constructor takes.
    takes = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    return "rngs" in inspect.signature(takes).parameters


def _swapped(value: Any, other: type) -> str:
    """What to add where a side got what belongs to the other."""
    kind = value if isinstance(value, type) else type(value)
    return "; are the two sides swapped?" if issubclass(kind, other) else ""


def _describe(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:80]}"


def _token(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def as_numpy(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Results as numpy arrays; typed keys as their data."""
    return {path: _numpy(x) for path, x in results.items()}


def _numpy(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x)
