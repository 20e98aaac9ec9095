"""The loop: which steps are told and saved, and what ends it."""

import unittest.mock

import numpy as np
import pytest

import shared
from shared.checkpoint.training import Manager
from shared.training import LoopOptions, Metrics, NotFiniteError, loop


class Countdown:
    """A trainer whose loss is the sum of all tokens so far."""

    def __init__(self, bad=None, field="loss", value=np.nan):
        self.total, self.taken, self.bad = 0, 0, (bad, field, value)

    def step(self, batch):
        self.taken += 1
        self.total += int(batch["tokens"].sum())
        said = Metrics(*map(np.float32, (self.total, 1, 2, 3, 4, 5)))
        step, field, value = self.bad
        return said._replace(**{field: value}) if self.taken == step else said

    def tree(self):
        return {"step": self.taken}


def batches(step):
    return {"tokens": np.full((2, 3), step)}


def run(steps, log_every=1, save_every=1, **options):
    trainer = options.pop("trainer", None) or Countdown()
    manager, records = unittest.mock.create_autospec(Manager, instance=True), []
    options = {"report": records.append, "manager": manager, **options}
    saved = lambda: [call.args for call in manager.save.call_args_list]
    try:
        ended = loop.run(
            trainer,
            batches,
            LoopOptions(steps, log_every, save_every),
            lambda step: step / 10,
            **options,
        )
    except NotFiniteError as error:
        ended = error
    return ended, records, saved()


def test_the_last_step_is_told_and_saved_whatever_the_intervals():
    ended, records, saved = run(7, log_every=3, save_every=4)
    assert ended == 7
    assert [record.step for record in records] == [3, 6, 7]
    assert saved == [(4, {"step": 4}), (7, {"step": 7})]


def test_a_record_is_of_its_step():
    _, records, _ = run(3)
    assert [record.loss for record in records] == [0, 6, 18]  # 2 x 3 of 0, 1, 2
    assert [record.learning_rate for record in records] == [0, 0.1, 0.2]
    assert [record.tokens for record in records] == [6, 12, 18]
    first, *others = records
    assert first.tokens_per_second is None  # it compiles
    assert all(other.tokens_per_second > 0 for other in others)
    assert first[2:6] == (1, 2, 3, 5)


def test_a_resumed_run_takes_up_the_batches_and_the_counts():
    _, whole, _ = run(5)
    ended, records, saved = run(5, first=3)
    assert ended == 5 and [step for step, _ in saved] == [4, 5]
    assert [record.loss for record in records] == [18, 42]  # of batches 3 and 4
    for name in ("step", "learning_rate", "tokens"):
        assert [getattr(r, name) for r in records] == [
            getattr(r, name) for r in whole[3:]
        ]


def test_a_run_that_is_done_does_nothing():
    assert run(5, first=5) == (5, [], [])


def test_a_stop_ends_after_the_step_with_a_record_and_a_checkpoint():
    trainer = Countdown()
    ended, records, saved = run(
        9, 5, 5, trainer=trainer, is_stopping=lambda: trainer.taken == 3
    )
    assert ended == trainer.taken == 3
    assert [record.step for record in records] == [3]
    assert saved == [(3, {"step": 3})]


@pytest.mark.parametrize("field", ["loss", "gradient_norm"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("log_every", "save_every"), [(1, 2), (7, 2), (7, 5)])
def test_a_step_that_is_not_finite_is_named_and_not_saved(
    field, value, log_every, save_every
):
    """Also where it is looked at steps later."""
    trainer = Countdown(4, field, np.float32(value))
    error, records, saved = run(9, log_every, save_every, trainer=trainer)
    assert f"{field} of step 4 is {value}" in str(error)
    assert [step for step, _ in saved] == ([2] if save_every == 2 else [])
    assert all(record.step < 4 for record in records)


@pytest.mark.parametrize("name", ["steps", "log_every", "save_every"])
def test_counts_below_one_are_told(name):
    with pytest.raises(shared.ConfigError, match=f"{name} must be at least 1. Got 0"):
        LoopOptions(**{"steps": 1, name: 0})
