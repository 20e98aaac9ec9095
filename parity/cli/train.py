"""Trains a model in one frontend, or in both with the proof that they agree.

parity train TARGET [--frontend=nnx] [--steps=N] [--data=FILE] [flags]
parity train --recipe=NAME [flags]
parity train TARGET --compare [flags]

TARGET is a preset (see `parity models`), whose first values are drawn, or a folder with
a checkpoint to begin with. Settings may stand in a file, --config=FILE: a JSON object
of the flags' names and `target`; flags win. --recipe=NAME is one that comes with us.

--data is a file of tokens: .npy, or raw integers of --token-dtype. Rows of --length are
shuffled without replacement in each epoch. Without it tokens are random. A batch is
found by the seed and the step's number alone. With --checkpoints=DIR steps are saved
there, and a run whose folder has some goes on from the last, to the bit; SIGTERM or
Ctrl-C ends a run after its step, with a checkpoint.

--compare trains both frontends on the same batches, and compares the loss, its parts
and the gradient's norm of every step, and the last state, to the bit.
Exit status 0: done, or equal; 1: the frontends differ, or the loss was no longer
finite; 2: bad input; 128 + the signal's number: stopped by it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import rich.console
from absl import flags

import shared
from parity.cli import UsageError, check_files, say
from parity.cli.shardings import read_mesh, read_rules
from parity.reporting.report import Report, Tier
from parity.training import comparing, outputs, session, settings
from parity.training.session import Session
from shared import sharding
from shared.checkpoint.training import Manager
from shared.training import NotFiniteError, Placement, Record, loop

_FILES = ("json", "metrics")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags."""
    settings.define_flags(values)
    flags.DEFINE_string("config", None, "JSON file with settings.", flag_values=values)
    flags.DEFINE_string(
        "recipe",
        None,
        f"Settings that come with us: {', '.join(settings.recipes())}.",
        flag_values=values,
    )


def run(
    arguments: Sequence[str], options: Mapping[str, Any], console: rich.console.Console
) -> int:
    """Trains as one command says."""
    told = _settings(arguments, options)
    check_files(told, _FILES)
    _check_folders(told)
    prepared = session.prepare(told, _placement(told))
    if told["compare"]:
        return _compare(prepared, console)
    if told["checkpoints"] is not None and session.saved_steps(told["checkpoints"]):
        session.check_same_run(told["checkpoints"], prepared)
    with _Stop() as stop:
        return _train(prepared, console, stop)


# Input.


def _settings(arguments: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    if len(arguments) > 1:
        raise UsageError(
            f"Give one target, a preset or a folder. Got {len(arguments)}."
        )
    names = [setting.name for setting in settings.SETTINGS]
    given = {name: options[name] for name in names}
    given["target"] = arguments[0] if arguments else None
    told = settings.merge(given, file=options["config"], recipe=options["recipe"])
    if told["compare"] and (told["checkpoints"] or told["tensorboard"]):
        raise UsageError(
            "--compare trains both frontends, to compare them: it takes no "
            "--checkpoints and no --tensorboard."
        )
    return told


def _check_folders(told: Mapping[str, Any]) -> None:
    for name in ("checkpoints", "tensorboard"):
        if told[name] is None:
            continue
        path = pathlib.Path(told[name])
        if not told[name] or (path.exists() and not path.is_dir()):
            raise UsageError(f"--{name}={told[name]}: that is no folder.")
    if told["tensorboard"] is not None:
        outputs.require_tensorboard()


def _placement(told: Mapping[str, Any]) -> Placement:
    rules = sharding.AXIS_RULES
    if told["rules"] is not None:
        rules = read_rules(told["rules"])
    if not told["mesh"]:
        return Placement(None, rules)
    sizes = read_mesh(told["mesh"], with_rest=True)
    return Placement(sharding.make_mesh(sizes), rules)


class _Stop:
    """Notes a signal that asks for the end; a second one ends the process as ever."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self.__exit__()


# One frontend.


def _train(prepared: Session, console: rich.console.Console, stop: _Stop) -> int:
    told = prepared.settings
    records: list[Record] = []
    failure = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(prepared.placement.context())
        manager, state = _begin(prepared, stack)
        first = ended = int(state["step"])
        say(console, _title(prepared, told["frontend"]))
        if first:
            say(console, f"resumed from step {first} in {told['checkpoints']}")
        reports = [records.append, lambda record: say(console, outputs.line(record))]
        if told["metrics"]:
            reports.append(
                stack.enter_context(outputs.json_lines(told["metrics"], first))
            )
        if told["tensorboard"]:
            reports.append(
                stack.enter_context(outputs.tensorboard(told["tensorboard"], first))
            )

        def report(record: Record) -> None:
            for tell in reports:
                tell(record)

        try:
            ended = loop.run(
                prepared.trainer(told["frontend"], state),
                prepared.batches,
                prepared.loop_options,
                prepared.schedule,
                first=first,
                manager=manager,
                report=report,
                place=prepared.placement.batch,
                is_stopping=lambda: stop.number is not None,
            )
        except NotFiniteError as error:
            failure = str(error)
    stopped = None if stop.number is None else signal.Signals(stop.number).name
    say(console, failure or _ending(prepared, first, ended, stopped))
    if told["json"]:
        _write(
            prepared,
            {
                "first_step": first,
                "last_step": ended,
                "stopped_by": stopped,
                "failure": failure,
                "records": [outputs.as_dict(record) for record in records],
            },
        )
    if failure is not None:
        return 1
    return 0 if stop.number is None else 128 + stop.number


def _begin(
    prepared: Session, stack: contextlib.ExitStack
) -> tuple[Manager | None, dict[str, Any]]:
    """The manager of the run's steps, if it has one, and the state to go on from."""
    folder = prepared.settings["checkpoints"]
    if folder is None:
        return None, prepared.first_state()
    goes_on = bool(session.saved_steps(folder))
    # Weights that are no good are told before there is a folder.
    state = None if goes_on else prepared.first_state()
    manager = Manager(folder, prepared.config, keep=prepared.settings["keep"])
    stack.enter_context(manager)
    if state is None:
        return manager, prepared.restored_state(manager)
    session.note_run(folder, prepared)
    return manager, state


def _title(prepared: Session, what: str) -> str:
    told = prepared.settings
    shapes = shared.abstract_params(prepared.config)
    count = sum(leaf.size for _, leaf in shared.trees.flatten(shapes))
    mesh = ",".join(told["mesh"])
    where = f"mesh {mesh} of {prepared.devices} devices" if mesh else "one device"
    return (
        f"{told['target']} in {what}: {count:,} parameters, batches of "
        f"{told['batch']} x {told['length']} tokens, {where}"
    )


def _ending(prepared: Session, first: int, ended: int, stopped: str | None) -> str:
    told = prepared.settings
    if first >= told["steps"]:
        return f"the run is at step {first}, and --steps={told['steps']}: nothing to do"
    saved = f", saved in {told['checkpoints']}" if told["checkpoints"] else ""
    return (
        f"{stopped}: stopped at step {ended}{saved}"
        if stopped
        else (f"done: {ended} steps{saved}")
    )


# Both.


def _compare(prepared: Session, console: rich.console.Console) -> int:
    told, steps = prepared.settings, []
    say(console, _title(prepared, "both frontends"))

    def report(step: comparing.Step) -> None:
        steps.append(step)
        is_due = step.step % told["log_every"] == 0 or step.step == told["steps"]
        if is_due or not step.compared.equal:
            losses = "  ".join(f"{name} {loss!r}" for name, loss in step.losses.items())
            verdict = "equal" if step.compared.equal else "DIFFERENT"
            say(console, f"step {step.step}  loss  {losses}  {verdict}")

    with prepared.placement.context():
        compared = comparing.compare(prepared, report)
    note = (
        "training: loss, its parts and the gradient's norm of every step, parameters "
        "and optimizer state of the last, to the bit"
    )
    verdict = Report(told["target"], (Tier("bits", compared, len(steps), note),))
    verdict.print(console)
    console.print(verdict.verdict, style="bold")
    if told["json"]:
        lines = [
            {"step": step.step, "losses": step.losses, "equal": step.compared.equal}
            for step in steps
        ]
        _write(prepared, {"steps": lines, "report": verdict.as_dict()})
    return 0 if verdict.ok else 1


def _write(prepared: Session, result: Mapping[str, Any]) -> None:
    told = prepared.settings
    whole = {"schema": "parity-zoo/training", "version": 1, "settings": told, **result}
    text = json.dumps(whole, indent=2, allow_nan=False) + "\n"
    pathlib.Path(told["json"]).write_text(text, encoding="utf-8")
