"""Evaluation is counted as the script asks for it, or left out when asked, and it is said either way."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.core.units import MIB
from peakcast.timelines.timeline import Category

WIDTH = 1024


def training(evaluates):
    """A network that, where it evaluates, does it on batches a hundred times as large as those that it trains on."""
    import torch

    def network():
        return torch.nn.Sequential(torch.nn.Embedding(100, WIDTH), torch.nn.Linear(WIDTH, WIDTH)).cuda()

    def train():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            if evaluates:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(6400, dtype=torch.int64, device="cuda"))
                model.train()
            reference = network().eval()
            with torch.no_grad():  # no evaluation: it is never trained
                wanted = reference(torch.ones(64, dtype=torch.int64, device="cuda"))
            (model(torch.ones(64, dtype=torch.int64, device="cuda")) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_evaluation_is_counted_or_left_out():
    counted = peakcast.dryrun(training(True), "A100-80GB")
    skipped = peakcast.dryrun(training(True), "A100-80GB", skip_evaluation=True)
    without = peakcast.dryrun(training(False), "A100-80GB", skip_evaluation=True)
    peaks = [found.timelines["steady"].peak().num_bytes for found in (counted, skipped, without)]
    assert peaks[0] > 2 * 6400 * WIDTH * 4
    assert peaks[1] == pytest.approx(peaks[2], abs=MIB / 8)
    assert peaks[2] < peaks[0] / 2
    assert counted.job.micro_batch_size * counted.job.sequence_length == 64  # what it trains on
    (said,) = [said for said in counted.answer.assumptions if "evaluation" in said]
    assert "test_evaluation.py:28 counts" in said
    assert any("test_evaluation.py:28 is left out" in warning for warning in skipped.answer.warnings)
    codes = ({finding.code for finding in found.answer.findings} for found in (counted, skipped))
    assert ["peak_in_evaluation" in found for found in codes] == [True, False]
    assert not any("evaluation" in said for said in (*without.answer.assumptions, *without.answer.warnings))
    assert "generation and saving checkpoints during the run" in counted.answer.not_modelled
    assert "evaluation, generation and saving checkpoints during the run" in skipped.answer.not_modelled


def test_the_trainer_evaluates_within_the_steps_that_are_seen(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    often = ["--bf16", "--eval_strategy", "steps", "--eval_steps", "500", "--per_device_eval_batch_size", "64"]
    found = run_script("trainer.py", *often)
    skipped = run_script("trainer.py", *often, skip_evaluation=True)
    assert any("counts, with" in said for said in found.answer.assumptions)
    assert any("Trainer's evaluation is left out" in warning for warning in skipped.answer.warnings)
    ours, theirs = (one.timelines["steady"].peak().num_bytes for one in (found, skipped))
    assert ours > theirs


def warming_up():
    """Three steps, after which the optimizer begins anew; then an evaluation, and training."""
    import torch

    model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
    for steps in (3, 100):
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(steps):
            if steps > 3 and step % 50 == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(16 * WIDTH, WIDTH, device="cuda"))
                model.train()
            model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del optimizer


def test_an_evaluation_after_a_warm_up_is_met_again_with_the_optimizer_states_of_training():
    found = peakcast.dryrun(warming_up, "A100-80GB")
    weight = WIDTH * WIDTH * 4
    assert found.steps == 4
    for timeline in (found.timelines["steady"], found.timelines["run"]):
        peak = timeline.peak()
        assert peak.num_bytes > (2 * 16 + 3) * weight  # into the evaluation and out of it, the weight and its states
        assert timeline.composition(peak.instant)[Category.OPTIMIZER_STATES] == pytest.approx(2 * weight, abs=1024)
    assert len(found.timelines["run"].phases) > len(found.timelines["steady"].phases)


def test_an_evaluation_after_many_steps_is_reached_by_steps_that_train_nothing(run_script):
    found = run_script("late_evaluation.py")
    rows = 64_000 * WIDTH * 4
    assert found.timelines["run"].peak().num_bytes > 2 * rows
    assert found.timelines["steady"].peak().num_bytes > 2 * rows
    states = found.timelines["run"].composition(found.timelines["run"].peak().instant)[Category.OPTIMIZER_STATES]
    assert states == pytest.approx(4 * WIDTH * WIDTH * 4, rel=0.01)
    assert any("late_evaluation.py:21 counts" in said for said in found.answer.assumptions)
    assert any("the network's forward and backward were left out" in said for said in found.answer.warnings)


def test_a_loop_that_reads_gradients_is_answered_without_a_later_evaluation(run_script):
    found = run_script("late_evaluation.py", "--reads")
    assert found.timelines["run"].peak().num_bytes < 64_000 * WIDTH * 4
    assert any("evaluates after the steps that were followed" in said for said in found.answer.warnings)


def test_an_evaluation_that_was_not_reached_is_said(monkeypatch):
    from peakcast.collectors.dryrun import evaluation
    from peakcast.collectors.dryrun.noted import RunFindings
    from peakcast.collectors.tracing.tracer import Tracer

    for text, skip, expected in (
        ("model.eval()", False, ["more"]),
        ("model.eval()", True, []),
        ("model.train()", False, []),
    ):
        monkeypatch.setattr(evaluation, "text_of_script", lambda text=text: text)
        notes = RunFindings()
        evaluation.Evaluations(Tracer(), notes, skip=skip).said(set(), 0)
        assert [finding.direction for finding in notes.findings] == expected


def test_a_line_that_has_put_a_teacher_into_evaluation_mode_is_no_evaluation_to_come(monkeypatch):
    torch = pytest.importorskip("torch")
    from peakcast.collectors.dryrun import evaluation
    from peakcast.collectors.dryrun.noted import RunFindings
    from peakcast.collectors.tracing.tracer import Tracer

    script = "teacher = make()\nteacher.eval()\n"
    monkeypatch.setattr(evaluation, "text_of_script", lambda: script)
    monkeypatch.setattr(evaluation.sys, "argv", ["train.py"])
    monkeypatch.setattr(torch.nn.Module, "eval", torch.nn.Module.eval)  # undone afterwards
    evaluations = evaluation.Evaluations(Tracer(), RunFindings(), skip=False)
    evaluations.install()
    assert evaluations.come_later
    exec(compile(script, "train.py", "exec"), {"make": lambda: torch.nn.Linear(1, 1)})
    assert not evaluations.come_later
