"""The first screen of an answer, as the command prints it."""

from __future__ import annotations

import pytest

from peakcast import api
from peakcast.commands import cli
from peakcast.jobs.adapter_settings import RANKED
from peakcast.printing.screen import prediction_text


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


def test_where_host_memory_decides_what_lowers_the_gpus_peak_is_not_advised():
    job = {
        "architecture": "llama-3.1-8b",
        "framework": "deepspeed",
        "parallelism": {"data_parallel_size": 8, "zero_stage": 3},
        "offload": {"optimizer": True},
    }
    answer = api.predict(job, "H100-80GB", host_memory_gib=32)
    assert (answer.fits, answer.limit.quantity) == ("no", "peak_host_bytes")
    text = " ".join(prediction_text(answer).split())
    assert "First to try: more host memory for each rank" in text
    assert "(--set offload.optimizer=false)" in text
    assert "allocated peak:" not in text
