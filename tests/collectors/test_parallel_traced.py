"""The ledger of tensor, pipeline and context parallelism against the trace of the real libraries, on fake groups."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from peakcast.collectors.grid import expand
from peakcast.collectors.tracing.trace import trace_job
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.pipeline import turns_of_rank
from peakcast.models.analytical.scope import out_of_scope
from peakcast.ranks import ranks_to_trace
from peakcast.spec import Parallelism
from peakcast.timeline import Phase

pytest.importorskip("transformers")

QWEN = {"name": "qwen3-0.6b", "num_hidden_layers": 2}
SPLIT = {"tensor_parallel_size": 2, "sequence_parallel": True}
STAGES = {"name": "qwen3-8b", "num_hidden_layers": 5, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8192}
CELLS = {
    "transformers_plan": {"framework": "huggingface", "parallelism": {"tensor_parallel_size": 2}},
    "torchtitan_plan": {"parallelism": SPLIT, "activation_checkpointing.mode": "full"},
    "under_fsdp2": {"parallelism": {**SPLIT, "data_parallel_size": 4, "sharding": "fsdp2"}},
}
RING = {**QWEN, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 2}
"""So that the peaks lie inside the ring."""
SHARED = {"context_parallel_size": 4, "data_parallel_size": 2, "sharding": "fsdp2"}
PIPELINES = {
    "gpipe": {"pipeline_parallel_size": 2, "pipeline_schedule": "gpipe", "pipeline_layers": [2, 3]},
    "1f1b_checkpointed": {"pipeline_parallel_size": 2, "pipeline_layers": [3, 2]},
    "interleaved": {
        "pipeline_parallel_size": 2,
        "pipeline_schedule": "interleaved_1f1b",
        "virtual_pipeline_stages": 2,
        "pipeline_layers": [1, 2, 1, 1],
    },
    "with_tensor_parallelism": {"pipeline_parallel_size": 2, "pipeline_layers": [3, 2], **SPLIT},
    "all_three": {
        "pipeline_parallel_size": 2,
        "pipeline_layers": [2, 3],
        "data_parallel_size": 4,
        "sharding": "fsdp2",
        **SPLIT,
    },
}


@pytest.fixture(scope="module")
def traces():
    base = {"framework": "torch", "architecture": QWEN, "sequence_length": 256, "micro_batch_size": 2}
    jobs = {name: expand({"base": base, "include": [cell]})[0] for name, cell in CELLS.items()}
    with ThreadPoolExecutor(2) as pool:
        timelines = dict(zip(jobs, pool.map(trace_job, jobs.values()), strict=True))
    return {name: (jobs[name], timelines[name]) for name in jobs}


def test_a_place_in_the_ring_equals_its_trace_phase_by_phase():
    """Within 0.1 %, of a rank with one before it and two behind it; the grid `agreement` has the others."""
    base = {"framework": "torch", "architecture": RING, "sequence_length": 2048, "activation_checkpointing.mode": "full"}
    (job,) = expand({"base": base, "include": [{"parallelism": SHARED}]})
    assert out_of_scope(job) == ""
    assert ranks_to_trace(job) == (0, 1, 3)
    for step, trace in trace_job(job, rank=1).items():
        closed_form = ledger(job, rank=1, step=step)
        for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER_STEP):
            assert closed_form.peak(phase).num_bytes == pytest.approx(trace.peak(phase).num_bytes, rel=1e-3), (step, phase)


@pytest.mark.parametrize("name", PIPELINES)
def test_every_stage_of_a_pipeline_equals_its_trace_phase_by_phase(name):
    """Within 0.5 %, of the first and of the last stage, in the first and in a steady step."""
    cell = {"parallelism": PIPELINES[name], "activation_checkpointing.mode": "full" if "checkpointed" in name else "none"}
    base = {"framework": "torch", "architecture": STAGES, "sequence_length": 256, "gradient_accumulation_steps": 4}
    if name == "all_three":
        base |= {"versions": {"torchtitan": "main"}, "precision.parameters": "float32", "micro_batch_size": 2}
    (job,) = expand({"base": base, "include": [cell]})
    ranks = (0, job.parallelism.world_size - 1)
    assert out_of_scope(job) == ""
    with ThreadPoolExecutor(2) as pool:
        traces = list(pool.map(lambda rank: trace_job(job, rank=rank), ranks))
    for rank, timelines in zip(ranks, traces, strict=True):
        for step, trace in timelines.items():
            closed_form = ledger(job, rank=rank, step=step)
            for phase, size in trace.phase_peaks().items():
                if phase is not Phase.INIT:
                    assert closed_form.peak(phase).num_bytes == pytest.approx(size, rel=5e-3), (rank, step, phase.name)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_turns_are_those_of_torchs_own_schedule(rank, micro_batches):
    from torch.distributed.pipelining import schedules

    real = object.__new__(schedules.ScheduleInterleaved1F1B)
    real.pp_group_size, real.n_local_stages, real._n_microbatches = 4, 2, micro_batches
    real.number_of_rounds = max(1, micro_batches // 4)
    real.microbatches_per_round = micro_batches // real.number_of_rounds
    theirs = [action for action in real._calculate_single_rank_operations(rank) if action]
    layout = Parallelism(pipeline_parallel_size=4, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2)
    ours = [(turn.forward, turn.micro_batch, turn.chunk) for turn in turns_of_rank(layout, rank, micro_batches)]
    turns = [(a.computation_type.name, a.microbatch_index, a.stage_index // 4) for a in theirs]
    names = {True: "FORWARD", False: "FULL_BACKWARD"}
    assert [(names[forward], *rest) for forward, *rest in ours] == [turn for turn in turns if turn[0] in names.values()]
