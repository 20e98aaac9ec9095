"""The fields of a config.json, with their types checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shared.config import ConfigError

_JSON_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


class Source:
    """The fields of a config.json; remembers which were asked for."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data = data
        self.where = where
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def get(self, name: str, default: Any, *types: type) -> Any:
        """The value of a field, which must be of one of `types`."""
        self._asked.add(name)
        value = self.data.get(name, default)
        if name in self.data and type(value) not in types:
            names = " or ".join(n for t, n in _JSON_NAMES.items() if t in types)
            raise self.error(f"{name} must be {names}. Got {value!r}.")
        return value

    def any(self, name: str, default: Any) -> Any:
        """The value of a field, whatever its type."""
        return self.get(name, default, *_JSON_NAMES)

    def size(self, name: str, default: int) -> int:
        """An integer of at least 1."""
        value = self.get(name, default, int)
        if value < 1:
            raise self.error(f"{name} must be at least 1. Got {value}.")
        return value

    def check(self, name: str, value: Any, why: str) -> None:
        """Compares a field, where it stands, with what follows from others.

        Raises:
          ConfigError: it has another value.
        """
        given = self.any(name, value)
        if given != value:
            raise self.error(f"{name} is {given!r}, but must be {value!r}: {why}.")

    def unknown(self, ignored: Iterable[str] = ()) -> list[str]:
        """Fields that nobody asked for, and that are not among those ignored."""
        return sorted(self.data.keys() - self._asked - set(ignored))

    def error(self, message: str) -> ConfigError:
        """An error that says where the trouble is."""
        return ConfigError(f"{self.where}: {message}")
