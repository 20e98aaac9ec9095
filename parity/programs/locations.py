"""The user's line among the frames of an MLIR location."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax
import jax
import jaxlib
from jaxlib.mlir import ir

_PACKAGES = (jax, jaxlib, flax)
# Frames of theirs say nothing, nor does the call in `parity.programs.program.lower`.
_SKIPPED = (
    *(f"{pathlib.Path(str(package.__file__)).parent}/" for package in _PACKAGES),
    str(pathlib.Path(__file__).parent / "program.py"),
)


class _Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} ({self.function})" if self.function else where


def innermost(places: Sequence[ir.Location]) -> str:
    """file:line (function) of the innermost frame of the user's, else of all."""
    first = None
    for frame in (frame for place in places for frame in _frames(place)):
        if not frame.file.startswith(_SKIPPED):
            return str(frame)
        first = first or frame
    return "unknown" if first is None else str(first)


def _frames(place: Any, function: str = "") -> Iterator[_Frame]:
    """The frames of a location, innermost first."""
    while place is not None:
        if isinstance(place, ir.CallSiteLoc):
            yield from _frames(place.callee)
            place, function = place.caller, ""
        elif isinstance(place, ir.NameLoc):
            place, function = place.child_loc, place.name_str
        elif isinstance(place, ir.FusedLoc):
            for part in place.locations:
                yield from _frames(part)
            return
        else:
            if isinstance(place, ir.FileLineColLoc):
                yield _Frame(place.filename, place.start_line, function)
            return
