"""A recorded micro-batch, placed on a step as often as the job runs it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from peakcast import catalog
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import ActivationCheckpointing, Parallelism, TrainingJob
from peakcast.models.ledger.recorded.composing import recipe_ledger
from peakcast.models.recipes.recipe import recorded
from peakcast.timelines.timeline import Phase, Timeline
from tests.models.recipes.walks import Library


def step(num_micro_batches: int, which: str = "steady") -> Timeline:
    job = TrainingJob(
        architecture=catalog.architecture("llama-3.2-1b"),
        micro_batch_size=2,
        sequence_length=256,
        gradient_accumulation_steps=num_micro_batches,
    )
    return recipe_ledger(job, recorded(Library(8), (2, 256)), step=which)


def alive(timeline: Timeline, name: str) -> list[tuple[int, int]]:
    """The lives of the entries of that name, the earliest first."""
    own = [index for index, other in enumerate(timeline.names) if other == name]
    return sorted(zip(timeline.born[own].tolist(), timeline.dies[own].tolist(), strict=True))


def test_a_micro_batch_leaves_what_the_next_one_lets_go() -> None:
    """The plain loop's `logits` are a variable: the old ones live until the next forward has new ones."""
    (old, first, second) = alive(step(2), "logits")
    assert old[0] == 0
    assert first[0] + 1 == old[1]  # both are there while the lm_head runs
    assert second[0] + 1 == first[1]
    assert second[1] >= len(step(2).phases)  # the last ones are there when the step ends


def test_the_first_step_finds_nothing_left_over() -> None:
    assert len(alive(step(2, "first"), "logits")) == 2
    assert len(alive(step(1, "first"), "logits")) == 1


def test_what_outlives_the_step_is_held_once() -> None:
    assert len(alive(step(2), "input_ids")) == len(alive(step(1), "input_ids")) == 1


def test_gradients_stand_from_the_first_micro_batch_on() -> None:
    """Eight layers' gradients; those of the second micro-batch are added to them at once."""
    made, added = alive(step(2), "w.grad")[:8], alive(step(2), "w.grad")[8:]
    assert {dies for _, dies in made} == {len(step(2).phases) - 1}  # zero_grad
    assert [dies - born for born, dies in added] == [1] * 8


def test_more_than_two_micro_batches_need_as_much_as_two() -> None:
    two, many = step(2), step(7)
    assert np.array_equal(two.num_bytes, many.num_bytes)


def test_ddp_clones_what_the_network_returns_unless_layers_are_checkpointed() -> None:
    """The Trainer looks for unused parameters (`find_unused_parameters`) only then. Both the logits and their clone are
    there: 1,000 bytes each."""
    one = recorded(Library(8), (2, 256))
    head, phases = one.walk.num_places - 1, list(one.walk.phases)
    phases[head] = bytes([Phase.LOSS] * len(phases[head]))
    returned = one.walk.names.index("logits", one.walk.names.index("logits") + 1)
    known = replace(one, walk=replace(one.walk, phases=tuple(phases), returned=(returned,)))
    plain = job_from_mapping({"architecture": "llama-3.2-1b", "micro_batch_size": 2, "sequence_length": 256})
    job = plain.replace(parallelism=Parallelism(data_parallel_size=2))
    found = recipe_ledger(job, known)
    cloned = [index for index, name in enumerate(found.names) if name == "outputs.logits"]
    assert found.num_bytes[cloned].tolist() == [1024, 1024]
    assert {found.labels[instant] for instant in found.born[cloned]} == {"ddp_sink.clone"}
    for other in (plain, job.replace(activation_checkpointing=ActivationCheckpointing(mode="full"))):
        assert "outputs.logits" not in recipe_ledger(other, known).names
