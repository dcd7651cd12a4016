"""DeepSpeed's engine in a script: it releases gradients in every backward, and steps when micro-batches are added up."""

from __future__ import annotations

import functools

import pytest

import peakcast
from peakcast.timelines.timeline import Category

WIDTH, TOKENS, RANKS, MICRO_BATCHES = 512, 4096, 4, 4
ELEMENTS = 2 * WIDTH * TOKENS + WIDTH * WIDTH  # a table, a layer and a head


def train(stage):
    import deepspeed
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, TOKENS, bias=False)

        def forward(self, tokens):
            return self.head(self.layer(self.table(tokens))).float().mean()

    settings = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "optimizer": {"type": "AdamW", "params": {}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=Network().cuda(), config=settings)
    for _ in range(4 * MICRO_BATCHES):
        loss = engine(torch.zeros(1, 64, dtype=torch.long, device="cuda"))
        engine.backward(loss)
        engine.step()


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_ends_when_the_engine_has_added_up_its_micro_batches(stage):
    """Not with each backward, which leaves no gradients: a rank's part of both moments, in float32, is there in a later
    step. The network's own sizes are read although ZeRO-3 has taken its tensors apart."""
    found = peakcast.dryrun(functools.partial(train, stage), "H100-80GB", world_size=RANKS)
    assert found.job.gradient_accumulation_steps == MICRO_BATCHES
    assert (found.job.architecture.vocab_size, found.job.architecture.hidden_size) == (TOKENS, WIDTH)
    steady = found.timelines["steady"]
    states = steady.categories == Category.OPTIMIZER_STATES
    assert steady.num_bytes[states & (steady.num_bytes > 1024)].sum() == 2 * 4 * ELEMENTS // RANKS
