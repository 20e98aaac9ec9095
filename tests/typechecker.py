"""What checks signatures while tests run (see conftest)."""

from collections.abc import Callable
from typing import Any

import beartype


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a function at every call, but for those made within a call.

    To make the check of such a one takes a thousand times longer than the check, every
    time; what it is given has been checked where it came in.
    """
    if "<locals>" in getattr(function, "__qualname__", ""):
        return function
    return beartype.beartype(function)
