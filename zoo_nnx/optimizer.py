"""An NNX model and its optimizer as one plain tree, such as Linen's train state is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared.stores.store import path_text
from shared.stores.tree import is_empty, named_nodes
from zoo_nnx.state import to_params


def training_state(model: nnx.Module, optimizer: nnx.Optimizer) -> dict[str, Any]:
    """What training goes on with, without a trace of NNX.

    Example usage::

      >>> import optax
      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> model = zoo_nnx.Decoder(shared.preset("qwen3-next-tiny"), rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
      >>> state = zoo_nnx.training_state(model, optimizer)
      >>> sorted(state)
      ['opt_state', 'params', 'step']
      >>> sorted(state["opt_state"][0].mu) == sorted(state["params"])
      True
      >>> zoo_nnx.load_training_state(model, optimizer, state)

    Returns:
      `params` as nested dicts, `opt_state` as the optimizer's transformation gives it
      for them, `step` as int32: what a Linen `TrainState` has, to the byte. The RNG
      streams of the model are not in it (`nnx.state(model, nnx.RngState)`).
    """
    opt_state = jax.tree.map(
        lambda node: nnx.to_pure_dict(node) if _is_state(node) else node,
        nnx.as_pure(optimizer.opt_state),
        is_leaf=_is_state,
    )
    step = optimizer.step.get_value().astype(jnp.int32)
    return {"params": to_params(model), "opt_state": opt_state, "step": step}


def load_training_state(
    model: nnx.Module, optimizer: nnx.Optimizer, state: Mapping[str, Any]
) -> None:
    """Puts a state that `training_state` gave, or a Linen train state's, into both.

    Args:
      model: gets the parameters.
      optimizer: of that model, with the same transformation.
      state: `params`, `opt_state` and `step`.

    Raises:
      ValueError: leaves are missing, unexpected or of another shape or dtype; all are
        listed, and nothing has been changed.
    """
    own = training_state(model, optimizer)
    names = "params", "opt_state", "step"
    given = {name: state[name] for name in names if name in state}
    _check_alike(own, given)
    params = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(params, dict(given["params"]))
    nnx.update(model, params)
    values = _by_path(given["opt_state"])
    for path, variable in _by_path(optimizer.opt_state, _is_variable).items():
        variable.set_value(values[path])
    optimizer.step.set_value(jnp.asarray(given["step"], jnp.uint32))


def _is_state(node: Any) -> bool:
    return isinstance(node, nnx.State)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _by_path(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    found, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def _check_alike(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compares paths, shapes and dtypes of two states; raises ValueError."""
    want, have = (
        {path_text(path): leaf for path, leaf in nodes if not is_empty(leaf)}
        for nodes in (named_nodes(own)[0], named_nodes(given)[0])
    )
    lines = [f"missing: {path}" for path in want if path not in have]
    lines += [f"unexpected: {path}" for path in have if path not in want]
    for path in want.keys() & have.keys():
        ours, theirs = (
            f"{jnp.result_type(leaf)} {jnp.shape(leaf)}"
            for leaf in (want[path], have[path])
        )
        if ours != theirs:
            lines.append(f"{path} must be {ours}, got {theirs}")
    if lines:
        raise ValueError(
            "The state is not one of this model and optimizer:\n  "
            + "\n  ".join(sorted(lines))
        )
