"""The first screen of an answer, as the command prints it."""

from __future__ import annotations

import pytest

from peakcast.commands import cli
from peakcast.jobs.adapter_settings import RANKED


@pytest.mark.parametrize("method", sorted({*RANKED, "ia3"} - {"qlora", "oft"}))
def test_every_method_of_adapters_is_named(method, capsys):
    rank = ["--lora-rank", "8"] if method in RANKED else []
    question = ["--model", "llama-3.2-1b", "--sequence-length", "512", "--gpu", "A100-80GB", "--method", method, *rank]
    assert cli._run(["predict", *question]) in cli.FITS_EXIT_CODES.values()
    printed = capsys.readouterr()
    assert f"Asked: llama-3.2-1b, {'LoRA' if method == 'lora' else f'adapters ({method})'}, " in printed.out, printed.err


def test_the_columns_of_a_peak_above_1000_gib_are_apart(capsys):
    cli._run(["predict", "--model", "llama-3.1-405b", "--sequence-length", "512", "--gpu", "A100-80GB"])
    header, *rows = (line.split() for line in capsys.readouterr().out.split("\n\n")[1].splitlines())
    assert header[:4] == ["peak", "GiB", "90", "%"]
    for row in rows[:3]:
        lower, peak, upper = (float(row[column].replace(",", "")) for column in (2, 1, 4))
        assert 1000 < lower <= peak <= upper
