"""What is known to differ in older releases of torch is followed when it is asked for, and said when it is not."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.collectors.dryrun import older_torch
from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.core.errors import SpecError
from peakcast.timelines.timeline import Category

ROWS, WIDTH, LAYERS = 4096, 1024, 8
NORM = "_fused_rms_norm.default"


def train():
    import torch

    class Network(torch.nn.Linear):
        def forward(self, inputs):
            return torch.nn.functional.rms_norm(super().forward(inputs), (WIDTH,))

    model = Network(WIDTH, WIDTH).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16))
        outputs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("torch", "element"), [(None, 4), ("2.13", 4), ("2.10.0+cu128", 2)])
def test_autocast_keeps_the_dtype_of_rms_norm_before_torch_2_12(torch, element):
    steady = peakcast.dryrun(train, "H100-80GB", torch=torch).timelines["steady"]
    results = {int(size) for name, size in zip(steady.names, steady.num_bytes, strict=True) if name == NORM}
    assert max(results) == element * ROWS * WIDTH


def test_a_norm_under_autocast_is_said_if_no_release_is_asked_for():
    for asked, script, autocast, expected in (
        (None, "F.rms_norm(x)", True, ["less"]),
        ("2.11", "F.rms_norm(x)", True, []),
        (None, "F.layer_norm(x)", True, []),
        (None, "F.rms_norm(x)", False, []),
    ):
        notes = RunFindings()
        older_torch.say(notes, asked, script, autocast=autocast, compiled=False)
        assert [finding.direction for finding in notes.findings] == expected


@pytest.mark.parametrize("compiled", [True, False])
def test_code_compiled_by_another_release_than_the_one_that_is_asked_for_is_said(compiled):
    import torch

    here = torch.__version__.partition("+")[0]
    for asked, expected in ((None, 0), (here, 0), (f"{here}+cu128", 0), ("2.9.1", compiled)):
        notes = RunFindings()
        older_torch.say(notes, asked, "", autocast=True, compiled=compiled)
        assert [f"is that of torch {here}" in finding.sentence for finding in notes.findings] == [True] * expected


def test_a_release_must_be_one():
    with pytest.raises(SpecError, match="torch='newish' must be a release"):
        peakcast.dryrun(train, "H100-80GB", torch="newish")


@pytest.mark.parametrize(("torch", "temporaries", "limited"), [("2.0.1", 2, False), ("2.1.0", 1, True)])
def test_before_torch_2_1_adam_kept_its_denominator_apart_and_fsdp_gathered_ahead(torch, temporaries, limited):
    def adam():
        import inspect

        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel

        assert inspect.signature(FullyShardedDataParallel).parameters["limit_all_gathers"].default is limited
        model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.ones(1, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steady = peakcast.dryrun(adam, "H100-80GB", torch=torch).timelines["steady"]
    held = {
        instant: sum(
            kind is Category.OPTIMIZER_TEMPORARIES and size == 4 * WIDTH * WIDTH and born <= instant < dies
            for kind, size, born, dies in zip(
                map(Category, steady.categories), steady.num_bytes, steady.born, steady.dies, strict=True
            )
        )
        for instant in range(len(steady.labels))
    }
    assert max(held.values()) == temporaries


def test_before_torch_2_2_flash_attention_put_the_rows_of_a_sequence_together():
    """`nn.MultiheadAttention` has those of a position together, and copies the output for its projection."""
    sequences, length, width = 4, 256, 128

    def attend():
        import torch

        layer = torch.nn.MultiheadAttention(width, 2, bias=False, batch_first=True).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            inputs = torch.ones(sequences, length, width, device="cuda", dtype=torch.bfloat16)
            layer(inputs, inputs, inputs, need_weights=False)[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def activations(torch):
        steady = peakcast.dryrun(attend, "H100-80GB", torch=torch).timelines["steady"]
        return sum(
            int(size)
            for kind, size in zip(steady.categories, steady.num_bytes, strict=True)
            if Category(kind) is Category.ACTIVATIONS
        )

    assert activations("2.1.2") - activations("2.2.0") == 2 * sequences * length * width


@pytest.mark.parametrize("torch", ["2.0.1", "2.1.0"])
def test_before_torch_2_1_fsdp1_kept_frozen_units_until_backward_ended(torch):
    """The ledger's count of the job that the script turned out to run is that of the dry run."""

    def adapt():
        import os

        import torch
        from peft import LoraConfig, get_peft_model
        from peft.utils.other import fsdp_auto_wrap_policy
        from torch.distributed.fsdp import FullyShardedDataParallel
        from transformers import LlamaConfig, LlamaForCausalLM

        os.environ["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "LlamaDecoderLayer"
        torch.distributed.init_process_group("nccl")
        sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
        config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=1024)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tuning = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
        model = get_peft_model(model, tuning, autocast_adapter_dtype=False)
        policy = fsdp_auto_wrap_policy(model)
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=0, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            tokens = torch.randint(1024, (1, 128), device="cuda")
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    ran = peakcast.dryrun(adapt, "H100-80GB", torch=torch, world_size=4)
    counted = peakcast.predict(ran.job, "H100-80GB").peak_allocated_bytes.baseline
    assert counted == pytest.approx(ran.answer.peak_allocated_bytes.baseline, rel=1e-4)
    layers = LAYERS * 2 * (4 * WIDTH**2 + 3 * 4 * WIDTH**2)  # in bfloat16
    assert (counted > layers) == (torch == "2.0.1")
