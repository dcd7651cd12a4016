"""Runs of LitGPT's networks by torch.compile and eagerly that Lightning-AI/lightning-thunder's threads record, as
`Measurement` rows.

Source: `lightning_thunder.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.core.fields import to_mapping
from peakcast.measurements.records import Measurement

COMMON_ASSUMPTIONS = (
    "peak_allocated_bytes is torch.cuda.max_memory_allocated() of rank 0 in GB of 10^9 bytes with two decimals.",
    "The loop of thunder/benchmarks/benchmark_litgpt.py is plain, and its loss takes the logits in bfloat16 as they are: "
    "torch.nn.functional.cross_entropy(logits.reshape(-1, n), targets.reshape(-1)).",
    "LitGPT projects queries, keys and values by one matrix (litgpt 0.4.11 model.py CausalSelfAttention.attn), whose whole "
    "result stays for the values' sake.",
)
COMPILED = (
    "Layers are counted as if compiled one by one: FSDP's hooks break the graph of a compiled network at each unit, and of "
    "one that DDP wraps torch.compile makes a graph for each of DDP's buckets."
)
FLOAT8 = ("THUN-007", "THUN-008", "THUN-009", "THUN-010")
"""Rows with enable_fsdp_float8_all_gather."""
RECOMPUTED_FLOAT8 = ("THUN-008", "THUN-010")
"""Rows with force_recompute_fp8_weight_in_bwd."""
APART = ("THUN-006",)
"""Rows in which embedding, last norm and head are wrapped as units of their own."""
UNBUCKETED = ("THUN-012", "THUN-014", "THUN-016", "THUN-018")
"""Rows with bucketing_mode=none, whose policy (`zero_bucket_wrap_policy`) has FSDP1 wrap every module."""


def read_lightning_thunder(path: Path) -> list[Measurement]:
    """Every row of `lightning_thunder.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    name = record["id"]
    base = row_job({**record, "framework": "torch"})
    options = dict(base.framework_options)
    if name in APART:
        options["fsdp2_units"] = "ends"
    if name in UNBUCKETED:
        options["fsdp1_units"] = "modules"
    precision = {**to_mapping(base.precision), **({"compute": "float8"} if name in FLOAT8 else {})}
    if name in FLOAT8:
        options["fsdp_float8_all_gather"] = True
    if name in RECOMPUTED_FLOAT8:
        options["float8_weights_kept"] = "none"
    return ImportedRow(
        job=row_job(
            {**record, "framework": "torch"},
            precision=precision,
            framework_options=options,
        ),
        assumptions=(
            *COMMON_ASSUMPTIONS,
            "torch is not named: 2.5.0, as of September 2024, is assumed.",
            *((COMPILED,) if record["compile"] else ()),
        ),
    )
