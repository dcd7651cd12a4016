"""What an answer says of the job that a script ran: what it was in training, and what a job cannot say."""

from __future__ import annotations

import pytest

import peakcast

pytestmark = pytest.mark.needs("transformers")

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64
}  # fmt: skip
BATCH, LENGTH = 2, 32


def test_layers_that_are_recomputed_in_training_and_not_where_it_generates_are_recomputed():
    """TRL 1.16 generates so (`disable_gradient_checkpointing`), and steps end where the next forward begins."""

    def train():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**SIZES)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="cuda")
        for _ in range(4):
            model.gradient_checkpointing_disable()
            with torch.no_grad():
                model(input_ids=tokens)
            model.gradient_checkpointing_enable()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "H100-80GB").job.activation_checkpointing.mode == "full"


def test_what_a_job_cannot_say_is_named():
    def train():
        import torch
        from transformers import LlamaConfig, LlamaForSequenceClassification

        model = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0)).cuda()
        model.model.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters())
        tokens = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
        for _ in range(3):
            outputs = model(input_ids=tokens, labels=torch.zeros(BATCH, dtype=torch.long, device="cuda"))
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    said = " ".join(peakcast.dryrun(train, "H100-80GB").answer.assumptions)
    assert "the network is a LlamaForSequenceClassification, without the logits of all words" in said
    assert "% of its weights train, and those are no adapters" in said
    assert "keys and values of all layers stay with the network's outputs" in said


def test_weights_that_zero_3_has_sharded_count_as_if_they_were_whole():
    """DeepSpeed leaves their parameters without elements, and says how many there are."""
    import torch

    from peakcast.collectors.dryrun.described import _dtype

    sharded = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    sharded.ds_numel = 4096
    assert _dtype([sharded, torch.nn.Parameter(torch.zeros(64))]) == "bfloat16"
