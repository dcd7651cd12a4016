"""Small stand-ins for what the models take as arguments: jobs, a GPU, a ledger, measured rows with a known truth."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from peakcast.catalog import Device
from peakcast.core.units import GIB, MIB
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Parallelism, TrainingJob
from peakcast.measurements.records import Measurement
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

MODEL_TYPES = ("llama", "gpt2", "qwen3", "phi", "olmo2", "gemma2", "falcon", "opt", "bloom", "mpt", "cohere", "glm")


def make_architecture(**changes) -> Architecture:
    shape = {
        "name": "tiny",
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 1408,
        "vocab_size": 32000,
    }
    return Architecture(**{**shape, **changes})


def make_job(*, architecture: Architecture | None = None, **changes) -> TrainingJob:
    return TrainingJob(architecture=architecture or make_architecture(), **changes)


def make_device(name: str = "H100-80GB", **changes) -> Device:
    facts = {
        "generation": "Hopper",
        "memory_bytes": 80 * GIB,
        "nvml_memory_bytes": 79 * GIB,
        "cuda_memory_bytes": 79 * GIB,
        "num_sms": 132,
        "max_threads_per_sm": 2048,
        "compute_capability": (9, 0),
        "source": "test",
        "cuda_memory_source": "test",
    }
    return Device(name=name, **{**facts, **changes})


DEVICES = {
    "H100-80GB": make_device(),
    "A100-80GB": make_device("A100-80GB", num_sms=108, compute_capability=(8, 0), generation="Ampere"),
    "H200": make_device("H200", cuda_memory_bytes=139 * GIB),
}


def fake_ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """A step of six instants whose bytes can be counted by hand: weights W = hidden · 1 MiB, activations A = tokens ·
    4 KiB, gradients W, states 2 W, and W of temporaries in the optimizer step. The last pipeline stage has 8 MiB of
    logits more."""
    weights = job.architecture.hidden_size * MIB // job.parallelism.pipeline_parallel_size
    activations = job.micro_batch_size * job.sequence_length * 4096
    stages = job.parallelism.pipeline_parallel_size
    on_last_stage = (rank or 0) * stages // job.parallelism.world_size == stages - 1
    entries = [
        Entry("weight", Category.PARAMETERS, weights, 0, 99),
        Entry("activation", Category.ACTIVATIONS, activations, 0, 3),
        Entry("gradient", Category.GRADIENTS, weights, 2, 5),
        Entry("exp_avg", Category.OPTIMIZER_STATES, weights, 4 if step == "first" else 0, 99),
        Entry("temporary", Category.OPTIMIZER_TEMPORARIES, weights, 4, 5),
    ]
    if not job.offload.optimizer:
        entries.append(Entry("exp_avg_sq", Category.OPTIMIZER_STATES, weights, 4 if step == "first" else 0, 99))
    if on_last_stage:
        entries.append(Entry("logits", Category.LOGITS, 8 * MIB, 1, 5))
    step_and_zero_grad = [Phase.OPTIMIZER_STEP] * 2
    phases = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.GRADIENT_CLIPPING, *step_and_zero_grad]
    return Timeline.from_entries(entries, phases)


def make_rows(
    *,
    num_architectures: int = 12,
    rows_each: int = 4,
    hidden: Callable[[np.random.Generator, int], float] = lambda random, unit: 0.0,
    noise: float = 0.001,
    gpus: tuple[str, ...] = ("H100-80GB",),
    seed: int = 0,
) -> list[Measurement]:
    """Measured rows whose allocated peak is the fake baseline × exp(hidden effect + noise)."""
    from peakcast.models.baseline.baseline import baseline

    random = np.random.default_rng(seed)
    rows = []
    for unit in range(num_architectures):
        model_type = MODEL_TYPES[unit % len(MODEL_TYPES)]
        architecture = make_architecture(name=f"net{unit}", model_type=model_type, hidden_size=256 + 64 * unit)
        for index in range(rows_each):
            job = make_job(
                architecture=architecture,
                sequence_length=512 * 2 ** (index % 4),
                micro_batch_size=1 + index // 4,
                parallelism=Parallelism(data_parallel_size=1 + index % 2, sharding="fsdp2" if index % 2 else "none"),
            )
            gpu = gpus[index % len(gpus)]
            base = baseline(job, DEVICES[gpu], 0, ledger=fake_ledger)
            peak = round(base.peak_allocated_bytes * np.exp(hidden(random, unit) + random.normal(0, noise)))
            rows.append(
                Measurement(
                    job=job,
                    gpu=gpu,
                    provenance="measured",
                    source="peakcast",
                    case=f"{unit}-{index}",
                    peak_allocated_bytes=peak,
                )
            )
    return rows


def stand_ins() -> dict[str, object]:
    """Arguments that put the stand-ins in the place of catalog, ledger and scope."""
    from peakcast.models.baseline.baseline import baseline

    return {
        "device_of": DEVICES.__getitem__,
        "baseline_of": lambda job, device, rank: baseline(job, device, rank, ledger=fake_ledger),
        "scope_of": lambda job: "",
    }


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    """Everything above, for tests (which cannot import from here)."""
    return SimpleNamespace(
        architecture=make_architecture,
        job=make_job,
        device=make_device,
        devices=DEVICES,
        ledger=fake_ledger,
        rows=make_rows,
        stand_ins=stand_ins(),
    )
