"""The loop over chunks of the fused loss, counted by hand: 8 tokens of width 4 over 16 words go in chunks of 2."""

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Finetuning, Precision, TrainingJob
from peakcast.models.ledger.huggingface.blocks.fused_loss import passing_bytes
from peakcast.models.ledger.huggingface.contexts import block_context

SINGLE = Precision(parameters="float32", compute="float32")
AUTOCAST = {"precision": Precision(parameters="float32"), "framework_options": FrozenMapping({"autocast": True})}
ADAPTERS = {"finetuning": Finetuning(method="lora", rank=8)}
MATRIX, LOGITS, ROWS = 16 * 4, 2 * 16, 2 * 4
"""Elements of the head's weight, and of one chunk's logits and hidden states."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 * LOGITS),
        (ADAPTERS, 2 * LOGITS),
        # the weight's product is a tensor of its own
        ({"precision": SINGLE}, 4 * LOGITS + 4 * MATRIX),
        # second chunk: the weight's copy is cached, and its transpose's made anew
        (AUTOCAST, 2 * (MATRIX + MATRIX + ROWS + LOGITS)),
        # nothing is cached of a weight that does not train
        ({**AUTOCAST, **ADAPTERS}, 2 * (MATRIX + ROWS + LOGITS)),
    ],
)
def test_what_a_chunk_holds_in_passing(changes, expected):
    job = TrainingJob(architecture=catalog.architecture("llama-3.2-1b"), sequence_length=8).replace(**changes)
    context = block_context(job, None)
    assert passing_bytes(context, 4, 16, 8 * 4 * context.precision.weight_bytes) == expected


def test_what_is_narrow_already_is_not_cast():
    job = TrainingJob(architecture=catalog.architecture("minitron-4b"), sequence_length=8).replace(**AUTOCAST)
    assert passing_bytes(block_context(job, None), 4, 16, 8 * 4 * 2) == 2 * (MATRIX + MATRIX + LOGITS)


def test_gpt_oss_lets_a_chunk_have_eight_times_as_many_logits():
    job = TrainingJob(architecture=catalog.architecture("gpt-oss-20b"), sequence_length=8)
    assert passing_bytes(block_context(job, None), 4, 16, 8 * 4 * 2) == 2 * 8 * 16
