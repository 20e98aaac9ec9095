"""What a migration would write, and writing it."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parity.mapping.correspondence import Correspondence
from parity.mapping.rules import Rules
from parity.migration.draft import Move, Options
from parity.migration.drafting import make_draft
from parity.migration.optimizer import Follower
from parity.migration.origin import Origin
from parity.migration.source import PARAMS, Source, read_source
from parity.migration.trees import Tree, linen_tree, name_of, nnx_tree
from parity.trees import Difference
from shared.checkpoint.manifest import (
    LeafRecord,
    Manifest,
    check_digests,
    check_leaves,
    find_manifest,
    writer,
)
from shared.checkpoint.native import write_checkpoint
from shared.stores import CheckpointError, Leaf, Path, Store, open_store, path_text
from shared.stores.folders import check_new
from shared.stores.store import numeric_order, some

SIDES = ("linen", "nnx")
CHOICES = {"to": SIDES, "form": ("state", "dict"), "optimizer": ("optax", "nnx")}
_ORIGIN = "linen"  # what a manifest's origin calls the layout of a Linen source


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a migration would write.

    Attributes:
      given: the checkpoint's path, or a store's name.
      source: the checkpoint, taken apart.
      options: what was asked for.
      trees: which leaf of the model is which.
      leaves: what is written, by path; not yet read.
      empty: nodes without leaves that are written, too.
      moves: where each leaf comes from.
      differences: why nothing can be written; none: it can.
      followers: the optimizer's trees that go where their parameters go.
      carried: paths of what is neither, and stays as it is.
      ignored: paths of what rules leave out.
      notes: what was chosen, and what is not kept.
      origin: how a Linen source is laid out, for the way back.
    """

    given: str
    source: Source
    options: Options
    trees: Correspondence
    leaves: Mapping[Path, Leaf]
    empty: Mapping[Path, str]
    moves: tuple[Move, ...]
    differences: tuple[Difference, ...]
    followers: tuple[Follower, ...]
    carried: tuple[Path, ...]
    ignored: tuple[Path, ...]
    notes: tuple[str, ...]
    origin: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Whether it can be written."""
        return not self.differences

    @property
    def nbytes(self) -> int:
        """Bytes of all that is written."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def store(self) -> Store:
        """What would be written, as if it were."""
        name = f"{self.source.store.path} as {self.options.to}"
        return Store(name, "plan", self.leaves, boxes=True, empty=self.empty)

    @property
    def layout_changes(self) -> tuple[Move, ...]:
        """The moves that change more than a name."""
        return tuple(move for move in self.moves if move.steps)

    def describe(self) -> tuple[str, ...]:
        """Lines for people."""
        store = self.source.store
        size = sum(leaf.nbytes for leaf in store.leaves.values())
        model = dataclasses.replace(self.trees, rng=())  # which notes tell of
        at = "" if store.step is None else f", step {store.step}"
        lines = [
            f"from {store.format}{at}, {len(store.leaves):,} leaves, {size:,} bytes: "
            f"{store.path}",
            *store.notes,
            *self.source.notes,
            *(f"model: {line}" for line in model.describe()),
            *(f"with its parameters: {follower}" for follower in self.followers),
        ]
        if self.carried:
            lines.append(f"as it is: {_some(self.carried)}")
        if self.ignored:
            lines.append(f"left out by rules: {_some(self.ignored)}")
        lines += self.notes
        casts = collections.Counter(move.cast for move in self.moves if move.cast)
        lines += [
            f"cast {before} to {after}: {count} leaves, which keep not all their bits"
            for (before, after), count in casts.items()
        ]
        total = f"{len(self.leaves):,} leaves, {self.nbytes:,} bytes"
        return (*lines, f"to {self.options.to}: {total}")

    @property
    def has_manifest(self) -> bool:
        """Whether the source says what its bytes are."""
        return _find_manifest(self.source.store) is not None

    def check(self) -> None:
        """Refuses a plan that cannot be written.

        Raises:
          CheckpointError: lists all differences.
        """
        if self.differences:
            raise CheckpointError(
                f"{self.source.store.path} cannot be migrated to {self.options.to}, "
                f"and nothing is written. {len(self.differences)} differences:",
                [str(difference) for difference in self.differences],
            )

    def check_target(self, folder: str | os.PathLike[str]) -> None:
        """Refuses a folder that exists, or is the source or in it.

        Raises:
          CheckpointError: it cannot be written there.
        """
        target = pathlib.Path(folder).absolute()
        source = pathlib.Path(self.given)
        if source.resolve() in (target.resolve(), *target.resolve().parents):
            raise CheckpointError(
                f"{target} is in the source, {source}, which is never touched: give "
                "another folder."
            )
        check_new(target)

    def check_source(self, progress: Callable[[int], Any] | None = None) -> None:
        """Compares the source with its manifest, if it has one; all of it is read.

        Args:
          progress: told of bytes as they are read.

        Raises:
          CheckpointError: leaves have changed since they were written.
        """
        manifest = _find_manifest(self.source.store)
        if manifest is not None:
            check_digests(self.source.store, manifest, progress)

    def write(
        self,
        folder: str | os.PathLike[str],
        progress: Callable[[int], Any] | None = None,
    ) -> Manifest:
        """Writes it, leaf by leaf; the folder appears when it has been read back.

        A run that was killed is gone on with.

        Args:
          folder: new or empty.
          progress: told of bytes as they are read for verification, written, and read
            back.

        Raises:
          CheckpointError: the plan has differences, the source is damaged, or the
            folder is not empty. Nothing is there, then.
        """
        self.check()
        self.check_target(folder)
        self.check_source(progress)
        return write_checkpoint(
            folder,
            self.leaves,
            self._manifest,
            empty=self.empty,
            fingerprint=self.fingerprint(),
            progress=progress,
        )

    def _manifest(self, records: Mapping[str, LeafRecord]) -> Manifest:
        store = self.source.store
        origin: dict[str, Any] = {"format": store.format, "step": store.step}
        if self.origin:
            origin[_ORIGIN] = dict(self.origin)
        return Manifest(
            self.options.to, records, store.path, origin=origin, writer=writer()
        )

    def fingerprint(self) -> dict[str, Any] | None:
        """Of all that the result depends on: a killed run goes on where it is equal.

        Of a source in memory there is none.
        """
        files = _files(pathlib.Path(self.source.store.path))
        if not files:
            return None
        ways = hashlib.sha256()
        for move in self.moves:
            ways.update(f"{move!r}\n".encode())
        for path, leaf in self.leaves.items():
            ways.update(f"{path!r} {leaf.type_name} {leaf.shape}\n".encode())
        ways.update(repr(list(self.empty.items())).encode())
        return {
            "command": "migrate",
            "writer": writer(),
            "options": list(self.options),
            "source": files,
            "moves": ways.hexdigest(),
        }


def plan(
    source: str | os.PathLike[str] | Store,
    *,
    to: str,
    nnx: Any = None,
    linen: Any = None,
    inputs: Any = None,
    call: Any = None,
    rules: Any = None,
    step: int | None = None,
    params: str | None = None,
    collection_names: Sequence[str] = (),
    form: str = "state",
    optimizer: str = "optax",
    boxes: bool | None = None,
    cast: bool = False,
) -> Plan:
    """Plans a migration; only metadata is read.

    Args:
      source: a checkpoint, or a store.
      to: "nnx" or "linen".
      nnx: the NNX module, or what makes it; only its shapes are looked at.
      linen: the Linen module, or (module, variables).
      inputs: of the call that initialises the Linen module.
      call: how it is called, as for `parity.check`.
      rules: see `parity.mapping.rules`.
      step: of a checkpoint manager's folder; None: the latest.
      params: path of the parameters in the source; None: found out.
      collection_names: further names of collections that stand beside `params`.
      form: of an NNX target: "state" as an `nnx.State` is saved, with a level `value`
        for each Variable; "dict" as a pure dict is.
      optimizer: how an NNX target keeps an optimizer's state: "optax" as it is, with
        empty states; "nnx" as an `nnx.Optimizer` does.
      boxes: whether a last level `value` in the source is a box; None: found out.
      cast: whether floats may be rounded to the dtypes of the target's module.

    Raises:
      CheckpointError: the source cannot be read, or it is unclear where the model is.
      CheckError: a module cannot be made.
      RuleError: rules are wrong.
      ValueError: an option is none of its choices.
    """
    options = Options(to, form, optimizer, cast)
    for name, choices in CHOICES.items():
        got = getattr(options, name)
        if got not in choices:
            raise ValueError(f"{name} must be {' or '.join(choices)}. Got {got!r}.")
    store = source if isinstance(source, Store) else open_store(source, step)
    manifest = _find_manifest(store)
    if manifest is not None:
        check_leaves(store, manifest)
        if manifest.tree == to:
            raise CheckpointError(
                f"{store.path} is a {to} checkpoint already, says its manifest: give "
                f"--to={SIDES[to == 'linen']}, or use it as it is."
            )
    trees = {
        "linen": None if linen is None else linen_tree(linen, inputs, call),
        "nnx": None if nnx is None else nnx_tree(nnx),
    }
    ruled = Rules.of(rules)
    side = SIDES[to == "linen"]
    names = [*collection_names]
    if side == "linen":
        names += [*_collections_of(ruled), *_collections_in(trees["nnx"])]
    origin = Origin.of(manifest.origin.get(_ORIGIN) if manifest else None)
    told = origin.model is not None and params is None
    taken = read_source(
        store,
        side,
        params=origin.model if told else params,
        why="the manifest" if told else "--params",
        collection_names=names,
        own=trees[side],
        boxes=origin.boxed_state if told and boxes is None else boxes,
    )
    draft = make_draft(taken, options, trees, ruled, origin)
    draft.notes += _has_names_already(taken, to, trees[to])
    ordered = sorted(draft.leaves, key=numeric_order)
    return Plan(
        store.path if isinstance(source, Store) else os.fspath(source),
        taken,
        options,
        draft.trees,
        {path: draft.leaves[path] for path in ordered},
        draft.empty,
        tuple(sorted(draft.moves, key=lambda move: numeric_order(move.sources[0]))),
        tuple(dict.fromkeys(draft.differences)),
        draft.followers,
        tuple(draft.carried),
        tuple(draft.ignored),
        tuple(draft.notes),
        draft.origin,
    )


def _has_names_already(source: Source, to: str, tree: Tree | None) -> list[str]:
    """A line where a checkpoint looks as the target does: --to may be a mistake."""
    if tree is None:
        return []
    names = {name_of(leaf.name) for leaf in source.model}
    wanted = {name_of(leaf.path) for leaf in tree.leaves}
    boxed = not source.boxed.isdisjoint(leaf.path for leaf in source.model)
    # Linen's checkpoints have a node `params`; NNX's have boxes, and no such node.
    in_params = source.params[-1:] == (PARAMS,)
    looks = boxed and not in_params if to == "nnx" else in_params and not boxed
    if not wanted or names != wanted or not looks:
        return []
    other, api = SIDES[to == "linen"], {"linen": "Linen", "nnx": "NNX"}[to]
    return [
        f"{source.store.path} already has the names of the {api} module: if it is a "
        f"checkpoint of that, --to={other} is meant"
    ]


def _find_manifest(store: Store) -> Manifest | None:
    """The manifest in a checkpoint's folder, or beside its only tree."""
    folder = pathlib.Path(store.path)
    if not folder.is_dir():
        return None
    manifest = find_manifest(folder)
    if manifest is None and folder.parent.is_dir():
        above = find_manifest(folder.parent)
        if above is not None and above.leaves.keys() == {*map(path_text, store.leaves)}:
            return above
    return manifest


def _collections_of(rules: Rules) -> list[str]:
    """The collections that rules name plainly."""
    patterns = [pattern.pattern for rule in rules.rules for pattern in rule.linen]
    tops = [pattern.partition("/") for pattern in patterns]
    return [top for top, slash, _ in tops if slash and top.isidentifier()]


def _collections_in(tree: Tree | None) -> list[str]:
    return [] if tree is None else [leaf.collection for leaf in tree.leaves]


def _files(path: pathlib.Path) -> list[list[Any]]:
    """Name, size and time of all files of a checkpoint."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files if file.is_file()]
    root = path if path.is_dir() else path.parent
    return [
        [str(file.relative_to(root)), stat.st_size, stat.st_mtime_ns]
        for file, stat in stats
    ]


def _some(paths: Sequence[Path]) -> str:
    return some([path_text(path) for path in paths], 12)
