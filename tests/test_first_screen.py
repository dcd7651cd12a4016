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
