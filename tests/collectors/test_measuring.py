"""Cells that are measured, whole, without a GPU: real libraries on the CPU, CUDA's readings from a stand-in."""

import time

import pytest

from peakcast.collectors.machine import probes
from peakcast.collectors.measure import worker
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect, ranks_to_run
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.core.errors import CollectorError
from peakcast.jobs.spec import job_to_mapping
from peakcast.measurements import store

TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def job(**changes):
    cell = {"architecture": TINY, "sequence_length": 16, "precision": {"parameters": "float32"}}
    return expand({"include": [cell | changes]})[0]


def measured(asked, **question):
    ((row, _),) = worker.run({"job": job_to_mapping(asked), "gpu": None, "ranks": "one", **question})
    return row


SCHEDULES = {
    "1f1b": {},
    "gpipe": {"pipeline_schedule": "gpipe", "pipeline_layers": [1, 3]},
    "interleaved": {"pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": 2},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_rank_of_a_pipeline_is_measured_on_one_device(stand_in, name):
    torch = pytest.importorskip("torch")
    stages = {"pipeline_parallel_size": 2, **SCHEDULES[name]}
    asked = job(framework="torch", parallelism=stages, gradient_accumulation_steps=2)
    for rank in (1, 0):
        row = measured(asked, rank=rank)
        assert (row.rank, row.collectives, row.outcome, row.provenance) == (rank, "fake", "ok", "measured")
        assert row.gpu == "H100-80GB"
        phases = {"forward", "backward", "gradient_clipping", "optimizer_step"}
        assert set(row.phase_peaks) == phases | ({"loss"} if rank else set())  # the last stage has the loss
        assert row.environment["pipeline_schedule"].startswith("Schedule")
        assert row.spoiled == ()
        torch.distributed.destroy_process_group()


TABLE, MATRICES, NORMS = 100 * 32, 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64, 2 * 32
"""Weights of `TINY`: of a token table (and of a head), of a layer."""
SPREAD = {
    "fsdp2": ({"data_parallel_size": 4, "sharding": "fsdp2"}, (2 * TABLE + 4 * (MATRICES + NORMS) + 32) // 4),
    "tensor parallel": ({"tensor_parallel_size": 2}, TABLE + 2 * MATRICES + 4 * NORMS + 32),
    "stages of fsdp2": (
        {"pipeline_parallel_size": 2, "data_parallel_size": 2, "sharding": "fsdp2"},
        (TABLE + 2 * (MATRICES + NORMS)) // 2,
    ),
}
"""Layout -> what rank 0 keeps, counted by hand."""


@pytest.mark.parametrize("name", SPREAD)
def test_a_rank_makes_no_weight_that_it_does_not_keep(stand_in, monkeypatch, name):
    """The network is made without a value, split, and only the rank's own part is filled."""
    from peakcast.collectors.stacks import spreading

    torch = pytest.importorskip("torch")
    filled = []
    settle = spreading.settle

    def settled(model, *rest):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        settle(model, *rest)
        assert before  # the rotary embedding's, which are computed once
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert not any(parameter.is_meta for parameter in model.parameters())
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
        filled.append((sum(part.numel() for part in parts), all(part.std() > 0 for part in parts if part.numel() > 1)))

    monkeypatch.setattr(spreading, "settle", settled)
    layout, keeps = SPREAD[name]
    row = measured(
        job(framework="torch", parallelism=layout, gradient_accumulation_steps=2, versions={"torchtitan": "main"})
    )
    assert (row.outcome, row.collectives, row.spoiled) == ("ok", "fake", ())
    assert filled == [(keeps, True)]


def test_ranks_are_asked_for_by_number_or_by_kind_of_stage(tmp_path):
    two, alone = job(framework="torch", parallelism={"pipeline_parallel_size": 2}), job()
    assert ranks_to_run(two, CollectSettings(ranks="1")) == (1,)
    assert ranks_to_run(two, CollectSettings(ranks="0,1,7", trace=True)) == (0, 1)
    assert ranks_to_run(two, CollectSettings(ranks="auto")) == (0,)
    assert ranks_to_run(two, CollectSettings(ranks="real", trace=True)) == (0,)
    with pytest.raises(CollectorError, match=r"ranks='5' names no rank of tiny, .*, which has 2; they count from 0"):
        ranks_to_run(two, CollectSettings(ranks="5"))
    with pytest.raises(CollectorError, match=r"ranks='1' names no rank of tiny, .*, which has 1; they count from 0"):
        ranks_to_run(alone, CollectSettings(ranks="1"))
    for bad in ("all", "-1", "1,x", ""):
        with pytest.raises(CollectorError, match=f"ranks='{bad}' must be one of auto, real, one, or numbers"):
            ranks_to_run(two, CollectSettings(ranks=bad))


def test_each_rank_that_is_asked_for_is_a_cell_of_its_own(tmp_path, cell):
    shard = tmp_path / "cells.jsonl"
    jobs = [job(framework="torch", parallelism={"pipeline_parallel_size": 2})]
    full = cell("""
    rank = question["rank"]
    made = row(question)
    return type(made)(**{**vars(made), "rank": rank, "collectives": "fake", "outcome": "out_of_memory" if rank else "ok"})
    """)
    summary = collect(jobs, shard, CollectSettings(trace=True, ranks="0,1"), work=full)
    assert (summary.finished, summary.out_of_memory) == (1, 1)
    assert {row.rank for row in store.read_shard(shard)[0]} == {0, 1}
    assert collect(jobs, shard, CollectSettings(trace=True, ranks="0,1"), work=full).skipped == 2


FORMS = {
    "padding_free": {"form": "padding_free", "num_tokens": 40},
    "masked": {"form": "masked", "num_tokens": 40},
    "full rows joined": {"form": "padding_free"},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FORMS)
def test_packed_and_padded_batches_are_measured(stand_in, monkeypatch, name, attention):
    """The model is called with what it needs to keep sequences apart, and each attends to itself alone."""
    import transformers

    calls = []
    forward = transformers.LlamaModel.forward

    def seen(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        calls.append((input_ids, attention_mask, position_ids))
        return forward(self, input_ids, attention_mask, position_ids, **rest)

    monkeypatch.setattr(transformers.LlamaModel, "forward", seen)
    row = measured(job(micro_batch_size=3, batch=FORMS[name], attention=attention))
    assert (row.outcome, row.job.batch.form, row.spoiled) == ("ok", FORMS[name]["form"], ())
    ids, mask, positions = calls[-1]
    if row.job.batch.form == "masked":
        assert (tuple(ids.shape), mask.sum(dim=1).tolist()) == ((3, 16), [16, 12, 12])
    else:
        assert tuple(ids.shape) == (1, row.job.num_tokens)
        assert (positions == 0).sum() == 3
        assert mask is None


def test_sequences_that_are_joined_do_not_see_each_other():
    """A packed row's logits are those of its sequences alone: transformers builds the block mask from the positions."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import build

    training = build(job(micro_batch_size=2, batch={"form": "padding_free", "num_tokens": 20}), "cpu")
    ids, positions = training.batch["input_ids"], training.batch["position_ids"]
    assert positions[0].tolist() == [*range(16), *range(4)]
    with torch.no_grad():
        joined = training.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = training.model(input_ids=ids[:, 16:], use_cache=False).logits
    assert torch.allclose(joined[:, 16:], alone, atol=1e-5)


def test_more_sequences_than_tokens_are_refused():
    from peakcast.collectors.stacks.batches import sequence_lengths

    with pytest.raises(CollectorError, match=r"batch.num_tokens=2 is fewer than the 3 sequences"):
        sequence_lengths(job(micro_batch_size=3, batch={"form": "masked", "num_tokens": 2}))


MIB = 2**20


def test_host_memory_that_came_and_went_is_the_rows(stand_in, monkeypatch):
    """64 MiB of the process's own, held during one step and given back, beside what is pinned."""
    from peakcast.collectors.stacks import huggingface_training

    step = huggingface_training.HuggingFaceTraining.step

    def heavy(self):
        held = b"1" * (64 * MIB)
        time.sleep(0.05)  # sampled every 5 ms
        del held
        step(self)

    monkeypatch.setattr(huggingface_training.HuggingFaceTraining, "step", heavy)
    stand_in.pinned = 2 * MIB
    row = measured(job(**{"offload.activations": True}))
    readings = row.environment["readings"]
    grown = readings["host_pageable_bytes"] - readings["host_pageable_before_bytes"]
    assert grown >= 64 * MIB
    assert row.peak_host_bytes == grown + 2 * MIB
    assert readings["host_pinned_bytes"] == 2 * MIB
    assert probes.pageable_bytes() < readings["host_pageable_bytes"]


def test_pinned_memory_that_was_the_process_own_is_not_counted_twice(stand_in, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True")
    monkeypatch.setattr(torch_memory(), "_set_allocator_settings", lambda _: None)
    stand_in.pinned = 1 << 40
    row = measured(job())
    assert row.peak_host_bytes < 1 << 40 == row.environment["readings"]["host_pinned_bytes"]


def torch_memory():
    return pytest.importorskip("torch").cuda.memory


def test_paged_states_are_host_memory(stand_in):
    torch = pytest.importorskip("torch")
    paged, plain = torch.zeros(1000), torch.zeros(1000)
    paged.is_paged = True
    optimizer = type("Optimizer", (), {"state": {"p": {"state1": paged, "state2": plain, "step": 3}}})
    assert probes.managed_bytes(optimizer) == 4000


def test_what_each_part_of_a_run_adds_outside_the_allocator_is_told_apart(stand_in, monkeypatch):
    """The driver's number grows by 400 MiB with the context, by 30 in the first forward and by 7 in the optimizer's step,
    while PyTorch's own 100 MiB are taken off."""
    from peakcast.collectors.stacks import huggingface_training

    def adding(size, function):
        def added(*arguments, **keywords):
            stand_in.used += size
            return function(*arguments, **keywords)

        return added

    def context():
        stand_in.reserved = 100 * MIB
        stand_in.used += 500 * MIB

    training = huggingface_training.HuggingFaceTraining
    monkeypatch.setattr(probes, "open_context", context)
    monkeypatch.setattr(training, "forward", adding(30 * MIB, training.forward))
    monkeypatch.setattr(training, "step", adding(7 * MIB, training.step))
    stand_in.used = 50 * MIB
    row = measured(job())
    assert row.context_bytes == 400 * MIB
    found = {name: size // MIB for name, size in row.environment["readings"]["outside_bytes"].items()}
    assert found == {
        "context": 400, "process group": 0, "build": 0, "forward": 30, "loss": 0, "backward": 0,
        "gradient_clipping": 0, "optimizer_step": 7, "later steps": 2 * 37,
    }  # fmt: skip
    assert row.peak_device_bytes == (400 + 100 + 3 * 37) * MIB


def test_first_uses_say_what_each_library_takes_and_why_one_does_not(monkeypatch):
    from peakcast.collectors.measure import first_uses
    from peakcast.collectors.measure.growth import Growth

    torch = pytest.importorskip("torch")
    memory = {"used": 10, "allocated": 0, "peak": 0}

    def takes(outside, kept, peak):
        def step(device):
            memory["used"] += outside + kept
            memory["allocated"] += kept
            memory["peak"] = memory["allocated"] - kept + peak

        return step

    def missing(device):
        memory["used"] += 1
        raise ImportError("No module named 'bitsandbytes'")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: memory.update(peak=memory["allocated"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: memory["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: memory["peak"])
    growth = Growth(lambda: memory["used"], lambda: memory["allocated"], 10)
    steps = {"cublas": takes(80, 32, 40), "bitsandbytes": missing, "nccl": takes(200, 0, 0)}
    assert first_uses.first_uses("cpu", growth, steps) == [
        {"step": "cublas", "outside_bytes": 80, "kept_bytes": 32, "temporary_bytes": 8},
        {"step": "bitsandbytes", "reason": "ImportError: No module named 'bitsandbytes'"},
        {"step": "nccl", "outside_bytes": 200, "kept_bytes": 0, "temporary_bytes": 0},
    ]
    assert growth.steps["bitsandbytes (failed)"] == 1  # what it took before it failed is nobody else's


def test_the_first_uses_that_need_no_gpu_run_here(monkeypatch):
    from peakcast.collectors.measure import first_uses

    monkeypatch.setattr(first_uses, "TOKENS", 8)
    monkeypatch.setattr(first_uses, "VOCABULARY", 16)
    monkeypatch.setattr(first_uses, "WIDTH", 32)
    here = {"elementwise", "cublas", "cublas in backward", "cublaslt", "cudnn", "attention: math", "attention: flash",
            "embedding backward", "cross entropy", "adamw: foreach", "adamw: fused"}  # fmt: skip
    assert here < set(first_uses.STEPS)
    for name in here:
        first_uses.STEPS[name]("cpu")
    assert {case["backend"] for case in first_uses.chosen_attention("cpu")} <= set(first_uses.BACKENDS.values())


def test_without_a_driver_nothing_is_said_of_growth():
    from peakcast.collectors.measure.growth import Growth

    growth = Growth(lambda: None, lambda: 0, None)
    assert growth.mark("context") is None
    assert growth.readings() == {}


STACKS = {
    "ddp": {"parallelism": {"data_parallel_size": 4}, "gradient_accumulation_steps": 2},
    "ddp of adapters": {"parallelism": {"data_parallel_size": 4}, "finetuning": {"method": "lora", "rank": 4}},
    "hsdp": {"parallelism": {"data_parallel_size": 16, "sharding": "hsdp"}},
    "transformers' tensor parallelism": {"parallelism": {"tensor_parallel_size": 2}},
    "tied": {"architecture": TINY | {"tie_word_embeddings": True}, "parallelism": SPREAD["fsdp2"][0]},
    "generation": {"task": "inference", "inference": {"prompt_length": 8, "new_tokens": 4}},
    "offloaded activations": {"offload.activations": True},
    "nf4": {"finetuning": {"method": "qlora", "rank": 4, "quantization": "nf4"}},
    "int8": {"finetuning": {"method": "qlora", "rank": 4, "quantization": "int8"}},
    "bitsandbytes": {"optimizer.name": "adamw_8bit"},
    "paged": {"optimizer.name": "paged_adamw_8bit"},
    "torchao": {"optimizer.name": "adamw_4bit"},
    "deepspeed": {  # one only: it keeps the first process group that it saw
        "framework": "deepspeed",
        "precision": {"parameters": "float32", "compute": "float32", "gradients": "float32", "optimizer_states": "float32"},
        "parallelism": {"data_parallel_size": 4, "zero_stage": 3},
        "offload": {"optimizer": True, "parameters": True},
    },
}


@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", STACKS)
def test_each_stack_is_measured_whole(stand_in, name):
    try:
        row = measured(job(**STACKS[name]))
    except CollectorError as error:
        if "pip install" not in error.message:
            raise
        pytest.skip(error.message)
    assert (row.outcome, row.spoiled) == ("ok", ())
    assert row.peak_host_bytes >= 0
    assert row.first_step_peak_allocated_bytes <= row.peak_allocated_bytes
