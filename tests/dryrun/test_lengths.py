"""Lengths that change from step to step: which are drawn, how many steps are followed, and what they reserve."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.collectors.dryrun.lengths import CHANGING_STEPS, MOST_STEPS, NUM_STEPS, StepLengths, drawn, growth
from peakcast.core.errors import SpecError


def test_drawn_lengths_are_always_the_same_and_some_are_the_longest():
    lengths = drawn(128, 4096, 512)
    assert lengths == drawn(128, 4096, 512)
    assert min(lengths) >= 128
    assert max(lengths) == 4096
    assert lengths.count(4096) == pytest.approx(512 / CHANGING_STEPS, rel=0.3)
    assert set(drawn(64, 64, 10)) == {64}


def followed(lengths, asked):
    """How many of the steps with sequences of `lengths` are followed."""
    seen = StepLengths(asked)
    for length in lengths:
        if seen.enough:
            break
        seen.saw(length)
        seen.end_step()
    return len(seen.of_steps)


def test_steps_are_followed_until_the_longest_has_come_after_the_first():
    many = [100] * (2 * MOST_STEPS)
    assert followed(many, None) == NUM_STEPS
    assert followed([50, 200, *many], (50, 200)) == CHANGING_STEPS
    assert followed([200, *many[:10], 200, *many], (50, 200)) == 12
    assert followed([120, *many[:10], 120, *many], (50, 200)) == 12  # cut to 120
    assert followed([150, *many], (50, 200)) == MOST_STEPS


def training(lengths):
    import torch

    def train():
        model = torch.nn.Sequential(torch.nn.Embedding(1000, 256), torch.nn.Linear(256, 1000)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for length in lengths:
            tokens = torch.randint(1000, (4, length)).cuda()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_what_changing_lengths_reserve_is_that_of_their_steps_in_turn():
    lengths = [700, 900, 1300, 1100, 1700, 1500, 2048, 600, 1000]
    changing = peakcast.dryrun(training(lengths), "A100-80GB", lengths=(512, 2048))
    fixed = peakcast.dryrun(training([2048] * 9), "A100-80GB", length=2048)
    allocated = [found.answer.peak_allocated_bytes.baseline for found in (changing, fixed)]
    reserved = [found.answer.peak_reserved_bytes.baseline for found in (changing, fixed)]
    assert changing.steps == CHANGING_STEPS
    assert allocated[0] == allocated[1]
    assert reserved[0] > reserved[1]
    assert (changing.job.batch.shortest_sequence, changing.job.sequence_length) == (600, 2048)
    assert "batches of other lengths (give the longest)" not in changing.answer.not_modelled
    assert any("8 steps that were seen are replayed in turn" in said for said in changing.answer.assumptions)


def test_lengths_that_do_not_change_or_do_unasked_are_said():
    asked = peakcast.dryrun(training([64] * 9), "A100-80GB", lengths=(32, 64))
    unasked = peakcast.dryrun(training([64, 32, 96, 16]), "A100-80GB")
    said = [" ".join(found.answer.warnings) for found in (asked, unasked)]
    assert "every step had sequences of 64 tokens, whatever --lengths says" in said[0]
    assert "each step had 64, 32, 96 tokens" in said[1]


@pytest.mark.parametrize(("length", "lengths"), [(5, (5, 9)), (None, (9, 5)), (0, None), (None, (1, 2**40))])
def test_lengths_that_cannot_be_are_refused(length, lengths):
    with pytest.raises(SpecError, match="lengths"):
        peakcast.dryrun(training([64]), "A100-80GB", length=length, lengths=lengths)


def test_batches_that_grow_in_stages_are_told_from_those_that_merely_differ():
    assert growth([16_384] * 10 + [32_768] * 5) == (
        "batches grew from 16,384 to 32,768 tokens in the 15 steps that were followed; where they grow further, that needs "
        "more."
    )
    assert growth([1024] * 3) == ""
    assert growth([900, 1000, 1024]) == ""  # rows padded batch by batch
    assert growth([1024, 2048, 4096, 4096, 1024]) == ""  # a warm-up that has ended
