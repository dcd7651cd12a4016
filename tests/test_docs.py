"""The README is true: its commands print what it shows, its Python runs, its figures are the command's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from peakcast import api, cli
from peakcast.reports.readme import accuracy_table, commands, run
from peakcast.reports.tables import headline_markdown

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
REFRESH = "python -P -m peakcast.reports.readme refreshes README.md"


@pytest.mark.parametrize(("command", "shown"), list(commands(TEXT)), ids=[command[:60] for command, _ in commands(TEXT)])
def test_a_command_of_the_readme_prints_what_the_readme_shows(command: str, shown: str) -> None:
    assert "peakcast" in command
    assert run(command, ROOT) == shown, REFRESH


@pytest.mark.slow
def test_the_accuracy_table_is_what_evaluate_prints() -> None:
    assert accuracy_table(TEXT, README) == headline_markdown(api.evaluate()), REFRESH


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.split()[0] in ("yes", "no", "uncertain")


def test_every_command_is_in_the_readme_and_every_one_there_exists() -> None:
    existing = {command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands if command.callback}
    assert set(re.findall(r"`peakcast ([a-z-]+)", TEXT)) == existing


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", TEXT):
        assert (ROOT / target).exists(), target
