"""What the ledger does not cover is named, and no more than that."""

from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import ActivationCheckpointing, Batch, Finetuning, Loss, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope

REENTRANT = ActivationCheckpointing(mode="full", use_reentrant=True)
EVERYWHERE = Finetuning(method="lora", rank=8, targets=("all-linear",))
IN_8_BITS = replace(EVERYWHERE, method="qlora", quantization="int8")
ATTENTION = Finetuning(method="lora", rank=8, targets=("q_proj", "v_proj"))
LIGER = {"framework_options": FrozenMapping({"liger_kernels": True})}
NARROW_MPT = replace(catalog.architecture("mpt-7b"), intermediate_size=8192)
FLASH = {"attention": "flash_attention_2"}
FUSED = Loss(fused_linear_cross_entropy=True)
MIXED = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
SELECTIVE = {"activation_checkpointing": ActivationCheckpointing(mode="selective")}
TENSOR = {"framework": "torch", "parallelism": Parallelism(tensor_parallel_size=2, sequence_parallel=True)}


def by_fsdp(sharding):
    return {"parallelism": Parallelism(data_parallel_size=4, sharding=sharding)}


def reason(name, **changes):
    return out_of_scope(TrainingJob(architecture=catalog.architecture(name)).replace(**changes))


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("qwen3-30b-a3b", {"finetuning": IN_8_BITS}, "adapters on the experts"),
        ("qwen3-30b-a3b", LIGER, "kernels for experts"),
        ("falcon-7b", LIGER, "no kernels for model_type='falcon'"),
        ("gpt2", {"loss": FUSED}, "no kernels for model_type='gpt2'"),
        ("granite-3.1-2b", {"loss": FUSED}, "no fused loss for Granite"),
        ("falcon-40b", FLASH, "of Falcon"),
        ("llama-3.1-8b", {**TENSOR, **LIGER}, "Liger's kernels under torch's tensor"),
        ("llama-3.1-8b", {**TENSOR, "attention": "eager"}, "under sequence_parallel fails"),
        ("llama-3.1-8b", {**by_fsdp("fsdp1"), "finetuning": ATTENTION, "precision": MIXED}, "cannot multiply two dtypes"),
        ("llama-3.1-8b", {**by_fsdp("fsdp1"), "finetuning": ATTENTION, **SELECTIVE}, "the units inside it run other"),
        ("llama-3.1-8b", {**by_fsdp("fsdp2"), "finetuning": ATTENTION, "loss": FUSED}, "is never called, so"),
        ("gpt-j-6b", {"task": "inference"}, "generation with"),
        ("gpt-j-6b", {**by_fsdp("fsdp2"), **SELECTIVE}, "position tables"),
        ("mpt-7b", FLASH, "no flash_attention_2"),
        ("mpt-7b", {"architecture": NARROW_MPT}, "4 * hidden_size wide"),
        ("opt-125m", {**FLASH, "batch": Batch(form="padding_free")}, "passes no positions to attention"),
        ("llama-3.2-1b", {"precision": Precision(compute="float8"), "sequence_length": 1000}, "a multiple of 16"),
        ("bert-base", {"task": "inference"}, "generates nothing"),
    ],
)
def test_what_no_trace_confirms_is_out_of_scope(name, changes, why):
    assert why in reason(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-30b-a3b", {"finetuning": ATTENTION}),
        ("qwen3-30b-a3b", {"loss": FUSED}),
        ("opt-125m", FLASH),
        ("gpt2", {"framework": "torch", "activation_checkpointing": REENTRANT}),
        ("llama-3.1-8b", {**by_fsdp("fsdp2"), "finetuning": ATTENTION, **SELECTIVE}),
        ("llama-3.2-1b", {**by_fsdp("fsdp2"), "finetuning": ATTENTION, "loss": FUSED}),
        ("llama-3.1-8b", {**by_fsdp("fsdp2"), "loss": FUSED}),
        ("mixtral-8x7b", {"finetuning": ATTENTION}),
        ("qwen3-0.6b", {**LIGER, "finetuning": EVERYWHERE}),
        ("deepseek-v2-lite", {"framework_options": FrozenMapping({"autocast": True})}),
    ],
)
def test_what_lies_beside_it_is_in_scope(name, changes):
    assert reason(name, **changes) == ""


def test_float8_changes_nothing_where_no_layer_is_linear():
    """torchao converts nn.Linear alone: GPT-2 has Conv1D instead, and GPTBigCode, otherwise written like it, does not."""
    changes = {"precision": Precision(compute="float8")}
    for name, alike in (("gpt2", True), ("starcoder-15b", False)):
        assert reason(name, **changes) == ""
        plain = TrainingJob(architecture=catalog.architecture(name), sequence_length=512)
        eight, sixteen = (ledger(plain.replace(**each)).phase_peaks() for each in (changes, {}))
        assert (eight == sixteen) == alike


def test_flash_attention_of_float32_weights_runs_where_something_computes_in_half_precision():
    wide = {"precision": MIXED, "framework": "torch", **FLASH}
    why = reason("llama-3.2-1b", **wide)
    assert why is not None
    assert "no kernel for float32" in why
    sharded = reason("llama-3.2-1b", **wide, **by_fsdp("fsdp2"))
    assert sharded is None or "no kernel for float32" not in sharded
