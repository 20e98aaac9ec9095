"""Checkpoints and trees of any kind as one thing: leaves by path, read in parts."""

from parity.stores.opening import open_store
from parity.stores.reading import digest, reading
from parity.stores.store import Leaf, Path, Store, StoreError, blocks, path_text
from parity.stores.tree import from_tree

__all__ = [
    "Leaf",
    "Path",
    "Store",
    "StoreError",
    "blocks",
    "digest",
    "from_tree",
    "open_store",
    "path_text",
    "reading",
]
