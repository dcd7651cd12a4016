"""How fast peakcast answers. Ratios within one run, never seconds: `python -P -m pytest tests/benchmarks -m benchmarks`.

Each test times one thing with pytest-benchmark, a reference beside it, and keeps both in the table's `extra_info`.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from peakcast.api import predict
from peakcast.catalog import architecture, gpu
from peakcast.doors.batching import predict_batch
from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import ActivationCheckpointing, Parallelism, Precision, TrainingJob
from peakcast.models.allocator import replay as allocator
from peakcast.models.allocator.caching_allocator import CachingAllocator
from peakcast.models.allocator.events import AllocatorEvents
from peakcast.models.baseline.knobs import with_knobs
from peakcast.models.baseline.ledger import ledger
from peakcast.models.baseline.sweep import sweep
from peakcast.searching.cheapest_first import fullest
from peakcast.searching.search import search
from peakcast.searching.search_settings import SearchSettings
from peakcast.searching.space import candidates

pytestmark = pytest.mark.benchmarks
DEVICE = gpu("H100-80GB")
MIXED = Precision(gradients="float32", optimizer_states="float32", main_parameters="float32")
EIGHTY_LAYERS = {
    "megatron, 4D": TrainingJob(
        architecture=architecture("llama-3.1-70b"),
        framework="megatron",
        precision=MIXED,
        sequence_length=8192,
        gradient_accumulation_steps=16,
        parallelism=Parallelism(
            tensor_parallel_size=8,
            pipeline_parallel_size=4,
            context_parallel_size=2,
            data_parallel_size=8,
            sequence_parallel=True,
            zero_stage=1,
        ),
    ),
    "huggingface": TrainingJob(
        architecture=architecture("llama-3.1-70b"),
        sequence_length=4096,
        activation_checkpointing=ActivationCheckpointing(mode="full"),
    ),
}


CPU = time.process_time


def fastest(function: Callable[[], object], rounds: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of some calls."""
    seconds = []
    for _ in range(rounds):
        start = clock()
        function()
        seconds.append(clock() - start)
    return min(seconds)


built = pytest.mark.skipif(allocator.compiled is None, reason="there was no compiler when peakcast was installed")


@built
@pytest.mark.parametrize("name", EIGHTY_LAYERS)
def test_allocator_events_beside_the_simulation_call_by_call(benchmark, name):
    steps = [ledger(EIGHTY_LAYERS[name], device=DEVICE, step=step) for step in ("first", "steady")]
    run = AllocatorEvents.of(steps)
    fast = benchmark(lambda: allocator.replay_run(steps))
    slow = fastest(lambda: allocator._replay_calls(run, CachingAllocator()))
    benchmark.extra_info["events_per_second"] = round(fast.num_events / benchmark.stats.stats.min)
    benchmark.extra_info["times_faster_than_call_by_call"] = round(slow / benchmark.stats.stats.min, 2)
    assert fast == allocator._replay_calls(run, CachingAllocator())
    assert slow > 4 * benchmark.stats.stats.min


@pytest.mark.parametrize("name", EIGHTY_LAYERS)
def test_one_ledger_of_eighty_layers_beside_a_formula(benchmark, name):
    """A job like one that was asked before, but for its micro-batch: what a search or a batch asks."""
    job, sizes = EIGHTY_LAYERS[name], itertools.count(1)
    ledger(job, device=DEVICE)
    benchmark(lambda: ledger(job.replace(micro_batch_size=next(sizes)), device=DEVICE).totals.max())
    benchmark.extra_info["times_a_plain_formula"] = round(benchmark.stats.stats.min / fastest(lambda: korthikanti(job)))


def korthikanti(job: TrainingJob) -> int:
    """Bytes of one rank by the formulas people use by hand: 18 per parameter, 34·s·b·h + 5·a·s²·b per layer
    (Korthikanti et al. 2022, arXiv:2205.05198, equation 2), over tensor and pipeline parallel ranks."""
    network, layout = job.architecture, job.parallelism
    s, b, h = job.sequence_length, job.micro_batch_size, network.hidden_size
    parameters = network.num_hidden_layers * 12 * h * h + network.vocab_size * h
    activations = network.num_hidden_layers * (34 * s * b * h + 5 * network.num_attention_heads * s * s * b)
    ranks = layout.tensor_parallel_size * layout.pipeline_parallel_size
    return (18 * parameters + activations) // ranks


def test_a_ledger_beside_torchs_memory_tracker(benchmark):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    layers, hidden = 4, 256
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1024,
    )  # fmt: skip
    mapping = {**config.to_dict(), "name": "small"}
    from peakcast.dialects.common.job_file import job_from_mapping

    job = job_from_mapping({"architecture": mapping, "sequence_length": 256, "precision": {"parameters": "float32"}})

    def track() -> None:
        with FakeTensorMode(), torch.device("cpu"):
            model = transformers.LlamaForCausalLM(config)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            ids = torch.zeros(1, 256, dtype=torch.long)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, ids)
            with tracker:
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

    sizes = itertools.count(1)
    benchmark(lambda: ledger(job.replace(micro_batch_size=next(sizes))).peak())
    times = fastest(track, 1) / benchmark.stats.stats.min
    benchmark.extra_info["times_faster_than_mem_tracker"] = round(times)
    assert times > 10


def grid(knobs: dict[str, list]) -> dict[str, list]:
    combinations = list(itertools.product(*knobs.values()))
    return {name: [values[i] for values in combinations] for i, name in enumerate(knobs)}


SWEEPS = {
    "micro-batch and length": (
        EIGHTY_LAYERS["huggingface"],
        {
            "micro_batch_size": list(range(1, 257)),
            "sequence_length": [256 * i for i in range(1, 129)],
            "activation_checkpointing.mode": ["none", "full"],
        },
    ),
    "layouts of up to 512 GPUs": (
        EIGHTY_LAYERS["megatron, 4D"],
        {
            "micro_batch_size": [1, 2, 4, 8],
            "activation_checkpointing.mode": ["none", "full", "selective"],
            "parallelism.tensor_parallel_size": [1, 2, 4, 8],
            "parallelism.pipeline_parallel_size": [1, 2, 4],
            "parallelism.data_parallel_size": [1, 2, 4, 8, 16, 32, 64],
            "parallelism.zero_stage": [0, 1],
        },
    ),
    "layouts, micro-batch and length": (
        EIGHTY_LAYERS["megatron, 4D"],
        {
            "micro_batch_size": [1, 2, 4, 8],
            "sequence_length": [1024 * i for i in range(1, 65)],
            "activation_checkpointing.mode": ["none", "full"],
            "parallelism.context_parallel_size": [1],
            "parallelism.tensor_parallel_size": [1, 2, 4, 8],
            "parallelism.pipeline_parallel_size": [1, 2, 4],
            "parallelism.data_parallel_size": [1, 2, 4, 8, 16, 32, 64],
            "parallelism.zero_stage": [0, 1],
        },
    ),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_beside_a_ledger_for_every_job(benchmark, name):
    job, knobs = SWEEPS[name]
    columns = grid(knobs)
    peaks = benchmark.pedantic(lambda: sweep(job, columns, device=DEVICE, processes=2), rounds=1)
    chosen = range(0, len(peaks), max(1, len(peaks) // 60))
    jobs = [with_knobs(job, {knob: values[i] for knob, values in columns.items()}) for i in chosen]

    def one_by_one() -> list[int]:
        return [
            max(
                ledger(each, device=DEVICE, rank=stage * (each.parallelism.world_size // stages)).peak().num_bytes
                for stage in range(stages)
            )
            for each in jobs
            for stages in (each.parallelism.pipeline_parallel_size,)
        ]

    per_job = fastest(one_by_one, 1) / len(jobs)
    seconds = benchmark.stats.stats.min
    benchmark.extra_info["peaks_per_second"] = round(len(peaks) / seconds)
    benchmark.extra_info["times_faster_than_ledgers"] = round(per_job * len(peaks) / seconds, 1)
    assert one_by_one() == peaks[list(chosen)].tolist()
    assert per_job * len(peaks) > 2 * seconds


def test_a_search_beside_the_peak_of_every_candidate(benchmark):
    experts = TrainingJob(
        architecture=architecture("qwen3-30b-a3b"),
        framework="megatron",
        precision=MIXED,
        sequence_length=4096,
        parallelism=Parallelism(
            pipeline_parallel_size=2, virtual_pipeline_stages=3, pipeline_schedule="interleaved_1f1b"
        ),
    )
    said: list[str] = []
    settings = SearchSettings(top=20, processes=2, progress=said.append)
    found = benchmark.pedantic(lambda: search(experts, DEVICE, 2048, 24_576, settings), rounds=1)
    seconds = benchmark.stats.stats.min
    some = list(candidates(experts, 2048, 24_576))[:: max(1, found.num_candidates // 60)]
    per_candidate = fastest(lambda: [fullest(job, DEVICE, 2**62) for job in some], 1) / len(some)
    benchmark.extra_info["candidates_per_second"] = round(found.num_candidates / seconds)
    benchmark.extra_info["times_faster_than_all_peaks"] = round(per_candidate * found.num_candidates / seconds, 1)
    assert found.num_candidates > 100_000
    assert len(found.plans) == 20
    assert said
    assert per_candidate * found.num_candidates > 10 * seconds


@built
def test_a_batch_beside_the_same_without_the_compiled_replay(benchmark, monkeypatch):
    lines = [
        json.dumps(
            {
                "gpu": "H100-80GB",
                "job": {"architecture": name, "micro_batch_size": batch, "sequence_length": length},
            }
        )
        for name in ("llama-3.1-8b", "qwen2.5-7b", "llama-3.2-1b")
        for batch in (1, 2)
        for length in range(1024, 4097, 512)
    ]
    list(predict_batch(lines[:1]))
    answers = benchmark.pedantic(lambda: list(predict_batch(lines)), rounds=1)
    benchmark.extra_info["jobs_per_second"] = round(len(lines) / benchmark.stats.stats.min)
    from peakcast.doors.batching import _remembered

    _remembered.cache_clear()
    monkeypatch.setattr(allocator, "compiled", None)
    slow: list[list[dict]] = []
    seconds = fastest(lambda: slow.append(list(predict_batch(lines))), 1)
    benchmark.extra_info["times_faster_than_call_by_call"] = round(seconds / benchmark.stats.stats.min, 2)
    assert slow[0] == answers


def test_a_cold_predict_beside_importing_what_it_stands_on(benchmark, tmp_path):
    """A process that answers one question, beside one that only imports numpy and typer. Compiled files are kept, as an
    installed package has them."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}

    def process(code: str) -> None:
        subprocess.run([sys.executable, "-P", "-c", code], env=environment, stdout=subprocess.DEVNULL, check=True)

    question = "from peakcast.commands import cli; cli._run(['predict', '--model', 'llama-3.1-8b', '--gpu', 'H100-80GB'])"
    process(question)
    benchmark.pedantic(lambda: process(question), rounds=5)
    imports = fastest(lambda: process("import numpy, typer.main"), 5)
    benchmark.extra_info["times_its_imports"] = round(benchmark.stats.stats.min / imports, 2)
    assert benchmark.stats.stats.min < 4.5 * imports


OF_A_RECIPE = {
    **{"model_type": "apertus", "name": "recorded", "torch_dtype": "bfloat16", "vocab_size": 65536, "hidden_size": 2048},
    **{"intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8},
}
"""A network that no rule of the ledger describes, as its config.json has it."""
USUAL = {
    "full": {"architecture": "llama-3.1-8b"},
    "LoRA": {"architecture": "llama-3.1-8b", "finetuning": {"method": "lora", "rank": 16}},
    "FSDP2": {
        "architecture": "llama-3.1-8b",
        "activation_checkpointing": {"mode": "full"},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
    },
    "recipe": {"architecture": OF_A_RECIPE},
}


@pytest.mark.benchmark(timer=CPU)
@pytest.mark.parametrize("kind", USUAL)
def test_a_prediction_in_python_beside_its_ledgers(benchmark, kind):
    """Processor time of usual questions, each time of another length: other GPU types and advice are computed when they are
    read."""
    lengths = itertools.count(1)

    def job():
        return {**USUAL[kind], "sequence_length": 8192 - 8 * next(lengths)}

    predict(job(), DEVICE)
    benchmark(lambda: predict(job(), DEVICE))
    jobs = [translation_of(job()).job for _ in range(60)]
    steps = ("first", "steady")
    ledgers = fastest(lambda: [ledger(one, device=DEVICE, step=step) for one in [jobs.pop()] for step in steps], 60, CPU)
    advised = fastest(lambda: predict(job(), DEVICE).first_to_try, clock=CPU)
    benchmark.extra_info["times_its_two_ledgers"] = round(benchmark.stats.stats.min / ledgers, 2)
    benchmark.extra_info["times_faster_than_with_advice"] = round(advised / benchmark.stats.stats.min, 1)
    assert benchmark.stats.stats.min < 4 * ledgers
    assert benchmark.stats.stats.min < advised / 3


SHARED = {
    "FSDP2": ("torch", Parallelism(data_parallel_size=8, sharding="fsdp2")),
    "ZeRO-2": ("deepspeed", Parallelism(data_parallel_size=8, zero_stage=2)),
    "ZeRO-3": ("deepspeed", Parallelism(data_parallel_size=8, zero_stage=3)),
}


@pytest.mark.parametrize("layout", SHARED)
def test_both_steps_of_a_run_beside_a_later_one(benchmark, layout):
    """The first step and later ones share forward and backward, so that both take little longer than one."""
    framework, parallelism = SHARED[layout]
    job = TrainingJob(architecture=architecture("llama-3.1-8b"), framework=framework, parallelism=parallelism)
    lengths = itertools.count(1)

    def steps(*kinds: str) -> None:
        asked = job.replace(sequence_length=8192 - 8 * next(lengths))
        for kind in kinds:
            ledger(asked, device=DEVICE, step=kind)

    steps("steady")
    benchmark(lambda: steps("first", "steady"))
    alone = fastest(lambda: steps("steady"), 20)
    benchmark.extra_info["times_one_step"] = round(benchmark.stats.stats.min / alone, 2)
    assert benchmark.stats.stats.min < 1.6 * alone
