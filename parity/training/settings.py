"""What a run is told, by flags, a file, a recipe or defaults: one table of names.

A name means the same wherever it stands. Flags win over the file, and that over the
recipe.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from absl import flags

from shared import training
from shared.config import FLOAT_DTYPES
from shared.training.data import BINARY_DTYPES

FRONTENDS = ("linen", "nnx")
LOADERS = ("numpy", "grain")


class SettingsError(ValueError):
    """Settings that make no run; the message says which and why."""


class Setting(NamedTuple):
    """One thing that a run is told.

    Attributes:
      name: as a flag, and in files.
      kind: int, float, bool, str, list, or the values that there are.
      default: None: see `text`.
      text: what it is.
      low: the smallest number it may be.
    """

    name: str
    kind: Any
    default: Any
    text: str
    low: int | None = None


_OPTIMIZER = {
    "learning_rate": "At its peak.",
    "warmup_steps": "Over which the learning rate rises from 0.",
    "decay_steps": "At which its cosine ends. Default: it does not fall.",
    "final_learning_rate": "From there on.",
    "b1": "Decay of AdamW's mean of gradients.",
    "b2": "Decay of the mean of their squares.",
    "eps": "Added to the root of that.",
    "weight_decay": "Of matrices.",
    "clip_norm": "Gradients are scaled down to it; 0: they are not.",
}
_STEP = {
    "accumulation_steps": "Parts that a batch goes through the model in.",
    "z_loss_coef": "Weight of the z-loss.",
    "loss_chunk_size": "Tokens of a row whose logits are held at once.",
}
_INTEGERS = {"warmup_steps", "decay_steps", "accumulation_steps", "loss_chunk_size"}


def _of_fields(options: type, texts: Mapping[str, str]) -> tuple[Setting, ...]:
    return tuple(
        Setting(
            field.name,
            int if field.name in _INTEGERS else float,
            field.default,
            texts[field.name],
        )
        for field in dataclasses.fields(options)
    )


SETTINGS = (
    Setting("frontend", FRONTENDS, "linen", "Which one trains."),
    Setting("compare", bool, False, "Train both side by side and compare their bits."),
    Setting("steps", int, 100, "In all, those before a resume included.", 1),
    Setting("batch", int, 8, "Rows of a batch.", 1),
    Setting("batch_per_device", int, None, "The same, for each device of the mesh.", 1),
    Setting("length", int, 128, "Tokens of a row.", 2),
    Setting("data", str, "synthetic", "Random tokens, or a file of tokens."),
    Setting("token_dtype", BINARY_DTYPES, None, "Of a file that is no .npy."),
    Setting("loader", LOADERS, "numpy", "What shuffles the rows of a file."),
    Setting("seed", int, 0, "Of first values, batches and dropout.", 0),
    *_of_fields(training.OptimizerConfig, _OPTIMIZER),
    *_of_fields(training.StepOptions, _STEP),
    Setting("dropout_rate", float, None, "Of residual branches. Default: its own."),
    Setting("num_layers", int, None, "Of a preset: the first so many only.", 1),
    Setting("num_experts", int, None, "Of a preset: so many instead of its own.", 1),
    Setting("vocab_size", int, None, "Of a preset: so many instead of its own.", 1),
    Setting("param_dtype", FLOAT_DTYPES, None, "Of parameters and their moments."),
    Setting("dtype", FLOAT_DTYPES, None, "Of activations."),
    Setting("remat_policy", str, None, "What a layer keeps for its gradient."),
    Setting("scan_layers", bool, True, "Whether layers are stacked and scanned."),
    Setting("scan_period", int, None, "Layers in a period; by default it is found.", 1),
    Setting("mesh", list, [], "Sizes of its axes: fsdp=4,tensor=2; -1: all the rest."),
    Setting("rules", str, None, "JSON file with rules from axis names to mesh axes."),
    Setting("expert_chunks", int, None, "Parts that experts are gathered in.", 1),
    Setting("checkpoints", str, None, "Folder to save steps in, and to resume from."),
    Setting("save_every", int, 100, "Steps between two of them.", 1),
    Setting("keep", int, 3, "How many are kept.", 1),
    Setting("log_every", int, 10, "Steps between two lines.", 1),
    Setting("metrics", str, None, "Write a JSON object for each of them there."),
    Setting("tensorboard", str, None, "Folder for TensorBoard's events."),
    Setting("json", str, None, "Write the settings and all records there."),
)


def define_flags(values: flags.FlagValues) -> None:
    """Declares a flag for each setting, without a default: it may be in a file."""
    for setting in SETTINGS:
        name, text = setting.name, setting.text
        if setting.default is not None and type(setting.default) not in (list, bool):
            text = f"{text} (default: {setting.default})"
        if setting.kind is bool:
            flags.DEFINE_bool(name, None, text, flag_values=values)
        elif setting.kind is list:
            flags.DEFINE_list(name, None, text, flag_values=values)
        elif setting.kind is str:
            flags.DEFINE_string(name, None, text, flag_values=values)
        elif isinstance(setting.kind, type):
            define = flags.DEFINE_integer if setting.kind is int else flags.DEFINE_float
            define(name, None, text, lower_bound=setting.low, flag_values=values)
        else:
            flags.DEFINE_enum(name, None, setting.kind, text, flag_values=values)


def merge(
    given: Mapping[str, Any], *, file: str | None = None, recipe: str | None = None
) -> dict[str, Any]:
    """The value of every setting, and `target`.

    Args:
      given: by flags; None: not given.
      file: JSON object of settings.
      recipe: name of one of `recipes()`.

    Raises:
      SettingsError: a name is unknown, a value is none of its sort, or there is no
        target.
    """
    merged: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    merged["target"] = None
    levels = [{name: value for name, value in given.items() if value is not None}]
    if file is not None:
        levels.insert(0, read_file(file))
    if recipe is not None:
        levels.insert(0, read_recipe(recipe))
    for level in levels:
        if {"batch", "batch_per_device"} <= level.keys():
            raise SettingsError(
                f"batch={level['batch']} and batch_per_device="
                f"{level['batch_per_device']} say the same: give one of them."
            )
        if "batch" in level:
            merged["batch_per_device"] = None
        merged |= level
    if merged["target"] is None:
        raise SettingsError(
            "There is no target: name a preset or a folder with a checkpoint, or a "
            "recipe that has one."
        )
    return merged


def read_file(file: str | pathlib.Path) -> dict[str, Any]:
    """The settings of a JSON file.

    Raises:
      SettingsError: it has none, or some that are unknown or of another sort.
    """
    try:
        found = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"{file} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{file} must be a JSON object of settings.")
    return _checked(found, str(file))


def recipes() -> dict[str, str]:
    """What each recipe is, by name."""
    folder = importlib.resources.files("parity.training") / "recipes"
    names = sorted(entry.name for entry in folder.iterdir())
    return {
        name.removesuffix(".json"): json.loads((folder / name).read_text("utf-8"))[
            "about"
        ]
        for name in names
        if name.endswith(".json")
    }


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe.

    Raises:
      SettingsError: there is none of that name.
    """
    if name not in recipes():
        raise SettingsError(
            f"There is no recipe {name!r}. There are {', '.join(recipes())}."
        )
    file = importlib.resources.files("parity.training") / "recipes" / f"{name}.json"
    return _checked(json.loads(file.read_text("utf-8"))["settings"], f"recipe {name}")


def _checked(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values as the flags of the same names would have them."""
    values = flags.FlagValues()
    define_flags(values)
    known = {setting.name: setting for setting in SETTINGS}
    unknown = sorted(set(found) - {*known, "target"})
    if unknown:
        raise SettingsError(
            f"{where} has {', '.join(map(repr, unknown))}, which is no setting. There "
            f"are target, {', '.join(known)}."
        )
    checked: dict[str, Any] = {}
    for name, value in found.items():
        if name == "target":
            fits = isinstance(value, str)
        else:
            fits = _fits(known[name].kind, value)
        if not fits:
            raise SettingsError(f"{where}: {name} cannot be {json.dumps(value)}.")
        try:
            parser = None if name == "target" else values[name].parser
            checked[name] = value if parser is None else parser.parse(value)
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"{where}: {name} cannot be {json.dumps(value)}: {error}"
            ) from None
    return checked


def _fits(kind: Any, value: Any) -> bool:
    """Whether JSON has a setting's sort there; text of a number is no number."""
    if kind is list:
        several = value if isinstance(value, list) else [value]
        return all(isinstance(part, str) for part in several)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is (kind if isinstance(kind, type) else str)
