"""Lengths that change from step to step (`batch.shortest_sequence`): each micro-batch as a job of its own lengths.

The longest micro-batch decides what is allocated. What is reserved also depends on those before it: blocks that were cached
for shorter sequences do not fit longer ones. Measurement and replay therefore draw the same lengths, from the same seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from peakcast.jobs.spec import TrainingJob

CHANGING_STEPS = 8
"""One of this many steps has only sequences of the largest length; never the first step, which has no optimizer states
yet."""


def lengths_change(job: TrainingJob) -> bool:
    """Whether the sequences of `job` have other lengths in every step."""
    return job.batch.shortest_sequence is not None


def at_its_longest(job: TrainingJob) -> TrainingJob:
    """`job` with steps in which every sequence has the largest length; predictions and traces are of these."""
    return job.replace(batch=replace(job.batch, shortest_sequence=None, seed=0)) if lengths_change(job) else job


def longest_step(job: TrainingJob, rank: int = 0) -> int:
    """Number (from 0) of the step among the first `CHANGING_STEPS` in which all sequences have the largest length."""
    return random.Random(f"{job.batch.seed}.{rank}").randrange(1, CHANGING_STEPS)


def steps(job: TrainingJob, rank: int = 0) -> Iterator[tuple[TrainingJob, ...]]:
    """The steps of `rank`, without end: for each, its micro-batches as jobs whose lengths do not change.

    Lengths are drawn uniformly from `batch.shortest_sequence` to `sequence_length`: one for each sequence, or, if
    batch.form is rows, one for all, because rows without a mask have equal lengths. Ranks that share a sequence get equal
    parts; the longest sequence is padded so that they can.
    """
    drawn, longest = random.Random(f"{job.batch.seed}.{rank}.lengths"), longest_step(job, rank)
    for step in itertools.count():
        yield tuple(
            at_its_longest(job) if step == longest or not lengths_change(job) else _micro_batch(job, drawn)
            for _ in range(job.gradient_accumulation_steps)
        )


def _micro_batch(job: TrainingJob, drawn: random.Random) -> TrainingJob:
    same = job.batch.form == "rows"
    shortest = job.batch.shortest_sequence or 1
    lengths = [drawn.randint(shortest, job.sequence_length) for _ in range(1 if same else job.micro_batch_size)]
    batch = replace(at_its_longest(job).batch, num_tokens=None if same else sum(lengths))
    sharing = job.parallelism.sequence_sharing_ranks
    return job.replace(sequence_length=-(-max(lengths) // sharing) * sharing, batch=batch)
