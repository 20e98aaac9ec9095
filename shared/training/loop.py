"""The loop: steps, what is said of them, what is saved of them."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import optax

from shared.checkpoint.training import Manager
from shared.config import ConfigError
from shared.training.data import Batches
from shared.training.step import Batch, Metrics


class NotFiniteError(ArithmeticError):
    """A loss or a gradient that is no finite number; the message names the step."""


@runtime_checkable
class Trainer(Protocol):
    """A frontend's way of training: `zoo_linen.Trainer`, `zoo_nnx.Trainer`."""

    def step(self, batch: Batch) -> Metrics:
        """Takes a step, and goes on from there."""

    def tree(self) -> dict[str, Any]:
        """The state as `init_state` has it, until the next step."""


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """What a run does.

    Attributes:
      steps: so many in all, those before a resume included.
      log_every: steps between two records; the last step has one, too.
      save_every: steps between two checkpoints; the last step has one, too.
    """

    steps: int
    log_every: int = 1
    save_every: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(
                    f"{field.name} must be at least 1. Got {getattr(self, field.name)}."
                )


class Record(NamedTuple):
    """What is said of a step.

    Attributes:
      step: how many steps lie behind the state after it.
      loss: of its batch, before the update; so are those that follow.
      cross_entropy: see `Metrics`.
      z_loss: see `Metrics`.
      router_loss: see `Metrics`.
      gradient_norm: see `Metrics`.
      learning_rate: of its update.
      tokens: in all batches so far, counted from the first step of the run.
      tokens_per_second: since the last record; without the first step of a process,
        which compiles. None: there was no other.
    """

    step: int
    loss: float
    cross_entropy: float
    z_loss: float
    router_loss: float | None
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float | None


def run(
    trainer: Trainer,
    batches: Batches,
    options: LoopOptions,
    learning_rate: optax.Schedule,
    *,
    first: int = 0,
    manager: Manager | None = None,
    report: Callable[[Record], None] = lambda record: None,
    place: Callable[[Batch], Batch] = lambda batch: batch,
    is_stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Trains from step `first` to the last one.

    Nothing is saved of a run whose loss or gradient was not finite since the last
    checkpoint: the steps before stay as they are.

    Args:
      trainer: at step `first`.
      batches: of each step.
      options: see there.
      learning_rate: of a step, counted from 0.
      first: steps that lie behind.
      manager: saves checkpoints; None: there are none.
      report: is given the records.
      place: puts a batch on the devices.
      is_stopping: asked after each step; True ends the run there, with a record and a
        checkpoint.

    Returns:
      The step at which it ended.

    Raises:
      NotFiniteError: a loss or a gradient is not finite.
    """
    clock, pending = _Clock(), _Pending()
    for step in range(first + 1, options.steps + 1):
        batch = batches(step - 1)
        rows, length = batch["tokens"].shape
        metrics = trainer.step(place(batch))
        pending.add(step, metrics)
        clock.count(rows * length, metrics)
        is_last = step == options.steps or is_stopping()
        if is_last or step % options.log_every == 0:
            told = pending.take()
            rate = float(learning_rate(step - 1))
            report(_record(step, told, rate, step * rows * length, clock.per_second()))
        if manager is not None and (is_last or step % options.save_every == 0):
            pending.take()
            manager.save(step, trainer.tree())
        if is_last:
            return step
    return first


class _Pending:
    """What steps have said, not looked at yet: to look is to wait for the devices."""

    def __init__(self) -> None:
        self._metrics: dict[int, Metrics] = {}
        self._last: Metrics | None = None

    def add(self, step: int, metrics: Metrics) -> None:
        self._metrics[step] = metrics

    def take(self) -> Metrics:
        """Of the last step; all since the last look are finite.

        Raises:
          NotFiniteError: one is not.
        """
        found, self._metrics = jax.device_get(self._metrics), {}
        for step, metrics in found.items():
            for name in ("loss", "gradient_norm"):
                value = float(getattr(metrics, name))
                if not math.isfinite(value):
                    raise NotFiniteError(
                        f"{name} of step {step} is {value}: nothing was saved since. "
                        "Go on from an earlier step with a lower learning_rate, a "
                        "longer warm-up or a smaller clip_norm."
                    )
            self._last = metrics
        assert self._last is not None
        return self._last


class _Clock:
    """Tokens per second since they were last asked for."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._tokens = 0

    def count(self, tokens: int, metrics: Metrics) -> None:
        if self._began is None:  # the first step compiles
            jax.block_until_ready(metrics)
            self._began = time.perf_counter()
        else:
            self._tokens += tokens

    def per_second(self) -> float | None:
        assert self._began is not None
        now = time.perf_counter()
        elapsed, tokens = now - self._began, self._tokens
        self._began, self._tokens = now, 0
        return tokens / elapsed if tokens and elapsed > 0 else None


def _record(
    step: int, metrics: Metrics, rate: float, tokens: int, speed: float | None
) -> Record:
    router = metrics.router_loss
    return Record(
        step,
        float(metrics.loss),
        float(metrics.cross_entropy),
        float(metrics.z_loss),
        None if router is None else float(router),
        float(metrics.gradient_norm),
        rate,
        tokens,
        speed,
    )
