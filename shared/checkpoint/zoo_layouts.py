"""Which of the zoo's layouts a tree is in, and the older one that it may be in.

Until blocks were named by kind, a scanned period of four layers was stored as
`layers/layer_0` ... `layers/layer_3`, each with an axis for the blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from shared.checkpoint.scheme import (
    AS_IS,
    Scheme,
    Shape,
    Spot,
    differences,
    units,
    zoo_scheme,
)
from shared.config import DecoderConfig
from shared.plan import PlanError, make_plan
from shared.stores import CheckpointError
from shared.stores.store import Index

_SHOWN = 40  # lines of an error message


def flat_scheme(config: DecoderConfig) -> Scheme:
    """The older layout: `layers/layer_{i}` for the i-th layer of each period.

    Raises:
      CheckpointError: the layers are no whole periods, which it could not hold.
    """
    [group, *others] = make_plan(config.layers, period=config.scan_period).groups
    if others or group.repeats is None:
        raise CheckpointError(
            "The older layout layers/layer_{i} holds whole periods only, and the "
            f"layers are {config.plan.describe()}: use another layout."
        )
    shapes, spots = {}, {}
    for unit, shape in units(config).items():
        name = unit.leaf
        slot: Index = ()
        if unit.layer is not None:
            block, place = divmod(unit.layer, group.period)
            at = min(config.param_scan_axis, len(shape))
            name = f"{group.name}/layer_{place}/{unit.leaf}"
            slot = (*(slice(None),) * at, block)
            shape = (*shape[:at], group.repeats, *shape[at:])
        shapes[name] = shape
        spots[unit] = (Spot(name, slot, AS_IS),)
    return Scheme(shapes, spots)


def detect(
    shapes: Mapping[str, Shape], config: DecoderConfig, **given: Any
) -> tuple[DecoderConfig, Scheme]:
    """The config and scheme of the layout that a parameter tree is in.

    Args:
      shapes: of its leaves, a/b/c.
      config: of the model, in any layout.
      **given: `scan_layers`, `scan_period` or `param_scan_axis`, where they are known.

    Raises:
      CheckpointError: no layout fits, or several do, or another than the given one.
    """
    fitting = [
        (new, scheme, text)
        for new, scheme, text in _candidates(config)
        if scheme.shapes == dict(shapes)
    ]
    chosen = [
        found
        for found in fitting
        if all(has(found[0], name, value) for name, value in given.items())
    ]
    if len(chosen) == 1:
        return chosen[0][:2]
    asked = ", ".join(f"{name}={value}" for name, value in given.items())
    found = "; ".join(text for _, _, text in fitting)
    if not fitting:
        raise CheckpointError(
            "The tree is in none of the zoo's layouts of this config. Nearest:",
            _differences(shapes, config),
        )
    if chosen:
        raise CheckpointError(
            f"The tree may be in several layouts, for sizes are equal: {found}. Say "
            "which (scan_layers, scan_period, param_scan_axis)."
        )
    raise CheckpointError(f"{asked} is asked for, but the tree is in: {found}.")


def has(config: DecoderConfig, name: str, value: Any) -> bool:
    """Whether a config's layout is the given one; a period that was found counts."""
    if name == "scan_period":
        repeated = [group for group in config.plan.groups if group.repeats is not None]
        return value in (config.scan_period, *(group.period for group in repeated))
    return bool(getattr(config, name) == value)


def _candidates(config: DecoderConfig) -> list[tuple[DecoderConfig, Scheme, str]]:
    plain = config.replace(scan_layers=False, scan_period=None, param_scan_axis=0)
    found = [(plain, zoo_scheme(plain), "scan_layers=False")]
    periods = [None, *range(1, config.num_layers + 1)]
    seen: list[Mapping[str, Shape]] = []
    for period, axis in itertools.product(periods, (0, 1)):
        try:
            new = config.replace(
                scan_layers=True, scan_period=period, param_scan_axis=axis
            )
            schemes = [(zoo_scheme(new), "")]
        except (PlanError, ValueError):
            continue
        try:
            schemes.append((flat_scheme(new), ", layer_{i} of each period"))
        except CheckpointError:
            pass
        for scheme, more in schemes:
            if any(scheme.shapes == other for other in seen) and period is not None:
                continue  # the period that would have been found
            seen.append(scheme.shapes)
            text = f"scan_period={period}, param_scan_axis={axis}{more}"
            found.append((new, scheme, text))
    return found


def _differences(shapes: Mapping[str, Shape], config: DecoderConfig) -> list[str]:
    def distance(scheme: Scheme) -> int:
        return len(scheme.shapes.items() ^ shapes.items())

    _, nearest, text = min(_candidates(config), key=lambda found: distance(found[1]))
    lines = [f"{text}: {distance(nearest)} differences"]
    lines += itertools.chain(*differences(shapes, nearest.shapes).values())
    if len(lines) > _SHOWN:
        lines[_SHOWN:] = [f"and {len(lines) - _SHOWN} more"]
    return lines
