"""Gradients that a loop adds to float32 ones after each backward, as nanotron does with `accumulate_grad_in_fp32`."""

from __future__ import annotations

import numpy as np
import pytest

from peakcast.catalog import architecture
from peakcast.core.units import round_up
from peakcast.jobs.spec import Parallelism, Precision, TrainingJob
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.ignored import ignored_findings
from peakcast.timelines.timeline import Category, Phase, Timeline

WIDE = Precision(gradients="float32", optimizer_states="float32", main_parameters="float32")


def job(**settings: object) -> TrainingJob:
    asked = {"architecture": architecture("smollm2-135m"), "framework": "torch", "sequence_length": 128, "precision": WIDE}
    return TrainingJob(**{**asked, **settings})  # type: ignore[arg-type]


def bytes_while(step: Timeline, phase: Phase) -> list[int]:
    """Bytes of gradients at each instant of a phase."""
    mine = step.categories == Category.GRADIENTS
    born, dies, sizes = step.born[mine], step.dies[mine], step.num_bytes[mine]
    return [int(sizes[(born <= now) & (dies > now)].sum()) for now in np.flatnonzero(step.phases == phase)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_float32_gradients_stay_and_those_of_a_micro_batch_go(ranks: int, accumulation: int) -> None:
    """4 bytes for each parameter throughout, 2 more from a backward until it has ended."""
    asked = job(gradient_accumulation_steps=accumulation, parallelism=Parallelism(data_parallel_size=ranks))
    step = ledger(asked)
    elements = sum(tensor.numel for tensor in stored_parameters(asked))
    sums = round_up(4 * elements, MIN_BLOCK_BYTES)
    assert bytes_while(step, Phase.FORWARD)[0] == sums
    assert bytes_while(step, Phase.GRADIENT_CLIPPING)[0] == sums
    most = max(bytes_while(step, Phase.BACKWARD))
    assert most == pytest.approx(6 * elements, rel=0.001)  # each tensor is rounded to 512 bytes
    assert not [found for found in ignored_findings(asked) if found.parameter == "precision.gradients"]


def test_sharded_gradients_are_not_summed_so_and_the_answer_says_it() -> None:
    sharded = job(parallelism=Parallelism(data_parallel_size=2, sharding="fsdp2"))
    assert [found for found in ignored_findings(sharded) if found.parameter == "precision.gradients"]
