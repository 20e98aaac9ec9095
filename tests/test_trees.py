"""The parameter tree of every preset, as text: a change of it is a change people see.

`pytest tests/test_trees.py --update` rewrites the texts.
"""

import pathlib

import pytest

import shared
from shared.trees import flatten, path_text

TREES = pathlib.Path(__file__).parent / "trees"


def describe(config):
    """One line a leaf: path, shape, dtype and axis names."""
    leaves = list(flatten(shared.abstract_params(config)))
    axes = dict(flatten(shared.logical_axes(config)))
    lines = [
        f"{path_text(path)}  {leaf.dtype}  "
        + ", ".join(
            f"{size} {name or '-'}"
            for size, name in zip(leaf.shape, axes[path], strict=True)
        )
        for path, leaf in leaves
    ]
    total = sum(leaf.size for _, leaf in leaves)
    return "\n".join([f"{len(leaves)} leaves, {total:,} parameters", *lines]) + "\n"


@pytest.mark.parametrize("name", shared.presets())
def test_tree_of_preset(name, update):
    file, text = TREES / f"{name}.txt", describe(shared.preset(name))
    if update:
        TREES.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.is_file(), f"no {file.name}: run pytest with --update"
    assert text == file.read_text(), "if it is meant to change, run pytest --update"


def test_every_text_has_its_preset():
    assert {file.stem for file in TREES.glob("*.txt")} == set(shared.presets())


def test_published_sizes():
    """80 billion parameters and 3 active: what the model is called."""
    config = shared.preset("qwen3-next-80b-a3b")
    total = sum(leaf.size for _, leaf in flatten(shared.abstract_params(config)))
    assert 79e9 < total < 81e9
    assert 3e9 < shared.active_parameters(config) < 4.5e9
