"""Lines of code: what is left without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import io
import pathlib
import tokenize
from collections.abc import Iterator
from types import ModuleType

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_lines(source: str) -> int:
    r"""Lines of Python that hold code.

    >>> count_lines('"A module."\n\n# why\nx = 1  # one\n')
    1
    """
    lines = source.splitlines()
    docstrings = list(_docstrings(ast.parse(source)))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _LAYOUT or any(a <= token.start < b for a, b in docstrings):
            continue
        used.update(range(token.start[0], token.end[0] + 1))
    return sum(bool(lines[number - 1].strip()) for number in used)


def package_lines(package: ModuleType) -> dict[str, int]:
    """Lines of code of every module of a package, by file name."""
    assert package.__file__ is not None
    folder = pathlib.Path(package.__file__).parent
    return {
        file.relative_to(folder).as_posix(): count_lines(file.read_text("utf-8"))
        for file in sorted(folder.rglob("*.py"))
    }


def _docstrings(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where docstrings start and end: line from 1, column from 0."""
    for node in ast.walk(tree):
        if not isinstance(node, _DOCUMENTED) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            if isinstance(first.value.value, str):
                assert first.end_lineno is not None and first.end_col_offset is not None
                start = first.lineno, first.col_offset
                yield start, (first.end_lineno, first.end_col_offset)
