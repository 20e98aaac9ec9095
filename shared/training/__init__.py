"""Training: the loss, the optimizer and the step, for both frontends."""

from shared.training.loss import Loss, decoder_loss
from shared.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from shared.training.placing import place_batch
from shared.training.step import (
    Metrics,
    StepOptions,
    gradients,
    init_state,
    state_shardings,
    train_step,
)

__all__ = [
    "Loss",
    "Metrics",
    "OptimizerConfig",
    "StepOptions",
    "decoder_loss",
    "gradients",
    "init_state",
    "learning_rate",
    "make_optimizer",
    "place_batch",
    "state_shardings",
    "train_step",
]
