"""The ledger of data-parallel layouts against the trace of the real wrappers, on a fake process group."""

from dataclasses import replace

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.units import MIB
from peakcast.models.allocator.replay import replay_run
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

CUT = {"name": "smollm2-135m", "num_hidden_layers": 3}
MIXED = {"precision.parameters": "float32", "precision.compute": "bfloat16"}
NARROW = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
SHORT = {"sequence_length": 64, "micro_batch_size": 1, "optimizer.name": "sgd"}
CELLS = {
    "ddp_trainer": {"parallelism": {"data_parallel_size": 8}},
    "fsdp1_lora_prefetching": {
        "framework": "torch",
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp1"},
        "finetuning": {"method": "lora", "rank": 16},
    },
    "fsdp1_lora_keeping_inputs": {
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"},
        "finetuning": {"method": "lora", "rank": 16},
        "activation_checkpointing": {"mode": "full", "use_reentrant": True},
        "framework_options": {"checkpoints_around_units": True},
        "architecture": {**CUT, "num_hidden_layers": 4, "vocab_size": 512},
        "sequence_length": 2048,
    },
    "fsdp1_never_prefetching": {  # nothing fetches ahead where reentrant checkpoints are around the units
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"},
        "activation_checkpointing": {"mode": "full", "use_reentrant": True},
        "framework_options": {"checkpoints_around_units": True, "fsdp1_backward_prefetch": "BACKWARD_PRE"},
        "architecture": {**CUT, "num_hidden_layers": 4, "vocab_size": 512},
    },
    "fsdp1_lora_in_layers": {
        "framework": "torch",
        "parallelism": {"data_parallel_size": 4, "sharding": "fsdp1"},
        "finetuning": {"method": "lora", "rank": 16, "adapter_dtype": "bfloat16"},
        "activation_checkpointing.mode": "full",
        "gradient_accumulation_steps": 3,
        "framework_options": {"fsdp1_units": "layers_with_adapters", "accumulates_without_sync": True},
    },
    "fsdp2_narrow_weights_reduced_wide": {
        **SHORT,
        "framework": "torch",
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
        "framework_options": {"fsdp_reduce_dtype": "float32"},
    },
    "fsdp1_every_module": {  # with its peak in the loss
        "sequence_length": 1024,
        "framework": "torch",
        "architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 2, "vocab_size": 8192, **NARROW},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp1"},
        "framework_options": {"fsdp1_units": "modules"},
    },
    "fsdp1_lora_gathered_ahead": {  # the last adapter of a layer, before the layer is run again
        "architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 3, "vocab_size": 4096, **NARROW},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp1"},
        "precision.gradients": "float32",
        "finetuning": {"method": "lora", "rank": 16, "targets": ["all-linear"], "dropout": 0.1},
        "activation_checkpointing.mode": "full",
        "framework_options": {
            "autocast": True,
            "fsdp1_use_orig_params": True,
            "fsdp1_backward_prefetch": "BACKWARD_PRE",
        },
    },
    "fsdp1_lora_wide_at_first": {  # adapters are read in their stored dtype by the first forward alone
        "architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 3, "vocab_size": 4096, **NARROW},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp1"},
        "precision.gradients": "float32",
        "finetuning": {"method": "lora", "rank": 16, "targets": ["all-linear"], "dropout": 0.1},
        "activation_checkpointing.mode": "full",
        "framework_options.autocast": True,
    },
    "fsdp1_offloading": {
        **MIXED,
        "framework": "torch",
        "parallelism": {"data_parallel_size": 4, "sharding": "fsdp1"},
        "offload": {"parameters": True, "optimizer": True},
    },
    "fsdp1_lora_offloading": {
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"},
        "finetuning": {"method": "lora", "rank": 16},
        "activation_checkpointing.mode": "full",
        "offload": {"parameters": True, "optimizer": True},
        "sequence_length": 8192,  # little else stands on the GPU than the inputs, beside which clipping's scalars are small
        "micro_batch_size": 8,
    },
    "fsdp2_offloading_activations_too": {
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"},
        "activation_checkpointing.mode": "full",
        "offload": {"parameters": True, "activations": True},
        "sequence_length": 8192,
        "micro_batch_size": 8,
    },
    "fsdp1_trainer_accumulating": {
        **MIXED,
        "framework_options": {"autocast": True},
        "gradient_accumulation_steps": 2,
        "parallelism": {"data_parallel_size": 3, "sharding": "fsdp1"},
    },
    "fsdp1_between": {  # the peak is in a micro-batch between the first and the last
        **SHORT,
        "gradient_accumulation_steps": 3,
        "parallelism": {"data_parallel_size": 4, "sharding": "fsdp1"},
    },
    "fsdp2_between": {
        **SHORT,
        "gradient_accumulation_steps": 4,
        "parallelism": {"data_parallel_size": 4, "sharding": "fsdp2"},
    },
    "fsdp2_trainer_checkpointed": {
        "activation_checkpointing.mode": "full",
        "parallelism": {"data_parallel_size": 64, "sharding": "fsdp2"},
    },
    "hsdp_mixed": {**MIXED, "framework": "torch", "parallelism": {"data_parallel_size": 16, "sharding": "hsdp"}},
}


LONGEST = (
    *("fsdp1_between", "fsdp2_between", "fsdp1_offloading", "fsdp1_lora_in_layers"),
    *("fsdp1_lora_gathered_ahead", "fsdp1_lora_wide_at_first", "fsdp1_lora_offloading", "fsdp2_trainer_checkpointed"),
    "fsdp1_lora_prefetching",
)
"""Micro-batches, offloading, checkpoints and adapters of FSDP are in other cells too."""


def job(name):
    base = {"architecture": CUT, "sequence_length": 256, "micro_batch_size": 2, "attention": "sdpa"}
    return expand({"base": base, "include": [CELLS[name]]})[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.whole] * (name in LONGEST)) for name in CELLS])
def test_the_ledger_equals_the_trace_phase_by_phase(ledger_equals_trace, name):
    """Within 0.5 % of the phase's peak and 0.1 % of the whole step's, in the first and in a steady step."""
    for closed_form, trace in ledger_equals_trace(job(name), rel=5e-3).values():
        assert closed_form.peak().num_bytes == pytest.approx(trace.peak().num_bytes, rel=1e-3)


@pytest.mark.parametrize("keeps_originals", [True, False])
def test_what_fsdp1_has_copied_to_and_from_the_host(traced, keeps_originals):
    """Reduced gradients stay on the GPU until backward ends; gathered parts too, where parameters are views of them. What
    clipping and the step have there is a few KiB, which no peak shows."""
    cell = {
        "architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 2, "vocab_size": 512, **NARROW},
        "sequence_length": 64,
        "framework": "torch",
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"},
        "offload": {"parameters": True},
        "framework_options": {"fsdp1_use_orig_params": keeps_originals},
    }
    (asked,) = expand({"include": [cell]})
    for step, trace in traced(asked).items():
        closed_form = ledger(asked, step=step)
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            assert closed_form.peak(phase).num_bytes == pytest.approx(trace.peak(phase).num_bytes, rel=1e-3), (step, phase)


def test_frozen_units_are_resharded_although_all_fake_tensors_have_one_address(traced):
    """FSDP1 compares addresses to see what is sharded; were all equal, a frozen root would stay gathered after backward."""
    root = 49152 * 576 * 2  # the token table that embedding and head share
    steady = traced(job("fsdp1_lora_prefetching"))["steady"]
    end = steady.alive_at(len(steady.phases) - 1)
    assert max(steady.num_bytes[end]) < root


def reserved_by_streams(steps):
    """What the pool of each stream reserves at most, in bytes, largest first."""
    streams = sorted({int(stream) for step in steps for stream in step.streams})
    own = ([replace(step, num_bytes=step.num_bytes * (step.streams == stream)) for step in steps] for stream in streams)
    return sorted((replay_run(each).peak_reserved_bytes for each in own), reverse=True)


@pytest.mark.parametrize(
    "name", ["fsdp1_lora_keeping_inputs", "fsdp1_never_prefetching", "fsdp1_trainer_accumulating", "hsdp_mixed"]
)
def test_each_stream_reserves_what_the_ledger_says(ledger_equals_trace, name):
    """On which streams FSDP makes its tensors, and which of its blocks wait for others, is written down in the ledger and
    observed in the trace. Pools grow by 2 MiB at least."""
    both = ledger_equals_trace(job(name), rel=5e-3).values()
    closed_form, trace = (reserved_by_streams([pair[which] for pair in both]) for which in (0, 1))
    assert len(trace) > 2
    assert closed_form == pytest.approx(trace, abs=2 * MIB)
