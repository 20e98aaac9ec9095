"""Checkpoints and trees of any kind as one thing: leaves by path, read in parts."""

from shared.stores.opening import open_store
from shared.stores.reading import digest, reading
from shared.stores.store import (
    CheckpointError,
    Leaf,
    Path,
    Store,
    blocks,
    path_text,
)
from shared.stores.tree import from_tree

__all__ = [
    "Leaf",
    "Path",
    "Store",
    "CheckpointError",
    "blocks",
    "digest",
    "from_tree",
    "open_store",
    "path_text",
    "reading",
]
