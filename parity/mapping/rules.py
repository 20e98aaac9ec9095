r"""Rules that say how the leaves of a Linen tree become those of an NNX module.

A rule file is TOML. Patterns are regular expressions that must match all of a leaf's
text (`params/Dense_0/kernel`); templates refer to their groups as `\1` or `\g<name>`.
Nothing in a file is run.

```toml
[[rule]]                                     # another name
linen = 'params/Dense_(\d+)/(kernel|bias)'
nnx = 'params/layers/\1/\2'

[[rule]]                                     # another layout
linen = 'params/head/kernel'
nnx = 'params/head/kernel'
transpose = [1, 0]                    # or moveaxis = [0, 1], or reshape = [8, -1]

[[rule]]                                     # several leaves become one
linen = ['params/(q)/kernel', 'params/(k)/kernel', 'params/(v)/kernel']
nnx = 'params/qkv/kernel'
axis = -1

[[rule]]                                     # one leaf becomes several
linen = 'params/qkv/kernel'
nnx = ['params/q/kernel', 'params/k/kernel', 'params/v/kernel']
axis = -1

[[ignore]]                                   # a leaf the other side does not have
linen = 'batch_stats/.*/count'
reason = 'nothing reads it'
```

In one rule the order is: concatenate, transpose or moveaxis, reshape, split. Where a
rule's target is no leaf, the known differences are tried on it: a rule that renames
a recurrent cell need not say how its gates are fused.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_RULE_KEYS = ("linen", "nnx", "transpose", "moveaxis", "reshape", "axis")
_IGNORE_KEYS = ("linen", "nnx", "reason")
_GROUP = re.compile(r"\\(?:g<(?P<name>[^>]+)>|(?P<number>\d+))")


class RuleError(ValueError):
    """A rule file that cannot be used, whatever the trees are."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How some leaves of Linen's become leaves of NNX's.

    Attributes:
      name: what to call it in a report: "rule 2".
      linen: patterns; more than one are concatenated.
      nnx: templates; more than one are split into.
      transpose: order of the axes, or None.
      moveaxis: from where to where one axis goes, or None.
      reshape: the shape after, one size may be -1; or None.
      axis: to concatenate or split along.
    """

    name: str
    linen: tuple[re.Pattern[str], ...]
    nnx: tuple[str, ...]
    transpose: tuple[int, ...] | None = None
    moveaxis: tuple[int, int] | None = None
    reshape: tuple[int, ...] | None = None
    axis: int | None = None

    def __str__(self) -> str:
        patterns = ", ".join(pattern.pattern for pattern in self.linen)
        return f"{self.name} ({patterns} -> {', '.join(self.nnx)})"

    def targets(self, text: str, part: int = 0) -> tuple[str, ...] | None:
        """The NNX texts for a Linen text, None where the pattern does not match."""
        found = self.linen[part].fullmatch(text)
        return None if found is None else tuple(map(found.expand, self.nnx))


@dataclasses.dataclass(frozen=True)
class Ignore:
    """Leaves that one side may have and the other not.

    Attributes:
      name: what to call it in a report: "ignore 1".
      side: "linen" or "nnx".
      pattern: of the leaves' texts.
      reason: why.
    """

    name: str
    side: str
    pattern: re.Pattern[str]
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.side} {self.pattern.pattern}: {self.reason})"


@dataclasses.dataclass(frozen=True)
class Rules:
    r"""All rules for one pair of models; see this module for the file's form.

    >>> rules = Rules.of([{"linen": r"params/Dense_0/(.*)", "nnx": r"params/head/\1"}])
    >>> rules.rules[0].targets("params/Dense_0/bias")
    ('params/head/bias',)
    """

    rules: tuple[Rule, ...] = ()
    ignored: tuple[Ignore, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Rules:
        """Reads a rule file.

        Raises:
          RuleError: names the file, the rule and what is wrong with it.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise RuleError(
                f"The rule file {path} cannot be read: there is no such file."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise RuleError(f"The rule file {path} cannot be read: {why}.") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "rules") -> Rules:
        """Reads rules from TOML text; `source` is what errors call it."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RuleError(f"{source} is no TOML: {error}") from error
        return cls.of(data, source)

    @classmethod
    def of(cls, rules: Any, source: str = "rules") -> Rules:
        """Rules from whatever a caller has.

        Args:
          rules: None, Rules, the path of a rule file, a dict with lists `rule` and
            `ignore` as in a file, or a list of dicts; those with a `reason` are ignored
            leaves.
          source: what errors call it.

        Raises:
          RuleError: a rule is wrong.
        """
        match rules:
            case None:
                return cls()
            case Rules():
                return rules
            case str() | os.PathLike():
                return cls.read(rules)
            case Mapping():
                _check_keys(rules, ("rule", "ignore"), source)
                entries = _tables(rules, "rule", source)
                ignored = _tables(rules, "ignore", source)
            case Sequence():
                entries = [r for r in rules if "reason" not in r]
                ignored = [r for r in rules if "reason" in r]
            case _:
                raise RuleError(
                    f"{source}: rules are a path, a dict or a list of dicts, not "
                    f"{type(rules).__name__}."
                )
        return cls(
            tuple(
                _rule(entry, f"rule {i}", source) for i, entry in enumerate(entries, 1)
            ),
            tuple(
                _ignore(entry, f"ignore {i}", source)
                for i, entry in enumerate(ignored, 1)
            ),
        )


def rule_line(linen: str, nnx: str) -> str:
    """A rule that maps one leaf, as an error tells it on one line."""
    return f"[[rule]] with linen = {quoted(escaped(linen))} and nnx = {quoted(nnx)}"


def escaped(text: str) -> str:
    """A leaf's text as a pattern; unlike `re.escape`, it stays readable."""
    return re.sub(r"([.^$*+?{}\[\]\\|()])", r"\\\1", text)


def quoted(text: str) -> str:
    """Text as a TOML string."""
    if "'" not in text:
        return f"'{text}'"
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _rule(entry: Any, name: str, source: str) -> Rule:
    where = f"{source}, {name}"
    _check_table(entry, where)
    _check_keys(entry, _RULE_KEYS, where)
    for key in ("linen", "nnx"):
        if key not in entry:
            raise RuleError(f"{where}: `{key}` is missing.")
    patterns = tuple(_pattern(p, where) for p in _texts(entry, "linen", where))
    templates = tuple(_texts(entry, "nnx", where))
    if len(patterns) > 1 and len(templates) > 1:
        raise RuleError(
            f"{where}: both `linen` ({len(patterns)}) and `nnx` ({len(templates)}) are "
            "lists. Concatenate or split: give one of them a single text."
        )
    for template in templates:
        for pattern in patterns:
            _check_groups(template, pattern, where)
    many = len(patterns) > 1 or len(templates) > 1
    if many != ("axis" in entry):
        raise RuleError(
            f"{where}: `axis` says where to concatenate or split, so it stands with a "
            f"list of two or more, and only there. `linen` has {len(patterns)}, `nnx` "
            f"has {len(templates)}."
        )
    transpose = _ints(entry, "transpose", where)
    if transpose is not None and sorted(transpose) != list(range(len(transpose))):
        raise RuleError(
            f"{where}: transpose = {list(transpose)} is no order of the axes 0 to "
            f"{len(transpose) - 1}."
        )
    moveaxis = _ints(entry, "moveaxis", where)
    if moveaxis is not None and len(moveaxis) != 2:
        raise RuleError(
            f"{where}: moveaxis = {list(moveaxis)} must be [from, to], got "
            f"{len(moveaxis)} numbers."
        )
    if transpose is not None and moveaxis is not None:
        raise RuleError(f"{where}: give `transpose` or `moveaxis`, not both.")
    reshape = _ints(entry, "reshape", where)
    if reshape is not None and (reshape.count(-1) > 1 or min(reshape, default=0) < -1):
        raise RuleError(
            f"{where}: reshape = {list(reshape)} must be sizes, one of which may be -1."
        )
    axis = entry.get("axis")
    if axis is not None and type(axis) is not int:
        raise RuleError(f"{where}: axis = {axis!r} must be a whole number.")
    return Rule(
        name,
        patterns,
        templates,
        transpose,
        None if moveaxis is None else (moveaxis[0], moveaxis[1]),
        reshape,
        axis,
    )


def _ignore(entry: Any, name: str, source: str) -> Ignore:
    where = f"{source}, {name}"
    _check_table(entry, where)
    _check_keys(entry, _IGNORE_KEYS, where)
    sides = [side for side in ("linen", "nnx") if side in entry]
    if len(sides) != 1:
        raise RuleError(
            f"{where}: give either `linen` or `nnx`, got {sides or 'none'}."
        )
    reason = entry.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise RuleError(f"{where}: `reason` must say why the leaves may be left out.")
    [text] = _texts(entry, sides[0], where)[:1]
    if not isinstance(entry[sides[0]], str):
        raise RuleError(
            f"{where}: `{sides[0]}` must be one pattern; write more tables."
        )
    return Ignore(name, sides[0], _pattern(text, where), reason)


def _check_table(entry: Any, where: str) -> None:
    if not isinstance(entry, Mapping):
        raise RuleError(f"{where} must be a table of keys, got {entry!r}.")


def _check_keys(entry: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = [key for key in entry if key not in known]
    if unknown:
        raise RuleError(
            f"{where}: unknown key {', '.join(map(repr, unknown))}. There are: "
            f"{', '.join(known)}."
        )


def _tables(data: Mapping[str, Any], key: str, source: str) -> Sequence[Any]:
    tables = data.get(key, [])
    if isinstance(tables, str | Mapping) or not isinstance(tables, Sequence):
        raise RuleError(f"{source}: `{key}` must be a list of tables: write [[{key}]].")
    return tables


def _texts(entry: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = entry[key]
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list | tuple)
        or not texts
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise RuleError(
            f"{where}: {key} = {value!r} must be a text or a list of texts."
        )
    return list(texts)


def _ints(entry: Mapping[str, Any], key: str, where: str) -> tuple[int, ...] | None:
    if key not in entry:
        return None
    value = entry[key]
    if not isinstance(value, list | tuple) or not all(type(n) is int for n in value):
        raise RuleError(f"{where}: {key} = {value!r} must be a list of whole numbers.")
    return tuple(value)


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise RuleError(
            f"{where}: {text!r} is no regular expression: {error}. A dot, a bracket or "
            "a star that stands for itself needs a backslash."
        ) from error


def _check_groups(template: str, pattern: re.Pattern[str], where: str) -> None:
    rest = _GROUP.sub("", template)
    if "\\" in rest:
        raise RuleError(
            f"{where}: {template!r} has a backslash that refers to no group; write \\1 "
            "or \\g<name>."
        )
    for found in _GROUP.finditer(template):
        number = found["number"] or (found["name"] if found["name"].isdigit() else "")
        known = (
            0 < int(number) <= pattern.groups
            if number
            else found["name"] in pattern.groupindex
        )
        if not known:
            raise RuleError(
                f"{where}: {template!r} refers to group {found[0]}, but "
                f"{pattern.pattern!r} has {pattern.groups} and calls these by name: "
                f"{', '.join(pattern.groupindex) or 'none'}."
            )
