"""What tests of migrations compare: digests, bytes, trees, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared.stores import CheckpointError, digest, from_tree, open_store
from shared.stores.folders import partial_folder
from shared.stores.reading import read_whole


def digests(path):
    """Of every leaf, by path without the types of its keys."""
    store = path if not hasattr(path, "exists") else open_store(path)
    return {
        "/".join(map(str, p)): digest(leaf, str(p)) for p, leaf in store.leaves.items()
    }


def content(folder):
    """Every byte of a folder or file."""
    files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
    return {str(f): f.read_bytes() for f in files if f.is_file()}


def assert_same(tree, other):
    """Equal structure, dtypes and bytes."""
    plain = lambda x: jax.random.key_data(x) if is_key(x) else x
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for (path, a), (_, b) in zip(
        *(jax.tree_util.tree_leaves_with_path(t) for t in (tree, other)), strict=True
    ):
        a, b = np.asarray(plain(a)), np.asarray(plain(b))
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def read(plan, *path):
    return read_whole(plan.leaves[path], str(path))


def assert_refused(plan, target, *words):
    """The plan has differences with these words, and writes nothing."""
    text = "\n".join(map(str, plan.differences))
    for word in words:
        assert word in text
    with pytest.raises(CheckpointError, match="nothing is written"):
        plan.write(target)
    assert not target.exists()
    assert not partial_folder(target).exists()


def digest_of(array):
    [leaf] = from_tree({"x": array}).leaves.values()
    return digest(leaf, "x")
