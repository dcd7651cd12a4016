"""A constant's name means one thing where it is read: no two modules have constants of the same name that others import."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.test_one_name_one_type import FOLDERS, ROOT, statements

CONSTANT_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def _module(path: Path) -> str:
    """The name under which a file is imported: all folders are parts of the package `peakcast`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("peakcast", *(part for part in parts if part not in ("peakcast", "__init__"))))


def _defined(tree: ast.Module) -> Iterator[str]:
    """The constants that a module itself gives values."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for name in (part for target in targets if target is not None for part in ast.walk(target)):
            if isinstance(name, ast.Name) and CONSTANT_NAME.fullmatch(name.id):
                yield name.id


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported by name, also within functions."""
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def test_no_two_modules_lend_different_constants_of_the_same_name() -> None:
    defined, imported = set[tuple[str, str]](), set[tuple[str, str]]()
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined.update((_module(path), name) for name in _defined(tree))
        imported.update(_imported(tree))
    lent: dict[str, set[str]] = defaultdict(set)
    for module, name in defined & imported:
        lent[name].add(module)
    assert len(lent) > 300
    assert {name: modules for name, modules in lent.items() if len(modules) > 1} == {}
