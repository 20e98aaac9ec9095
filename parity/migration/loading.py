"""A checkpoint's leaves into a model: all of them, or an error that names the rest.

Keys are compared as text, for a list's indices are numbers in a model and text on a
disk; boxes are opened. What a model has and a checkpoint has not, or the reverse, is an
error, as is another shape or dtype.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from parity.mapping.leaves import Leaf as Named
from parity.mapping.leaves import linen_leaves, nnx_leaves, write_nnx
from parity.migration.source import (
    PARAMS,
    ModelLeaf,
    box_candidates,
    looks_random,
    read_source,
)
from parity.migration.trees import BOX, name_of, parse_text
from shared.checkpoint.manifest import check_digests, find_manifest
from shared.stores import CheckpointError, Leaf, Path, Store, open_store, path_text
from shared.stores.reading import read_whole
from shared.stores.store import some


class Loaded(NamedTuple):
    """What was put into a model.

    Attributes:
      state: of the model, with it.
      leaves: how many were loaded.
      random: the model's RNG state that stayed as it was.
      skipped: the checkpoint's RNG state that was not used.
    """

    state: nnx.State
    leaves: int
    random: tuple[str, ...]
    skipped: tuple[str, ...]

    def __repr__(self) -> str:
        kept, skipped = (
            some(list(names), 4) if names else "none"
            for names in (self.random, self.skipped)
        )
        return f"Loaded({self.leaves} leaves; random: {kept}; skipped: {skipped})"


def load_into(
    target: Any,
    source: str | os.PathLike[str] | Store,
    *,
    step: int | None = None,
    rngs: bool = False,
    verify: bool = True,
) -> Loaded:
    """Puts a checkpoint into an NNX model, an optimizer or a state of one.

    Args:
      target: a module or an `nnx.Optimizer`, changed in place, or an `nnx.State`, of
        which a new one is made. It may be abstract (`nnx.eval_shape`).
      source: a checkpoint, or a store.
      step: of a checkpoint manager's folder; None: the latest.
      rngs: whether RNG state is loaded, too; else the model keeps its own.
      verify: whether to read all of it first and compare it with its manifest, if it
        has one.

    Raises:
      CheckpointError: a leaf is missing, is too much, or has another shape or dtype;
        nothing is changed then.
    """
    store = _opened(source, step, verify)
    found = nnx_leaves(target)
    wanted = _by_name(found.leaves, found.aliases)
    random = _by_name(found.rng, {})
    is_optimizer = isinstance(target, nnx.Optimizer)
    what = "optimizer" if is_optimizer else "model"
    part = _Part.best(store, {**wanted, **random}, what)
    extra = part.leaves.keys() - wanted.keys() - random.keys()
    if is_optimizer:  # the model may stand beside its state
        extra = _inside(extra, wanted)
    skipped = extra & part.random
    values = part.read(wanted, extra - skipped)
    if rngs:
        values |= part.read(random, ())
    else:
        skipped |= random.keys() & part.leaves.keys()
    state = target if isinstance(target, nnx.State) else nnx.state(target, graph=True)
    new = write_nnx(state, {leaf.text: values[name] for name, leaf in wanted.items()})
    if rngs:
        keys = {leaf.path: values[name] for name, leaf in random.items()}
        new = _with_random(new, keys)
    if not isinstance(target, nnx.State):
        nnx.update(target, new)
    kept = () if rngs else tuple(sorted(random))
    return Loaded(new, len(values), kept, tuple(sorted(skipped)))


def _with_random(state: nnx.State, values: Mapping[Any, Any]) -> nnx.State:
    return nnx.from_flat_state(
        [
            (path, node.copy(values[path]) if path in values else node)
            for path, node in nnx.to_flat_state(state)
        ]
    )


def load_variables(
    source: str | os.PathLike[str] | Store,
    like: Any,
    *,
    step: int | None = None,
    verify: bool = True,
) -> Any:
    """The variables of a Linen model, or a train state, out of a checkpoint.

    Args:
      source: a checkpoint, or a store.
      like: a tree of arrays or `jax.ShapeDtypeStruct`, boxed or not: variables as
        `init` gives them, parameters, or a `TrainState`. What stands beside it in a
        train state is not looked at, but for collections.
      step: of a checkpoint manager's folder; None: the latest.
      verify: whether to read all of it first and compare it with its manifest, if it
        has one.

    Returns:
      A tree as `like`, with the checkpoint's arrays.

    Raises:
      CheckpointError: a leaf is missing, is too much, or has another shape or dtype.
    """
    store = _opened(source, step, verify)
    leaves = linen_leaves({"": like})
    wanted = _by_name(leaves, {})
    part = _Part.best(store, wanted, "model")
    extra = part.leaves.keys() - wanted.keys()
    if PARAMS in {name.partition("/")[0] for name in wanted}:
        roots = read_source(store, "linen").roots.values()
        variables = {name_of(root[len(part.root) :]) for root in roots}
        beside = {name for name in extra if name.partition("/")[0] in variables}
        extra = _inside(extra, wanted) | beside
    values = part.read(wanted, extra)
    arrays = [values[name_of(leaf.path)] for leaf in leaves]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(like), arrays)


def _opened(
    source: str | os.PathLike[str] | Store, step: int | None, verify: bool
) -> Store:
    store = source if isinstance(source, Store) else open_store(source, step)
    folder = pathlib.Path(store.path)
    manifest = find_manifest(folder) if verify and folder.is_dir() else None
    if manifest is not None:
        check_digests(store, manifest)
    return store


def _by_name(
    leaves: Iterable[Named], aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, _Wanted]:
    found: dict[str, _Wanted] = {}
    for leaf in leaves:
        others = [name_of(parse_text(text)[1]) for text in aliases.get(leaf.text, ())]
        name = name_of(leaf.path)
        if name in found:
            raise CheckpointError(
                f"The model has two leaves called {name}, of which the keys are a "
                "number and a text: rename one."
            )
        found[name] = _Wanted(leaf, tuple(others))
    return found


def _inside(names: Iterable[str], wanted: Iterable[str]) -> set[str]:
    """The names that stand under a top that is wanted."""
    tops = {name.partition("/")[0] for name in wanted}
    return {name for name in names if name.partition("/")[0] in tops}


class _Wanted(NamedTuple):
    """A leaf of a model, and its other names where modules are tied."""

    leaf: Named
    aliases: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.leaf.text

    @property
    def path(self) -> tuple[Any, ...]:
        return self.leaf.path


class _Part(NamedTuple):
    """The part of a checkpoint that is a model.

    Attributes:
      store: the checkpoint.
      root: where the part is.
      leaves: by name.
      random: names of RNG state.
      what: it is to be, "model" or "optimizer".
    """

    store: Store
    root: Path
    leaves: Mapping[str, Leaf]
    random: frozenset[str]
    what: str

    @classmethod
    def best(cls, store: Store, wanted: Mapping[str, _Wanted], what: str) -> _Part:
        """The part with the most of the leaves that are wanted.

        Raises:
          CheckpointError: it has none of them, or leaves cannot be read.
        """
        if store.refused:
            raise CheckpointError(
                f"{len(store.refused)} leaves of {store.path} cannot be read:",
                [f"{path_text(path)}: {why}" for path, why in store.refused.items()],
            )
        names = {n: name for name, x in wanted.items() for n in (*x.aliases, name)}
        candidates = box_candidates(store.leaves) if store.boxes else set()
        counts: dict[Path, int] = {}
        for path in store.leaves:
            for length in range(min(3, len(path))):
                hit = any(name in names for name in _names(path[length:]))
                counts[path[:length]] = counts.get(path[:length], 0) + hit
        root = max(counts, key=lambda root: (counts[root], -len(root)), default=())
        if not counts.get(root):
            raise CheckpointError(
                f"Not one leaf of {store.path} is one of the {what}'s. The {what} has "
                f"{some(list(wanted), 4)}; the checkpoint has "
                f"{some([path_text(path) for path in store.leaves], 4)}."
            )
        leaves: dict[str, Leaf] = {}
        random = []
        for path, leaf in store.leaves.items():
            if path[: len(root)] != root:
                continue
            short = path[len(root) :]
            known = [name for name in _names(short) if name in names]
            plain = short[:-1] if path in candidates else short
            name = names[known[0]] if known else name_of(plain)
            if name in leaves:
                raise CheckpointError(
                    f"{store.path} has two leaves called {name}: their keys are a "
                    "number and a text, or the modules that it was written by were not "
                    "tied as the model's are. Rename one."
                )
            leaves[name] = leaf
            random.append(ModelLeaf((name,), "", plain, leaf))
        looks = {path[0] for path in looks_random(random)}
        return cls(store, root, leaves, frozenset(map(str, looks)), what)

    def read(
        self, wanted: Mapping[str, _Wanted], extra: Collection[str]
    ) -> dict[str, Any]:
        """The leaves that are wanted, after all of them have been compared.

        Args:
          wanted: by name.
          extra: names of leaves that are too much.

        Raises:
          CheckpointError: lists what is missing, too much, or of another kind.
        """
        problems = [
            f"missing: {name}, {x.leaf.shape} {x.leaf.dtype}"
            for name, x in wanted.items()
            if name not in self.leaves
        ]
        problems += [
            f"unexpected: {name}, {self.leaves[name].shape} {self.leaves[name].dtype}"
            for name in sorted(extra)
        ]
        for name, x in wanted.items():
            if name in self.leaves:
                problems += _unlike(name, self.leaves[name], x.leaf, self.what)
        if problems:
            where = f" under {path_text(self.root)}" if self.root else ""
            way = "migrate it with the module (parity migrate --nnx=… or --linen=…), "
            way = f"{way}or " if self.what == "model" else ""
            raise CheckpointError(
                f"{self.store.path}{where} is not the {self.what}'s: {way}give the "
                f"{self.what} that it is of. The {self.what} is as it was.",
                problems,
            )
        return {
            name: _value(self.leaves[name], x.leaf, f"{self.store.path}:{name}")
            for name, x in wanted.items()
        }


def _names(path: Path) -> Iterator[str]:
    """The names that a path may stand for: as it is, or with a box in it."""
    yield name_of(path)
    for i in range(len(path) - 1, 0, -1):
        if path[i] == BOX:
            yield name_of((*path[:i], *path[i + 1 :]))


def _unlike(name: str, leaf: Leaf, wanted: Named, what: str) -> list[str]:
    """How a stored leaf differs from what a model or an optimizer has."""
    shape, dtype = tuple(wanted.shape), wanted.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        if not leaf.kind.startswith("key<"):
            return [f"{name}: {leaf.type_name} {leaf.shape}, the {what} has typed keys"]
        same = leaf.shape[: len(shape)] == shape
        return [] if same else [f"{name}: keys {leaf.shape}, the {what} has {shape}"]
    problems = []
    if leaf.shape != shape:
        problems.append(f"{name}: shape {leaf.shape}, the {what} has {shape}")
    if str(leaf.type_name) != str(dtype) and not _both_counters(leaf, wanted):
        problems.append(f"{name}: dtype {leaf.type_name}, the {what} has {dtype}")
    return problems


def _both_counters(leaf: Leaf, wanted: Named) -> bool:
    """A step may be counted in any integers."""
    whole = all(jnp.issubdtype(x, jnp.integer) for x in (leaf.dtype, wanted.dtype))
    return whole and not leaf.kind and leaf.shape == tuple(wanted.shape) == ()


def _value(leaf: Leaf, wanted: Named, name: str) -> Any:
    array = read_whole(leaf, name)
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=leaf.kind[4:-1])
    if _both_counters(leaf, wanted):
        limits = np.iinfo(wanted.dtype)
        if not limits.min <= int(array) <= limits.max:
            raise CheckpointError(
                f"{name} is {int(array)}, and {wanted.dtype}, which the model counts "
                f"in, ends at {limits.max}."
            )
        array = array.astype(wanted.dtype)
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        return array  # JAX without x64 would narrow it
    return jnp.asarray(array)
