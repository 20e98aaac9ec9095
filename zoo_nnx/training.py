"""Training as NNX's users write it fast: state that is split outside of `jit`.

A model and its optimizer are split once; the compiled step merges them, changes them as
modules are changed, and gives their state back. Gradients and update are
`shared.training`'s, so that losses and states are those of
`shared.training.train_step`, and of Linen, to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import PRNGKeyArray

from shared import training
from shared.config import DecoderConfig
from shared.training import StepOptions
from shared.training.optimizer import update
from zoo_nnx.decoder import Decoder
from zoo_nnx.function import as_function
from zoo_nnx.optimizer import training_state
from zoo_nnx.state import from_params, to_params

_DEFAULT = StepOptions()


class Optimizer(nnx.Optimizer):
    """An `nnx.Optimizer` of a decoder's parameters, in which dtypes stay what they are.

    Its transformation sees nested dicts, as `shared.training.make_optimizer` expects.

    Example usage::

      >>> from flax import nnx
      >>> import shared, zoo_nnx
      >>> from shared import training
      >>> config = shared.preset("qwen3-next-tiny")
      >>> model = zoo_nnx.Decoder(config, rngs=nnx.Rngs(0))
      >>> tx = training.make_optimizer(training.OptimizerConfig(), config)
      >>> optimizer = zoo_nnx.Optimizer(model, tx)
      >>> sorted(zoo_nnx.training_state(model, optimizer))
      ['opt_state', 'params', 'step']

    Args:
      model: whose parameters are trained.
      tx: how.
      opt_state: of `tx`, for nested dicts; None: the first.
      step: that it belongs to.
    """

    def __init__(
        self,
        model: Decoder,
        tx: optax.GradientTransformation,
        *,
        opt_state: Any = None,
        step: Any = 0,
    ):
        if opt_state is None:
            opt_state = tx.init(to_params(model))
        self.graph = None
        self.tx = tx
        self.wrt = nnx.Param
        self.step = nnx.OptState(jnp.asarray(step).astype(jnp.uint32))
        self.opt_state = nnx.data(jax.tree.map(nnx.optimizer.OptArray, opt_state))

    def update(  # type: ignore[override]  # takes no other arguments
        self, model: Decoder, grads: Mapping[str, Any], /
    ) -> None:
        """Changes the model and this by gradients, which are a nested dict."""
        old = nnx.as_pure(self.opt_state)
        params, opt_state = update(self.tx, grads, old, to_params(model))
        nnx.update(model, params)
        jax.tree.map(
            lambda variable, leaf: variable.set_value(leaf),
            self.opt_state,
            opt_state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
        self.step.set_value(self.step.get_value() + 1)


def train_step(
    graphdef: nnx.GraphDef[Any],
    state: nnx.State,
    batch: training.Batch,
    options: StepOptions = _DEFAULT,
    dropout_key: PRNGKeyArray | None = None,
) -> tuple[nnx.State, training.Metrics]:
    """The state after one step, and what the step says; to be compiled.

    Args:
      graphdef: `graphdef, state = nnx.split((model, optimizer))`.
      state: before it; `nnx.update((model, optimizer), state)` brings a later one back.
      batch: see `shared.training.gradients`.
      options: see there.
      dropout_key: of the run: a step folds its number into it. None: no dropout.
    """
    model, optimizer = nnx.merge(graphdef, state)
    if dropout_key is not None:
        dropout_key = jax.random.fold_in(dropout_key, optimizer.step.get_value())
    metrics, grads = training.gradients(
        as_function(model), to_params(model), batch, options, dropout_key
    )
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), metrics


class Trainer:
    """What `shared.training.loop` runs.

    Args:
      config: of the model.
      tree: the state to go on from: `init_state`'s, Linen's, or one that was restored.
        Its memory is taken over by the first step.
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
        model = from_params(config, tree["params"])
        own = Optimizer(
            model, optimizer, opt_state=tree["opt_state"], step=tree["step"]
        )
        self.graphdef, self.state = nnx.split((model, own))
        step = functools.partial(
            train_step, self.graphdef, options=options, dropout_key=dropout_key
        )
        self._step = training.compile_step(step, self.state)

    def step(self, batch: training.Batch) -> training.Metrics:
        """Takes a step, and goes on from there."""
        self.state, metrics = self._step(self.state, batch)
        return metrics

    def tree(self) -> dict[str, Any]:
        """The state as `training_state` gives it, until the next step."""
        model, optimizer = nnx.merge(self.graphdef, self.state)
        return training_state(model, optimizer)
