"""The pairs in `examples`, loaded as if one stood in their folder."""

import functools
import importlib
import pathlib
import sys
from types import SimpleNamespace

import parity

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
NAMES = ("cnn", "translator", "tagger")
MODULES = ("linen_model", "nnx_model", "inputs")


@functools.cache
def load(name):
    """The modules of one example; each folder has modules of the same names."""
    folder = str(FOLDER / name)
    sys.path.insert(0, folder)
    try:
        found = {module: importlib.import_module(module) for module in MODULES}
    finally:
        sys.path.remove(folder)
        for module in MODULES:
            sys.modules.pop(module, None)
    rules = (FOLDER / name / "rules.toml").read_text()
    return SimpleNamespace(**found, rules=rules)


@functools.cache
def linen(name):
    """The Linen side, made once."""
    return load(name).linen_model.make()


def check(name, nnx=None, **options):
    """The example's check, with anything in it replaced."""
    pair = load(name)
    defaults = {"call": pair.inputs.calls(), "rules": parity.Rules.parse(pair.rules)}
    return parity.check(
        linen(name),
        nnx or pair.nnx_model.make,
        pair.inputs.inputs(),
        **defaults | options,
    )
