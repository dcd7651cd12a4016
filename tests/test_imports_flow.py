"""Imports run one way: values <- catalog <- records <- collectors | models <- reports <- api <- cli.

Read from the import statements themselves, those inside functions and of `if TYPE_CHECKING:` included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    ".".join(("peakcast", *path.relative_to(ROOT / top).with_suffix("").parts))
    if top == "peakcast"
    else ".".join(("peakcast", top, *path.relative_to(ROOT / top).with_suffix("").parts)): path
    for top in ("peakcast", "collectors", "models", "reports")
    for path in sorted((ROOT / top).rglob("*.py"))
}
COLLECTORS, MODELS, REPORTS = "peakcast.collectors", "peakcast.models", "peakcast.reports"
TRACKING = "peakcast.tracking"
DOORS = tuple(
    f"peakcast.{name}"
    for name in (
        *("__main__", "answers", "api", "assistant", "batch", "cli", "doctor", "job_flags", "places", "questions"),
        *("render", "screen", "calibrating", "collected", "commands", "dryrunning", "keeping", "kept", "measuring"),
        *("pytest_plugin", "proposing", "recording", "replaying", "refusing", "shipping", "watching"),
    )
)
EXPLAINING = "peakcast.explaining"
"""Reads the models' timelines; only its own door also runs traces."""
SEARCHING = "peakcast.searching"
"""Sweeps the models, and counts what a layout sends as `explaining` does."""
EXPORTS_LAZILY = {"peakcast.__init__"}
"""Modules that name the doors to hand them on when asked, and import nothing by themselves."""


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


def layer(module: str) -> str:
    """The part of the flow a module belongs to."""
    for package in (COLLECTORS, MODELS, REPORTS):
        if within(module, package):
            return package
    if module == TRACKING:
        return TRACKING
    # they name the command line's flags
    texts = tuple(f"peakcast.explaining.{name}" for name in ("text", "steps", "beside_text"))
    if within(module, *DOORS, "peakcast.explaining.door", *texts, "peakcast.web"):
        return "doors"
    return next((package for package in (EXPLAINING, SEARCHING) if within(module, package)), "peakcast")


FORBIDDEN = {
    "peakcast": (COLLECTORS, MODELS, REPORTS, TRACKING, EXPLAINING, SEARCHING, *DOORS),
    EXPLAINING: (COLLECTORS, REPORTS, TRACKING, SEARCHING, *DOORS),
    SEARCHING: (COLLECTORS, REPORTS, TRACKING, *DOORS),
    TRACKING: (COLLECTORS, REPORTS, EXPLAINING, SEARCHING, *DOORS),
    COLLECTORS: (MODELS, REPORTS, TRACKING, EXPLAINING, SEARCHING, *DOORS),
    MODELS: (COLLECTORS, REPORTS, TRACKING, EXPLAINING, SEARCHING, *DOORS),
    REPORTS: (COLLECTORS, TRACKING, EXPLAINING, SEARCHING, *DOORS),
    "doors": (),
}


@pytest.mark.parametrize("module", sorted(set(MODULES) - EXPORTS_LAZILY))
def test_imports_run_one_way(module: str) -> None:
    backwards = [name for name in imports(MODULES[module]) if within(name, *FORBIDDEN[layer(module)])]
    assert backwards == []


def test_the_page_on_architecture_says_what_is_enforced() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `?(\w+)`? \| [^|]+ \| ([^|]+) \|$", page.partition("may import |")[2], re.MULTILINE))
    parts = {part.removeprefix("peakcast."): part for part in FORBIDDEN}
    assert {name for name in told if name in parts} == set(parts)
    for name, part in parts.items():
        allowed = [other for other, full in parts.items() if other not in (name, "doors") and full not in FORBIDDEN[part]]
        listed = ", ".join(f"`{other}`" for other in allowed) or "nothing of the others"
        wanted = "everything" if part == "doors" else listed
        assert sorted(told[name].split(", ")) == sorted(wanted.split(", ")), name


def test_files_that_the_page_on_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for named in re.findall(r"`((?:peakcast|collectors|models|reports|datasets|tests)/[\w./*-]*)`", page):
        assert list(ROOT.glob(named.rstrip("/"))), named


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {named for name in imports(path) if (named := _module_of(name)) and named != module}
        for module, path in MODULES.items()
        if module not in EXPORTS_LAZILY
    }
    TopologicalSorter(graph).prepare()


def _module_of(name: str) -> str | None:
    """The module of this project that an imported name is, or is a part of; a package is its `__init__`."""
    outer = name.rpartition(".")[0]
    candidates = (name, f"{name}.__init__", outer, f"{outer}.__init__")
    return next((module for module in candidates if module in MODULES), None)


def test_only_tracking_imports_mlflow() -> None:
    assert {m for m, path in MODULES.items() if any(within(n, "mlflow") for n in imports(path))} <= {TRACKING}


def test_only_collectors_import_torch_and_nvml() -> None:
    heavy = ("torch", "pynvml", "transformers", "accelerate", "peft", "bitsandbytes")
    users = {module for module, path in MODULES.items() if any(within(name, *heavy) for name in imports(path))}
    assert {module for module in users if not within(module, COLLECTORS)} == set()


def test_the_flow_is_seen_at_all(tmp_path: Path) -> None:
    code = tmp_path / "backwards.py"
    code.write_text("def f():\n    from peakcast import api\n    import torch.nn\n")
    assert imports(code) == ("peakcast.api", "torch.nn")
