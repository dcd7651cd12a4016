"""Lengths that change from step to step (`batch.shortest_sequence`): each micro-batch as a job of its own lengths.

The longest micro-batch decides what is allocated. What is reserved also depends on those before it: blocks cached for
shorter sequences do not fit longer ones. So who measures and who replays draw the same lengths, from the same seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from peakcast.spec import TrainingJob

NUM_STEPS = 8
"""Of these steps one has every sequence as long as may be: never the first, which has no optimizer states yet."""


def lengths_change(job: TrainingJob) -> bool:
    """Whether the sequences of `job` are of other lengths in every step."""
    return job.batch.shortest_sequence is not None


def at_its_longest(job: TrainingJob) -> TrainingJob:
    """`job` in steps in which every sequence is as long as may be, which is what predictions and traces are of."""
    return job.replace(batch=replace(job.batch, shortest_sequence=None, seed=0)) if lengths_change(job) else job


def longest_step(job: TrainingJob, rank: int = 0) -> int:
    """Which of the first `NUM_STEPS` steps has only sequences as long as may be, counted from 0."""
    return random.Random(f"{job.batch.seed}.{rank}").randrange(1, NUM_STEPS)


def steps(job: TrainingJob, rank: int = 0) -> Iterator[tuple[TrainingJob, ...]]:
    """The steps of `rank`, without end: of each, its micro-batches as jobs whose lengths do not change.

    Lengths are drawn evenly from `batch.shortest_sequence` to `sequence_length`, one for each sequence; with batch.form
    rows one for all, because rows without a mask are equally long. Ranks that share a sequence get equal parts: the
    longest is padded up to them.
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
