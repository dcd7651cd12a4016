"""What is installed is what stands in the folders, and starting up loads nothing heavy."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import Distribution

import peakcast
from peakcast.installing import BuildPy

ROOT = Path(__file__).resolve().parents[1]
CODE_FOLDERS = ("peakcast", "collectors", "datasets", "models", "reports")
OF_DATA = {"peakcast.datasets.recipes"}
"""Folders without code that go with an installation."""
HEAVY = ("torch", "mlflow", "pandas", "sklearn", "matplotlib", "jinja2", "transformers", "pydantic", "rich", "gradio")


def _setuptools() -> dict[str, object]:
    tables: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return tables


def _packages_in_folders() -> set[str]:
    folders = [init.parent for top in CODE_FOLDERS for init in (ROOT / top).rglob("__init__.py")]
    names = [folder.relative_to(ROOT).parts for folder in folders if "__pycache__" not in folder.parts]
    return {".".join(parts if parts[0] == "peakcast" else ("peakcast", *parts)) for parts in names}


def test_every_folder_of_code_is_a_listed_package_and_every_listed_package_is_a_folder() -> None:
    listed = _setuptools()["packages"]
    assert isinstance(listed, list)
    assert sorted(listed) == sorted(_packages_in_folders() | OF_DATA)


def test_every_code_folder_of_the_root_is_mapped_into_the_one_import_name() -> None:
    mapped = _setuptools()["package-dir"]
    tops = {name.split(".")[1] for name in _packages_in_folders() | OF_DATA if "." in name}
    outside = {top for top in tops if not (ROOT / "peakcast" / top).is_dir()}
    assert mapped == {"peakcast": "peakcast", **{f"peakcast.{top}": top for top in sorted(outside)}}


def test_what_is_compiled_is_optional_and_its_source_is_there() -> None:
    modules = _setuptools()["ext-modules"]
    assert isinstance(modules, list)
    for module in modules:
        assert module["optional"]
        assert all((ROOT / source).is_file() for source in module["sources"])


def test_datasets_is_data_only_lest_it_shadow_hugging_faces_library() -> None:
    assert not list((ROOT / "datasets").rglob("__init__.py"))


def test_the_licence_goes_with_an_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (name,) = project["license-files"]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert project["license"] == "Apache-2.0"
    assert "Apache License\n" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_changelog_begins_with_what_is_unreleased_and_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version] == ["Unreleased", peakcast.__version__]


def _heavy_modules_after(code: str) -> list[str]:
    probe = f"{code}\nimport sys\nprint('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    loaded: list[str] = eval(done.stdout.rpartition("LOADED")[2])
    return loaded


@pytest.mark.parametrize(
    "code",
    [
        "import peakcast",
        "import peakcast.commands.cli",
        "import peakcast; peakcast.predict; peakcast.predict_batch",
        "from peakcast.commands.cli import app; app(['--help'], standalone_mode=False)",
        "import peakcast; peakcast.predict('llama-3.1-8b', 'H100-80GB')",
        "from peakcast.commands import cli; cli._run(['predict', '--model', 'llama-3.1-8b', '--gpu', 'H100-80GB'])",
        "from peakcast.commands import cli; cli._run(['explain', '--model', 'llama-3.1-8b', '--snapshot', '/dev/null'])",
        "from peakcast.commands import cli; cli._run(['doctor'])",
    ],
)
def test_starting_and_predicting_load_nothing_heavy(code: str) -> None:
    assert _heavy_modules_after(code) == []


def test_an_editable_install_byte_compiles_the_modules_of_its_packages_alone(tmp_path: Path) -> None:
    for folder in ("of_package", "beside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    for editable in (False, True):
        distribution = Distribution({"packages": ["package"], "package_dir": {"package": str(tmp_path / "of_package")}})
        distribution.script_name = "setup.py"
        command = BuildPy(distribution)
        command.build_lib = str(tmp_path / "built")
        command.ensure_finalized()
        command.editable_mode = editable
        command.run()
        assert bool(list(tmp_path.glob("of_package/__pycache__/__init__.*.pyc"))) is editable
    assert not list(tmp_path.glob("beside/__pycache__/*"))
