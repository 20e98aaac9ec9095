"""Nested dicts of arrays, by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]


def flatten(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Path and leaf of every leaf, sorted by path."""
    for name in sorted(tree):
        node = tree[name]
        if isinstance(node, Mapping):
            yield from flatten(node, (*above, name))
        else:
            yield (*above, name), node


def path_text(path: Path) -> str:
    """A path as people write it: a/b/c."""
    return "/".join(map(str, path))


def check_same_paths(expected: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compares paths and shapes of two trees.

    Raises:
      ValueError: lists every leaf missing from, unexpected in or misshapen in `given`.
    """
    want, have = dict(flatten(expected)), dict(flatten(given))
    lines = [f"missing: {path_text(p)} {want[p].shape}" for p in want if p not in have]
    lines += [f"unexpected: {path_text(p)}" for p in have if p not in want]
    lines += [
        f"wrong shape: {path_text(p)} must be {want[p].shape}, got {have[p].shape}"
        for p in want
        if p in have and want[p].shape != have[p].shape
    ]
    if lines:
        raise ValueError(
            "The parameters do not fit the config (check scan_layers, scan_period and "
            "the sizes):\n  " + "\n  ".join(lines)
        )
