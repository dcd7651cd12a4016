"""Options that a command receives together, as one value (`peakcast/commands/option_groups.py`)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from peakcast.commands.option_groups import OptionGroup, takes_groups


@dataclass(frozen=True, slots=True)
class Size(OptionGroup):
    rows: Annotated[int, typer.Option(min=1)] = 1
    wide: Annotated[bool, typer.Option("--wide")] = False


@dataclass(frozen=True, slots=True)
class ColouredSize(Size):
    colour: str | None = None


def declared(*, name: str = "x", size: ColouredSize, last: bool = False) -> None:
    print(name, size, last)


@pytest.fixture
def app() -> typer.Typer:
    application = typer.Typer()
    application.command()(takes_groups(declared))
    return application


def test_the_options_stand_where_the_group_stands_with_those_of_the_group_that_it_extends_first() -> None:
    parameters = inspect.signature(takes_groups(declared)).parameters
    assert list(parameters) == ["name", "rows", "wide", "colour", "last"]
    assert [one.default for one in parameters.values()] == ["x", 1, False, None, False]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ([], "x ColouredSize(rows=1, wide=False, colour=None) False"),
        (["--rows", "3", "--wide", "--name", "y"], "y ColouredSize(rows=3, wide=True, colour=None) False"),
        (["--colour", "red", "--last"], "x ColouredSize(rows=1, wide=False, colour='red') True"),
    ],
)
def test_a_command_gets_what_was_given_and_the_defaults_of_the_rest(
    app: typer.Typer, words: list[str], printed: str
) -> None:
    assert CliRunner().invoke(app, words).stdout.strip() == printed


def test_an_option_is_checked_as_its_field_declares(app: typer.Typer) -> None:
    assert CliRunner().invoke(app, ["--rows", "0"]).exit_code == 2
