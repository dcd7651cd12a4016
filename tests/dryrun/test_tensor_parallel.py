"""Layers that are split by `parallelize_module`: what a rank holds is counted by hand."""

from __future__ import annotations

import pytest

from peakcast.timelines.timeline import Category, Phase

VOCABULARY, HIDDEN, INNER, LAYERS, TOKENS = 32_000, 1024, 2816, 2, 2 * 1024
"""Those of `scripts/tensor_parallel.py`."""


@pytest.mark.parametrize(
    ("size", "logits", "world", "rank"),
    [
        (4, "whole", 4, 0),
        pytest.param(4, "whole", 4, 3, marks=pytest.mark.whole),
        pytest.param(4, "split", 4, 1, marks=pytest.mark.whole),
        (2, "split", 8, 5),
    ],
)
def test_a_rank_holds_its_part_of_what_is_split(run_script, size, logits, world, rank):
    found = run_script("tensor_parallel.py", str(size), logits, rank=rank, world_size=world)
    layout = found.job.parallelism
    assert (layout.tensor_parallel_size, layout.num_replicas) == (size, world // size)
    split, norms = 2 * VOCABULARY * HIDDEN + LAYERS * 3 * HIDDEN * INNER, (LAYERS + 1) * HIDDEN
    weights = 2 * (split // size + norms) // (world // size)
    steady = found.timelines["steady"]
    composition = steady.composition(0)
    assert composition[Category.PARAMETERS] == pytest.approx(weights, rel=1e-3)
    assert composition[Category.OPTIMIZER_STATES] == pytest.approx(2 * weights, rel=1e-3)
    part, whole = 2 * TOKENS * HIDDEN // size, 2 * TOKENS * HIDDEN
    kept = part + whole + 4 * 2 * TOKENS * INNER // size  # a norm's input, its whole output, w1's, silu's, w3's and w2's
    scores = 2 * TOKENS * VOCABULARY // (size if logits == "split" else 1)
    activations = LAYERS * kept + part + whole + 2 * scores  # the logits and their log-softmax
    if world > size:
        activations += 2 * (2 * VOCABULARY * HIDDEN // size + HIDDEN)  # both ends, which FSDP2's root has gathered
    backward = steady.composition(steady.peak(Phase.BACKWARD if logits == "whole" else Phase.LOSS).instant)
    assert backward[Category.ACTIVATIONS] == pytest.approx(activations, rel=0.01)
