"""Runs of LitGPT's networks by torch.compile and eagerly that Lightning-AI/lightning-thunder's threads record, as
`Measurement` rows.

Source: `lightning_thunder.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import Reading, job_of, read_plain_rows
from peakcast.fields import to_mapping
from peakcast.records import Measurement

COMMON_ASSUMPTIONS = (
    "peak_allocated_bytes is torch.cuda.max_memory_allocated() of rank 0 in GB of 10^9 bytes with two decimals.",
    "The loop of thunder/benchmarks/benchmark_litgpt.py is plain, and its loss takes the logits in bfloat16 as they are: "
    "torch.nn.functional.cross_entropy(logits.reshape(-1, n), targets.reshape(-1)).",
    "LitGPT projects queries, keys and values by one matrix (litgpt 0.4.11 model.py CausalSelfAttention.attn), whose whole "
    "result stays for the values' sake.",
)
COMPILED = {
    "none": "Around the compiled network the loss runs as it is, in bfloat16.",
    "ddp": "Of a network that DDP wraps, torch.compile makes a graph for each of DDP's buckets: layers compiled one by one "
    "are counted.",
    "fsdp": "FSDP's hooks break the graph of a compiled network at each unit: layers compiled one by one are counted.",
}
"""What torch.compile makes of the network, by how it is distributed."""
FLOAT8 = ("THUN-007", "THUN-008", "THUN-009", "THUN-010")
RECOMPUTED_FLOAT8 = ("THUN-008", "THUN-010")
APART = ("THUN-006",)
"""Rows in which embedding, last norm and head are wrapped as units of their own."""


def read_lightning_thunder(path: Path) -> list[Measurement]:
    """Every row of `lightning_thunder.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> Reading:
    name, compiled = record["id"], record["compile"]
    way = record["layout"]["distributed_mode"].rstrip("2")
    base = job_of({**record, "framework": "torch"})
    network = {**to_mapping(base.architecture), "fused_qkv": True}
    options = {**base.framework_options, "loss_kernel": "eager"}
    if name in APART:
        options["fsdp2_units"] = "ends"
    if compiled:
        options |= {"compiles_loss": False, **({} if way == "none" else {"compiled_regions": "layers"})}
    precision = {**to_mapping(base.precision), **({"compute": "float8"} if name in FLOAT8 else {})}
    reasons = []
    if name in FLOAT8:
        reasons.append(
            "Weights are gathered in float8 (enable_fsdp_float8_all_gather), and counted as gathered in bfloat16."
        )
    if name in RECOMPUTED_FLOAT8:
        reasons.append("force_recompute_fp8_weight_in_bwd, which lets go of float8 weights after forward, is not modelled.")
    return Reading(
        job=job_of(
            {**record, "framework": "torch"},
            architecture=network,
            precision=precision,
            framework_options=options,
            versions={"litgpt": record["versions"]["litgpt"], "torch": "2.5"},
        ),
        assumptions=(
            *COMMON_ASSUMPTIONS,
            "torch is not named: of the autumn of 2024, 2.5 is taken.",
            *((COMPILED[way],) if compiled else ()),
        ),
        out_of_scope=tuple(reasons),
    )
