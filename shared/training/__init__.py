"""Training: loss, optimizer, step, data and loop, for both frontends."""

from shared.training import data, loop
from shared.training.data import DataError
from shared.training.loop import LoopOptions, NotFiniteError, Record
from shared.training.loss import Loss, decoder_loss
from shared.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from shared.training.placing import place_batch
from shared.training.state import (
    Placement,
    abstract_state,
    compile_step,
    draw_params,
    make_state,
    place_params,
)
from shared.training.step import (
    Batch,
    Metrics,
    StepOptions,
    gradients,
    init_state,
    state_shardings,
    train_step,
)

__all__ = [
    "Batch",
    "DataError",
    "LoopOptions",
    "Loss",
    "Metrics",
    "NotFiniteError",
    "OptimizerConfig",
    "Placement",
    "Record",
    "StepOptions",
    "abstract_state",
    "compile_step",
    "data",
    "decoder_loss",
    "draw_params",
    "gradients",
    "init_state",
    "learning_rate",
    "loop",
    "make_optimizer",
    "place_batch",
    "make_state",
    "place_params",
    "state_shardings",
    "train_step",
]
