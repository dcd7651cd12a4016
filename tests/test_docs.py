"""The README and the pages of docs/ are true: their commands print what they show, their Python runs, their figures are
the command's."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peakcast import api
from peakcast.commands import cli
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import DIALECTS, dialect_of
from peakcast.measurements.store import load
from peakcast.models.calibration.samples import prepare as prepare_rows
from peakcast.reports.readme import accuracy_table, commands, prepare, run
from peakcast.reports.render import slug
from peakcast.reports.tables import HEADLINE_COLUMNS, short_cells, short_markdown, targets_note

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
REFRESH = "python -P -m peakcast.reports.readme FILE refreshes it"
PAGES = {path.name: path for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
RUNS_SCRIPTS = "dryrun.md"
"""Its commands run whole training scripts, and each needs what the one before has written."""
LONG = re.compile(
    r"PEAKCAST_RECIPES=recipes|peakcast ((explain|replay|collect) .*--(trace|module)|verify grid.yaml)"
    r"|peakcast (import-published|evaluate --against published)"
)
"""Commands that record a network or use what was recorded, and those that trace a step: other tests hold the answers
against traces; here they take as long as all other commands together. And those that import the published rows, which
`collectors/test_published.py` compares with the tables to the byte, and judge them, as `test_check.py` does with others."""


def takes_long(page: str, command: str) -> bool:
    """Whether `command` of `page` runs only where the tests marked `whole` do."""
    return page == RUNS_SCRIPTS or LONG.search(command) is not None


SHOWN = [
    pytest.param(
        page,
        *pair,
        id=f"{page}: {pair[0][:60]}",
        marks=[pytest.mark.whole] * takes_long(page, pair[0]),
    )
    for page, path in PAGES.items()
    for pair in commands(path.read_text(encoding="utf-8"))
]


class Page:
    """A folder in which the commands of one page run in their order: one may need what those before it wrote."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.name, self.folder = path.name, prepare(folder, path)
        self._waiting = [command for command, _ in commands(path.read_text(encoding="utf-8"))]

    def printed(self, command: str, programs: Path) -> str:
        """What `command` prints. One that takes long runs those before it first, whose own tests may be deselected."""
        if takes_long(self.name, command):
            while self._waiting[0] != command:
                run(self._waiting.pop(0), self.folder, [programs])
        self._waiting.remove(command)
        return run(command, self.folder, [programs])


@pytest.fixture(scope="module")
def opened_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Each page with a folder of its own."""
    return {name: Page(path, tmp_path_factory.mktemp(name.removesuffix(".md"))) for name, path in PAGES.items()}


SERVER = """
import json, os, socket, sys
from peakcast.commands import cli

with open(os.devnull, "w") as sys.stdout:
    for command in ("predict", "explain"):
        cli._run([command, "--model", "gpt2", "--gpu", "H100-80GB"])
sys.stdout = sys.__stdout__
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
running = set()
while True:
    client, _ = listener.accept()
    running = {child for child in running if not os.waitpid(child, os.WNOHANG)[0]}
    if child := os.fork():
        running.add(child)
        client.close()
        continue
    question, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
    folder, environment, sys.argv = json.loads(question)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        cli.main()
    except SystemExit as error:
        code = error.code
    sys.stderr.flush()
    client.sendall(bytes([code]))
    os._exit(code)
"""
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
question = json.dumps([os.getcwd(), dict(os.environ), sys.argv]).encode()
socket.send_fds(server, [question], [0, 1, 2])
sys.exit(ord(server.recv(1)))
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose `peakcast` is a copy of a process that has imported it: a start takes longer than most commands."""
    folder = tmp_path_factory.mktemp("forked")
    address, script = folder / "socket", folder / "peakcast"
    script.write_text(CLIENT.format(python=sys.executable, address=str(address)), encoding="utf-8")
    script.chmod(0o755)
    environment = {**os.environ, "COLUMNS": "120"}
    command = [sys.executable, "-P", "-c", SERVER, str(address)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        yield folder
        server.kill()


@pytest.mark.parametrize(("page", "command", "shown"), SHOWN)
def test_a_command_prints_what_its_page_shows(
    page: str, command: str, shown: str, opened_pages: dict[str, Page], forked: Path
) -> None:
    assert opened_pages[page].printed(command, forked) == shown, REFRESH


@pytest.mark.whole
def test_the_accuracy_table_is_what_evaluate_prints() -> None:
    assert accuracy_table(TEXT, README) == short_markdown(api.evaluate(splits=["architecture"])), REFRESH


def test_the_accuracy_table_is_that_of_the_reports() -> None:
    *lines, note, targets, _ = [line for line in accuracy_table(TEXT, README).splitlines()[2:] if line]
    reports = {path.parent.name: path.read_text(encoding="utf-8") for path in (ROOT / "reports").glob("*/report.md")}
    assert len(lines) > 5
    for line in lines:
        cells = _cells(line)
        report = reports[slug(cells[0])]
        whole = [row for row in map(_cells, report.splitlines()) if len(row) == len(HEADLINE_COLUMNS)]
        assert cells in [short_cells(row) for row in whole if row[2].startswith("≥")], REFRESH
        assert note in report, REFRESH
    assert targets == targets_note(), REFRESH


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_reports_are_of_the_rows_and_the_ledger_of_today() -> None:
    """Of every twenty-fifth row the stored baselines are those that the ledger gives."""
    stored: dict[str, dict[str, int]] = {}
    for path in (ROOT / "reports").glob("*/rows.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                stored.setdefault(row["key"], {})[row["quantity"]] = int(row["baseline_bytes"])
    chosen = set(sorted(stored)[::25])
    found = prepare_rows(row for row in load() if row.key in chosen).samples
    assert len({sample.row.key for sample in found}) == len(chosen) > 50
    for sample in found:
        baselines = stored[sample.row.key]
        assert {name: getattr(sample.baseline, name) for name in baselines} == baselines, "peakcast reproduce refreshes it"


@pytest.mark.parametrize("page", [name for name in PAGES if name != README.name])
def test_the_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepare(tmp_path, PAGES[page]))
    for snippet in re.findall(r"^```python\n(.*?)^```$", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(snippet, page, "exec"), {})


def test_the_python_of_the_readme_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for snippet in re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out.split()[0] in ("yes", "no", "uncertain")


def test_every_command_is_in_the_readme_and_every_one_there_exists() -> None:
    existing = {command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands if command.callback}
    assert set(re.findall(r"`peakcast ([a-z-]+)", TEXT)) == existing


def test_every_example_is_on_the_page_of_configurations_and_known() -> None:
    examples = sorted((ROOT / "docs" / "examples").glob("*.*"))
    text = PAGES["configs.md"].read_text(encoding="utf-8")
    named = [path for path in examples if f"examples/{path.name}" in text]
    linked = [ROOT / "docs" / target for target in re.findall(r"\]\((\.\./tests/dialects/recorded/[^)]+)\)", text)]
    found = {dialect_of(opened(path).values) for path in (*named, *linked)}
    asked_for = {"trl", "transformers"}  # by --dialect alone
    of_its_package = {"nemo_2"}  # which is read where it is installed
    assert found >= set(DIALECTS) - {"job", "hf_config", "peft", "fsdp", "megatron_yaml"} - asked_for - of_its_package


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGES[page].read_text(encoding="utf-8")):
        assert (PAGES[page].parent / target).exists(), target


@pytest.mark.parametrize("command", [command.callback for command in cli.app.registered_commands if command.callback])
def test_a_page_of_a_command_is_linked_in_the_readme(command: Callable[..., object]) -> None:
    page = f"docs/{command.__name__.replace('_', '-')}.md"
    assert not (ROOT / page).exists() or f"({page})" in TEXT


def test_every_test_that_the_page_on_reliability_names_exists() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGES["reliability.md"].read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if f"def {name}(" not in tests] == []
