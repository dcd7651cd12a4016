"""The features from which the residual may learn: numbers with a physical reason, by name, one row for each (job, device,
baseline).

The residual is relative, log(measured / baseline), so a fixed amount of hidden memory appears as a share of the baseline.
Flags are 0 or 1. Everything is known before the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from peakcast.core.units import GIB
from peakcast.core.versions import release, resolved
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.spec import Parallelism, TrainingJob
from peakcast.models.baseline.baseline import Baseline
from peakcast.models.baseline.reserved_findings import reserved_findings
from peakcast.models.calibration.grouping import gathers_weights
from peakcast.timelines.timeline import Category, Phase

if TYPE_CHECKING:
    from peakcast.catalog import Device

_COUNTED_AS = {Category.REFERENCE_PARAMETERS: Category.PARAMETERS, Category.KV_CACHE: Category.ACTIVATIONS}
"""Categories that too few measured rows have, and as what they count for the fit."""
_CATEGORIES = tuple(category.name.lower() for category in Category if category not in _COUNTED_AS)
_PHASES = tuple(phase.name.lower() for phase in Phase)
_ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flex")
_FRAMEWORKS = ("huggingface", "torch", "megatron", "deepspeed")

FEATURES: dict[str, str] = {
    "gib_over_start": "1 GiB / what the quantity's residual starts from: the weight of a fixed hidden amount",
    "log2_allocated": "log2 of the allocated baseline in GiB",
    "log2_reserved_over_allocated": "what the simulated allocator keeps beyond the tensors",
    "log2_device_over_reserved": "what is estimated outside PyTorch",
    "allocator_slack": "replayed / tensor peak − 1: unsplit rests of blocks, which torch counts as allocated",
    "held_share": "parameters, gradients and states as a share of the peak: exact bytes, no residual expected",
    **{f"share_{name}": f"share of the peak that is {name}" for name in _CATEGORIES},
    "temporaries_share": "share of the peak that lives for one operation: where kernels hide memory of their own",
    **{f"peak_in_{name}": f"the peak is in phase {name}" for name in _PHASES},
    "second_phase_ratio": "peak of the runner-up phase / peak: near 1, a small fault moves the peak elsewhere",
    "log2_tokens": "log2 of tokens per micro-batch and rank",
    "log2_sequence_length": "log2 of the sequence length per rank",
    "log2_hidden_size": "log2 of the width",
    "log2_num_hidden_layers": "log2 of the depth",
    "log2_vocab_size": "log2 of the vocabulary per tensor-parallel rank",
    "log2_head_dim": "log2 of the head dimension (attention kernels pad it)",
    "log2_query_groups": "log2 of query heads per key-value head (kernels may expand keys and values)",
    "log2_num_experts": "log2 of the experts, 0 for a dense network (routing makes sizes vary)",
    "log2_experts_per_token": "log2 of the experts each token visits, 0 for dense",
    "log2_data_parallel": "log2 of data_parallel_size",
    "log2_tensor_parallel": "log2 of tensor_parallel_size",
    "log2_pipeline_parallel": "log2 of pipeline_parallel_size",
    "log2_virtual_stages": "log2 of virtual_pipeline_stages",
    "log2_context_parallel": "log2 of context_parallel_size",
    "log2_expert_parallel": "log2 of expert_parallel_size",
    "num_parallel_axes": "axes with more than one rank: communicators and streams",
    "sequence_parallel": "activations are split along the sequence",
    "sharded": "parameters are sharded (FSDP, ZeRO 3, Megatron-FSDP): gathers on streams of their own",
    "distributed_optimizer": "optimizer states are sharded (any ZeRO stage or FSDP)",
    "accumulates": "more than one micro-batch per optimizer step",
    **{f"attention_{name}": f"attention={name}: its kernels' own temporaries" for name in _ATTENTIONS},
    **{f"framework_{name}": f"framework={name}" for name in _FRAMEWORKS},
    "checkpointing_full": "full activation checkpointing",
    "checkpointing_selective": "selective activation checkpointing",
    "adapters": "LoRA or QLoRA: most weights are frozen",
    "quantized": "frozen weights are quantised: dequantised temporaries",
    "optimizer_foreach": "foreach implementation: temporaries of a whole parameter group",
    "optimizer_low_bit": "8-bit or 4-bit optimizer states",
    "fused_cross_entropy": "the loss never holds all logits",
    "compile": "the compiler decides what is kept",
    "generates": "inference that decodes tokens: caches grow with every one",
    "beyond_replay": "published runs of such jobs are known to reserve more than is simulated",
    "changing_lengths": "sequences are not equally long: what one step leaves in the cache may not fit the next",
    "float8": "float8 compute: extra scaled copies and workspaces",
    "float32_main_gradients": "gradients in float32",
    "expandable_segments": "the allocator's expandable segments",
    "published": "the row was published by others: what else their runs held, and how they measured",
    "torch_release": "the software's date: torch's major.minor as a number (2.11 is 2.11 → 211), 0 where not given",
    "compute_capability": "GPU generation (9.0 is 90)",
    "num_sms": "multiprocessors in hundreds: split kernels and the local-memory arena grow with them",
}
"""Name → why it may matter. The order is the order of a row."""


MONOTONE = {"gib_over_start": 1, "log2_allocated": -1}
"""Features with which a residual may only rise (1) or only fall (−1), all else equal: memory of fixed size that no tensor
explains is a larger share of a smaller job."""
ENOUGH_FOR_FEATURES = 5
"""With fewer architectures, nothing is learned from features. There are some sixty features, so a fit to three or four
architectures would distinguish them by any feature that happens to differ, and say nothing about a fifth."""


def sizes(job: TrainingJob, allocated_bytes: int) -> dict[str, float]:
    """The features that are powers of two: the sizes of a job whose baseline allocates `allocated_bytes`."""
    layout, a = job.parallelism, job.architecture
    sequence = job.sequence_length / layout.context_parallel_size
    return {
        "log2_allocated": math.log2(max(allocated_bytes, 1) / GIB),
        "log2_tokens": math.log2(job.micro_batch_size * job.sequence_length / layout.context_parallel_size),
        "log2_sequence_length": math.log2(sequence),
        "log2_hidden_size": math.log2(a.hidden_size),
        "log2_num_hidden_layers": math.log2(a.num_hidden_layers),
        "log2_vocab_size": math.log2(a.vocab_size / layout.tensor_parallel_size),
        "log2_head_dim": math.log2(a.head_dim),
        "log2_query_groups": math.log2(a.num_attention_heads / a.num_key_value_heads),
        "log2_num_experts": math.log2(a.moe.num_experts) if a.moe else 0.0,
        "log2_experts_per_token": math.log2(a.moe.num_experts_per_tok) if a.moe else 0.0,
        **{f"log2_{name}_parallel": math.log2(size) for name, size in _axes(layout).items()},
        "log2_virtual_stages": math.log2(layout.virtual_pipeline_stages),
    }


def kinds(job: TrainingJob) -> dict[str, float]:
    """The features that say what kind of run a job is, independent of its sizes: 0 or 1."""
    return {
        "sharded": float(gathers_weights(job)),
        "compile": float(job.compile),
        "generates": float(job.task == "inference" and (job.inference.new_tokens or 0) > 1),
        "beyond_replay": float(bool(reserved_findings(job))),
        "changing_lengths": float(lengths_change(job)),
    }


def _axes(layout: Parallelism) -> dict[str, int]:
    """Number of ranks along each parallel axis."""
    return {
        "data": layout.data_parallel_size,
        "tensor": layout.tensor_parallel_size,
        "pipeline": layout.pipeline_parallel_size,
        "context": layout.context_parallel_size,
        "expert": layout.expert_parallel_size,
    }


def features(job: TrainingJob, device: Device, base: Baseline, *, published: bool = False) -> dict[str, float]:
    """The row of `FEATURES` for one job, device and baseline, for the allocated peak (`of_quantity` for others); every
    value is finite. `published`: whether the row was published by others, not measured by peakcast or being asked about."""
    values = {
        **sizes(job, base.peak_allocated_bytes),
        **kinds(job),
        **_of_the_baseline(base),
        **_settings(job),
        **_machine(job, device),
        "published": published,
    }
    return {name: float(values[name]) for name in FEATURES}


def _of_the_baseline(base: Baseline) -> dict[str, float]:
    """The features of the analytical answer: how its quantities compare, and what its peak is made of."""
    peak, reserved = max(base.peak_allocated_bytes, 1), max(base.peak_reserved_bytes, 1)
    phases = sorted(base.phase_peaks_bytes.values(), reverse=True)
    shares = {name: base.composition.get(name, 0) / peak for name in _CATEGORIES}
    for own, counted_as in _COUNTED_AS.items():
        shares[counted_as.name.lower()] += base.composition.get(own.name.lower(), 0) / peak
    return {
        "gib_over_start": GIB / max(base.start("peak_allocated_bytes"), 1),
        "log2_reserved_over_allocated": math.log2(reserved / peak),
        "log2_device_over_reserved": math.log2(max(base.peak_device_bytes, 1) / reserved),
        "allocator_slack": base.replayed_allocated_bytes / peak - 1,
        "held_share": base.held_bytes / peak,
        **{f"share_{name}": share for name, share in shares.items()},
        "temporaries_share": shares["temporaries"] + shares["optimizer_temporaries"],
        **{f"peak_in_{name}": base.peak_phase == name for name in _PHASES},
        "second_phase_ratio": phases[1] / max(phases[0], 1) if len(phases) > 1 else 0.0,
    }


def _settings(job: TrainingJob) -> dict[str, float]:
    """The features that are single settings of a job."""
    layout = job.parallelism
    return {
        "num_parallel_axes": sum(size > 1 for size in _axes(layout).values()),
        "sequence_parallel": layout.sequence_parallel,
        "distributed_optimizer": layout.sharding in ("fsdp1", "fsdp2", "hsdp") or layout.zero_stage > 0,
        "accumulates": job.gradient_accumulation_steps > 1,
        **{f"attention_{name}": job.attention == name for name in _ATTENTIONS},
        **{f"framework_{name}": job.framework == name for name in _FRAMEWORKS},
        "checkpointing_full": job.activation_checkpointing.mode == "full",
        "checkpointing_selective": job.activation_checkpointing.mode == "selective",
        "adapters": job.finetuning.method != "full",
        "quantized": job.finetuning.quantization is not None,
        "optimizer_foreach": job.optimizer.implementation == "foreach",
        "optimizer_low_bit": job.optimizer.name in ("adamw_8bit", "adamw_4bit"),
        "fused_cross_entropy": job.loss.fused_linear_cross_entropy,
        "float8": job.precision.compute == "float8",
        "float32_main_gradients": job.precision.gradients == "float32",
        "expandable_segments": job.allocator.expandable_segments,
    }


def _machine(job: TrainingJob, device: Device) -> dict[str, float]:
    """The features of what a job runs on: the GPU, and the age of its software."""
    torch = release(resolved(job.versions).get("torch", "0.0"))
    major, minor = device.compute_capability
    return {
        "torch_release": torch[0] * 100 + torch[1] if len(torch) > 1 else 0,
        "compute_capability": major * 10 + minor,
        "num_sms": device.num_sms / 100,
    }


def of_quantity(row: Mapping[str, float], base: Baseline, quantity: str) -> dict[str, float]:
    """The row of `features` for the residual of `quantity`."""
    return {**row, "gib_over_start": GIB / max(base.start(quantity), 1)}
