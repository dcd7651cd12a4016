"""The baseline, on a step whose bytes are counted by hand (see `fake_ledger`)."""

from __future__ import annotations

from peakcast.core.units import MIB, power_of_two
from peakcast.jobs.ranks import ranks_that_differ
from peakcast.jobs.spec import Allocator, Offload, Parallelism
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.device_memory import (
    BASE_CONTEXT_BYTES,
    communicator_bytes,
    context_bytes,
    contexts_and_kernels_bytes,
)
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

W = 512 * MIB  # weights of the tiny architecture in the fake ledger
LOGITS = 8 * MIB


def test_the_peak_is_the_fullest_instant_of_the_first_and_any_later_step(fakes):
    base = baseline(fakes.job(), fakes.devices["H100-80GB"], ledger=fakes.ledger)
    assert base.peak_allocated_bytes == 5 * W + LOGITS  # weights, gradients, two states, temporaries
    assert base.peak_phase == "optimizer_step"
    assert base.first_step_peak_bytes == 5 * W + LOGITS
    assert base.steady_state_bytes == 3 * W  # what a step leaves
    assert base.phase_peaks_bytes["forward"] == 3 * W + 2048 * 4096
    assert base.held_bytes == 4 * W


def test_the_peak_is_explained_to_the_byte(fakes):
    base = baseline(fakes.job(), fakes.devices["H100-80GB"], ledger=fakes.ledger)
    assert sum(base.composition.values()) == base.peak_allocated_bytes
    assert base.largest[0] == ("weight", "parameters", W, 1)


def test_reserved_is_at_least_allocated_and_device_adds_what_lies_outside(fakes):
    device = fakes.devices["H100-80GB"]
    base = baseline(fakes.job(), device, ledger=fakes.ledger)
    assert base.peak_allocated_bytes <= base.replayed_allocated_bytes <= base.peak_reserved_bytes
    assert base.peak_device_bytes == base.peak_reserved_bytes + base.context_bytes
    assert base.communicator_bytes == 0


def test_expandable_segments_of_the_job_reach_the_replay(fakes):
    device = fakes.devices["H100-80GB"]
    job = fakes.job(sequence_length=4097)
    native = baseline(job, device, ledger=fakes.ledger)
    expandable = baseline(job.replace(allocator=Allocator(expandable_segments=True)), device, ledger=fakes.ledger)
    assert native.peak_allocated_bytes == expandable.peak_allocated_bytes
    assert native.peak_reserved_bytes != expandable.peak_reserved_bytes


def test_a_nearly_full_gpu_gives_cached_segments_back_and_a_full_one_is_answered_as_if_roomy(fakes):
    entries = [
        Entry("weight", Category.PARAMETERS, 10 * MIB, 0, 99),
        Entry("activation", Category.ACTIVATIONS, 60 * MIB, 0, 1),
        Entry("temporary", Category.TEMPORARIES, 80 * MIB, 1, 2),
    ]
    step = Timeline.from_entries(entries, [Phase.FORWARD, Phase.BACKWARD])

    def on_a_gpu_with(room):
        outside_bytes = contexts_and_kernels_bytes(fakes.job(), fakes.device())
        device = fakes.device(cuda_memory_bytes=room + outside_bytes)
        return baseline(fakes.job(), device, ledger=lambda job, **_: step)

    roomy, tight, too_small = on_a_gpu_with(200 * MIB), on_a_gpu_with(100 * MIB), on_a_gpu_with(80 * MIB)
    assert (roomy.peak_reserved_bytes, roomy.num_retries) == (150 * MIB, 0)
    assert (tight.peak_reserved_bytes, tight.num_retries) == (90 * MIB, 1)
    assert too_small.peak_reserved_bytes == roomy.peak_reserved_bytes


def test_the_context_is_the_base_and_one_kib_for_every_thread(fakes):
    assert context_bytes(fakes.devices["H100-80GB"], {"cuda": "12.8"}) == BASE_CONTEXT_BYTES[12] + 264 * MIB
    assert context_bytes(fakes.devices["A100-80GB"], {"torch": "2.11.0"}) == BASE_CONTEXT_BYTES[13] + 216 * MIB


def test_the_worst_rank_is_found_among_the_pipeline_stages(fakes):
    job = fakes.job(parallelism=Parallelism(pipeline_parallel_size=2, tensor_parallel_size=2))
    assert ranks_that_differ(job) == (0, 2)
    worst = baseline(job, fakes.devices["H100-80GB"], ledger=fakes.ledger)
    assert worst.rank == 2  # the stage with the logits
    first = baseline(job, fakes.devices["H100-80GB"], 0, ledger=fakes.ledger)
    assert (first.rank, worst.peak_allocated_bytes - first.peak_allocated_bytes) == (0, LOGITS)


def test_every_timeline_is_made_once(fakes):
    made = []

    def ledger(job, **which):
        made.append((job, *sorted(which.items())))
        return fakes.ledger(job, **which)

    job = fakes.job(parallelism=Parallelism(pipeline_parallel_size=4, data_parallel_size=2, zero_stage=1))
    baseline(job, fakes.devices["H100-80GB"], ledger=ledger)
    assert len(made) == len(set(made)) >= 5  # the steady step of each stage, and the first step of the worst


def test_each_axis_of_more_than_one_rank_has_a_communicator(fakes):
    job = fakes.job(parallelism=Parallelism(data_parallel_size=4, tensor_parallel_size=2))
    assert communicator_bytes(job, fakes.devices["A100-80GB"]) == (688 + 544 + 128) * MIB


def test_offloaded_states_go_to_the_host_rounded_to_powers_of_two(fakes):
    device = fakes.devices["H100-80GB"]
    architecture = fakes.architecture(hidden_size=576)
    job = fakes.job(architecture=architecture, offload=Offload(optimizer=True))
    assert baseline(job, device, ledger=fakes.ledger).peak_host_bytes == 1024 * MIB  # 576 MiB pinned
    assert baseline(job.replace(offload=Offload()), device, ledger=fakes.ledger).peak_host_bytes == 0
    assert [power_of_two(size) for size in (0, 1, 512, 513)] == [0, 1, 512, 1024]
