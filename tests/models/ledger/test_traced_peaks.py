"""Peaks of jobs in which the ledger once was off, as numbers: their steps were traced on fake tensors (`peakcast verify`).

Traced with torch 2.13.0, transformers 5.17, DeepSpeed 0.19.8, trl 1.16.0 and accelerate 1.15.
"""

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.units import MIB
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

ZERO3 = {
    "framework": "deepspeed",
    "parallelism": {"data_parallel_size": 2, "zero_stage": 3},
    "precision": {"main_parameters": "float32", "optimizer_states": "float32"},
}
ADAPTED = {"method": "lora", "rank": 16}
ADAPTED_ZERO3 = ZERO3 | {
    "architecture": {"name": "olmo-2-1b", "num_hidden_layers": 3},
    "sequence_length": 512,
    "micro_batch_size": 2,
    "finetuning": ADAPTED,
}
PACKED = {
    "architecture": {"name": "qwen2.5-0.5b", "num_hidden_layers": 3},
    "sequence_length": 256,
    "micro_batch_size": 2,
    "finetuning": {"method": "qlora", "quantization": "nf4", "rank": 16, "targets": ["all-linear"]},
    "parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"},
}
FSDP1 = {"data_parallel_size": 2, "sharding": "fsdp1"}
TRACED = {
    # rotary_emb, a module without weights, gathers the weights after it only when the token table has been freed
    "dpo_zero3_adapters": (ADAPTED_ZERO3 | {"loss.kind": "dpo"}, "steady", Phase.LOSS, 2982.5),
    "kto_zero3_adapters": (ADAPTED_ZERO3 | {"loss.kind": "kto"}, "first", Phase.FORWARD, 2616.1),
    # 4-bit weights: FSDP divides them if they are stored as floating numbers, and FSDP2 leaves integers whole on every rank
    "packed_fsdp2": (PACKED, "steady", Phase.OPTIMIZER_STEP, 153.68),
    "packed_fsdp2_integers": (
        PACKED | {"framework_options.quantized_storage": "uint8"},
        "steady",
        Phase.OPTIMIZER_STEP,
        164.35,
    ),
    "packed_fsdp1": (PACKED | {"parallelism": FSDP1}, "steady", Phase.BACKWARD, 1419.46),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_phase_peaks_as_high_as_its_trace(name):
    cell, step, phase, traced = TRACED[name]
    (job,) = expand({"include": [cell]})
    assert ledger(job, step=step).phase_peaks()[phase] / MIB == pytest.approx(traced, rel=2e-3)
