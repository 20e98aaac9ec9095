"""Rotary positions in a config.json, in both spellings.

transformers 5 has all of them in `rope_parameters`, below the kind of layer where these
differ; published files have `rope_theta`, `rope_scaling` and others beside the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from shared.checkpoint.hf_families.source import Source
from shared.config import (
    AttentionConfig,
    DecoderConfig,
    LatentAttentionConfig,
    LinearScaling,
    RopeConfig,
    YarnScaling,
)

KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class Rope:
    """How a family says the rotary positions of one of its attention parts.

    Attributes:
      part: of the config.
      kind: of the layers, below which they stand in `rope_parameters`; None: they are
        the same in all layers.
      theta: where a file does not say it.
      partial: share of a head's components that are rotated, where a file does not say
        it; None: all are, and only "proportional" ones say otherwise.
      types: values of `rope_type` that the family's models implement.
      absent: what holds where a file says nothing at all.
      flat_theta: what theta is called beside the rest; None: there is no such spelling.
      flat_scaling: whether `rope_scaling` is of this part.
      flat_hub: whether the published spelling is the one beside the rest.
      sections: frequencies of the three axes of multimodal positions, where a file
        does not say it; None: positions have one axis.
    """

    part: str = "attention"
    kind: str | None = None
    theta: float = 10000.0
    partial: float | None = None
    types: tuple[str, ...] = ("default",)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flat_theta: str | None = "rope_theta"
    flat_scaling: bool = True
    flat_hub: bool = True
    sections: tuple[int, int, int] | None = None

    def is_given(self, source: Source) -> bool:
        """Whether a file that tells kinds of layers apart speaks of this one."""
        flat = self.flat_theta is not None and self.flat_theta in source
        return self.kind is not None and (flat or bool(self._nested(source)))

    def words(self) -> list[tuple[str, str]]:
        """Our names of fields that have others in a file."""
        sections = [] if self.sections is None else [("sections", "mrope_section")]
        turning = [("turning_pairs", "partial_rotary_factor")]
        return sections + (turning if "proportional" in self.types else [])

    def read(
        self, source: Source, part: Mapping[str, Any] | None
    ) -> dict[str, Any] | None:
        """The fields of `RopeConfig` for a part.

        Args:
          source: of the fields.
          part: its own fields that are known so far; None: there is no such part.

        Raises:
          ConfigError: they are not implemented, or said twice in different ways.
        """
        parameters = Source(self._given(source) or self.absent, self._where(source))
        rope_type = parameters.get("rope_type", "default", str)
        if rope_type not in self.types:
            raise parameters.error(
                f"rope_type must be {' or '.join(map(repr, self.types))}: no other is "
                f"implemented. Got {rope_type!r}."
            )
        theta = float(parameters.get("rope_theta", self.theta, int, float))
        factor = self._factor(parameters, rope_type)
        sections = self._sections(parameters)
        scaling = _read_scaling(parameters, rope_type, source)
        if parameters.unknown():
            raise parameters.error(
                f"unknown fields {', '.join(parameters.unknown())}: they would change "
                "the rotation; it is not implemented."
            )
        if part is None:
            return None
        known = dict(part.get("rope", {}))
        width = rotary = known["rotary_dim"] if known else part["head_dim"]
        if rope_type == "proportional":
            known["turning_pairs"] = _turning(factor, width)
        else:
            rotary = _rotary(factor, width)
        if self.sections is not None:
            known["sections"] = sections or _fitting(self.sections, rotary // 2)
        known |= {"theta": theta, "rotary_dim": rotary, "scaling": scaling}
        return known

    def write(self, config: DecoderConfig, hub_style: bool) -> dict[str, Any]:
        """The inverse, in the published spelling if told so."""
        part = getattr(config, self.part)
        if part is None and self.kind is not None:
            return {}
        parameters = self._defaults() if part is None else self._parameters(part)
        if self.flat_theta is None or not (hub_style and self.flat_hub):
            nested = parameters if self.kind is None else {self.kind: parameters}
            return {"rope_parameters": nested}
        data = {self.flat_theta: parameters.pop("rope_theta")}
        if self.partial is not None:
            data["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
        if self.flat_scaling:
            rope_type = parameters["rope_type"]
            scaling = {"type": rope_type, **parameters}  # older readers look for "type"
            data["rope_scaling"] = None if rope_type == "default" else scaling
        return data

    def _defaults(self) -> dict[str, Any]:
        data = {"rope_type": "default", "rope_theta": self.theta}
        more = {} if self.partial is None else {"partial_rotary_factor": self.partial}
        return {**data, **more}

    def _parameters(
        self, part: AttentionConfig | LatentAttentionConfig
    ) -> dict[str, Any]:
        rope = part.rope
        data: dict[str, Any] = {**_written_scaling(rope), "rope_theta": rope.theta}
        partial = self.partial is not None
        if isinstance(part, AttentionConfig) and (
            partial or rope.rotary_dim != part.head_dim
        ):
            data["partial_rotary_factor"] = _share(
                rope.rotary_dim, part.head_dim, _rotary, rope.rotary_dim
            )
        if rope.turning_pairs is not None:
            data["rope_type"] = "proportional"
            data["partial_rotary_factor"] = _share(
                2 * rope.turning_pairs, rope.rotary_dim, _turning, rope.turning_pairs
            )
        if rope.sections is not None:
            data |= {"mrope_section": list(rope.sections), "mrope_interleaved": True}
        return data

    def _where(self, source: Source) -> str:
        kind = "" if self.kind is None else f".{self.kind}"
        return f"{source.where}: rope_parameters{kind}"

    def _nested(self, source: Source) -> dict[str, Any]:
        """What stands in `rope_parameters`."""
        given = source.get("rope_parameters", None, type(None), dict) or {}
        if self.kind is None:
            return given
        inner = Source(given, f"{source.where}: rope_parameters")
        if inner.unknown(KINDS):
            raise inner.error(
                f"unknown fields {', '.join(inner.unknown(KINDS))}: there must be "
                f"{' and '.join(KINDS)}, the kinds of layers."
            )
        return inner.get(self.kind, None, type(None), dict) or {}

    def _given(self, source: Source) -> dict[str, Any]:
        """All that a file says; what it says twice must be equal."""
        nested = _plain(self._nested(source), self._where(source))
        flat: dict[str, Any] = {}
        if self.flat_theta is not None and self.flat_theta in source:
            flat["rope_theta"] = source.get(self.flat_theta, None, int, float)
        if self.partial is not None and "partial_rotary_factor" in source:
            factor = source.get("partial_rotary_factor", None, int, float)
            flat["partial_rotary_factor"] = factor
        if self.flat_theta is not None and self.flat_scaling:
            flat |= self._scaling(source)
        for name in flat.keys() & nested.keys():
            if flat[name] != nested[name]:
                raise source.error(
                    f"{name} is {flat[name]} and in rope_parameters {nested[name]}: "
                    "keep one of them."
                )
        return {**flat, **nested}

    def _scaling(self, source: Source) -> dict[str, Any]:
        given = source.get("rope_scaling", None, type(None), dict)
        if given is None:
            return {}
        scaling = _plain(given, f"{source.where}: rope_scaling")
        if scaling.get("rope_type", "default") not in self.types:
            others = [repr(name) for name in self.types if name != "default"]
            only = " or of type ".join(["null", *others])
            raise source.error(
                f"rope_scaling must be {only}: other scaled positions are not "
                f"implemented. Got {given!r}."
            )
        return scaling

    def _factor(self, parameters: Source, rope_type: str) -> float:
        """The share of a head's components that are rotated."""
        partial = self.partial if rope_type == "default" else None
        whole = 1.0 if partial is None else partial
        factor = float(parameters.get("partial_rotary_factor", whole, int, float))
        if not 0 <= factor <= 1:
            raise parameters.error(
                f"partial_rotary_factor must be between 0 and 1. Got {factor}."
            )
        if factor != 1 and partial is None and rope_type != "proportional":
            raise parameters.error(
                f"partial_rotary_factor must be 1 where rope_type is {rope_type!r}: "
                f"no other is implemented. Got {factor}."
            )
        return factor

    def _sections(self, parameters: Source) -> tuple[int, ...] | None:
        if self.sections is None:
            return None
        if not parameters.get("mrope_interleaved", True, bool):
            raise parameters.error(
                "mrope_interleaved must be true: no other is implemented. Got false."
            )
        given = parameters.get("mrope_section", None, list, type(None))
        if given is not None and not all(type(size) is int for size in given):
            raise parameters.error(f"mrope_section must be integers. Got {given!r}.")
        return None if given is None else tuple(given)


def _plain(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Parameters under their present names: `type` is what older files have."""
    data = dict(given)
    older = data.pop("type", None)
    if older is not None and data.setdefault("rope_type", older) != older:
        raise Source(given, where).error(
            f"rope_type={data['rope_type']!r} and type={older!r}: keep one of them."
        )
    return data


def _rotary(factor: float, width: int) -> int:
    return int(width * factor)


def _turning(factor: float, width: int) -> int:
    return int(factor * width // 2)


def _share(
    part: int, whole: int, read: Callable[[float, int], int], wanted: int
) -> float:
    """`part / whole`, or the next number where only that is read as `wanted`."""
    factor = part / whole
    if read(factor, whole) != wanted:  # 49 * (1 / 49) is below 1
        factor = math.nextafter(factor, 1.0)
    return factor


def _fitting(sections: tuple[int, int, int], pairs: int) -> tuple[int, int, int]:
    """The numbers of frequencies that follow each axis, if there are `pairs` in all.

    The reference gives every third to the second axis and every third to the third, as
    long as these have some left, and all others to the first.
    """
    second = len(range(1, min(pairs, 3 * sections[1]), 3))
    third = len(range(2, min(pairs, 3 * sections[2]), 3))
    return pairs - second - third, second, third


def _read_scaling(
    parameters: Source, rope_type: str, source: Source
) -> LinearScaling | YarnScaling | None:
    if rope_type == "yarn":
        return _read_yarn(parameters, source)
    if rope_type == "linear" or (
        rope_type == "proportional" and "factor" in parameters
    ):
        return LinearScaling(_number(parameters, "factor"))
    return None


def _number(parameters: Source, name: str) -> float:
    if name not in parameters:
        raise parameters.error(f"{name} is missing.")
    return float(parameters.get(name, None, int, float))


def _read_yarn(parameters: Source, source: Source) -> YarnScaling:
    for name, value in (("attention_factor", None), ("truncate", True)):
        parameters.check(name, value, "no other is implemented")
    longest = source.size("max_position_embeddings", 4096)
    numbers = {
        name: float(parameters.get(name, None, int, float))
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        if name in parameters
    }
    magnitudes = {n: v for n, v in numbers.items() if n.startswith("mscale")}
    # With one of the two, implementations do not agree on the other.
    if len(magnitudes) == 1 or 0 in magnitudes.values():
        raise parameters.error(
            "mscale and mscale_all_dim must both be positive, or both be absent. Got "
            f"{magnitudes}."
        )
    return YarnScaling(
        factor=_number(parameters, "factor"),
        original_length=parameters.size("original_max_position_embeddings", longest),
        **numbers,
    )


def _written_scaling(rope: RopeConfig) -> dict[str, Any]:
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if not isinstance(scaling, YarnScaling):
        return {"rope_type": "default"}
    data = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }
    if scaling.mscale_all_dim or scaling.mscale != 1:
        data |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return data
