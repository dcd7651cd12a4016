"""What an answer says of the job that a script ran: what it was in training, and what a job cannot say."""

from __future__ import annotations

import pytest

import peakcast
from peakcast import catalog
from peakcast.models.baseline.ledger import ledger

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
        teacher = LlamaForSequenceClassification(LlamaConfig(**SIZES, pad_token_id=0)).cuda().eval()
        optimizer = torch.optim.SGD(model.parameters())
        tokens = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
        for _ in range(3):
            with torch.no_grad():
                teacher(input_ids=tokens)
            outputs = model(input_ids=tokens, labels=torch.zeros(BATCH, dtype=torch.long, device="cuda"))
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()

    found = peakcast.dryrun(train, "H100-80GB")
    said = " ".join(found.answer.assumptions)
    assert "the network is a LlamaForSequenceClassification, without the logits of all words" in said
    assert "% of its weights train, and those are no adapters" in said
    assert "another network runs beside the one that is trained" in said
    assert "gradients stay until after the next forward" in said
    assert found.job.framework_options["outputs_have_cache"]


def test_what_a_loop_keeps_with_the_outputs_is_counted_by_the_ledger():
    """Keys and values are copies of parts of GPT-NeoX's fused projection, which stay until the next forward has returned. A
    network in evaluation mode recomputes nothing, and its cache stays on."""

    def train():
        import torch
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        model = GPTNeoXForCausalLM(GPTNeoXConfig(**{**SIZES, "num_hidden_layers": 4})).cuda().bfloat16().eval()
        model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            tokens = torch.zeros(8, 512, dtype=torch.long, device="cuda")
            outputs = model(input_ids=tokens, labels=tokens)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "H100-80GB")
    assert found.job.framework_options["outputs_have_cache"]
    assert found.job.activation_checkpointing.mode == "none"
    assert "recomputation_off" in {finding.code for finding in found.answer.findings}
    expected = ledger(found.job, device=catalog.gpu("H100-80GB"), rank=0, step="steady").peak()
    assert expected.num_bytes == pytest.approx(found.timelines["steady"].peak().num_bytes, rel=1e-3)


@pytest.mark.parametrize("wrapped", [("LlamaDecoderLayer",), ("LlamaDecoderLayer", "Embedding")])
def test_layers_in_a_wrapper_of_torch_are_recomputed(wrapped):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
    from transformers import LlamaConfig, LlamaForCausalLM

    from peakcast.collectors.dryrun.attributes import checkpointing_of

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    wrapper.apply_activation_checkpointing(model, check_fn=lambda part: type(part).__name__ in wrapped)
    assert checkpointing_of(model) == {"mode": "full", "use_reentrant": False, "every_n_layers": 1}


def test_gradients_on_the_host_take_nothing_of_the_gpu():
    import torch
    from torch._subclasses import FakeTensorMode

    from peakcast.collectors.dryrun.attributes import gradient_bytes

    with FakeTensorMode():
        parts = [torch.nn.ParameterList([torch.empty(8, 8, device=device)]) for device in ("cpu", "cuda", "cuda")]
        for part in parts[:2]:
            part[0].grad = torch.empty_like(part[0])
        assert gradient_bytes([*parts, parts[1]]) == 8 * 8 * 4


def test_weights_that_zero_3_has_sharded_count_as_if_they_were_whole():
    """DeepSpeed leaves their parameters without elements, and says how many there are."""
    import torch

    from peakcast.collectors.dryrun.described import _dtype

    sharded = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
    sharded.ds_numel = 4096
    assert _dtype([sharded, torch.nn.Parameter(torch.zeros(64))]) == "bfloat16"


def test_sizes_of_zero_are_those_that_the_engine_came_to():
    """With "auto" in its configuration, transformers' Trainer chooses them by the hidden size."""
    from types import SimpleNamespace

    import torch

    from peakcast.collectors.dryrun.wrapped import OF_ZERO, of_deepspeed, offloads

    sizes = dict.fromkeys(OF_ZERO.values(), 1000) | {"contiguous_gradients": True}
    host = SimpleNamespace(device="cpu")
    settings = SimpleNamespace(**sizes, overlap_comm=True, offload_param=None, offload_optimizer=host)
    kind = type("DeepSpeedEngine", (torch.nn.Linear,), {"zero_optimization_stage": lambda self: 3})
    engine = kind(2, 2)
    engine._config = SimpleNamespace(zero_config=settings)
    options = of_deepspeed([engine])
    assert (options["reduce_bucket_size"], options["stage3_prefetch_bucket_size"]) == (1000, 1000)
    assert "overlap_comm" not in options  # as it is by default in stage 3
    assert offloads([engine]) == {"parameters": False, "optimizer": True}
