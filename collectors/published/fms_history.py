"""Earlier versions of fms-acceleration's A100 benchmark, with the library releases of their day, as `Measurement` rows.

Source: `scripts/benchmarks/refs/a100_80gb.csv` and `a100_80gb_moe.csv` in the git history of that project (Apache-2.0),
each row with its commit; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.fms_cases import Case, case_of
from peakcast.collectors.published.source_files import read_jsonl
from peakcast.core.units import GIB
from peakcast.measurements.records import DEVICE_MEAN, Measurement

_JULY_2024 = {"accelerate": "0.32.1", "bitsandbytes": "0.43.1", "flash_attn": "2.5.9.post1", "peft": "0.11.1",
              "torch": "2.2.2", "transformers": "4.39.3", "trl": "0.9.6"}  # fmt: skip
_NOVEMBER_2024 = {"accelerate": "1.0.1", "bitsandbytes": "0.43.3", "flash_attn": "2.6.3", "peft": "0.13.2",
                  "torch": "2.4.1", "transformers": "4.45.2", "trl": "0.11.4"}  # fmt: skip
_JUNE_2024 = {**_JULY_2024, "accelerate": "0.30.1"}
UNRECORDED_VERSIONS = {
    "810323822cf38f1f1a1ecae5363555cd75636714": _JUNE_2024,
    "00febdc8a6b03d2fc509469f2e9e4619dc96a372": _JUNE_2024,
    "ef9a58f6617aea74fe843bb7de72ed1110cf86d4": _NOVEMBER_2024,
}
"""Releases for three commits that record none (June and November 2024). They are assumed to be those of the next commit
that has them, except accelerate in June. This is inferred from the peaks: they fit adapters that are not cast to fp32, and
accelerate 0.32.1 casts them; the first release that does was not looked up. So these 93 rows do not test the
adapters' dtype independently."""
ROWS_MULTIPLE_OF = {"c3a069c842f2f62a70970b5515074f73530ca431": 8, "b6c1455bf12bf613250dc41d275232c0b7f1dca1": 8}
"""fms-hf-tuning rounded the rows of token table and lm_head up to this multiple in the two tables of July 2024: the default
of `embedding_size_multiple_of` (tuning/config/configs.py) was 8 when it was added that month (fms-hf-tuning #227) and 1
later. The allocated peaks of both tables are those of 32,008 rows; of the tables before and after, those of 32,001."""
LOADS_ON_HOSTS = "97fc3c138e09108354c74297cf5ee9899bf606dc"
"""The commit with transformers 4.45 whose plug-ins say that every rank is the first of its node, so that no rank has
quantised weights on `meta` (framework_plugin_bnb.py: patch_target_module of `is_local_dist_rank_0`; removed by
fms-acceleration #90)."""
BEFORE_OWN_GPTQ = ("810323822cf38f1f1a1ecae5363555cd75636714", "00febdc8a6b03d2fc509469f2e9e4619dc96a372")
"""The tables of June 2024, before the project had its own copy of GPTQModel; that of 2024-07-15 (c3a069c) has it."""
HOST_WEIGHTS = "810323822cf38f1f1a1ecae5363555cd75636714"
"""The commit whose plug-in is assumed to leave adapted layers out of FSDP, on the host. This is inferred: the plug-in was
read at neighbouring commits (0c76157 framework_plugin_fast_quantized_peft.py: ignored_modules = modules; 06a1af9
gptq/fast_lora.py: qweight.cuda()), not at this one. Its six rows are 0.2 to 7.6 % below the ledger."""

NEVER_RAN_BYTES = GIB
"""If GPUs held less than this, the job never loaded its network (four rows of 3 and 210 MiB: more expert shards than
GPUs)."""

DEVICE_ALONE = "The source gives nvidia-smi's number only: peak_allocated_bytes is not known."


def read_fms_history(path: Path) -> list[Measurement]:
    """Every row of `fms_history.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _measurement)


def _assumed_versions(commit: str) -> tuple[Mapping[str, str], list[str]]:
    """(the releases of a table that records none; what is assumed by them, as sentences)."""
    versions = UNRECORDED_VERSIONS[commit]
    facts = ["The releases are not recorded; those of the next table that has them are assumed."]
    if versions is _JUNE_2024:
        facts.append("accelerate is assumed to be 0.30.1, as the allocated peaks fit adapters that are not widened.")
    return versions, facts


def _measurement(record: Mapping[str, Any]) -> Measurement:
    arguments, measured = record["arguments"], record["measured"]
    recorded = {name.replace("-", "_"): version for name, version in record["versions"].items() if name != "triton"}
    versions, facts = (recorded, list[str]()) if recorded else _assumed_versions(record["commit"])
    if "peak_allocated_bytes" not in measured:
        facts.append(DEVICE_ALONE)
    case = case_of(
        arguments,
        versions,
        rows_multiple_of=ROWS_MULTIPLE_OF.get(record["commit"], 1),
        loads_on_hosts=record["commit"] == LOADS_ON_HOSTS,
        own_gptq=record["commit"] not in BEFORE_OWN_GPTQ,
    )
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
        peak_allocated_bytes=case.allocated(measured.get("peak_allocated_bytes")),
        peak_device_bytes=measured["peak_device_bytes"],
        environment={
            **recorded,
            "framework_config": arguments["framework_config"],
            "model_name_or_path": arguments["model_name_or_path"],
            "grade": record["grade"],
            "idle_subtracted": True,
            **({DEVICE_MEAN: True} if record["num_gpus"] > 1 else {}),
            **case.as_read(peak_allocated_bytes=measured.get("peak_allocated_bytes")),
        },
        assumptions=(*facts, *case.assumptions),
        out_of_scope=" ".join(_reasons(record, case)),
    )


def _reasons(record: Mapping[str, Any], case: Case) -> list[str]:
    """Why the ledger does not cover the run."""
    reasons = [case.out_of_scope] if case.out_of_scope else []
    sharded_foak = record["num_gpus"] > 1 and record["arguments"]["framework_config"] == "accelerated-peft-autogptq-foak"
    if record["commit"] == HOST_WEIGHTS and sharded_foak:
        reasons.append("Adapted layers are assumed to stay on the host, outside FSDP, which is not modelled.")
    return reasons
