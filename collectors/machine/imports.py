"""Changes to libraries that the script may import; each is made when the library is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

ModulePatch = Callable[[Any], None]
"""Gets the imported module."""


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.changes: dict[str, list[ModulePatch]] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in self.changes:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.changes[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as `loader` does, then makes the changes."""

    def __init__(self, loader: Any, changes: list[ModulePatch]) -> None:
        self._loader = loader
        self._changes = changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        for change in self._changes:
            change(module)


_FINDER = _Finder()


def when_imported(name: str, change: ModulePatch) -> None:
    """Make `change` to the module called `name`: now if it is imported already, else when it is."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.changes.setdefault(name, []).append(change)
