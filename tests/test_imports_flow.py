"""Imports run one way: every folder imports only from folders that docs/architecture.md lists above it.

Read from the import statements themselves, those inside functions and of `if TYPE_CHECKING:` included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOPS = ("peakcast", "collectors", "models", "reports")
MODULES = {
    ".".join((*dict.fromkeys(("peakcast", top)), *path.relative_to(ROOT / top).with_suffix("").parts)): path
    for top in TOPS
    for path in sorted((ROOT / top).rglob("*.py"))
}
FRONT = {"peakcast.__init__"}
"""The module that names what users import, and loads each when it is first used."""
ENTRIES = {module for module in MODULES if module.endswith(".__main__")}
"""What `python -m` runs: above everything, imported by doors alone."""


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every absolute module name that a file imports, at any depth of its code."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction; write the full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    """Whether `name` is one of `packages` or lies inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def module_of(name: str) -> str | None:
    """The module of this project that an imported name is, or is a part of; a package is its `__init__`."""
    outer = name.rpartition(".")[0]
    candidates = (name, f"{name}.__init__", outer, f"{outer}.__init__")
    return next((module for module in candidates if module in MODULES), None)


def folder(module: str) -> str:
    """The folder that a module lies in, from the root of the checkout; a loose file of `peakcast/` is its own."""
    path = MODULES[module].relative_to(ROOT)
    return path.as_posix() if path.parent.as_posix() == "peakcast" else path.parent.as_posix()


@cache
def imported(module: str) -> set[str]:
    """The modules of this project that `module` imports, but packages that only hold others."""
    found = {module_of(name) for name in imports(MODULES[module])}
    return {name for name in found if name and name != module and not _only_holds(name)}


@cache
def _only_holds(module: str) -> bool:
    if not module.endswith(".__init__"):
        return False
    return module in FRONT or len(ast.parse(MODULES[module].read_text(encoding="utf-8")).body) <= 1


def layers() -> dict[str, int]:
    """The layer of each folder, as the table of the page on architecture counts them."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    return {name: int(layer) for layer, names in rows for name in re.findall(r"`([^`]+)`", names)}


LAYERS = layers()


def test_every_folder_has_a_layer() -> None:
    folders = {folder(module) for module in set(MODULES) - FRONT - ENTRIES if not _only_holds(module)}
    assert folders == set(LAYERS)


def test_imports_run_one_way() -> None:
    upwards = {
        module: names
        for module in set(MODULES) - FRONT - ENTRIES
        if (names := [name for name in imported(module) - ENTRIES if _is_upwards(folder(module), folder(name))])
    }
    assert upwards == {}


def _is_upwards(home: str, other: str) -> bool:
    """Whether an import of the folder `other` in the folder `home` is not of a lower layer."""
    return other != home and LAYERS[other] >= LAYERS[home]


def test_what_python_m_runs_is_imported_by_doors_alone() -> None:
    users = {folder(module) for module in set(MODULES) - FRONT - ENTRIES if imported(module) & ENTRIES}
    assert users <= {"peakcast/doors"}


def test_collectors_and_models_know_nothing_of_each_other() -> None:
    for one, other in (("peakcast.collectors", "peakcast.models"), ("peakcast.models", "peakcast.collectors")):
        known = {name for module in MODULES if within(module, one) for name in imported(module)}
        assert [name for name in known if within(name, other)] == []


def test_files_that_the_page_on_architecture_names_exist() -> None:
    for named in re.findall(r"`((?:peakcast|collectors|models|reports|datasets|tests)/[\w./*-]*)`", PAGE):
        assert list(ROOT.glob(named.rstrip("/"))), named


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imported(module) for module in set(MODULES) - FRONT}).prepare()


def test_only_tracking_imports_mlflow() -> None:
    users = {module for module, path in MODULES.items() if any(within(name, "mlflow") for name in imports(path))}
    assert users <= {"peakcast.tracking"}


def test_only_collectors_import_torch_and_nvml() -> None:
    heavy = ("torch", "pynvml", "transformers", "accelerate", "peft", "bitsandbytes")
    users = {module for module, path in MODULES.items() if any(within(name, *heavy) for name in imports(path))}
    assert {module for module in users if not within(module, "peakcast.collectors")} == set()


def test_the_flow_is_seen_at_all(tmp_path: Path) -> None:
    code = tmp_path / "backwards.py"
    code.write_text("def f():\n    from peakcast import api\n    import torch.nn\n")
    assert imports(code) == ("peakcast.api", "torch.nn")
