"""Runs the layers of a plan by `jax.lax.scan` over split NNX state.

A stacked module is a layer whose every Variable holds all layers of a run. It is split
once per call; the scan's body merges one layer from a slice of the state. Parameters
only go in. Everything else a layer owns or makes (batch statistics, caches, RNG counts,
sown values) comes out again, a slice a layer, and goes back into the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array

from shared.config import DecoderConfig, resolve_remat_policy
from shared.context import Context
from shared.layers.decoder import STACK_AXES
from shared.layers.decoder_layer import KEEP_SINGLE_TRIP
from shared.plan import (
    Group,
    Run,
    insert,
    map_layers,
    node_at,
    run_indices,
    run_path,
    spread_new,
    stack_sizes,
)

LayerFactory = Callable[[Array, Any], nnx.Module]  # from index and kind
States = tuple[nnx.State, nnx.State]  # parameters, and everything else


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

    def split_layer(index: Array) -> States:
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
    names = STACK_AXES[:1] * (group.repeats is not None) + STACK_AXES[1:] * run.stacked
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
) -> tuple[Array, Any, dict[str, Any]]:
    """Runs the layers that `model` holds in the layout of the config's plan.

    Returns:
      The last layer's output; the caches and the aux of the layers, in the layout of
      the plan.
    """
    modules = {
        run_path(group, run): _find(model, run_path(group, run))
        for group, run in config.plan.runs()
    }
    graphdefs, states, per_layer = {}, {}, {}
    for path, module in modules.items():
        graphdefs[path], *states[path] = nnx.split(module, nnx.Param, ...)
        per_layer[path] = _below(config.plan.indices(), path), _below(cache, path)
    static = tuple(sorted(graphdefs.items(), key=lambda item: item[0]))
    x, results = _run_groups(static, config, states, x, context, per_layer)

    caches: dict[str, Any] = {}
    aux: dict[str, Any] = {}
    for path, (owned, run_cache, run_aux) in results.items():
        nnx.update(modules[path], owned)
        insert(caches, path, run_cache)
        insert(aux, path, run_aux)
    return x, None if cache is None else caches, aux


# Compiled by itself, so that a call outside `jit` traces the layers once, not every
# time; inlined, so that a call inside `jit` lowers to the same program as without it.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _run_groups(
    graphdefs: tuple[tuple[tuple[str, ...], nnx.GraphDef], ...],
    config: DecoderConfig,
    states: Mapping[tuple[str, ...], States],
    x: Array,
    context: Context,
    per_layer: Mapping[tuple[str, ...], Any],
) -> tuple[Array, dict[tuple[str, ...], Any]]:
    """The groups in order; results are (owned state, cache, aux) by path of the run."""
    results: dict[tuple[str, ...], Any] = {}
    for group in config.plan.groups:
        paths = [run_path(group, run) for run in group.runs]
        block = _Block(dict(graphdefs), group, context, config)
        inputs = {path: (states[path], per_layer[path]) for path in paths}
        x, group_results = block.run(x, inputs)
        results.update(group_results)
    return x, results


class _Block:
    """The runs of a group as a function of their state."""

    def __init__(
        self,
        graphdefs: Mapping[tuple[str, ...], nnx.GraphDef],
        group: Group,
        context: Context,
        config: DecoderConfig,
    ):
        self.graphdefs, self.group = graphdefs, group
        self.context, self.config = context, config

    def run(self, x: Array, inputs: Mapping[tuple[str, ...], Any]) -> tuple[Array, Any]:
        """The group once, or scanned over its repeats."""
        if self.group.repeats is None:
            return self(x, inputs)
        axis = self.config.param_scan_axis
        xs = {
            path: ((_to_front(params, axis), _to_front(rest, 0)), per_layer)
            for path, ((params, rest), per_layer) in inputs.items()
        }
        x, results = jax.lax.scan(self, x, xs, length=self.group.repeats)
        return x, {
            path: (_add_axis_name(owned, STACK_AXES[0]), cache, aux)
            for path, (owned, cache, aux) in results.items()
        }

    def __call__(
        self, x: Array, inputs: Mapping[tuple[str, ...], Any]
    ) -> tuple[Array, Any]:
        results = {}
        for run in self.group.runs:
            path = run_path(self.group, run)
            states, per_layer = inputs[path]
            step = _layer_step(self.graphdefs[path], self.config)
            run_layers = _scan_layers if run.stacked else _single_layer
            x, results[path] = run_layers(
                step, states, x, self.context, per_layer, self.config
            )
        return x, results


def _layer_step(graphdef: nnx.GraphDef, config: DecoderConfig) -> Callable[..., Any]:
    """One layer as a pure function; weights first, as in Linen's lifted `remat`."""

    def step(
        params: nnx.State, rest: nnx.State, x: Array, context: Context, per_layer: Any
    ) -> tuple[Array, Any]:
        index, cache = per_layer
        layer = nnx.merge(graphdef, _fresh(params), _fresh(rest))
        x, cache, aux = layer(x, context.at_layer(index), cache)
        return x, (_owned(layer, params), cache, aux)

    if config.remat_policy == "none":
        return step
    policy = resolve_remat_policy(config.remat_policy)
    return jax.checkpoint(step, policy=policy, prevent_cse=False)


def _scan_layers(
    step: Callable[..., Any],
    states: States,
    x: Array,
    context: Context,
    per_layer: Any,
    config: DecoderConfig,
) -> tuple[Array, Any]:
    params, rest = _to_front(states[0], config.param_scan_axis), _to_front(states[1], 0)

    def body(x, inputs):
        params, rest, per_layer = inputs
        return step(params, rest, x, context, per_layer)

    x, (owned, cache, aux) = jax.lax.scan(body, x, (params, rest, per_layer))
    return x, (_add_axis_name(owned, STACK_AXES[1]), cache, aux)


def _single_layer(
    step: Callable[..., Any],
    states: States,
    x: Array,
    context: Context,
    per_layer: Any,
    config: DecoderConfig,
) -> tuple[Array, Any]:
    """A scan of length one that closes over the weights.

    Carried, they would be saved for the backward pass of every block.
    """
    del config

    def body(x, _):
        return step(*states, x, context, per_layer)

    with set_xla_metadata(**KEEP_SINGLE_TRIP):
        x, result = jax.lax.scan(body, x, None, length=1)
    return x, jax.tree.map(lambda leaf: leaf[0], result)


def _owned(layer: nnx.Module, params: nnx.State) -> nnx.State:
    """All the layer holds besides the parameters that were given to it."""
    given = {path for path, _ in nnx.to_flat_state(params)}
    kept = [
        (path, leaf)
        for path, leaf in nnx.to_flat_state(nnx.state(layer))
        if path not in given
    ]
    return nnx.from_flat_state(kept)


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


def _add_axis_name(state: nnx.State, name: str, axis: int = 0) -> nnx.State:
    """The state with a new stack axis' name put in, where leaves have names."""

    def add(variable: nnx.Variable) -> nnx.Variable:
        names = variable.get_metadata().get("out_sharding")
        if not names:
            return variable
        at = min(axis, len(names))
        return variable.replace(
            variable.get_value(), out_sharding=(*names[:at], name, *names[at:])
        )

    return jax.tree.map(add, state, is_leaf=_is_variable)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _find(model: nnx.Module, path: tuple[str, ...]) -> nnx.Module:
    for name in path:
        model = getattr(model, name)
    return model


def _below(tree: Any, path: tuple[str, ...]) -> Any:
    return None if tree is None else node_at(tree, path)
