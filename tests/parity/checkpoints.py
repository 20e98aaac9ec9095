"""Checkpoints of every format, each written by its own library."""

import flax.serialization
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
from safetensors.numpy import save_file

from shared.trees import flatten, path_text


def write_orbax(tree, path, **options):
    """A tree's folder, by PyTreeCheckpointHandler with `options`."""
    handler = orbax.checkpoint.PyTreeCheckpointHandler(**options)
    with orbax.checkpoint.Checkpointer(handler) as checkpointer:
        checkpointer.save(path, args=orbax.checkpoint.args.PyTreeSave(tree))
    return path


def write_safetensors(tree, path):
    save_file(flat(tree), path)
    return path


def write_msgpack(tree, path):
    path.write_bytes(flax.serialization.to_bytes(tree))
    return path


def write_npz(tree, path):
    np.savez(path.with_suffix(".npz"), **flat(tree))
    return path.with_suffix(".npz")


def flat(tree):
    return {path_text(path): np.array(x, order="C") for path, x in flatten(tree)}


def stepped(folder, steps):
    """A checkpoint manager's folder; the tree of step n is {"a": n}."""
    args = orbax.checkpoint.args
    with orbax.checkpoint.CheckpointManager(folder) as manager:
        for step in steps:
            tree = {"a": jnp.full(3, float(step))}
            manager.save(step, args=args.StandardSave(tree))
        manager.wait_until_finished()
    return folder


WRITERS = {
    "orbax": write_orbax,
    "safetensors": write_safetensors,
    "msgpack": write_msgpack,
    "npz": write_npz,
}
