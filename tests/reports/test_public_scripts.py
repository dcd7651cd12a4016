"""Dry runs of public scripts: the page says what the two tables hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.core.units import MIB
from peakcast.reports.public_scripts import PAGES, DryRunPeaks, PublicRun, main, page, read_answers, read_runs


def answer(name: str, allocated: int, reserved: int) -> DryRunPeaks:
    """An answer of so many MiB, with bars of ± 10 %."""
    bars = {
        f"{quantity}{suffix}_bytes": round(mebibytes * share * MIB)
        for quantity, mebibytes in (("allocated", allocated), ("reserved", reserved))
        for suffix, share in (("", 1), ("_lower", 0.9), ("_upper", 1.1))
    }
    return DryRunPeaks(name=name, peakcast="0", torch="2", steps=3, **bars)


@pytest.fixture
def run() -> PublicRun:
    where = {"repository": "a/b", "commit": "c", "path": "log.txt", "script": "train.py", "environment": ""}
    return PublicRun(
        name="one",
        gpu="H100-80GB",
        num_gpus=8,
        torch="2.8",
        allocated_mib=1000,
        reserved_mib=2000,
        note="as it is.",
        **where,
    )


def test_errors_and_bars_are_those_of_the_printed_peaks(run: PublicRun) -> None:
    others = [replace(run, name="two", note=""), replace(run, name="three", reserved_mib=None, note="")]
    answers = {"one": answer("one", 1010, 1800), "two": answer("two", 1200, 1900), "three": answer("three", 1000, 1)}
    said = page([run, *others], answers)
    assert "- allocated: 3 runs, median error 1.00%, worst 20.0%; 2 of 3 inside the 90 % bar\n" in said
    assert "- reserved: 2 runs, median error 7.50%, worst 10.0%; 1 of 2 inside the 90 % bar\n" in said
    assert "| one | 2.8 | 1,000 | 1,010 | +1.00% | yes | 2,000 | 1,800 | -10.00% | no |" in said
    assert "| three | 2.8 | 1,000 | 1,000 | +0.00% | yes | – | 1 | – | – |" in said
    assert said.endswith("- one: as it is.\n")


def test_the_page_is_that_of_the_tables() -> None:
    runs, answers = read_runs(), read_answers()
    assert answers.keys() <= {run.name for run in runs}
    assert (PAGES / "README.md").read_text(encoding="utf-8") == page(runs, answers)


def test_a_name_of_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "no such run"])
    assert "NAME='no such run' begins the name of no run; there are modded-nanogpt" in capsys.readouterr().err
