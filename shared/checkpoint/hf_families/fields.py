"""What a family's config.json says, as a table that is read and written.

A path names a field of `DecoderConfig` or, below a part, one of that part:
"vocab_size", "attention.num_heads", "attention.rope.rotary_dim".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shared.checkpoint.hf_families.rope import Rope
from shared.checkpoint.hf_families.source import Source
from shared.config import ConfigError, DecoderConfig, LayerKind, Mixer, RopeConfig

# Fields of `DecoderConfig` by name; those of a part in a dict of their own.
Values = dict[str, Any]
# Which layers have use for a part.
USED_BY = {
    "attention": ("full_attention",),
    "sliding_attention": ("sliding_attention",),
    "delta_net": ("linear_attention",),
    "mlp": ("dense", "dense_and_moe"),
    "moe": ("moe", "dense_and_moe"),
}


class Field(NamedTuple):
    """A field of config.json that is a field of ours.

    Attributes:
      name: in config.json.
      default: of the reference, where the field is absent.
      paths: ours; all have the same value.
      type: int, float or bool.
      nullable: whether it may be null.
    """

    name: str
    default: int | float | bool | None
    paths: tuple[str, ...]
    type: type
    nullable: bool

    def read(self, source: Source) -> Any:
        """Its value in a file."""
        types = {self.type, int} if self.type is float else {self.type}
        types |= {type(None)} if self.nullable else set()
        value = source.get(self.name, self.default, *types)
        return None if value is None else self.type(value)


def field(
    name: str,
    default: int | float | bool | None,
    *paths: str,
    type_: type | None = None,
    nullable: bool = False,
) -> Field:
    """A field, whose type is that of its default where no other is given."""
    return Field(name, default, paths, type_ or type(default), nullable)


def everywhere(name: str, parts: Iterable[str]) -> tuple[str, ...]:
    """Paths of a field that the decoder and each of its parts has."""
    return (name, *(f"{part}.{name}" for part in parts))


def adapted(
    fields: Iterable[Field],
    parts: Iterable[str],
    defaults: Mapping[str, Any],
    without: Sequence[str] = (),
) -> tuple[Field, ...]:
    """The fields of a family that another has, too.

    Args:
      fields: of the one.
      parts: that the other has; paths into others go, and fields without a path.
      defaults: of the other, where they differ.
      without: fields that it does not have.
    """
    kept = {"", *parts}
    found = []
    for one in fields:
        paths = tuple(path for path in one.paths if _part(path) in kept)
        default = defaults.get(one.name, one.default)
        if paths and one.name not in without:
            found.append(one._replace(paths=paths, default=default))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class ConfigTable:
    """How a model type spells its config.

    Attributes:
      architecture: the class that the reference names.
      parts: that its models have, and their classes.
      fields: those that are fields of ours as they are.
      ropes: rotary positions of its attention parts.
      read_layers: the kinds of the layers; sets, too, what no single field says.
      write_layers: the inverse, in the published spelling if told so.
      constants: what all its models are, by path, where config.json does not say it.
      fixed: fields that must have this value where they stand, since the layers have
        no other; those that `to_hf` writes.
      written: fields that are written with this value, and ignored when read.
      hub_fixed: as `fixed`, for those that only the published spelling has.
      tolerated: as `fixed`, for fields that are never written; any of several values.
      ignored: fields that change nothing in what the model computes, and why.
      tokens: ids of special tokens where a file does not say them; others have none.
      hub_dtype: what the published spelling calls the dtype.
      hub_marks: fields that only the published spelling has.
    """

    architecture: str
    parts: Mapping[str, Callable[..., Any]]
    fields: tuple[Field, ...]
    ropes: tuple[Rope, ...]
    read_layers: Callable[[Source, Values], tuple[LayerKind, ...]]
    write_layers: Callable[[DecoderConfig, bool], dict[str, Any]]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hub_fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tolerated: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    ignored: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    hub_dtype: str = "torch_dtype"
    hub_marks: tuple[str, ...] = ()

    def read(self, source: Source) -> Values:
        """Layers, parts and other fields, but for dtypes and token ids.

        Raises:
          ConfigError: a value is of another type or not implemented, or two
            contradict each other.
        """
        self._check_fixed(source)
        values: Values = {part: {} for part in self.parts}
        for path, value in self.constants.items():
            _set(values, path, value)
        for known in self.fields:
            value = known.read(source)
            for path in known.paths:
                _set(values, path, value)
        values["layers"] = self.read_layers(source, values)
        used = {k.mixer for k in values["layers"]}
        used |= {k.feed_forward for k in values["layers"]}
        given = set(self._given(source))
        for part, by in USED_BY.items():
            # The file has numbers even where no layer has use for them; they are kept.
            if part in values and part not in given and not used & set(by):
                del values[part]
        for one in self.ropes:
            rope = one.read(source, values.get(one.part))
            if rope is not None:
                values[one.part]["rope"] = rope
        return values

    def make(self, values: Values, **more: Any) -> DecoderConfig:
        """The config from what `read` gave; it is checked here."""
        parts = {p: dict(values[p]) for p in self.parts if p in values}
        for part in parts.values():
            if "rope" in part:
                part["rope"] = RopeConfig(**part["rope"])
        made = {name: self.parts[name](**part) for name, part in parts.items()}
        return DecoderConfig(**{**values, **made}, **more)

    def write(self, config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
        """The inverse of `read`.

        Raises:
          ConfigError: one field stands for several of ours, which differ.
        """
        data = {**self.fixed, **self.written}
        data |= self.hub_fixed if hub_style else {}
        for one in self.fields:
            data |= _written(one, config)
        data |= self.write_layers(config, hub_style)
        for rope in self.ropes:
            _merge(data, rope.write(config, hub_style))
        return data

    def is_hub_style(self, data: Mapping[str, Any]) -> bool:
        """Whether a config.json is in the published spelling."""
        return "rope_parameters" not in data or bool(data.keys() & set(self.hub_marks))

    def in_their_words(self, words: set[str]) -> list[str]:
        """What those of `words` that are fields are called in config.json."""
        rotary = {ours: theirs for rope in self.ropes for ours, theirs in rope.words()}
        names = [f"{o} is {theirs}" for o, theirs in rotary.items() if o in words]
        for one in self.fields:
            ours = {path.rpartition(".")[2] for path in one.paths}
            if one.name not in ours:
                names += [f"{o} is {one.name}" for o in sorted(ours & words)]
        return names

    def _check_fixed(self, source: Source) -> None:
        fixed = {**self.fixed, **self.hub_fixed}
        allowed = {name: (value,) for name, value in fixed.items()}
        for name, more in self.tolerated.items():
            allowed[name] = (*allowed.get(name, ()), *more)
        for name, choices in allowed.items():
            value = source.any(name, choices[0])
            if value not in choices or type(value) not in map(type, choices):
                raise source.error(
                    f"{name} must be {' or '.join(map(repr, choices))}: no other is "
                    f"implemented. Got {value!r}."
                )

    def _given(self, source: Source) -> Iterator[str]:
        """The parts that a file speaks of."""
        for one in self.fields:
            alone = len(one.paths) == 1
            if alone and one.name in source and one.read(source) is not None:
                yield _part(one.paths[0])
        for rope in self.ropes:
            if rope.is_given(source):
                yield rope.part


def _part(path: str) -> str:
    return path.partition(".")[0] if "." in path else ""


def _set(values: Values, path: str, value: Any) -> None:
    *above, name = path.split(".")
    for key in above:
        values = values.setdefault(key, {})
    values[name] = value


def _get(config: Any, path: str) -> list[Any]:
    """The value at a path; empty where the config has no such part."""
    for name in path.split("."):
        if config is None:
            return []
        config = getattr(config, name)
    return [config]


def _written(one: Field, config: DecoderConfig) -> dict[str, Any]:
    values = {p: value for p in one.paths for value in _get(config, p)}
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"config.json has one {one.name}, but the config has several: "
            + ", ".join(f"{path}={value}" for path, value in values.items())
            + ". Make them equal."
        )
    return {one.name: next(iter(values.values()))} if values else {}


def _merge(data: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds fields; of objects, their entries."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(data.get(name), dict):
            value = {**data[name], **value}
        data[name] = value


def read_mixers(
    source: Source, length: int, interval: int, local: Mixer
) -> list[Mixer]:
    """An explicit `layer_types`, or every n-th layer with full attention.

    Args:
      source: of the fields.
      length: number of layers.
      interval: n, where `layer_types` is absent.
      local: mixer of the other layers.
    """
    types = source.get("layer_types", None, list, type(None))
    if types is None:
        return [
            local if (i + 1) % interval else "full_attention" for i in range(length)
        ]
    if len(types) != length:
        raise source.error(
            f"layer_types has {len(types)} layers and num_hidden_layers={length}: make "
            "them equal."
        )
    choices = (local, "full_attention")
    for kind in types:
        if kind not in choices:
            raise source.error(f"layer_types must be of {choices}. Got {kind!r}.")
    return list(types)


def write_mixers(config: DecoderConfig, interval: str | None = None) -> dict[str, Any]:
    """The inverse: `layer_types`, or the field `interval` where the layers have one."""
    mixers = [kind.mixer for kind in config.layers]
    data: dict[str, Any] = {"num_hidden_layers": len(mixers)}
    every = _find_interval(mixers)
    if interval is not None and every is not None:
        return {**data, interval: every}
    return {**data, "layer_types": mixers}


def _find_interval(mixers: list[Mixer]) -> int | None:
    full = [i + 1 for i, mixer in enumerate(mixers) if mixer == "full_attention"]
    interval = full[0] if full else len(mixers) + 1
    regular = list(range(interval, len(mixers) + 1, interval))
    return interval if full == regular else None
