"""Wherever a signature has shapes, they are checked while tests run."""

import importlib
import inspect
import pkgutil
import re

import shared

SHAPED = re.compile(r"\b(Float|Int|UInt|Bool|Shaped|Num)\[")


def functions_with_shapes():
    for info in pkgutil.walk_packages(shared.__path__, "shared."):
        module = importlib.import_module(info.name)
        for function in vars(module).values():
            own = getattr(function, "__module__", None) == module.__name__
            if own and inspect.isfunction(function):
                if SHAPED.search(str(inspect.signature(function))):
                    yield function


def test_shapes_in_signatures_are_checked():
    functions = list(functions_with_shapes())
    assert len(functions) > 50
    unchecked = [f for f in functions if not hasattr(f, "__wrapped__")]
    assert not unchecked, "see CHECKED in tests/conftest.py"
