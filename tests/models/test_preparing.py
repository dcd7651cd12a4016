"""Rows are prepared by as many processes as there are cores, and are the same as from one."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from peakcast.core.errors import SpecError
from peakcast.models.calibration import samples
from peakcast.models.calibration.samples import ENOUGH_TO_SHARE, prepare

ARCHITECTURES = ENOUGH_TO_SHARE // 2


@pytest.fixture
def rows(fakes):
    return fakes.rows(num_architectures=ARCHITECTURES, rows_each=4)


def prepared(rows, fakes, monkeypatch, cores, **changes):
    monkeypatch.setattr(samples, "available_cores", lambda: cores)
    found = prepare(rows, **{**fakes.stand_ins, **changes})
    return [(sample.row, sample.baseline, sample.features) for sample in found.samples], found.left_out


def test_two_processes_give_what_one_gives_and_share_the_work(rows, fakes, monkeypatch, tmp_path):
    def noted(job, device, rank):
        (tmp_path / str(os.getpid())).touch()
        if job.architecture.name == "net3":
            raise SpecError("not this one.", parameter="architecture", value="net3")
        return fakes.stand_ins["baseline_of"](job, device, rank)

    one = prepared(rows, fakes, monkeypatch, 1, baseline_of=noted)
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    assert prepared(rows, fakes, monkeypatch, 2, baseline_of=noted) == one
    assert len(list(tmp_path.iterdir())) == 3
    assert one[1] == {"the ledger cannot: not this one": 4}


def test_few_rows_start_no_process(rows, fakes, monkeypatch):
    monkeypatch.setattr(multiprocessing.context.ForkProcess, "start", None)
    assert prepared(rows[: 2 * ENOUGH_TO_SHARE - 1], fakes, monkeypatch, 2)[1] == {}


def test_what_a_lost_process_did_not_answer_is_answered_here(rows, fakes, monkeypatch):
    parent = os.getpid()

    def dies(job, device, rank):
        if job.architecture.name == "net3" and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return fakes.stand_ins["baseline_of"](job, device, rank)

    assert prepared(rows, fakes, monkeypatch, 2, baseline_of=dies) == prepared(rows, fakes, monkeypatch, 1)
