"""The guide of contributors is true: each example, applied to a copy of the checkout, does there what it says."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
EXAMPLES = {path.stem: path.read_text(encoding="utf-8").partition("\n")[2] for path in PAGES}
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"(New file|At the end of|In) `([^`]+)`(?:, after the line (`+)(.+)\3)?:")
COMMANDS = {"peakcast": "-P -m peakcast", "pytest": "-P -m pytest -q -p no:cacheprovider", "python": ""}
"""What the environment that the guide asks for has on its path."""


class Change(NamedTuple):
    """A block of the guide that goes into a file: as the whole of it, at its end, or after a line."""

    how: str
    path: str
    after: str
    text: str

    def apply(self, root: Path) -> None:
        """Change the file under `root`."""
        path = root / self.path
        if self.how == "New file":
            path.parent.mkdir(parents=True, exist_ok=True)
            assert not path.exists(), f"{self.path} is there already"
            path.write_text(self.text, encoding="utf-8")
        elif self.how == "At the end of":
            path.write_text(path.read_text(encoding="utf-8") + self.text, encoding="utf-8")
        else:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == self.after]
            path.write_text("".join([*lines[:number], self.text, *lines[number:]]), encoding="utf-8")


def changes(section: str) -> Iterator[Change]:
    """The changes of a section, in order; a block is of the line before it, which says where it goes."""
    before = 0
    for block in BLOCK.finditer(section):
        told = section[before : block.start()].strip().rpartition("\n\n")[2]
        place = PLACE.fullmatch(told)
        assert place or block[1] == "sh", f"nothing says where this goes: {block[0]}"
        if place:
            yield Change(place[1], place[2], place[4] or "", block[2])
        before = block.end()


def commands(section: str) -> list[str]:
    """The lines that a section has run."""
    return [line for language, text in BLOCK.findall(section) if language == "sh" for line in text.splitlines()]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the tracked files, with the extensions that were compiled, and the commands of an environment."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout here")
    root, programs = tmp_path / "checkout", tmp_path / "programs"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    compiled = [path.relative_to(ROOT).as_posix() for path in (ROOT / "models").rglob("*.so")]
    for name in (*filter(None, listed.stdout.decode().split("\0")), *compiled):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
    for words in (["init", "--quiet"], ["add", "--all"]):  # some tests ask which files are tracked
        subprocess.run(["git", *words], cwd=root, check=True)
    programs.mkdir()
    for name, arguments in COMMANDS.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    return root


LONGEST = ("family", "optimizer", "source", "dialect")
"""The first two record and trace networks, the third imports every table, the last asks all dialects of every file."""
NAMES = [pytest.param(name, marks=[pytest.mark.whole] * (name in LONGEST)) for name in EXAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_does_what_the_guide_says(name: str, checkout: Path) -> None:
    section = EXAMPLES[name]
    written = list(changes(section))
    for change in written:
        change.apply(checkout)
    python = [change.path for change in written if change.path.endswith(".py")]
    subprocess.run(["git", "add", "--all"], cwd=checkout, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PEAKCAST_"))}
    environment |= {"PYTHONPATH": str(checkout), "PATH": f"{checkout.parent / 'programs'}:{environment['PATH']}"}
    environment |= {"GIT_DIR": str(checkout / ".git"), "PEAKCAST_RECIPES": str(checkout.parent / "recipes")}
    checks = [f"python -P -m ruff check {' '.join(python)}"] if python else []
    for command in (*checks, *commands(section)):
        done = subprocess.run(
            ["sh", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "pytest" not in command or " passed" in done.stdout, f"{command}\n{done.stdout}"


def test_the_guide_has_its_five_examples_each_with_commands() -> None:
    assert len(EXAMPLES) == 5
    assert all(f"docs/contributing/{name}.md" in GUIDE for name in EXAMPLES)
    assert all(commands(section) and list(changes(section)) for section in EXAMPLES.values())


def test_what_the_guide_imports_is_there() -> None:
    """The longest examples run only where `whole` is asked for; a name that has changed is seen here."""
    added = {change.path for section in EXAMPLES.values() for change in changes(section)}
    found = re.findall(r"^from (peakcast\.[\w.]+) import (.+)$", "\n".join(EXAMPLES.values()), re.MULTILINE)
    assert len(found) > 5
    for module, names in found:
        if module.removeprefix("peakcast.").replace(".", "/") + ".py" not in added:
            there = vars(importlib.import_module(module))
            assert [name for name in names.split(", ") if name not in there] == [], module


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.stem)
def test_links_of_the_guide_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", BLOCK.sub("", path.read_text(encoding="utf-8"))):
        assert (path.parent / target).exists(), target
