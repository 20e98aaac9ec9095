"""Checkpoints of training: steps in a folder, kept by orbax's `CheckpointManager`.

    RUN/200/default/manifest.json    config, layout, a digest for each leaf
    RUN/200/default/_METADATA        orbax's: which paths there are
    RUN/200/default/params.norm/ ... the arrays (zarr)

A step is written as `shared.checkpoint.save` writes a model, with the rest of the state
beside `params`. Stock orbax restores it, `shared.checkpoint.load` takes the parameters
out of it, and it is the same, byte for byte, whichever frontend saved it.

With Linen, where `state` is a `TrainState`::

    with Manager("run", config, keep=3, every=100) as manager:
        tree = {"params": state.params, "opt_state": state.opt_state}
        tree |= {"step": state.step, "rng": rng}
        if manager.latest_step() is not None:
            tree = manager.restore(tree)
            rng = tree.pop("rng")
            state = state.replace(**tree)
        for step in range(int(state.step), steps):
            state = train_step(state, jax.random.fold_in(rng, step), batches[step])
            tree = {"params": state.params, "opt_state": state.opt_state}
            manager.save(step + 1, tree | {"step": state.step, "rng": rng})

With NNX, `zoo_nnx.training_state` gives the same tree of a model and its optimizer, and
`zoo_nnx.load_training_state` puts it back.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import operator
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from shared.checkpoint import adapters, native, snapshot
from shared.checkpoint.manifest import (
    LeafRecord,
    Manifest,
    adapter_manifest,
    model_manifest,
)
from shared.config import DecoderConfig
from shared.layers import decoder
from shared.lora import LoraConfig
from shared.stores import CheckpointError, Leaf, Path, Store, path_text
from shared.stores.kv_path import is_url
from shared.stores.reading import read_whole, reading
from shared.stores.tree import is_empty, key_kind, named_nodes
from shared.trees import check_same_paths, flatten

_UNFINISHED = ".orbax-checkpoint-tmp"
_REMOVED = ".removed"  # where steps wait that are no longer kept
# Seconds after which orbax gives a save up, and processes wait for another no longer.
_PATIENCE, _PATIENCE_TOGETHER = 24 * 60 * 60, 60 * 60


class Manager:
    """The steps of one run, in one folder.

    What a save costs: the previous one is waited for, the state is copied to the host,
    its bytes once, and `save` returns. On a CPU nothing is copied: the arrays' memory
    is held, and it is a donation before it is written that costs a copy. A thread then
    takes the SHA-256 of every leaf (0.5 to 2 GB/s), writes it, and lets go of it.

    A step comes by a rename and goes by one, so that a process that is killed leaves no
    half of it; older steps go when a later one is there, and their files with the next
    save or `close`. One process (or one program of several, `jax.distributed`, on a
    file system that they share) writes into a folder at a time.

    Several processes write their own shards of an array that none of them has whole.
    Such an array has no digest in the manifest, which says why.

    Args:
      folder: of the run; is made if need be.
      config: of the model.
      keep: how many steps are kept, the latest ones; None: all.
      every: `save` skips steps that are no multiples of this.
      lora: of a run that trains adapters alone (`shared.lora`): they stand below
        "params" instead of the model's parameters.

    Raises:
      ValueError: `keep` or `every` is less than 1, or `folder` is a URL.
      ConfigError: config.json cannot say what the config does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: DecoderConfig,
        *,
        keep: int | None = 3,
        every: int = 1,
        lora: LoraConfig | None = None,
    ):
        for name, value in (("keep", keep), ("every", every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1. Got {value}.")
        if is_url(folder):
            raise ValueError(
                f"Steps are renamed, so their folder must be one of a file system. Got "
                f"{folder}: give a mounted folder, and copy steps with parity convert."
            )
        self._folder = pathlib.Path(folder).absolute()
        self._config, self._every, self._lora = config, every, lora
        if lora is None:
            self._manifest = model_manifest(config, {}, source="training")
        else:
            self._manifest = adapter_manifest(config, lora, {}, source="training")
        self._swept = False
        together = jax.process_count() > 1
        waiting = ocp.AsyncOptions(
            timeout_secs=_PATIENCE_TOGETHER if together else _PATIENCE,
            create_directories_asynchronously=False,
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, todelete_subdir=_REMOVED, async_options=waiting
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def save(self, step: int, state: Mapping[str, Any]) -> bool:
        """Saves a step in the background.

        When this returns, the caller may change or donate the arrays.

        Args:
          step: how many training steps lie behind the state.
          state: a tree with the parameters, in the layout of `config.plan`, below
            "params", and whatever else training goes on with: optax's state, the step,
            PRNG keys, a position in the data. Arrays and numbers.

        Returns:
          Whether the step is saved: it is a multiple of `every`, or the machine is
          about to be taken away (`jax.distributed`'s preemption notice).

        Raises:
          CheckpointError: the state cannot be saved, there is a later step, or an
            earlier save has failed since.
        """
        step = operator.index(step)
        if step % self._every and not self._manager.reached_preemption(step):
            return False
        _check_params(state, self._config, self._lora)
        snapshot.check(state)
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise CheckpointError(
                f"{self._folder} has step {latest}, and step {step} is not after it: "
                "remove the later steps, or give another folder."
            )
        origin = {**self._manifest.origin, "step": step}
        manifest = dataclasses.replace(self._manifest, origin=origin)
        args = _Save(state, manifest, self._rubbish())
        self._manager.save(step, args=args, force=True)
        return True

    def wait(self) -> None:
        """Returns when the last save is on the disk.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._manager.reload()
            self._swept = False
            raise CheckpointError(
                f"A step was not saved in {self._folder} ({error}): make room, or give "
                f"another folder. There are the steps {self.all_steps()}."
            ) from error

    def close(self) -> None:
        """Waits for the last save; call it, or use the manager as a context.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()
            if jax.process_index() == 0:
                shutil.rmtree(self._folder / _REMOVED, ignore_errors=True)

    def all_steps(self) -> list[int]:
        """The steps on the disk, in order; one still being written is none."""
        return sorted(ocp.utils.checkpoint_steps(self._folder))

    def latest_step(self) -> int | None:
        """The last step on the disk; None: there is none yet."""
        return max(self.all_steps(), default=None)

    def restore(
        self, target: Any, step: int | None = None, *, verify: bool = True
    ) -> Any:
        """A state as it was saved.

        It may have been saved on other devices: each leaf is put where the target's is.

        Args:
          target: a tree as it was given to `save`: arrays, `jax.ShapeDtypeStruct`
            (with a sharding or without), PRNG keys, numbers. Values are not looked at.
            A Python number stands for one of its sort of any width.
          step: None: the latest.
          verify: whether to compare each leaf with its digest.

        Returns:
          A tree like the target, of NumPy arrays and numbers where that has them, else
          of JAX arrays.

        Raises:
          CheckpointError: there is no such step; it was saved with another config; its
            leaves are not just those of the target, of the same shapes and dtypes (all
            that differ are listed, before anything is read); or it is damaged.
        """
        store, manifest = self._open(step)
        _check_config(manifest, self._manifest, store.path)
        nodes, structure = named_nodes(target)
        _check_target(store, dict(nodes))
        leaves = {path_text(path): leaf for path, leaf in store.leaves.items()}
        problems: list[str] = []
        values = []
        for path, node in nodes:
            text = path_text(path)
            if is_empty(node):
                values.append(node)
                continue
            known = manifest.leaves[text] if verify else None
            values.append(_read(leaves[text], node, text, known, problems))
        if problems:
            raise CheckpointError(
                f"{store.path} has changed since it was written: restore another step "
                f"of {self.all_steps()}.",
                problems,
            )
        return structure.unflatten(values)

    def restore_params(
        self, step: int | None = None, *, verify: bool = True
    ) -> tuple[DecoderConfig, dict[str, Any]]:
        """The config of a step, and its parameters alone.

        Args:
          step: None: the latest.
          verify: whether to compare each leaf with its digest.

        Raises:
          CheckpointError: there is no such step, it is damaged, or it holds adapters
            (`shared.checkpoint.adapters.load` reads these).
        """
        return native.load(self._step_folder(step), verify=verify)

    def _open(self, step: int | None) -> tuple[Store, Manifest]:
        return native.open_checkpoint(self._step_folder(step))

    def _step_folder(self, step: int | None) -> pathlib.Path:
        self.wait()
        steps = self.all_steps()
        if not steps:
            raise CheckpointError(f"{self._folder} has no steps: save one first.")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self._folder} has no step {step}. It has {steps}.")
        return self._folder / str(steps[-1] if step is None else step)

    def _rubbish(self) -> list[pathlib.Path]:
        """Steps that are no longer kept, and what killed or failed saves have left."""
        if jax.process_index() != 0:
            return []
        found = [self._folder / _REMOVED]
        if not self._swept:
            found += self._folder.glob(f"*{_UNFINISHED}")
            self._swept = True
        return found


# Saving.


class _Handler(ocp.AsyncCheckpointHandler):
    """Writes a step's tree for orbax, which makes, renames and removes the folders."""

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        # Noted down in the step: with what stock orbax restores it.
        self.typestr = ocp.StandardCheckpointHandler.typestr

    async def async_save(self, directory: Any, args: _Save) -> list[Any]:
        """Takes the state to the host, and starts to write."""
        copies = snapshot.take(args.state)
        for path in args.rubbish:
            self._thread.submit(_remove, path, pathlib.Path(directory))
        folder = pathlib.Path(directory)
        return [self._thread.submit(snapshot.write, folder, copies, args.manifest)]

    def save(self, directory: Any, args: _Save) -> None:
        """Takes the state to the host, and writes it."""
        snapshot.write(
            pathlib.Path(directory), snapshot.take(args.state), args.manifest
        )

    def restore(self, directory: Any, args: _Restore | None = None) -> Any:
        """As stock orbax does."""
        return ocp.StandardCheckpointHandler().restore(directory)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


@ocp.args.register_with_handler(_Handler, for_save=True)
@dataclasses.dataclass
class _Save(ocp.args.CheckpointArgs):
    state: Mapping[str, Any]
    manifest: Manifest
    rubbish: Sequence[pathlib.Path] = ()


@ocp.args.register_with_handler(_Handler, for_restore=True)
@dataclasses.dataclass
class _Restore(ocp.args.CheckpointArgs):
    pass


def _remove(path: pathlib.Path, new: pathlib.Path) -> None:
    """Removes a folder, but not that in which the new step is written."""
    if path not in new.parents:
        shutil.rmtree(path, ignore_errors=True)


def _check_params(
    state: Mapping[str, Any], config: DecoderConfig, lora: LoraConfig | None
) -> None:
    """Raises CheckpointError if a state has not the parameters of the model."""
    params = state.get(native.PARAMS)
    if not isinstance(params, Mapping):
        raise CheckpointError(
            f"A state must have the parameters below {native.PARAMS!r}. It has "
            f"{', '.join(map(str, state)) or 'nothing'}."
        )
    boxed = [
        f"{path_text(path)} is a {type(leaf).__name__}"
        for path, leaf in flatten(params)
        if not hasattr(leaf, "shape")
    ]
    if boxed:
        raise CheckpointError(
            "Parameters must be arrays: unbox the whole state (flax.linen.unbox).",
            boxed,
        )
    if lora is not None:
        adapters.check(config, params, lora)
        return
    try:
        check_same_paths(decoder.param_specs(config), params)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


# Restoring.


def _check_config(saved: Manifest, given: Manifest, where: str) -> None:
    """Raises CheckpointError if a step was saved by another model or layout."""
    problems = _changes(saved.config, given.config, _MAY_CHANGE)
    # A period may be found or said: it is the same layout.
    same = saved.decoder_config().plan == given.decoder_config().plan
    problems += _changes(saved.layout, given.layout, ["scan_period"] if same else [])
    options = ({"lora": manifest.origin.get("lora")} for manifest in (saved, given))
    problems += _changes(*options)
    if problems:
        raise CheckpointError(
            f"{where} was saved with another config: give that, or convert the "
            "checkpoint to the layout that you want (parity convert).",
            problems,
        )


# What a run may go on with otherwise: dtypes of leaves are compared one by one.
_MAY_CHANGE = ("dtype", "initializer_range", "router_aux_loss_coef")


def _changes(
    saved: Mapping[str, Any] | None, given: Mapping[str, Any] | None, ignored: Any = ()
) -> list[str]:
    old, new = saved or {}, given or {}
    return [
        f"{name}: saved with {old.get(name)!r}, given {new.get(name)!r}"
        for name in sorted({*old, *new} - {*ignored})
        if old.get(name) != new.get(name)
    ]


def _check_target(store: Store, nodes: Mapping[Path, Any]) -> None:
    """Raises CheckpointError if a step's leaves are not those of the target."""
    have = {path_text(path): leaf for path, leaf in store.leaves.items()}
    none = {path_text(path) for path in store.empty}
    want = {path_text(path): node for path, node in nodes.items()}
    odd = [
        f"{text} is {node!r:.60}"
        for text, node in want.items()
        if not (is_empty(node) or _is_number(node) or hasattr(node, "dtype"))
    ]
    if odd:
        raise CheckpointError("A target has arrays and numbers only.", odd)
    problems = [
        f"unreadable: {path_text(p)}: {why}" for p, why in store.refused.items()
    ]
    problems += [
        f"unexpected: {text} {leaf.type_name} {leaf.shape}"
        for text, leaf in have.items()
        if text not in want
    ]
    problems += [f"unexpected: {text}, empty" for text in none - want.keys()]
    for text, node in want.items():
        if is_empty(node):
            if text not in none | have.keys():
                problems.append(f"missing: {text}, empty")
            elif text in have:
                problems.append(f"{text} is an array, and empty in the target")
        elif text in have:
            problems += _differences(have[text], node, text)
        elif text in none:
            problems.append(f"{text} is empty, and an array in the target")
        else:
            problems.append(f"missing: {text} {' '.join(map(str, _outline(node)))}")
    if problems:
        raise CheckpointError(
            f"{store.path} does not hold the state that is asked for.", sorted(problems)
        )


def _differences(leaf: Leaf, node: Any, text: str) -> list[str]:
    """What differs between a leaf and that of the target."""
    want, shape = _outline(node)
    lines = []
    if leaf.shape != shape:
        lines.append(f"wrong shape: {text} is {leaf.shape}, the target {shape}")
    if _is_number(node):
        same = jnp.issubdtype(leaf.dtype, _NUMBERS[type(node)]) and not leaf.kind
    else:
        same = leaf.type_name == want
    if not same:
        lines.append(f"wrong dtype: {text} is {leaf.type_name}, the target {want}")
    elif not (_is_number(node) or isinstance(node, np.ndarray | np.generic)):
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            lines.append(f"{text} is {leaf.dtype}, for which JAX needs jax_enable_x64")
    return lines


# What a number may be stored as.
_NUMBERS = {
    bool: np.bool_,
    int: np.integer,
    float: np.floating,
    complex: np.complexfloating,
}


def _is_number(node: Any) -> bool:
    return type(node) in _NUMBERS


def _outline(node: Any) -> tuple[str, tuple[int, ...]]:
    """The name of a target's dtype, as that of a leaf, and the shape of its data."""
    if _is_number(node):
        return type(node).__name__, ()
    if not _is_key(node):
        return str(np.dtype(node.dtype)), tuple(node.shape)
    data, implementation = _key_data(node)
    return f"{key_kind(implementation)} as {data.dtype}", tuple(data.shape)


def _is_key(node: Any) -> bool:
    return jnp.issubdtype(node.dtype, jax.dtypes.prng_key)


def _key_data(keys: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    """The data of PRNG keys, and how they are called."""
    names = []

    def data(keys: Any) -> Any:
        names.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    outline = jax.eval_shape(data, jax.ShapeDtypeStruct(keys.shape, keys.dtype))
    return outline, names[0]


def _read(
    leaf: Leaf, node: Any, text: str, known: LeafRecord | None, problems: list[str]
) -> Any:
    """A leaf, as and where the target has it."""
    sharding = _sharding(node)
    if sharding is not None and not sharding.is_fully_addressable:
        return _read_shards(leaf, node, text, sharding)
    array = read_whole(leaf, text)
    if known is not None and known.sha256:
        found = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
        if found != known.sha256:
            problems.append(
                f"{text}: its SHA-256 is {found}, and the manifest says {known.sha256}"
            )
    if _is_number(node):
        return type(node)(array[()])
    if isinstance(node, np.ndarray | np.generic):
        return array if isinstance(node, np.ndarray) else array[()]
    if _is_key(node):
        _, implementation = _key_data(node)
        array = jax.random.wrap_key_data(jnp.asarray(array), impl=implementation)
    elif not leaf.shape and getattr(node, "weak_type", False):
        array = _weak(array)
    return jax.device_put(array, sharding)


def _weak(array: np.ndarray) -> Any:
    """A count as Python's numbers become in `jit`, which else would compile anew."""
    weak = jnp.asarray(array.item())
    return weak if weak.dtype == array.dtype else array


def _sharding(node: Any) -> Any:
    """Where a target's leaf is to be; None: where JAX likes."""
    if isinstance(node, jax.Array) and not node.committed:
        return None
    return getattr(node, "sharding", None)


def _read_shards(leaf: Leaf, node: Any, text: str, sharding: Any) -> jax.Array:
    """This process's part of an array that none has whole; it is not verified."""
    if _is_key(node):
        array = read_whole(leaf, text)
        _, implementation = _key_data(node)
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=implementation)
        return jax.device_put(keys, sharding)
    with reading(leaf, text) as read:
        return jax.make_array_from_callback(
            leaf.shape, sharding, functools.partial(_part, read, leaf.shape)
        )


def _part(read: Any, shape: tuple[int, ...], index: Any) -> np.ndarray:
    box = zip(index, shape, strict=True)
    return read(tuple(slice(*at.indices(size)[:2]) for at, size in box))
