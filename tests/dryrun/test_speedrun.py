"""A script with what speed records are made of: compiled steps, operators in Python, files of tokens that are not there."""

from __future__ import annotations

import pytest

from peakcast.collectors.dryrun.lengths import NUM_STEPS
from peakcast.collectors.dryrun.patience import MOST_STEPS
from peakcast.timelines.timeline import Category, Phase

WIDTH, LAYERS, VOCABULARY, LENGTH, WORLD_SIZE = 256, 2, 4096, 1024, 8


@pytest.mark.whole
def test_a_speed_records_script_runs_as_it_is(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run_script("speedrun.py", world_size=WORLD_SIZE)
    assert found.steps == NUM_STEPS + MOST_STEPS  # an evaluation is to come, and steps are quick
    assert list(tmp_path.iterdir()) == []
    steady = found.timelines["steady"]
    held = steady.composition(0)
    matrices = LAYERS * 12 * WIDTH**2
    assert held[Category.PARAMETERS] == pytest.approx(4 * matrices + (4 + 2) * VOCABULARY * WIDTH, rel=1e-3)
    # AdamW's two states are an eighth of the head and the table; a momentum for the matrices that the first rank has
    momenta = 4 * (3 + 1 + 4 + 4) * WIDTH**2
    adam = 2 * (4 + 2) * VOCABULARY * WIDTH // WORLD_SIZE
    assert held[Category.OPTIMIZER_STATES] == pytest.approx(adam + momenta, rel=1e-2)
    assert found.job.sequence_length == LENGTH
    assert found.job.compile
    # what the head's own Python makes on the way, transposed copies of its gradient in FP8, lives in the backward alone
    copies = [
        (int(size), Phase(int(steady.phases[born])))
        for name, size, born in zip(steady.names, steady.num_bytes, steady.born, strict=True)
        if "_scaled_mm" in name and size == VOCABULARY * LENGTH
    ]
    assert len(copies) >= 2
    assert {phase for _, phase in copies} == {Phase.BACKWARD}
    assert any("train_*.bin is not here" in warning for warning in found.answer.warnings)


def test_a_missing_file_of_tokens_has_the_form_that_the_script_reads(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)
    found = run_script("small_gpt.py")
    assert found.steps == 3
    assert found.job.sequence_length == 256
    assert any("train.bin is not here" in warning for warning in found.answer.warnings)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_of_ones_own_has_stepped_once_the_gradients_are_gone():
    import peakcast

    def train():
        import torch

        torch.empty(1, device="cuda", requires_grad=True).backward()  # of no network
        model = torch.nn.Linear(512, 512, bias=False).cuda()
        momentum = torch.zeros_like(model.weight)
        for _ in range(5):
            for _ in range(2):
                model(torch.randn(8, 512, device="cuda")).square().mean().backward()
            with torch.no_grad():
                momentum.lerp_(model.weight.grad, 0.1)
                model.weight.sub_(momentum, alpha=0.1)
            model.zero_grad(set_to_none=True)

    found = peakcast.dryrun(train, "H100-80GB")
    assert (found.steps, found.job.gradient_accumulation_steps) == (3, 2)
    assert found.timelines["steady"].composition(0)[Category.PARAMETERS] == 4 * 512**2
