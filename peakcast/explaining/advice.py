"""Changes that lower a job's peak: each piece of advice is a changed job whose peak was computed.

A candidate is an entry of `CANDIDATES`. It is shown only if it applies to the job, the ledger covers the changed job as
well as the job itself, and the changed job's peak is lower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any

from peakcast.answers.advised import Advice
from peakcast.catalog import Device
from peakcast.core.errors import PeakcastError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.scope.scope import out_of_scope

Changes = Mapping[str, Any]
"""Path of a job's field -> its new value."""
WORTH_SHOWING_BYTES = 16 * MIB
WORTH_SHOWING_PART = 0.005
"""Savings below `WORTH_SHOWING_BYTES`, or below this fraction of the peak, are not worth a change."""
MORE_TO_FIT = 2
ADAPTER_RANK = 16
FREE = "none known"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to need less memory: the fields of a job that it changes (none if it does not apply), and the price of the
    change."""

    name: str
    sentence: str
    price: str
    changes: Callable[[TrainingJob], Changes]
    _: KW_ONLY
    same_training: bool = True
    """Whether training or generation gives the same result, up to rounding."""
    tasks: tuple[str, ...] = ("train",)
    """The tasks to which it applies."""


def _when(holds: bool, changes: Changes) -> Changes:
    return changes if holds else {}


def _checkpointing(job: TrainingJob) -> Changes:
    return _when(job.activation_checkpointing.mode != "full", {"activation_checkpointing.mode": "full"})


def _selective(job: TrainingJob) -> Changes:
    return _when(job.activation_checkpointing.mode == "none", {"activation_checkpointing.mode": "selective"})


def _not_reentrant(job: TrainingJob) -> Changes:
    checkpointing = job.activation_checkpointing
    reentrant = checkpointing.mode != "none" and checkpointing.use_reentrant and job.framework != "megatron"
    return _when(reentrant, {"activation_checkpointing.use_reentrant": False})


def _smaller_micro_batch(job: TrainingJob) -> Changes:
    """The same tokens per optimizer step in twice as many micro-batches."""
    smallest = next((d for d in range(2, job.micro_batch_size + 1) if job.micro_batch_size % d == 0), 0)
    if not smallest:
        return {}
    return {
        "micro_batch_size": job.micro_batch_size // smallest,
        "gradient_accumulation_steps": job.gradient_accumulation_steps * smallest,
    }


def _implementation(kind: str) -> Callable[[TrainingJob], Changes]:
    return lambda job: _when(job.optimizer.implementation == "foreach", {"optimizer.implementation": kind})


def _optimizer(name: str) -> Callable[[TrainingJob], Changes]:
    return lambda job: _when(job.optimizer.name in ("adamw", "adam"), {"optimizer.name": name})


def _lora(job: TrainingJob) -> Changes:
    changes = {"finetuning.method": "lora", "finetuning.rank": ADAPTER_RANK}
    return _when(job.finetuning.method == "full" and job.framework != "megatron", changes)


def _qlora(job: TrainingJob) -> Changes:
    changes = {"finetuning.method": "qlora", "finetuning.quantization": "nf4", "finetuning.rank": ADAPTER_RANK}
    return _when(job.finetuning.method == "full" and job.framework != "megatron", changes)


def _quantised_base(job: TrainingJob) -> Changes:
    return _when(job.finetuning.method == "lora", {"finetuning.method": "qlora", "finetuning.quantization": "nf4"})


def _narrow(job: TrainingJob) -> Changes:
    """Train in bfloat16 throughout, without autocast, which only float32 weights need."""
    wide = {
        f"precision.{part}": "bfloat16"
        for part in ("parameters", "gradients", "optimizer_states", "compute")
        if getattr(job.precision, part) == "float32"
    }
    if "autocast" in job.framework_options and "precision.parameters" in wide:
        wide["framework_options.autocast"] = False  # type: ignore[assignment]
    return _when(job.framework != "megatron", wide)


def _narrow_gradients(job: TrainingJob) -> Changes:
    wide = job.framework == "megatron" and job.precision.gradients == "float32" and job.precision.parameters != "float32"
    return _when(wide, {"precision.gradients": job.precision.parameters})


def _no_main_weights(job: TrainingJob) -> Changes:
    can_drop_them = job.precision.main_parameters is not None and job.framework != "megatron"  # which always has them
    return _when(can_drop_them, {"precision.main_parameters": None})


def _sequence_parallel(job: TrainingJob) -> Changes:
    layout = job.parallelism
    return _when(layout.tensor_parallel_size > 1 and not layout.sequence_parallel, {"parallelism.sequence_parallel": True})


def _distributed_optimizer(job: TrainingJob) -> Changes:
    layout = job.parallelism
    replicas = layout.data_parallel_size * layout.context_parallel_size
    return _when(job.framework == "megatron" and replicas > 1 and layout.zero_stage == 0, {"parallelism.zero_stage": 1})


def _fsdp(job: TrainingJob) -> Changes:
    layout = job.parallelism
    apart = layout.sharding in ("none", "no_shard") and layout.zero_stage == 0
    return _when(
        job.framework in ("huggingface", "torch") and layout.data_parallel_size > 1 and apart,
        {"parallelism.sharding": "fsdp2"},
    )


def _next_zero_stage(stage: int) -> Callable[[TrainingJob], Changes]:
    def changes(job: TrainingJob) -> Changes:
        layout = job.parallelism
        higher = job.framework == "deepspeed" and layout.data_parallel_size > 1 and layout.zero_stage < stage
        return _when(higher, {"parallelism.zero_stage": stage})

    return changes


def _fused_loss(job: TrainingJob) -> Changes:
    off = not job.loss.fused_linear_cross_entropy and job.framework != "megatron"
    return _when(off, {"loss.fused_linear_cross_entropy": True})


def _fused_megatron_loss(job: TrainingJob) -> Changes:
    off = job.framework == "megatron" and not conventions(job).get("cross_entropy_loss_fusion")
    return _when(off, {"framework_options.cross_entropy_loss_fusion": True})


def _attention(kind: str, instead_of: tuple[str, ...]) -> Callable[[TrainingJob], Changes]:
    return lambda job: _when(job.attention in instead_of and job.framework != "megatron", {"attention": kind})


def _offload(part: str) -> Callable[[TrainingJob], Changes]:
    return lambda job: _when(not getattr(job.offload, part), {f"offload.{part}": True})


def _optimizer_in_backward(job: TrainingJob) -> Changes:
    alone = job.framework == "torch" and not conventions(job).get("optimizer_in_backward")
    return _when(alone and job.gradient_accumulation_steps == 1, {"framework_options.optimizer_in_backward": True})


def _fewer_sequences(job: TrainingJob) -> Changes:
    smallest = next((d for d in range(2, job.micro_batch_size + 1) if job.micro_batch_size % d == 0), 0)
    return {"micro_batch_size": job.micro_batch_size // smallest} if smallest else {}


def _quantised(kind: str) -> Callable[[TrainingJob], Changes]:
    plain = {"huggingface", "torch"}
    return lambda job: _when(
        job.framework in plain and job.finetuning.quantization is None, {"finetuning.quantization": kind}
    )


RECOMPUTES = "one more forward per step, about a third more work (Chen et al. 2016, arXiv:1604.06174)"
NOT_WITH_TRL = "none known; TRL's trainers do not allow it for adapters under ZeRO-3"
LEARNS_LESS = "only adapters learn (Hu et al. 2021, arXiv:2106.09685)"
MANY_LAUNCHES = "one kernel launch per tensor and operation: a slower optimizer step"
TO_BE_TUNED = "another optimizer, to be tuned"
ROUNDED_AWAY = "small updates are rounded away"
SLOW_LINKS = "traffic over PCIe, and as much host memory"
ROUNDED = "rounded weights and slower matrix products (Dettmers et al. 2022, arXiv:2208.07339; 2023, arXiv:2305.14314)"
ANY_TASK = ("train", "inference")
CANDIDATES = (
    Candidate("fused-optimizer", "Use the fused optimizer step", FREE, _implementation("fused")),
    Candidate("looped-optimizer", "Update one tensor at a time (no foreach)", MANY_LAUNCHES, _implementation("loop")),
    Candidate("fused-loss", "Fuse the output layer with the loss (Liger's kernel)", FREE, _fused_loss),
    Candidate("fused-loss", "Fuse the vocabulary-parallel loss", FREE, _fused_megatron_loss),
    Candidate("checkpointing", "Recompute activations in the backward pass", RECOMPUTES, _checkpointing),
    Candidate("not-reentrant", "Recompute without reentrant autograd", NOT_WITH_TRL, _not_reentrant),
    Candidate("selective-checkpointing", "Recompute the attention core only", "a few percent more work", _selective),
    Candidate(
        "smaller-micro-batch",
        "Split the batch into smaller micro-batches and accumulate",
        "less work per kernel; the same tokens per optimizer step",
        _smaller_micro_batch,
    ),
    Candidate(
        "optimizer-in-backward",
        "Step each parameter's optimizer as its gradient comes",
        "no gradient clipping and no accumulation (torchtune's optimizer_in_bwd)",
        _optimizer_in_backward,
        same_training=False,
    ),
    Candidate("sdpa", "Let PyTorch choose a fused attention kernel", FREE, _attention("sdpa", ("eager",)), tasks=ANY_TASK),
    Candidate(
        "flash-attention",
        "Use FlashAttention",
        "another package to install",
        _attention("flash_attention_2", ("sdpa",)),
        tasks=ANY_TASK,
    ),
    Candidate(
        "fewer-sequences", "Generate for fewer sequences at a time", "more passes", _fewer_sequences, tasks=("inference",)
    ),
    Candidate(
        "static-cache",
        "Allocate the key-value cache once, for the longest answer",
        "what shorter answers do not use",
        lambda job: _when(job.inference.cache == "dynamic", {"inference.cache": "static"}),
        tasks=("inference",),
    ),
    Candidate(
        "8-bit-weights",
        "Load the weights in 8 bits",
        ROUNDED,
        _quantised("int8"),
        same_training=False,
        tasks=("inference",),
    ),
    Candidate(
        "4-bit-weights", "Load the weights in 4 bits", ROUNDED, _quantised("nf4"), same_training=False, tasks=("inference",)
    ),
    Candidate(
        "8-bit-optimizer",
        "Keep optimizer states in 8 bits",
        "quantised states (Dettmers et al. 2021, arXiv:2110.02861)",
        _optimizer("adamw_8bit"),
        same_training=False,
    ),
    Candidate("adafactor", "Use Adafactor's factored states", TO_BE_TUNED, _optimizer("adafactor"), same_training=False),
    Candidate("lion", "Use Lion's single state", TO_BE_TUNED, _optimizer("lion"), same_training=False),
    Candidate("lora", f"Train adapters of rank {ADAPTER_RANK} (LoRA)", LEARNS_LESS, _lora, same_training=False),
    Candidate(
        "qlora", f"Train adapters of rank {ADAPTER_RANK} on 4-bit weights (QLoRA)", LEARNS_LESS, _qlora, same_training=False
    ),
    Candidate(
        "quantised-base",
        "Quantise the frozen weights to 4 bits (QLoRA)",
        "rounded weights and slower matrix products (Dettmers et al. 2023, arXiv:2305.14314)",
        _quantised_base,
        same_training=False,
    ),
    Candidate("bfloat16", "Keep everything in bfloat16", ROUNDED_AWAY, _narrow, same_training=False),
    Candidate("narrow-gradients", "Sum gradients in 16 bits", "less exact sums", _narrow_gradients, same_training=False),
    Candidate(
        "no-main-weights", "Keep no float32 copy of the weights", ROUNDED_AWAY, _no_main_weights, same_training=False
    ),
    Candidate("sequence-parallel", "Share activations among tensor-parallel ranks", FREE, _sequence_parallel),
    Candidate("distributed-optimizer", "Shard the optimizer over data-parallel ranks", FREE, _distributed_optimizer),
    Candidate("fsdp", "Shard everything over data-parallel ranks (FSDP2)", "half as much traffic again", _fsdp),
    Candidate("zero-1", "Shard optimizer states (ZeRO-1)", FREE, _next_zero_stage(1)),
    Candidate("zero-2", "Shard gradients too (ZeRO-2)", "gradients travel every micro-batch", _next_zero_stage(2)),
    Candidate("zero-3", "Shard weights too (ZeRO-3)", "half as much traffic again", _next_zero_stage(3)),
    Candidate("offload-optimizer", "Keep optimizer states in host memory", SLOW_LINKS, _offload("optimizer")),
    Candidate("offload-parameters", "Keep weights in host memory", SLOW_LINKS, _offload("parameters")),
    Candidate("offload-activations", "Keep activations in host memory", SLOW_LINKS, _offload("activations")),
)


def advice(
    job: TrainingJob, device: Device | None, rank: int, candidates: Sequence[Candidate] = CANDIDATES
) -> tuple[Advice, ...]:
    """Changes that lower the peak of a steady step of `rank`, the largest saving first. Each candidate costs one ledger."""
    if out_of_scope(job):
        return ()
    before = _peak(job, device, rank)
    found = []
    for candidate in candidates:
        changes = candidate.changes(job) if job.task in candidate.tasks else {}
        after = _peak_after(job, changes, device, rank) if changes else None
        if after is not None and before - after >= max(WORTH_SHOWING_BYTES, WORTH_SHOWING_PART * before):
            found.append(
                Advice(
                    name=candidate.name,
                    sentence=candidate.sentence,
                    price=candidate.price,
                    changes=dict(changes),
                    same_training=candidate.same_training,
                    saved_bytes=before - after,
                    peak_bytes=after,
                )
            )
    # savings that differ by less than `WORTH_SHOWING_BYTES` count as equal; the sort is stable, so the cheaper change,
    # which comes first in `CANDIDATES`, stays first
    return tuple(sorted(found, key=lambda item: -(item.saved_bytes // WORTH_SHOWING_BYTES)))


def first_to_try(job: TrainingJob, device: Device | None, rank: int, count: int = 3) -> tuple[Advice, ...]:
    """Up to `count` changes, each applied on top of those before it, and each the one that then saves most: if a step has
    two peaks of nearly the same height, only changes to both lower the maximum. Changes that do not alter the training come
    first. The bytes of a change are what it saves beyond the changes before it. If the step needs more than `device` has, a
    change that makes it fit is preferred to the one that saves most; of several such changes, the one that comes first in
    `CANDIDATES`. If `count` changes are not enough, up to `MORE_TO_FIT` more are added, provided that the job then fits."""
    room = _room(job, device)
    found: list[Advice] = []

    def take(candidates: Sequence[Candidate], most: int) -> None:
        nonlocal job
        while len(found) < most and (others := advice(job, device, rank, _fresh(candidates, found, room))):
            enough = {item.name: item for item in others if item.peak_bytes <= room < item.peak_bytes + item.saved_bytes}
            found.append(next((enough[mild.name] for mild in candidates if mild.name in enough), others[0]))
            job = changed(job, found[-1].changes)

    for same_training in (True, False):
        take([candidate for candidate in CANDIDATES if candidate.same_training is same_training], count)
    if found and found[-1].peak_bytes > room:
        take(CANDIDATES, count + MORE_TO_FIT)
    enough = next((number for number, item in enumerate(found, 1) if item.peak_bytes <= room), 0)
    return tuple(found[: max(count, enough)])


def _fresh(candidates: Sequence[Candidate], found: Sequence[Advice], room: int) -> list[Candidate]:
    """Candidates worth trying next. A change that was made already (halving the micro-batch once more) is tried again only
    if it may make the job fit."""
    again = bool(found) and found[-1].peak_bytes > room
    return [candidate for candidate in candidates if again or all(item.name != candidate.name for item in found)]


def _room(job: TrainingJob, device: Device | None) -> int:
    from peakcast.models.baseline.baseline import usable_bytes
    from peakcast.models.baseline.measured_constants import known_context_bytes

    return usable_bytes(job, device) - known_context_bytes(device, job.versions) if device is not None else 2**62


def expandable_segments(job: TrainingJob, device: Device, rank: int) -> tuple[Advice, ...]:
    """What `expandable_segments` saves of reserved memory, from a replay of the step in the simulated allocator."""
    from peakcast.models.baseline.baseline import baseline

    if job.allocator.expandable_segments or out_of_scope(job):
        return ()
    changes = {"allocator.expandable_segments": True}
    before = baseline(job, device, rank).peak_reserved_bytes
    after = baseline(changed(job, changes), device, rank).peak_reserved_bytes
    if before - after < max(WORTH_SHOWING_BYTES, WORTH_SHOWING_PART * before):
        return ()
    return (
        Advice(
            name="expandable-segments",
            sentence="Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            price=FREE,
            changes=changes,
            same_training=True,
            saved_bytes=before - after,
            peak_bytes=after,
            quantity="peak_reserved_bytes",
        ),
    )


def changed(job: TrainingJob, changes: Changes) -> TrainingJob:
    """`job` with `changes`, whose paths have at most two parts. Raises: SpecError if the result is not a valid job."""
    values: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        parent, _, name = path.rpartition(".")
        (inside.setdefault(parent, {}) if parent else values)[name] = value
    for parent, inner in inside.items():
        before = getattr(job, parent)
        mapped = isinstance(before, FrozenMapping)
        values[parent] = FrozenMapping({**before, **inner}) if mapped else replace(before, **inner)
    return job.replace(**values)


def _peak_after(job: TrainingJob, changes: Changes, device: Device | None, rank: int) -> int | None:
    """The peak of the changed job; None if that is not a valid job or the ledger does not cover it."""
    try:
        other = changed(job, changes)
        return None if out_of_scope(other) else _peak(other, device, rank)
    except (PeakcastError, NotImplementedError):
        return None


@lru_cache(maxsize=256)  # `first_to_try` and `advice` compute the same jobs
def _peak(job: TrainingJob, device: Device | None, rank: int) -> int:
    from peakcast.models.baseline.ledger import ledger

    return ledger(job, device=device, rank=rank).peak().num_bytes
