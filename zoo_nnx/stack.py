"""Runs the layers of a plan by `jax.lax.scan` over split NNX state.

A stacked module is a layer whose every Variable holds all layers of a run. It is split
once per call; the scan's body merges one layer from a slice of the state. Parameters
only go in. Everything else a layer owns or makes (batch statistics, caches, RNG counts,
sown values, a parameter made on the way) comes out again, a slice a layer, and goes
back into the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jax.typing import ArrayLike
from jaxtyping import Array

from shared.config import DecoderConfig, rematerialised
from shared.context import Context
from shared.layers import decoder
from shared.layers.decoder import PerLayer
from shared.layers.decoder_layer import KEEP_SINGLE_TRIP, pass_keys_on
from shared.plan import (
    STACK_AXES,
    Group,
    Run,
    cache_slot,
    insert,
    map_layers,
    node_at,
    run_indices,
    run_path,
    spread_new,
    stack_axes,
    stack_sizes,
)

LayerFactory = Callable[[Array, Any], nnx.Module]  # from index and kind
RunPath = tuple[str, ...]
# The residual stream, the caches of what is run, and the keys to lend, by mixer.
Carry = tuple[Array, Any, Any]
# Parameters; RNG streams of the model, which its layers share; everything else.
States = tuple[nnx.State, nnx.State, nnx.State]


class Block(nnx.Module):
    """The runs of a group, each a stacked module under the run's name."""

    def __init__(self, group: Group, make_layer: LayerFactory, axis: int, traced: bool):
        for run in group.runs:
            assert run.name is not None
            setattr(self, run.name, make_run(group, run, make_layer, axis, traced))


def make_run(
    group: Group, run: Run, make_layer: LayerFactory, axis: int, traced: bool
) -> nnx.Module:
    """The layers of a run as one module, its Variables stacked.

    Args:
      group: of the plan.
      run: of the group.
      make_layer: makes one layer from its absolute index and kind.
      axis: where the stack axes of parameters stand; others have theirs in front.
      traced: whether this runs inside `jit` (see `shared.plan.map_layers`).
    """
    sizes = stack_sizes(group, run)
    indices = run_indices(group, run)
    if not sizes:
        return make_layer(jnp.asarray(indices), run.kind)
    graphdefs = []

    def split_layer(index: Array) -> tuple[nnx.State, nnx.State]:
        layer = make_layer(index, run.kind)
        graphdef, *states = nnx.split(layer, nnx.Param, ...)
        graphdefs.append(graphdef)
        return states[0], states[1]

    params, rest = map_layers(split_layer, indices, traced)
    if any(graphdef != graphdefs[0] for graphdef in graphdefs):
        raise ValueError(
            f"The layers of run {run.name!r} differ in structure, so one scan cannot "
            "hold them. Build them alike, or set scan_layers=False."
        )
    names = stack_axes(group, run)
    return nnx.merge(
        graphdefs[0],
        _spread_state(params, sizes, names, axis),
        _spread_state(rest, sizes, names, 0),
    )


def run_plan(
    model: nnx.Module,
    config: DecoderConfig,
    x: Array,
    context: Context,
    cache: Any,
    told: Mapping[str, Any],
) -> tuple[Array, Any, dict[str, Any]]:
    """Runs the layers that `model` holds in the layout of the config's plan.

    Args:
      model: with the layers.
      config: of the model.
      x: the first layer's input.
      context: of the call.
      cache: of the layers, in the layout of the plan; None: there is none.
      told: `PerLayer` of the runs, in the layout of the plan.

    Returns:
      The last layer's output; the caches and the aux of the layers, in the layout of
      the plan.
    """
    modules = {
        run_path(group, run): _find(model, run_path(group, run))
        for group, run in config.plan.runs()
    }
    graphdefs, states, shared = {}, {}, _streams(model)
    for path, module in modules.items():
        graphdefs[path], *states[path] = nnx.split(
            module, nnx.Param, lambda _, leaf: id(leaf) in shared, ...
        )
    layer_inputs = {path: node_at(told, path).input for path in modules}
    held = None
    if cache is not None:
        held = {path: node_at(cache, path) for path in modules}
    static = tuple(sorted(graphdefs.items(), key=lambda item: item[0]))
    lent = decoder.init_lent(config, x)
    (x, held, _), results = _run_groups(
        static, type(model), config, states, (x, held, lent), context, layer_inputs
    )

    aux: dict[str, Any] = {}
    for path, (owned, run_aux) in results.items():
        _give_back(modules[path], owned, shared)
        insert(aux, path, run_aux)
    return x, None if held is None else _nested(held), aux


def _nested(by_run: Mapping[RunPath, Any] | None) -> dict[str, Any]:
    """What is held by the paths of runs, in the layout of the plan."""
    tree: dict[str, Any] = {}
    for path, node in (by_run or {}).items():
        insert(tree, path, node)
    return tree


# Compiled by itself, so that a call outside `jit` traces the layers once, not every
# time; inlined, so that a call inside `jit` lowers to the same program as without it.
# The class is there for its identity: Qwix makes one for each set of rules, and these
# change what the same layers compute.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _run_groups(
    graphdefs: tuple[tuple[tuple[str, ...], nnx.GraphDef], ...],
    model_class: type[nnx.Module],
    config: DecoderConfig,
    states: Mapping[RunPath, States],
    carry: Carry,
    context: Context,
    layer_inputs: Mapping[RunPath, Any],
) -> tuple[Carry, dict[RunPath, Any]]:
    """The groups in order; results are (owned state, aux) by path of the run."""
    del model_class
    # Indices are made here, so that they are constants of the program, as in Linen's.
    told = {
        run_path(group, run): PerLayer(
            run_indices(group, run), layer_inputs[run_path(group, run)]
        )
        for group, run in config.plan.runs()
    }
    x, caches, lent = carry
    new_caches: dict[RunPath, Any] = {}
    results: dict[RunPath, Any] = {}
    for group in config.plan.groups:
        paths = [run_path(group, run) for run in group.runs]
        trees = [None if caches is None else _nested(c) for c in (caches, new_caches)]
        lending = decoder.lend(config, group, context, lent, *trees)
        streams = {path: states[path][1] for path in paths}
        block = _Block(dict(graphdefs), group, streams, lending, config)
        sliced = {path: states[path][::2] for path in paths}
        inputs = sliced, {path: told[path] for path in paths}
        held = None if caches is None else {path: caches[path] for path in paths}
        (x, held, lent), group_results = block.run((x, held, lent), inputs)
        new_caches |= held or {}
        results |= group_results
    return (x, None if caches is None else new_caches, lent), results


class _Block:
    """The runs of a group as a function of their state."""

    def __init__(
        self,
        graphdefs: Mapping[tuple[str, ...], nnx.GraphDef],
        group: Group,
        streams: Mapping[RunPath, nnx.State],
        context: Context,
        config: DecoderConfig,
    ):
        self.graphdefs, self.group, self.streams = graphdefs, group, streams
        self.context, self.config = context, config

    def run(self, carry: Carry, inputs: tuple[Any, ...]) -> tuple[Carry, Any]:
        """The group once, or scanned over its repeats.

        Caches of stacked layers are carried whole, and each layer writes into them what
        is its own: as inputs and outputs of a scan they would be copied at every step.
        """
        if self.group.repeats is None:
            return self(carry, inputs)
        axis = self.config.param_scan_axis
        states, told = inputs
        xs = {
            path: (_to_front(params, axis), _to_front(rest, 0))
            for path, (params, rest) in states.items()
        }
        body = self._flat if self.config.is_flat(self.group) else self
        # Weights before what layers are told, which is Linen's order of operands.
        carry, results = jax.lax.scan(
            body, carry, (xs, told), length=self.group.repeats
        )
        return carry, {
            path: (_stacked(owned, STACK_AXES[0], axis), aux)
            for path, (owned, aux) in results.items()
        }

    def _flat(self, carry: Carry, inputs: tuple[Any, ...]) -> tuple[Carry, Any]:
        """The runs once, rematerialised as a whole; weights first, as in Linen."""

        def call(states: Any, carry: Carry, told: Any) -> tuple[Carry, Any]:
            return self(carry, (states, told))

        states, told = inputs
        return rematerialised(call, self.config, jax.checkpoint)(states, carry, told)

    def __call__(self, carry: Carry, inputs: tuple[Any, ...]) -> tuple[Carry, Any]:
        x, caches, lent = carry
        new_caches, results = {}, {}
        flat = self.config.is_flat(self.group)
        for run in self.group.runs:
            path = run_path(self.group, run)
            states, told = (tree[path] for tree in inputs)
            carry = x, None if caches is None else caches[path], lent
            step = _layer_step(
                self.graphdefs[path], self.streams[path], self.group, run, self.config
            )
            if run.stacked:
                axis, unroll = self.config.param_scan_axis, run.length if flat else 1
                carry, results[path] = _scan_layers(
                    step, states, carry, self.context, told, axis, unroll
                )
            elif self.config.loops_over_one(self.group):
                carry, results[path] = _loop_over_one(
                    step, states, carry, self.context, told
                )
            else:
                carry, results[path] = step(*states, carry, self.context, told)
            x, new_caches[path], lent = carry
        return (x, None if caches is None else new_caches, lent), results


def _layer_step(
    graphdef: nnx.GraphDef,
    streams: nnx.State,
    group: Group,
    run: Run,
    config: DecoderConfig,
) -> Callable[..., Any]:
    """One layer as a pure function; weights first, as in Linen's lifted `remat`."""

    def call(
        params: nnx.State,
        rest: nnx.State,
        x: Array,
        cache: Any,
        context: Context,
        told: PerLayer,
    ) -> tuple[Array, Any, Any, nnx.State]:
        slot = () if cache is None else cache_slot(group, run, told.layer)
        own_streams = _at_layer(streams, told.layer)
        layer = nnx.merge(graphdef, _fresh(params), own_streams, _fresh(rest))
        context = context.at_layer(told.layer, slot, told.input)
        return *layer(x, context, cache), _owned(layer, params)

    if not config.is_flat(group):
        call = rematerialised(call, config, jax.checkpoint)

    def step(
        params: nnx.State,
        rest: nnx.State,
        carry: Carry,
        context: Context,
        told: PerLayer,
    ) -> tuple[Carry, Any]:
        x, cache, lent = carry
        x, cache, aux, owned = call(params, rest, x, cache, context, told)
        lent, aux = pass_keys_on(lent, aux, run.kind)
        return (x, cache, lent), (owned, aux)

    return step


def _scan_layers(
    step: Callable[..., Any],
    states: tuple[nnx.State, nnx.State],
    carry: Carry,
    context: Context,
    told: PerLayer,
    axis: int,
    unroll: int,
) -> tuple[Carry, Any]:
    params, rest = _to_front(states[0], axis), _to_front(states[1], 0)

    def body(carry, inputs):
        params, rest, own = inputs
        return step(params, rest, carry, context, own)

    xs = params, rest, told
    carry, (owned, aux) = jax.lax.scan(body, carry, xs, unroll=unroll)
    return carry, (_stacked(owned, STACK_AXES[1], axis), aux)


def _loop_over_one(
    step: Callable[..., Any],
    states: tuple[nnx.State, nnx.State],
    carry: Carry,
    context: Context,
    told: PerLayer,
) -> tuple[Carry, Any]:
    """A rematerialised layer, by a scan of length one that closes over the weights.

    Carried, they would be saved for the backward pass of every block.
    """

    def body(carry, _):
        return step(*states, carry, context, told)

    with set_xla_metadata(**KEEP_SINGLE_TRIP):
        carry, result = jax.lax.scan(body, carry, None, length=1)
    return carry, jax.tree.map(lambda leaf: leaf[0], result)


def _owned(layer: nnx.Module, params: nnx.State) -> nnx.State:
    """All the layer holds besides the parameters that were given to it."""
    given = {path for path, _ in nnx.to_flat_state(params)}
    kept = [
        (path, leaf)
        for path, leaf in nnx.to_flat_state(nnx.state(layer))
        if path not in given
    ]
    return nnx.from_flat_state(kept)


def _streams(model: nnx.Module) -> set[int]:
    """Identities of the RNG state in the model's own streams.

    Its layers may hold them, too: Qwix gives one set of streams to every module.
    """
    return {
        id(leaf)
        for node in vars(model).values()
        if isinstance(node, nnx.Rngs | nnx.RngStream)
        for _, leaf in nnx.iter_graph(node)
        if isinstance(leaf, nnx.RngState)
    }


def _at_layer(streams: nnx.State, index: ArrayLike) -> nnx.State:
    """Streams that several layers share, for one of them: each draws its own values."""

    def fold(variable: nnx.Variable) -> nnx.Variable:
        value = variable.get_value()
        if isinstance(variable, nnx.RngKey):
            value = jax.random.fold_in(value, jnp.asarray(index))
        return variable.replace(value)

    return jax.tree.map(fold, streams, is_leaf=_is_variable)


def _give_back(module: nnx.Module, owned: nnx.State, shared: set[int]) -> None:
    """Puts what the layers of a run own back into it.

    In a shared stream each layer starts from the same count. Their counts come out
    stacked, and the highest of any run stays, so that no number is drawn again.
    """
    flat = dict(nnx.to_flat_state(owned))
    streams = nnx.state(module, lambda _, leaf: id(leaf) in shared)
    for path, variable in nnx.to_flat_state(streams):
        reached = flat.pop(path).get_value()
        if isinstance(variable, nnx.RngCount):
            count = jnp.maximum(variable.get_value(), jnp.max(reached))
            flat[path] = variable.replace(count)
    nnx.update(module, nnx.from_flat_state(list(flat.items())))


def _fresh(state: nnx.State) -> nnx.State:
    """New Variables, which belong to the trace at hand and so can be written to."""
    return jax.tree.map(lambda leaf: leaf, state)


def _spread_state(
    state: nnx.State, sizes: tuple[int, ...], names: Sequence[str], axis: int
) -> nnx.State:
    """The state of a run, one leading axis for its layers, with its stack axes."""
    state = jax.tree.map(lambda leaf: spread_new(leaf, sizes, axis), state)
    for name in reversed(names):
        state = _add_axis_name(state, name, axis)
    return state


def _to_front(state: nnx.State, axis: int) -> nnx.State:
    """The state with its stack axis in front, ready to be sliced: the name goes."""

    def move(variable: nnx.Variable) -> nnx.Variable:
        value = jax.tree.map(
            lambda leaf: jnp.moveaxis(leaf, axis, 0) if axis else leaf,
            variable.get_value(),
        )
        names = variable.get_metadata().get("out_sharding")
        if not names:
            return variable.replace(value)
        return variable.replace(value, out_sharding=(*names[:axis], *names[axis + 1 :]))

    return jax.tree.map(move, state, is_leaf=_is_variable)


def _stacked(state: nnx.State, name: str, axis: int) -> nnx.State:
    """What came out of a scan, stack axis in front, as the next call takes it.

    Parameters made on the way get theirs where those that were there have it.
    """

    def place(variable: nnx.Variable) -> nnx.Variable:
        at = axis if isinstance(variable, nnx.Param) else 0
        move = lambda leaf: (
            jnp.moveaxis(leaf, 0, min(at, leaf.ndim - 1)) if at else leaf
        )
        value = jax.tree.map(move, variable.get_value())
        return _with_axis_name(variable.replace(value), name, at)

    return jax.tree.map(place, state, is_leaf=_is_variable)


def _add_axis_name(state: nnx.State, name: str, axis: int) -> nnx.State:
    """The state with a new stack axis' name put in, where leaves have names."""
    return jax.tree.map(
        lambda variable: _with_axis_name(variable, name, axis),
        state,
        is_leaf=_is_variable,
    )


def _with_axis_name(variable: nnx.Variable, name: str, axis: int) -> nnx.Variable:
    names = variable.get_metadata().get("out_sharding")
    if not names:
        return variable
    at = min(axis, len(names))
    return variable.replace(
        variable.get_value(), out_sharding=(*names[:at], name, *names[at:])
    )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _find(model: nnx.Module, path: tuple[str, ...]) -> nnx.Module:
    for name in path:
        model = getattr(model, name)
    return model
