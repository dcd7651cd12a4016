"""Earlier versions of fms-acceleration's A100 benchmark, with the library releases of their day, as `Measurement` rows.

Source: `scripts/benchmarks/refs/a100_80gb.csv` and `a100_80gb_moe.csv` in the git history of that project (Apache-2.0),
each row with its commit; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.fms_cases import case_of
from peakcast.collectors.published.source_files import read_jsonl
from peakcast.records import Measurement
from peakcast.units import GIB

_JULY_2024 = {"accelerate": "0.32.1", "bitsandbytes": "0.43.1", "flash_attn": "2.5.9.post1", "peft": "0.11.1",
              "torch": "2.2.2", "transformers": "4.39.3", "trl": "0.9.6"}  # fmt: skip
_NOVEMBER_2024 = {"accelerate": "1.0.1", "bitsandbytes": "0.43.3", "flash_attn": "2.6.3", "peft": "0.13.2",
                  "torch": "2.4.1", "transformers": "4.45.2", "trl": "0.11.4"}  # fmt: skip
UNRECORDED_VERSIONS = {
    "810323822cf38f1f1a1ecae5363555cd75636714": _JULY_2024,
    "00febdc8a6b03d2fc509469f2e9e4619dc96a372": _JULY_2024,
    "ef9a58f6617aea74fe843bb7de72ed1110cf86d4": _NOVEMBER_2024,
}
"""Of three commits no releases are recorded (June and November 2024): those of the next commit that has them are taken."""

NEVER_RAN_BYTES = GIB
"""A job whose GPUs held less never loaded its network (four rows of 3 and 210 MiB: more expert shards than GPUs)."""

DEVICE_ALONE = "The source gives nvidia-smi's number only: peak_allocated_bytes is not known."


def read_fms_history(path: Path) -> list[Measurement]:
    """Every row of `fms_history.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _measurement)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    arguments, measured = record["arguments"], record["measured"]
    recorded = {name.replace("-", "_"): version for name, version in record["versions"].items() if name != "triton"}
    versions, facts = recorded, list[str]()
    if not recorded:
        versions = UNRECORDED_VERSIONS[record["commit"]]
        facts.append("The releases are not recorded; those of the next table that has them are taken.")
    if "peak_allocated_bytes" not in measured:
        facts.append(DEVICE_ALONE)
    case = case_of(arguments, versions)
    return Measurement(
        job=case.job,
        gpu=record["gpu"],
        provenance="published",
        source=f"foundation-model-stack/fms-acceleration {record['path'].split(' line ')[0]} (history)",
        source_version=record["commit"],
        case=f"{record['id']}/{case.name}",
        observed=record["note"].removeprefix("date ")[:10],
        collectives="nccl" if record["num_gpus"] > 1 else "none",
        outcome="failed" if measured["peak_device_bytes"] < NEVER_RAN_BYTES else "ok",
        peak_allocated_bytes=measured.get("peak_allocated_bytes"),
        peak_device_bytes=measured["peak_device_bytes"],
        environment={
            **recorded,
            "framework_config": arguments["framework_config"],
            "model_name_or_path": arguments["model_name_or_path"],
            "grade": record["grade"],
            "idle_subtracted": True,
        },
        assumptions=(*facts, *case.assumptions),
        out_of_scope=case.out_of_scope,
    )
