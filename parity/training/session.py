"""A run as its settings describe it: everything is checked before anything is made."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

import shared
import zoo_linen
import zoo_nnx
from parity import zoo
from parity.training.settings import SettingsError
from shared import sharding, training
from shared.checkpoint.training import Manager
from shared.training import LoopOptions, OptimizerConfig, Placement, StepOptions, data
from shared.training.loop import Trainer

TRAINERS: dict[str, Callable[..., Trainer]] = {
    "linen": zoo_linen.Trainer,
    "nnx": zoo_nnx.Trainer,
}
# A resumed run is the same run if these are the same. All else may change: how long it
# is, what it says, which frontend and which devices go on with it.
_SAME = (
    "seed",
    "batch",
    "length",
    "loader",
    *(field.name for field in dataclasses.fields(OptimizerConfig)),
    "accumulation_steps",
    "z_loss_coef",
)
_RUN_FILE = "run.json"
_SHRINKING = ("num_layers", "num_experts", "vocab_size")


@dataclasses.dataclass(frozen=True, eq=False)
class Session:
    """A run that can begin.

    Attributes:
      settings: all of them, `batch` for all devices.
      config: of the model.
      folder: whose weights it begins with; None: it draws them.
      placement: of its arrays.
      schedule: learning rate of a step.
      optimizer: of the parameters.
      step_options: of a step.
      loop_options: of the loop.
      batches: of each step.
      identity: what a resumed run must have, too.
    """

    settings: Mapping[str, Any]
    config: shared.DecoderConfig
    folder: pathlib.Path | None
    placement: Placement
    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    step_options: StepOptions
    loop_options: LoopOptions
    batches: data.Batches
    identity: Mapping[str, Any]

    @property
    def devices(self) -> int:
        """How many train."""
        mesh = self.placement.mesh
        return 1 if mesh is None else mesh.size

    def first_state(self) -> dict[str, Any]:
        """Before the first step.

        Raises:
          CheckpointError: the weights to begin with are no good.
        """
        if self.folder is None:
            key = jax.random.key(self.settings["seed"])
            params = training.draw_params(key, self.config, self.placement)
        else:
            loaded = zoo.load(self.folder, **_layout(self.settings))[1]
            params = training.place_params(loaded, self.config, self.placement)
        return training.make_state(params, self.optimizer, self.config, self.placement)

    def restored_state(self, manager: Manager) -> dict[str, Any]:
        """Of the last step that was saved.

        Raises:
          CheckpointError: it is another model's, or damaged.
        """
        target = training.abstract_state(self.optimizer, self.config, self.placement)
        state: dict[str, Any] = manager.restore(target)
        return state

    def trainer(self, frontend: str, state: Mapping[str, Any]) -> Trainer:
        """A frontend that goes on from a state, whose memory it takes over."""
        key = None
        if self.config.dropout_rate:
            key = jax.random.fold_in(jax.random.key(self.settings["seed"]), 1)
        return TRAINERS[frontend](
            self.config, state, self.optimizer, self.step_options, key
        )


def prepare(settings: Mapping[str, Any], placement: Placement) -> Session:
    """Reads what the settings name, and checks it.

    Args:
      settings: of `settings.merge`.
      placement: what their mesh and rules come to.

    Raises:
      ValueError: they make no run; the class says what is at fault.
      OSError: a file cannot be read.
    """
    settings = dict(settings)
    config, folder = resolve_config(settings, placement)
    if settings["batch_per_device"] is not None:
        devices = 1 if placement.mesh is None else placement.mesh.size
        settings["batch"] = settings["batch_per_device"] * devices
    if settings["batch"] % settings["accumulation_steps"]:
        raise SettingsError(
            f"accumulation_steps={settings['accumulation_steps']} does not divide the "
            f"{settings['batch']} rows of a batch."
        )
    names = [field.name for field in dataclasses.fields(OptimizerConfig)]
    chosen = {name: settings[name] for name in names}
    chosen["clip_norm"] = chosen["clip_norm"] or None
    options = OptimizerConfig(**chosen)
    optimizer = training.make_optimizer(options, config)
    batches, source = _data(settings, config)
    session = Session(
        settings,
        config,
        folder,
        placement,
        training.learning_rate(options),
        optimizer,
        StepOptions(**_of(StepOptions, settings)),
        LoopOptions(**_of(LoopOptions, settings)),
        batches,
        identity={
            **{name: settings[name] for name in _SAME},
            "data": source,
            "dtype": config.dtype,
            "dropout_rate": config.dropout_rate,
        },
    )
    _check_memory(session)
    placement.batch(batches(0))
    return session


def _of(options: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: settings[field.name] for field in dataclasses.fields(options)}


def _layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("scan_layers", "scan_period")}


def resolve_config(
    settings: Mapping[str, Any], placement: Placement
) -> tuple[shared.DecoderConfig, pathlib.Path | None]:
    """The model of a run, and the folder whose weights it begins with, if any.

    Raises:
      ValueError: there is no such model.
    """
    config, folder = zoo.resolve(settings["target"], {})
    config = _shrunk(config, folder, settings)
    names = ("dropout_rate", "param_dtype", "dtype", "remat_policy", "expert_chunks")
    changes = {name: settings[name] for name in names if settings[name] is not None}
    if placement.mesh is not None:
        changes["axis_rules"] = placement.rules
    config = config.replace(**_layout(settings), **changes)
    if "float64" in (config.dtype, config.param_dtype) and not jax.config.read(
        "jax_enable_x64"
    ):
        raise SettingsError(
            f"param_dtype={config.param_dtype} and dtype={config.dtype} need "
            "JAX_ENABLE_X64=1 in the environment."
        )
    return config, folder


def _shrunk(
    config: shared.DecoderConfig,
    folder: pathlib.Path | None,
    settings: Mapping[str, Any],
) -> shared.DecoderConfig:
    """A preset of fewer layers, experts or tokens, as settings say."""
    layers, experts, tokens = given = [settings[name] for name in _SHRINKING]
    if folder is not None and given != [None] * len(given):
        raise SettingsError(
            f"{', '.join(_SHRINKING)} are for presets, and {folder} has weights of "
            f"{len(config.layers)} layers: leave them out."
        )
    if layers is not None:
        if layers > len(config.layers):
            raise SettingsError(
                f"num_layers={layers}, and the preset has {len(config.layers)}."
            )
        config = config.replace(layers=config.layers[:layers], scan_period=None)
    if experts is not None:
        if config.moe is None:
            raise SettingsError(f"num_experts={experts}, and the preset has none.")
        moe = dataclasses.replace(config.moe, num_experts=experts)
        config = config.replace(moe=moe)
    return config if tokens is None else config.replace(vocab_size=tokens)


def _data(
    settings: Mapping[str, Any], config: shared.DecoderConfig
) -> tuple[data.Batches, str]:
    """Batches, and what they are of, in a word."""
    batch, length, seed = (settings[name] for name in ("batch", "length", "seed"))
    if settings["data"] == "synthetic":
        return data.SyntheticTokens(config.vocab_size, batch, length, seed), "synthetic"
    file = data.open_token_file(
        settings["data"], config.vocab_size, settings["token_dtype"]
    )
    windows = data.TokenWindows(file, length)
    source = f"{file.tokens.size} tokens, SHA-256 {file.digest}"
    if settings["loader"] == "grain":
        return data.GrainBatches.shuffled(windows, batch, seed), source
    return data.ShuffledBatches(windows, batch, seed), source


def state_bytes(session: Session) -> int:
    """What a device holds of parameters, their gradients and the optimizer's state."""
    state = training.abstract_state(
        session.optimizer, session.config, session.placement
    )
    held = sum(map(_bytes_held, jax.tree.leaves(state)))
    return held + sum(map(_bytes_held, jax.tree.leaves(state["params"])))


def _bytes_held(leaf: jax.ShapeDtypeStruct) -> int:
    return sharding.bytes_held(leaf, leaf.sharding)


def _check_memory(session: Session) -> None:
    device = jax.local_devices()[0]
    copies = 2 if session.settings["compare"] else 1
    there = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "cpu":  # whose devices share the machine's memory
        copies *= min(session.devices, jax.local_device_count())
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    wanted = copies * state_bytes(session)
    if there is not None and wanted > there:
        raise SettingsError(
            f"{session.settings['target']} needs {wanted / 2**30:.1f} GiB for "
            "parameters, gradients and the optimizer's state, and there are "
            f"{there / 2**30:.1f} GiB: spread it over more devices (mesh), or train "
            "fewer layers."
        )


# Resuming.


def saved_steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps in the folder of a run; there may be no such folder yet."""
    path = pathlib.Path(folder)
    if not path.is_dir():
        return []
    return sorted(int(part.name) for part in path.iterdir() if part.name.isdecimal())


def check_same_run(folder: str | os.PathLike[str], session: Session) -> None:
    """Compares a run with what was noted of it when it began.

    Raises:
      SettingsError: it was begun with other settings; each is named with both values.
    """
    file = pathlib.Path(folder) / _RUN_FILE
    if not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{file} is damaged: {error!r}.") from None
    lines = [
        f"{name}: begun with {saved.get(name)!r}, given {value!r}"
        for name, value in session.identity.items()
        if saved.get(name) != value
    ]
    if lines:
        raise SettingsError(
            f"The run in {folder} was begun with other settings: give the same, or let "
            f"another run begin with its weights (parity train {folder} "
            "--checkpoints=ANOTHER).\n  " + "\n  ".join(lines)
        )


def note_run(folder: str | os.PathLike[str], session: Session) -> None:
    """Notes down what a resumed run must have, too."""
    file = pathlib.Path(folder) / _RUN_FILE
    noted = {"target": session.settings["target"], "settings": dict(session.identity)}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")
    part.replace(file)
