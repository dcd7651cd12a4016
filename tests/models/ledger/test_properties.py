"""What holds for every ledger, whatever the job: it adds up, nothing is negative, more costs more, splitting never does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from peakcast.catalog import architecture, gpu
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, Loss, Optimizer, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Category, Phase, Timeline

DEVICE = gpu("A100-80GB")
HELD = (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
MIXED = Precision(gradients="float32", optimizer_states="float32", main_parameters="float32")
quickly = settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])


def tuning(method: str) -> Finetuning:
    quantization = {"qlora": "nf4"}.get(method)
    return Finetuning(method=method, rank=None if method == "full" else 8, quantization=quantization)


HUGGINGFACE = st.builds(
    TrainingJob,
    architecture=st.sampled_from(["llama-3.2-1b", "gpt2", "qwen3-0.6b"]).map(architecture),
    micro_batch_size=st.integers(1, 6),
    sequence_length=st.integers(16, 1024),
    gradient_accumulation_steps=st.integers(1, 3),
    optimizer=st.builds(
        Optimizer, name=st.sampled_from(["adamw", "sgd"]), implementation=st.sampled_from(["fused", "foreach", "loop"])
    ),
    finetuning=st.sampled_from(["full", "lora", "qlora"]).map(tuning),
    attention=st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    activation_checkpointing=st.sampled_from(["none", "full"]).map(lambda mode: ActivationCheckpointing(mode=mode)),
    loss=st.booleans().map(lambda fused: Loss(fused_linear_cross_entropy=fused)),
)


@st.composite
def megatron_jobs(draw: st.DrawFn) -> TrainingJob:
    tensor = draw(st.sampled_from([1, 2, 4]))
    context = draw(st.sampled_from([1, 2]))
    return TrainingJob(
        architecture=architecture("llama-3.2-1b"),
        framework="megatron",
        precision=MIXED,
        micro_batch_size=draw(st.integers(1, 4)),
        sequence_length=tensor * context * draw(st.integers(4, 300)),
        gradient_accumulation_steps=draw(st.integers(1, 6)),
        activation_checkpointing=ActivationCheckpointing(mode=draw(st.sampled_from(["none", "selective", "full"]))),
        parallelism=Parallelism(
            data_parallel_size=draw(st.sampled_from([1, 2, 8])),
            tensor_parallel_size=tensor,
            sequence_parallel=draw(st.booleans()),
            pipeline_parallel_size=draw(st.sampled_from([1, 2, 4])),
            context_parallel_size=context,
            zero_stage=draw(st.integers(0, 1)),
        ),
    )


JOBS = st.one_of(HUGGINGFACE, megatron_jobs())
STEPS = st.sampled_from(["first", "steady"])


def peak(job: TrainingJob) -> int:
    return ledger(job, device=DEVICE).peak().num_bytes


def held(job: TrainingJob) -> int:
    """Bytes of parameters, gradients that stand by, and states at the beginning of a steady step."""
    timeline = ledger(job, device=DEVICE)
    standing = np.isin(timeline.categories, [int(category) for category in HELD]) & timeline.alive_at(0)
    return int(timeline.num_bytes[standing].sum())


def rows(timeline: Timeline) -> list[tuple[object, ...]]:
    columns = timeline.categories, timeline.num_bytes, timeline.born, timeline.dies
    return sorted(zip(timeline.names, timeline.modules, *(column.tolist() for column in columns), strict=True))


@quickly
@given(job=JOBS, step=STEPS)
def test_the_ledger_adds_up_to_the_byte(job, step):
    timeline = ledger(job, device=DEVICE, step=step)
    by_category = np.zeros((len(Category), len(timeline.phases)), dtype=np.int64)
    for category, size, born, dies in zip(
        timeline.categories.tolist(),
        timeline.num_bytes.tolist(),
        timeline.born.tolist(),
        timeline.dies.tolist(),
        strict=True,
    ):
        by_category[category, born:dies] += size
    assert np.array_equal(by_category.sum(axis=0), timeline.totals)
    assert by_category.min() >= 0
    peak = timeline.peak()
    assert peak.num_bytes == timeline.totals.max() == sum(timeline.composition(peak.instant).values())
    assert timeline.composition(peak.instant) == {
        category: int(by_category[category, peak.instant])
        for category in sorted(Category, key=lambda c: -by_category[c, peak.instant])
        if by_category[category, peak.instant]
    }


@quickly
@given(job=JOBS, step=STEPS)
def test_every_tensor_has_bytes_as_the_allocator_counts_them_and_a_life_in_the_step(job, step):
    timeline = ledger(job, device=DEVICE, step=step)
    assert (timeline.num_bytes > 0).all()
    assert (timeline.num_bytes % 512 == 0).all()
    assert (timeline.born >= 0).all()
    assert (timeline.dies >= timeline.born).all()
    assert (timeline.dies <= len(timeline.phases)).all()
    assert len(timeline.labels) == len(timeline.phases)


@quickly
@given(job=JOBS)
def test_more_tokens_never_need_less(job):
    assume(job.sequence_length >= 2)
    more = job.parallelism.tensor_parallel_size * job.parallelism.context_parallel_size
    assert peak(job) <= peak(job.replace(micro_batch_size=job.micro_batch_size + 1))
    assert peak(job) <= peak(job.replace(sequence_length=job.sequence_length + more))


@quickly
@given(job=JOBS)
def test_the_first_step_never_has_the_higher_peak(job):
    # the states are there all along in later steps: why the sweep asks for a steady step alone
    assert ledger(job, device=DEVICE, step="first").peak().num_bytes <= peak(job)


@quickly
@given(job=JOBS, ranks=st.sampled_from([1, 2, 4, 8]), times=st.sampled_from([2, 4]))
def test_more_data_parallel_ranks_never_raise_what_one_holds(job, ranks, times):
    # (from one rank to two, ZeRO would bring DeepSpeed's fp32 copies with it)
    sharded = {"zero_stage": 1} if job.framework == "megatron" else {"sharding": "fsdp2"}
    layouts = [
        Parallelism(
            **{**sharded, "data_parallel_size": n, "pipeline_parallel_size": job.parallelism.pipeline_parallel_size}
        )
        for n in (ranks, ranks * times)
    ]
    fewer, more = (held(job.replace(parallelism=layout)) for layout in layouts)
    assert more <= fewer


@quickly
@given(job=megatron_jobs())
def test_a_higher_tensor_parallel_size_never_raises_what_one_rank_holds(job):
    layout = job.parallelism
    halves = Parallelism(
        data_parallel_size=layout.data_parallel_size,
        tensor_parallel_size=layout.tensor_parallel_size * 2,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        zero_stage=layout.zero_stage,
    )
    try:
        split = job.replace(parallelism=halves, sequence_length=1024)
    except SpecError:
        assume(False)
    assert held(split) <= held(job)


@quickly
@given(job=HUGGINGFACE, sharding=st.sampled_from(["none", "fsdp1", "fsdp2", "hsdp", "no_shard"]))
def test_sharding_over_one_rank_changes_nothing(job, sharding):
    layout = Parallelism(sharding=sharding)
    assert rows(ledger(job.replace(parallelism=layout), device=DEVICE)) == rows(ledger(job, device=DEVICE))


OF_SEVERAL_RANKS = {
    "ddp_bucket_cap_mib": 1,
    "ddp_gradient_as_bucket_view": True,
    "accumulates_without_sync": True,
    "fsdp2_units": "ends",
    "fsdp_reshard_after_forward": False,
    "fsdp_reduce_dtype": "bfloat16",
    "shard_group_size": 2,
    "loss_parallel": False,
    "context_parallel_rotation": "alltoall",
}
"""Options of DDP, FSDP, tensor and context parallelism, none as it is by default."""


@quickly
@given(
    job=HUGGINGFACE,
    framework=st.sampled_from(["huggingface", "torch"]),
    sharding=st.sampled_from(["none", "fsdp1", "fsdp2", "hsdp"]),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    option=st.sampled_from(sorted(OF_SEVERAL_RANKS)),
)
def test_torchs_layouts_of_size_one_change_nothing_however_they_are_set(job, framework, sharding, schedule, option):
    """Nobody is asked for gradients, columns, keys or stages: neither framework wraps a network for one rank."""
    plain = job.replace(framework=framework)
    assume(option in conventions(plain))
    layout = Parallelism(sharding=sharding, sequence_parallel=True, pipeline_schedule=schedule)
    ones = plain.replace(parallelism=layout, framework_options=FrozenMapping({option: OF_SEVERAL_RANKS[option]}))
    for step in ("first", "steady"):
        assert rows(ledger(ones, device=DEVICE, step=step)) == rows(ledger(plain, device=DEVICE, step=step))


@quickly
@given(job=megatron_jobs())
def test_megatron_layouts_of_size_one_change_nothing(job):
    plain = job.replace(parallelism=Parallelism())
    ones = job.replace(parallelism=Parallelism(sequence_parallel=True, expert_tensor_parallel_size=1))
    assert rows(ledger(ones, device=DEVICE)) == rows(ledger(plain, device=DEVICE))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stages_between_the_ends_hold_less_the_later_they_are(stages):
    job = TrainingJob(
        architecture=architecture("llama-3.2-1b"),
        framework="megatron",
        precision=MIXED,
        gradient_accumulation_steps=16,
        parallelism=Parallelism(pipeline_parallel_size=stages),
    )
    peaks = [ledger(job, device=DEVICE, rank=stage).peak().num_bytes for stage in range(stages)]
    assert peaks[1:-1] == sorted(peaks[1:-1], reverse=True)


LAYOUTS = st.sampled_from(
    [
        Parallelism(),
        *(Parallelism(data_parallel_size=2, sharding=sharding) for sharding in ("none", "fsdp1", "fsdp2")),
        *(Parallelism(data_parallel_size=2, zero_stage=stage) for stage in (1, 2, 3)),
    ]
)


@quickly
@given(job=HUGGINGFACE, layout=LAYOUTS)
def test_clipping_takes_one_number_for_each_gradient_whatever_its_limit(job, layout):
    """clip_grad_norm_ scales in place, and DeepSpeed takes the norm of its gradients whether it clips or not: so it is
    counted always, and configurations need not say `max_grad_norm`."""
    framework = "deepspeed" if layout.zero_stage else "huggingface"
    try:
        timeline = ledger(job.replace(parallelism=layout, framework=framework), device=DEVICE)
    except SpecError:
        assume(False)
    peaks = timeline.phase_peaks()
    numbers = 512 * sum(name.endswith(".norm") for name in timeline.names)
    assert peaks.get(Phase.GRADIENT_CLIPPING, 0) <= max(peaks[Phase.BACKWARD], peaks[Phase.OPTIMIZER_STEP]) + numbers
