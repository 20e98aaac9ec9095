"""Where a format keeps each parameter, said once a format; any two give a conversion.

A *unit* is what every format keeps in one piece: a parameter of one layer (or of the
model), or of one expert of one layer. A `Scheme` says for a config where a format has
each unit, and how it is oriented there. Two schemes give a `Conversion`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shared.config import DecoderConfig, LayerKind
from shared.layers import decoder, decoder_layer
from shared.params import ParamSpec
from shared.stores import CheckpointError, Leaf
from shared.stores.store import Index, Piece, constant
from shared.stores.views import (
    assembled,
    cast,
    part_of,
    permuted,
    reshaped,
)
from shared.trees import flatten, path_text

Shape = tuple[int, ...]


class Unit(NamedTuple):
    """A parameter, by its path in the tree of its layer; `layer` None: of the model."""

    leaf: str
    layer: int | None


def _same(shape: Shape) -> Shape:
    return shape


class Layout(NamedTuple):
    """How a unit is oriented in a format: axes exchanged, then another shape.

    Attributes:
      swapped: whether its last two axes stand the other way round.
      shape: what then becomes of its shape; entries stay in order.
    """

    swapped: bool = False
    shape: Callable[[Shape], Shape] = _same

    def tensor_shape(self, unit: Shape) -> Shape:
        """The shape in the format of a unit of this shape."""
        return self.shape(self._swap_shape(unit))

    def to_tensor(self, unit: Leaf) -> Leaf:
        """The unit as the format has it."""
        return reshaped(self._swap(unit), self.tensor_shape(unit.shape))

    def to_unit(self, tensor: Leaf, unit: Shape) -> Leaf:
        """The inverse, to a unit of this shape."""
        return self._swap(reshaped(tensor, self._swap_shape(unit)))

    def _swap(self, leaf: Leaf) -> Leaf:
        if not self.swapped:
            return leaf
        return permuted(leaf, self._swap_shape(tuple(range(len(leaf.shape)))))

    def _swap_shape(self, shape: Shape) -> Shape:
        if not self.swapped:
            return shape
        return (*shape[:-2], shape[-1], shape[-2])


AS_IS = Layout()
# torch's Linear keeps [out, in] and we [in, out]; of one expert or of all of a layer.
TRANSPOSED = Layout(swapped=True)
# torch's depthwise Conv1d keeps [C, 1, W] and we [W, C].
CONVOLUTION = Layout(swapped=True, shape=lambda shape: (shape[0], 1, shape[1]))


class Spot(NamedTuple):
    """Where a format has a unit, or one expert of it: a part of a tensor.

    Attributes:
      tensor: its name; a path is written a/b/c.
      at: index of the part.
      layout: orientation of the part.
      expert: the only expert that is there; None: the whole unit.
    """

    tensor: str
    at: Index
    layout: Layout
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A format's tensors for some config, and the units in them.

    Attributes:
      shapes: of all tensors, in the order in which they are written.
      spots: of each unit, one, or one for each of its experts in order.
      sizes: shapes of the units, where they are not those of the config: a format has
        no rows for the padding of a vocabulary.
    """

    shapes: Mapping[str, Shape]
    spots: Mapping[Unit, Sequence[Spot]]
    sizes: Mapping[Unit, Shape] | None = None

    def places(self) -> list[tuple[Unit, str, Index, int | None]]:
        """Where each unit is: equal for two schemes that lay a tree out alike."""
        return [
            (unit, spot.tensor, spot.at, spot.expert)
            for unit, spots in self.spots.items()
            for spot in spots
        ]

    def contents(self) -> dict[str, list[tuple[Unit, Spot]]]:
        """What each tensor holds."""
        found: dict[str, list[tuple[Unit, Spot]]] = {name: [] for name in self.shapes}
        for unit, spots in self.spots.items():
            for spot in spots:
                found[spot.tensor].append((unit, spot))
        return found


def unit_specs(config: DecoderConfig) -> dict[Unit, ParamSpec]:
    """Every unit of a model, outer ones first, then layer by layer."""
    found = {
        Unit(path_text(path), None): spec
        for path, spec in flatten(decoder.outer_specs(config))
    }
    of_kind: dict[LayerKind, dict[str, ParamSpec]] = {}
    for layer, kind in enumerate(config.layers):
        if kind not in of_kind:
            specs = flatten(decoder_layer.param_specs(config, kind))
            of_kind[kind] = {path_text(path): spec for path, spec in specs}
        found |= {Unit(leaf, layer): spec for leaf, spec in of_kind[kind].items()}
    return found


def units(config: DecoderConfig) -> dict[Unit, Shape]:
    """The shape of every unit of a model."""
    return {unit: spec.shape for unit, spec in unit_specs(config).items()}


def differences(
    shapes: Mapping[str, Shape], wanted: Mapping[str, Shape]
) -> dict[str, list[str]]:
    """Lines for what is missing, unexpected or misshapen among tensors, by sort."""
    return {
        "missing": [f"missing: {n} {wanted[n]}" for n in wanted if n not in shapes],
        "unexpected": [
            f"unexpected: {n} {shapes[n]}" for n in shapes if n not in wanted
        ],
        "wrong shape": [
            f"wrong shape: {n} must be {wanted[n]}. Got {shapes[n]}"
            for n in wanted
            if n in shapes and shapes[n] != wanted[n]
        ],
    }


def check_tensors(shapes: Mapping[str, Shape], scheme: Scheme) -> None:
    """Compares names and shapes with those that a format has.

    Args:
      shapes: of the tensors that there are.
      scheme: of the format.

    Raises:
      CheckpointError: lists all that are missing, unexpected or misshapen.
    """
    problems = differences(shapes, scheme.shapes)
    counts = [f"{len(lines)} {sort}" for sort, lines in problems.items() if lines]
    if counts:
        raise CheckpointError(
            f"The tensors do not fit the config: {', '.join(counts)}. Correct the "
            "config or the layout.",
            list(itertools.chain(*problems.values())),
        )


def zoo_scheme(config: DecoderConfig) -> Scheme:
    """The zoo's own tree in the layout of `config.plan`."""
    places = config.plan.places()
    shapes = {
        path_text(path): spec.shape
        for path, spec in flatten(decoder.param_specs(config))
    }
    spots = {}
    for unit, shape in units(config).items():
        path: tuple[str, ...] = (unit.leaf,)
        slot: tuple[int, ...] = ()
        if unit.layer is not None:
            place = places[unit.layer]
            path, slot = (*place.path, unit.leaf), place.slot
        at = min(config.param_scan_axis, len(shape))
        spots[unit] = (Spot("/".join(path), (slice(None),) * at + slot, AS_IS),)
    return Scheme(shapes, spots)


class Conversion:
    """From the tensors of one format to those of another.

    Args:
      source: the format that there is.
      target: the format that is wanted.
      sizes: shapes of all units, from `units`.
    """

    def __init__(self, source: Scheme, target: Scheme, sizes: Mapping[Unit, Shape]):
        self._source, self._target = source, target
        self._have, self._want = source.sizes or sizes, target.sizes or sizes
        self._contents = target.contents()

    def behind(self, name: str) -> list[str]:
        """The tensors of the source that a tensor of the target is made of."""
        tensors: dict[str, None] = {}
        for unit, spot in self._contents[name]:
            spots = self._source.spots[unit]
            if spot.expert is not None and spots[0].expert is not None:
                spots = spots[spot.expert : spot.expert + 1]
            tensors |= dict.fromkeys(spot.tensor for spot in spots)
        return list(tensors)

    def leaves(
        self,
        tensors: Mapping[str, Leaf],
        dtypes: Mapping[str, np.dtype] | None = None,
    ) -> dict[str, Leaf]:
        """The tensors of the target; nothing is read until they are.

        Args:
          tensors: of the source, by name.
          dtypes: to which the target's are cast; None: as in the source.

        Raises:
          CheckpointError: without `dtypes`, a tensor would be made of several.
        """
        if dtypes is None:
            dtypes = self._own_dtypes(tensors)
        return {
            name: self._leaf(name, tensors, np.dtype(dtypes[name]))
            for name in self._contents
        }

    def _own_dtypes(self, tensors: Mapping[str, Leaf]) -> dict[str, np.dtype]:
        dtypes, problems = {}, []
        for name in self._contents:
            found = {tensors[other].dtype: other for other in self.behind(name)}
            dtypes[name] = next(iter(found))
            if len(found) > 1:
                some = ", ".join(f"{other} {dtype}" for dtype, other in found.items())
                problems.append(f"{name} has one dtype, but would be made of {some}")
        if problems:
            raise CheckpointError(
                "Parameters of different dtypes cannot be one tensor: cast them, or "
                "choose a layout that keeps them apart (scan_layers=False; a tensor "
                "for each expert).",
                problems,
            )
        return dtypes

    def _leaf(self, name: str, tensors: Mapping[str, Leaf], dtype: np.dtype) -> Leaf:
        """A tensor whose pieces, often thousands, are looked up when it is read."""
        pieces = functools.partial(self._pieces, name, tensors, dtype)
        return assembled(self._target.shapes[name], dtype, pieces)

    def _pieces(
        self, name: str, tensors: Mapping[str, Leaf], dtype: np.dtype
    ) -> Iterator[Piece]:
        for unit, spot in self._contents[name]:
            leaf = cast(self._unit(unit, spot.expert, tensors), dtype)
            if self._have[unit] != self._want[unit]:
                leaf = _fitted(leaf, self._want[unit])
            yield Piece(spot.at, spot.layout.to_tensor(leaf))

    def _unit(
        self, unit: Unit, expert: int | None, tensors: Mapping[str, Leaf]
    ) -> Leaf:
        """A unit, or one expert of it, as the zoo orients it."""
        spots, shape = self._source.spots[unit], self._have[unit]
        if spots[0].expert is None:
            whole = _at(spots[0], tensors, shape)
            return whole if expert is None else part_of(whole, (expert,))
        if expert is not None:
            return _at(spots[expert], tensors, shape[1:])
        dtype = tensors[spots[0].tensor].dtype
        pieces = functools.partial(_experts, spots, tensors, shape[1:])
        return assembled(shape, dtype, pieces)


def _fitted(leaf: Leaf, shape: Shape) -> Leaf:
    """The leaf with its end cut off, or zeros behind it, in each axis."""
    common = tuple(map(min, leaf.shape, shape))
    kept = part_of(leaf, tuple(slice(0, n) for n in common))
    pieces = [Piece(tuple(slice(0, n) for n in common), kept)]
    for axis, (have, want) in enumerate(zip(common, shape, strict=True)):
        if have < want:
            more = (*common[:axis], want - have, *shape[axis + 1 :])
            at = (*(slice(0, n) for n in common[:axis]), slice(have, want))
            zeros = constant(np.broadcast_to(np.zeros((), leaf.dtype), more))
            pieces.append(Piece(at, zeros))
    return assembled(shape, leaf.dtype, lambda: pieces)


def _at(spot: Spot, tensors: Mapping[str, Leaf], shape: Shape) -> Leaf:
    part = part_of(tensors[spot.tensor], spot.at)
    return spot.layout.to_unit(part, shape)


def _experts(
    spots: Sequence[Spot], tensors: Mapping[str, Leaf], shape: Shape
) -> Iterator[Piece]:
    for expert, spot in enumerate(spots):
        yield Piece((expert,), _at(spot, tensors, shape))
