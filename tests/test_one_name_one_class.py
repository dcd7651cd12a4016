"""A class name means one thing in this project: no two modules define classes of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_no_two_modules_define_a_class_of_the_same_name() -> None:
    defined: dict[str, list[str]] = defaultdict(list)
    for top in ("peakcast", "models", "collectors", "reports"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    defined[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(defined) > 400
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}
