"""Generation is followed at its two ends, and holds what it holds token by token."""

from __future__ import annotations

import functools

import pytest

import peakcast

PROMPT, NEW, BATCH, WIDTH = 16, 32, 4096, 256
CACHE = 2 * 2 * BATCH * WIDTH
"""Bytes of a token's keys and values in bfloat16, of one layer."""


def train(few=None):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from peakcast.collectors.dryrun import generation

    generation.FEW = few or generation.FEW
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        prompt = torch.randint(0, 64, (BATCH, PROMPT), device="cuda")
        told = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=True)
        assert told.shape == (BATCH, PROMPT + NEW)
        model(input_ids=told[:1], labels=told[:1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.whole
@pytest.mark.needs("transformers")
def test_the_tokens_between_the_ends_are_counted_and_not_followed():
    shortened, followed = (peakcast.dryrun(functools.partial(train, few), "H100-80GB").answer for few in (None, NEW))
    ours, theirs = shortened.peak_allocated_bytes.baseline, followed.peak_allocated_bytes.baseline
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours > CACHE * (PROMPT + NEW - 1)
    said = [finding for finding in shortened.findings if finding.parameter == "generate"]
    assert [f"of {NEW} tokens" in finding.sentence for finding in said] == [True]
    assert not [finding for finding in followed.findings if finding.parameter == "generate"]
