"""Sends a function of this process to another one; the objects in its closure are copied too."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from peakcast.core.errors import SpecError

_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, ValueError, RecursionError)


def pack(function: Callable[[], object], path: Path) -> None:
    """Write `function` to `path`. Raises: SpecError if it contains objects that only exist in this process."""
    import cloudpickle

    with _by_value(_found_here_only()):
        try:
            path.write_bytes(cloudpickle.dumps((function, _file_of(function))))
        except _UNPICKLABLE as error:
            raise SpecError(
                f"command: the function {name_of(function)!r} cannot run in another process, since it holds what cannot be "
                f"copied there ({error}); make that inside the function, or give the words of a command.",
                parameter="command",
            ) from error


def unpack(path: Path) -> Callable[[], object]:
    """The function that `pack` wrote to `path`."""
    function, file = pickle.loads(path.read_bytes())
    if file:
        function.__code__ = function.__code__.replace(co_filename=file)
    packed: Callable[[], object] = function
    return packed


def _file_of(function: Callable[[], object]) -> str:
    """The file in which the function is written, which cloudpickle does not store since 3.1.3; "" for a function without
    Python code."""
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else ""


def name_of(function: Callable[[], object]) -> str:
    """The function's name."""
    return str(getattr(function, "__name__", "function"))


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """A context in which functions and classes of `modules` are pickled by value, not by name."""
    import cloudpickle

    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _found_here_only() -> list[ModuleType]:
    """Modules that another process could not import by their names, such as a file that pytest has imported."""
    installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    found = {}  # by their own name: cloudpickle registers that, and some modules are in `sys.modules` by two
    specs: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and not file.startswith(installed) and _place(name, specs) != file:
            found[module.__name__] = module
    return list(found.values())


def _place(name: str, specs: dict[str, Any]) -> str | None:
    """The file that importing `name` would run in a new process."""
    spec = _spec(name, specs)
    return spec.origin if spec is not None else None


def _spec(name: str, specs: dict[str, Any]) -> Any:
    """What the finders say of `name`. `specs` keeps it: every module of a package asks for the package's own."""
    if name not in specs:
        package, _, _ = name.rpartition(".")
        around = _spec(package, specs) if package else None
        if package and around is None:
            specs[name] = None
        else:
            specs[name] = _found(name, around.submodule_search_locations if around is not None else None)
    return specs[name]


def _found(name: str, path: Any) -> Any:
    for finder in sys.meta_path:
        with suppress(Exception):  # of finders that do not know this kind of path
            if (spec := finder.find_spec(name, path)) is not None:
                return spec
    return None
