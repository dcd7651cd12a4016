from __future__ import annotations

from pathlib import Path

import pytest

from peakcast.core.errors import RecordError
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.readme import BEGIN, END, accuracy_table, commands, with_outputs, write_table
from peakcast.reports.tables import short_markdown

TEXT = f"""# Title
```console
$ first --flag
old
$ second
```
{BEGIN}
old table
{END}
```sh
$ not run
```
"""


def test_the_table_is_replaced_between_its_markers_and_nothing_else(evaluation: Evaluation, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(TEXT)
    write_table(evaluation, path)
    assert path.read_text() == TEXT.replace("old table\n", short_markdown(evaluation))
    write_table(evaluation, path)
    assert accuracy_table(path.read_text(), path) == short_markdown(evaluation)


def test_a_file_without_markers_is_refused_and_left_alone(evaluation: Evaluation, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("nothing here")
    with pytest.raises(RecordError, match="has no lines"):
        write_table(evaluation, path)
    assert path.read_text() == "nothing here"


def test_commands_are_those_of_console_blocks_with_what_is_shown_below() -> None:
    assert list(commands(TEXT)) == [("first --flag", "old"), ("second", "")]


def test_outputs_are_rewritten_in_place() -> None:
    text = with_outputs(TEXT, {"first --flag": "new\nlines", "second": "two"}.__getitem__)
    assert list(commands(text)) == [("first --flag", "new\nlines"), ("second", "two")]
    assert text.replace("new\nlines", "old").replace("$ second\ntwo", "$ second") == TEXT
