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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import flax
import jax
from flax import linen as nn
from flax import nnx
from jaxtyping import Array

from parity.mapping.correspondence import Correspondence, Entry
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
from parity.pairs.masks import set_keys, shared_keys, stream_names
from parity.pairs.outputs import default_loss, flat, is_float, plain

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
      static: what else the call changed, in words; no compiled call keeps it.
    """

    outputs: Any
    state: dict[str, Any]
    leaves: Any
    requests: int
    touched: frozenset[str] = frozenset()
    static: tuple[str, ...] = ()


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

    def __init__(
        self,
        module: nn.Module,
        variables: Mapping[str, Any],
        streams: Sequence[str] = ("dropout",),
    ):
        self.module = module
        self._streams = set(streams)
        self._variables = {k: v for k, v in variables.items() if k != SOWN}
        self.leaves: tuple[Leaf, ...] = linen_leaves(self._variables)
        self.values = read_linen(self._variables)

    def apply(self, values: Values, call: Call, args: Args, key: Array) -> Outcome:
        """Calls the module with `values` in place, by own path."""
        with shared_keys(key) as requests:
            outputs, mutated = self.module.apply(
                write_linen(self._variables, values),
                *args.positional,
                rngs=dict.fromkeys(self._streams, key),
                mutable=flax.core.DenyList("params"),
                method=call.methods[0],
                **args.keywords,
                **call.linen,
            )
        if not requests.streams <= self._streams:  # again, with keys for these too
            self._streams |= requests.streams
            return self.apply(values, call, args, key)
        leaves = linen_leaves(mutated)
        return Outcome(plain(outputs), read_linen(mutated), leaves, len(requests))


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
        self.streams = tuple({"dropout": None, **dict.fromkeys(stream_names(module))})

    def apply(self, values: Values, call: Call, args: Args, key: Array) -> Outcome:
        """Calls a copy of the module with `values` in place, by own path."""
        # What a call makes for itself is not there yet.
        values = {path: x for path, x in values.items() if path in self.values}
        model = nnx.merge(self._graphdef, write_nnx(self._state, values))
        if call.mode is not None:
            getattr(model, call.mode)()
        set_keys(model, key)
        before = _static(model)
        with shared_keys(key) as requests, warnings.catch_warnings():
            # What a module sows is read from it here, as Linen's is.
            warnings.filterwarnings("ignore", r"Using 'Module\.(sow|perturb)", Warning)
            outputs = getattr(model, call.methods[1])(
                *args.positional, **args.keywords, **call.nnx
            )
        state = read_nnx(model)
        touched = frozenset(t for t, x in values.items() if state.get(t) is not x)
        return Outcome(
            plain(outputs),
            state,
            nnx_leaves(model),
            len(requests),
            touched,
            _changes(before, _static(model)),
        )


class Functions(NamedTuple):
    """One frontend's call, as functions of values in Linen's naming.

    Each is called as `f(values, args, key)` and gives a flat dict by path.

    Attributes:
      forward: outputs and state.
      gradient: loss, and its gradients by parameter and by input; None: not asked for.
    """

    forward: Callable[..., dict[str, Any]]
    gradient: Callable[..., dict[str, Any]] | None


class Naming(NamedTuple):
    """How one side's values are called in Linen's naming.

    Attributes:
      to_own: values in Linen's naming and layout, in the side's own.
      from_own: the inverse; what is ignored is left out.
      params: own paths of what either side trains.
      changing: own paths of parameters that NNX's calls change, which Linen's cannot.
    """

    to_own: Callable[[Values], dict[str, Any]]
    from_own: Callable[[Values], dict[str, Any]]
    params: frozenset[str]
    changing: frozenset[str]


def make_linen(
    linen: Any,
    variables: Mapping[str, Any] | None,
    call: Call,
    args: Args,
    seed: int,
    streams: Sequence[str] = ("dropout",),
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
        linen = _made("linen", linen)
    if not isinstance(linen, nn.Module):
        raise CheckError(
            "The Linen side must be a flax.linen.Module, such a class, or "
            f"(module, variables). Got {_describe(linen)}{_swapped(linen, nnx.Module)}."
        )
    if variables is None:
        variables = _without_sown(_initialise(linen, call, args, seed))
    return LinenSide(linen, variables, streams)


def make_nnx(module: Any, seed: int) -> NNXSide:
    """The NNX side, from a module or from a function that makes one.

    A function may take `rngs`.

    Raises:
      CheckError: it is no NNX module.
    """
    if isinstance(module, tuple) and len(module) == 2:
        module, state = module
        if not isinstance(module, nnx.Module):
            raise CheckError(
                "The NNX side must be a flax.nnx.Module, a function that makes one, or "
                f"(module, state). Got a pair that begins with {_describe(module)}."
            )
        module = nnx.clone(module)
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


def namings(
    trees: Correspondence, nnx: NNXLeaves, touched: frozenset[str]
) -> tuple[Naming, Naming]:
    """The namings of Linen's and of NNX's side.

    Args:
      trees: which leaf is which.
      nnx: leaves of the NNX module.
      touched: own paths of NNX's values that a call changes.
    """
    left_out = set(trees.ignored.get("linen", ()))

    def compared(values: Values) -> dict[str, Any]:
        return {path: x for path, x in values.items() if path not in left_out}

    trained = [entry for entry in trees.entries if _is_trained(entry, nnx)]
    changing = [entry for entry in trained if touched & set(entry.nnx)]
    return (
        Naming(
            dict,
            compared,
            frozenset(path for entry in trained for path in entry.linen),
            frozenset(path for entry in changing for path in entry.linen),
        ),
        Naming(
            trees.to_nnx,
            trees.to_linen,
            frozenset(path for entry in trained for path in entry.nnx),
            frozenset(path for entry in changing for path in entry.nnx),
        ),
    )


def _is_trained(entry: Entry, nnx: NNXLeaves) -> bool:
    """Whether it is a parameter in Linen, or of a subtype of `nnx.Param` in NNX."""
    leaves = (leaf for leaf in nnx.leaves if leaf.text in entry.nnx)
    return entry.linen[0].startswith("params/") or any(
        is_parameter(leaf, nnx) for leaf in leaves
    )


def is_parameter(leaf: Leaf | None, nnx: NNXLeaves) -> bool:
    """Whether a leaf's Variable is an `nnx.Param` or of a type derived from it."""
    if leaf is None:
        return False
    return "params" in (leaf.collection, *nnx.collections.get(leaf.text, ()))


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


def is_abstract(values: Mapping[str, Any]) -> bool:
    """Whether there are shapes instead of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in values.values())


def make_functions(
    side: Side, call: Call, loss: Loss | None, naming: Naming
) -> Functions:
    """One side of `call`, in Linen's naming.

    Args:
      side: Linen's or NNX's.
      call: how it is called.
      loss: of the outputs; None: `default_loss` of outputs and sown values.
      naming: the side's.
    """

    def forward(values: Values, args: Args, key: Array) -> dict[str, Any]:
        own = naming.to_own(values)
        outcome = side.apply(own, call, args, key)
        state = {k: x for k, x in outcome.state.items() if k not in naming.params}
        # Linen's calls give no parameters back: they stay what they were.
        state |= {k: outcome.state.get(k, own[k]) for k in naming.changing}
        return {
            **flat(outcome.outputs, "outputs"),
            **{f"state/{path}": x for path, x in naming.from_own(state).items()},
        }

    def objective(own: Values, args: Args, key: Array) -> Array:
        outcome = side.apply(own, call, args, key)
        if loss is not None:
            return loss(outcome.outputs)
        sown = {k: x for k, x in outcome.state.items() if k not in own}
        return default_loss((outcome.outputs, naming.from_own(sown)))

    def gradient(values: Values, args: Args, key: Array) -> dict[str, Any]:
        own = naming.to_own(values)
        params = {k: v for k, v in own.items() if k in naming.params and is_float(v)}
        leaves, treedef = jax.tree.flatten(args)
        floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

        def total(params: Values, floats: Mapping[int, Array]) -> Array:
            merged = [floats.get(i, leaf) for i, leaf in enumerate(leaves)]
            args = jax.tree.unflatten(treedef, merged)
            return objective({**own, **params}, args, key)

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
        gradients = naming.from_own(by_param)
        return {
            "loss": value,
            **{f"gradient/{path}": x for path, x in gradients.items()},
            **{path: by_input[i] for path, i in inputs.items() if i in by_input},
        }

    return Functions(forward, gradient if call.gradient else None)


def _static(model: nnx.Module) -> dict[str, Any]:
    """What an NNX module holds besides arrays, by attribute."""
    plain_types = (int, float, complex, str, bytes, bool, type(None), tuple)
    return {
        ".".join(map(str, (*path, name))): value
        for path, node in nnx.iter_graph(model, graph=True)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if isinstance(value, plain_types) and not name.startswith("_")
    }


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{name} from {before.get(name, 'nothing')!r} to {after.get(name, 'nothing')!r}"
        for name in {**before, **after}
        if name not in before or name not in after or before[name] != after[name]
    )


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


def _without_sown(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Without collections of tuples: what `init` sowed would stay in the way."""
    leaves = linen_leaves(variables)
    sown = {x.collection for x in leaves if x.path and isinstance(x.path[-1], int)}
    return {k: v for k, v in variables.items() if k == "params" or k not in sown}


def _build(make: Callable[..., Any], seed: int) -> Any:
    keywords = {"rngs": nnx.Rngs(seed)} if _takes_rngs(make) else {}
    return _made("nnx", functools.partial(make, **keywords))


def _made(side: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        raise CheckError(
            f"{side}: making the module raises {type(error).__name__}: {error}"
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
