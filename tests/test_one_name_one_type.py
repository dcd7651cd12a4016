"""A type's name means one thing in this project: types of the same name in two modules are the same type."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("peakcast", "models", "collectors", "reports")
TYPE_NAME = re.compile(r"[A-Z][a-z]\w*")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within a node, without going through their expressions."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in getattr(node, field, ()):
            yield statement
            yield from statements(statement)


def _types(path: Path) -> Iterator[tuple[str, str]]:
    """The name of each class, also within functions, and each type alias of a module, with what makes two of them the same
    type: a class's file, or an alias's value."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in statements(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, path.relative_to(ROOT).as_posix()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and TYPE_NAME.fullmatch(target.id) and getattr(node, "value", None):
            yield target.id, ast.unparse(node.value)


def test_no_two_modules_define_different_types_of_the_same_name() -> None:
    defined: dict[str, set[str]] = defaultdict(set)
    for top in FOLDERS:
        for path in sorted((ROOT / top).rglob("*.py")):
            for name, same in _types(path):
                defined[name].add(same)
    assert len(defined) > 400
    assert {name: found for name, found in defined.items() if len(found) > 1} == {}
