"""The Python function that a program calls: by the very object, as MLIR names none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from parity.programs import cost
from parity.programs.listing import digest
from parity.programs.stablehlo import ProgramError

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# By id: a number and the object, which is kept, so that no other gets its id.
_objects: dict[int, tuple[int, Any]] = {}
_numbers = itertools.count()


def called(jaxpr: ClosedJaxpr | Jaxpr) -> str:
    """The Python function that a jaxpr calls, as text; "" if there is none.

    The text is the same for the same object only, and holds in this process only.

    Raises:
      ProgramError: there are several, which StableHLO does not tell apart, or one that
        cannot be compared.
    """
    found = sorted(set(_called(jaxpr)))
    if len(found) > 1:
        raise ProgramError(
            f"Python callbacks have no canonical form if there are {len(found)} of "
            f"them: StableHLO does not say which is called where. {'; '.join(found)}"
        )
    return "".join(found)


def _called(jaxpr: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name in ("pure_callback", "io_callback"):
            callback = params["callback"]
            # JAX wraps the function anew in each trace.
            function = getattr(callback, "callback_func", callback)
            yield f"{name} {_said(function)} {getattr(callback, 'in_tree', '')}"
        elif name == "debug_print":
            # Options of numpy's printing among them: too long to be read.
            yield f"{name} {params['fmt']!r} {digest(_said(params))[:16]}"
        elif "callback" in name or name == "check" and not params.get("debug"):
            raise ProgramError(
                f"Python callbacks have no canonical form, and {name} hides its "
                "function: jax.debug.print, jax.pure_callback and "
                "jax.experimental.io_callback can be compared."
            )
        else:
            for inner in cost.inner_jaxprs(params):
                yield from _called(inner)


def _said(value: Any) -> str:
    """Plain values as they are, all else by the object."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (tuple, list):
        return f"({', '.join(map(_said, value))})"
    if type(value) is dict:
        return f"({', '.join(f'{k} {_said(v)}' for k, v in sorted(value.items()))})"
    if isinstance(value, jax.tree_util.PyTreeDef):
        return str(value)
    number, _ = _objects.setdefault(id(value), (next(_numbers), value))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} #{number}"
