"""Training as Linen's users write it: a `TrainState`, and a step from one to the next.

Gradients and update are `shared.training`'s, so that losses and states are those of
`shared.training.train_step`, and of NNX, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import optax
from flax import struct
from flax.training import train_state
from jaxtyping import PRNGKeyArray

from shared import training
from shared.config import DecoderConfig
from shared.training import StepOptions
from shared.training.optimizer import update
from zoo_linen.decoder import Decoder
from zoo_linen.function import as_function

_DEFAULT = StepOptions()


class TrainState(train_state.TrainState):
    """Flax's `TrainState` of a decoder, in which dtypes stay what they are.

    Example usage::

      >>> import jax, optax
      >>> import shared, zoo_linen
      >>> config = shared.preset("qwen3-next-tiny")
      >>> params = shared.init_params(jax.random.key(0), config)
      >>> model, tx = zoo_linen.Decoder(config), optax.adamw(1e-3)
      >>> state = zoo_linen.TrainState.create(
      ...     apply_fn=model.apply, params=params, tx=tx, model=model
      ... )
      >>> sorted(zoo_linen.training.to_tree(state))
      ['opt_state', 'params', 'step']

    Attributes:
      model: whose parameters are trained.
    """

    model: Decoder = struct.field(pytree_node=False)

    def apply_gradients(
        self, *, grads: Mapping[str, Any], **changes: Any
    ) -> TrainState:
        """The state after an update; `changes` are of its other fields."""
        params, opt_state = update(self.tx, grads, self.opt_state, self.params)
        new: TrainState = self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **changes
        )
        return new


def train_step(
    state: TrainState,
    batch: training.Batch,
    options: StepOptions = _DEFAULT,
    dropout_key: PRNGKeyArray | None = None,
) -> tuple[TrainState, training.Metrics]:
    """The state after one step, and what the step says; to be compiled.

    Args:
      state: before it.
      batch: see `shared.training.gradients`.
      options: see there.
      dropout_key: of the run: a step folds its number into it. None: no dropout.
    """
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, state.step)
    function = as_function(state.model)
    metrics, grads = training.gradients(
        function, state.params, batch, options, dropout_key
    )
    return state.apply_gradients(grads=grads), metrics


def to_tree(state: TrainState) -> dict[str, Any]:
    """The state as `shared.training.init_state` has it, which is what is saved."""
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
    }


def from_tree(
    model: Decoder, tree: Mapping[str, Any], optimizer: optax.GradientTransformation
) -> TrainState:
    """A state that goes on from a tree of `to_tree`, of NNX's, or of `init_state`."""
    return TrainState(apply_fn=model.apply, model=model, tx=optimizer, **tree)


class Trainer:
    """What `shared.training.loop` runs.

    Args:
      config: of the model.
      tree: the state to go on from. Its memory is taken over by the first step.
      optimizer: of `shared.training.make_optimizer`, or of your own.
      options: of a step.
      dropout_key: of the run; None: no dropout.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tree: Mapping[str, Any],
        optimizer: optax.GradientTransformation,
        options: StepOptions = _DEFAULT,
        dropout_key: PRNGKeyArray | None = None,
    ):
        self.state = from_tree(Decoder(config), tree, optimizer)
        step = functools.partial(train_step, options=options, dropout_key=dropout_key)
        self._step = training.compile_step(step, self.state)

    def step(self, batch: training.Batch) -> training.Metrics:
        """Takes a step, and goes on from there."""
        self.state, metrics = self._step(self.state, batch)
        return metrics

    def tree(self) -> dict[str, Any]:
        """The state as `to_tree` gives it, until the next step."""
        return to_tree(self.state)
