"""Both frontends trained side by side, compared to the bit at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parity.training.session import TRAINERS, Session
from parity.trees import Comparison, compare_bytes
from shared.stores import path_text
from shared.stores.tree import named_nodes

_COMPARED = ("loss", "cross_entropy", "z_loss", "router_loss", "gradient_norm")


class Step(NamedTuple):
    """What both said of a step.

    Attributes:
      step: how many steps lie behind, this one included.
      losses: by frontend.
      compared: the loss, its parts and the gradient's norm.
    """

    step: int
    losses: dict[str, float]
    compared: Comparison


def compare(session: Session, report: Callable[[Step], None]) -> Comparison:
    """Trains both from one state; compares each step, and the states at the end.

    Args:
      session: the run; its state is held twice.
      report: is given each step.
    """
    state = session.first_state()
    copy = jax.tree.map(jnp.copy, state)
    trainers = {
        name: session.trainer(name, tree)
        for name, tree in zip(TRAINERS, (state, copy), strict=True)
    }
    whole = Comparison()
    for step in range(1, session.loop_options.steps + 1):
        batch = session.placement.batch(session.batches(step - 1))
        said = {
            name: {key: value for key, value in metrics.items() if value is not None}
            for name, metrics in (
                (name, jax.device_get(trainer.step(batch))._asdict())
                for name, trainer in trainers.items()
            )
        }
        left, right = (
            {key: metrics[key] for key in _COMPARED if key in metrics}
            for metrics in said.values()
        )
        compared = compare_bytes(left, right, finite=True).under(f"step {step}/")
        losses = {name: float(metrics["loss"]) for name, metrics in said.items()}
        report(Step(step, losses, compared))
        whole += compared
    leaves = [_by_path(trainer.tree()) for trainer in trainers.values()]
    return whole + compare_bytes(*leaves, finite=True).under("last state/")


def _by_path(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a state, optax's included, by path."""
    nodes, _ = named_nodes(tree)
    return {
        path_text(path): np.asarray(leaf)
        for path, leaf in nodes
        if jax.tree.leaves(leaf)
    }
