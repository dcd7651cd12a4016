"""Tensors that the training loop passes to the model: tokens, labels, masks of padding, and this rank's parts of them."""

from __future__ import annotations

from peakcast.core.units import INT64
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category


def hold_inputs(timeline: Step, job: TrainingJob) -> None:
    """Hold the inputs of a micro-batch, all through the step: the training loop refers to them."""
    joined = job.batch.form == "padding_free"
    tokens = job.num_tokens if joined else job.micro_batch_size * job.sequence_length
    hold_shared_inputs(timeline, job)
    targets = job.micro_batch_size * (job.decoder_sequence_length or job.sequence_length)
    timeline.hold("input_ids", Category.INPUTS, tokens * INT64, 0)
    if job.architecture.head == "sequence_classifier" and job.loss.kind == "cross_entropy":
        tokens_of_labels = job.micro_batch_size
    else:
        tokens_of_labels = tokens if joined else targets
    timeline.hold("labels", Category.INPUTS, tokens_of_labels * INT64, 0)
    if joined:
        timeline.hold("position_ids", Category.INPUTS, tokens * INT64, 0)
    elif job.batch.form == "masked" or conventions(job).get("trainer"):  # data collators send a mask of ones along
        timeline.hold("attention_mask", Category.INPUTS, tokens * INT64, 0)


def hold_shared_inputs(timeline: Step, job: TrainingJob) -> None:
    """Hold what is made of the inputs before context parallelism splits them. They stay whole, because a part is a view."""
    tokens, ranks = job.micro_batch_size * job.sequence_length, job.parallelism.context_parallel_size
    if ranks > 1:
        timeline.hold("shift_labels", Category.INPUTS, tokens * INT64, 0)
        timeline.hold("position_ids", Category.INPUTS, max(job.sequence_length, tokens // ranks) * INT64, 0)


def hold_parts_of_inputs(timeline: Step, job: TrainingJob, start: int) -> None:
    """Hold copies of this rank's parts of the inputs while `context_parallel` (torch 2.13) is entered; of the last input it
    makes two copies."""
    ranks, kinds = job.parallelism.context_parallel_size, 4 + bool(conventions(job).get("trainer"))
    if ranks > 1:
        size = job.micro_batch_size * job.sequence_length // ranks * INT64
        timeline.hold_all((("context_parallel.shard", "", size),) * (kinds + 1), Category.INPUTS, start, timeline.now)
