"""pytorch/torchtitan's own runs, recorded in its commit messages, as `Measurement` rows.

Source: `torchtitan_log.jsonl`; the facts about it are in `datasets/README.md`. A row names a commit, not a release. Its
conventions are given by the release that has most of them, and by options for those that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, measurement, row_job
from peakcast.collectors.published.source_files import read_jsonl
from peakcast.measurements.records import Measurement

COMMON_ASSUMPTIONS = (
    "peak_reserved_bytes is what torchtitan logs as `memory:`, torch.cuda.max_memory_reserved() in GiB with two decimals.",
    "Of the H100 many are cards of 95 GiB, which the catalog has no type for: whether a run fits is not asked of a row.",
)
UNCOMPILED_LOSS = {"compiles_loss": False}
WIDENED_BY_THE_MODEL = {"logits_upcast": "model", **UNCOMPILED_LOSS}
EXCHANGES_REPEATED = {"selective_checkpointing_keeps": ["attention", "flex", "reduce_scatter"]}


@dataclass(frozen=True)
class Day:
    """torchtitan's state at a commit: the release with its conventions, what differs, and why."""

    release: str
    why: str
    options: dict[str, Any] = field(default_factory=dict)


SUMMER_2024 = Day(
    "0.0.2",
    "a nightly torch of mid-2024: as before 0.1.0, with logits widened by the model (pull request 642, 2024-10-22, moved "
    "that to the loss)",
    WIDENED_BY_THE_MODEL,
)
SPRING_2025 = Day("0.0.2", "a nightly torch of February or March 2025: as before 0.1.0, whose loss was not compiled")
SUMMER_2025 = Day(
    "0.2.0",
    "a nightly torch of mid-2025, between 0.1.0 and 0.2.0: as 0.2.0, but for exchanges of experts, which are no part of "
    "what is kept before 0.2.0",
    EXCHANGES_REPEATED,
)
WINTER_2026 = Day("0.2.2", "a nightly torch of February or March 2026: as 0.2.2")
DAYS = {
    "7cf41bbb6": SUMMER_2024,
    "7a49674b8": SUMMER_2024,
    "9dc418a8b": SUMMER_2024,
    "5940ddeb5": SPRING_2025,
    "3b39d7ab0": SPRING_2025,
    "e23bb707d": SPRING_2025,
    "c31ff8b05": Day("0.1.0", "a nightly torch of June 2025, the month of 0.1.0"),
    "b00e484e1": SUMMER_2025,
    "d54d05a5f": SUMMER_2025,
    "b109f7d71": SUMMER_2025,
    "f738a03bf": SUMMER_2025,
    "8a749c618": SUMMER_2025,
    "c4e229115": SUMMER_2025,
    "f6ebe8402": WINTER_2026,
    "a764c9815": WINTER_2026,
    "27aa49077": Day("0.2.2", "no torch is named, and what it runs came after 0.2.2"),
    "f4614f333": Day("0.2.2", "no torch is named, and what it runs came after 0.2.2"),
    "df2e96d51": Day("0.2.2", "no torch is named; the pull request is of early 2026"),
    "00cffaeb3": Day("0.2.2", "no torch is named, and what it runs came after 0.2.2"),
}
"""Nine digits of the commit -> its state."""

ONE_GRAPH = (
    "Forward and backward are traced into one graph whose passes decide what is kept and when it is freed (torchtitan's "
    "experiments graph_trainer and compiler_toolkit): eager operations, or layers compiled one by one, are counted."
)
OTHER_BATCH = (
    "Batch and number of GPUs are assumed, and the pair of rows contradicts them: keeping exchanged tokens of 8 × 4,096 "
    "a rank in 26 layers takes 39 GiB, and keeping them took 4.5 GiB here, as a batch of 1 on 4 GPUs would."
)
UNKNOWN_LOSS = (
    "Whether the loss was compiled, or taken in chunks, is not said: reserved memory is 22 and 11 % below what "
    "a whole eager one needs, and within 4 % of what a compiled one does."
)
OTHER_NETWORK = (
    "Not the 16B: the same log (pull request 1373) has 69,111 tokens a second on each GPU at 28.68 TFLOP/s, 0.4 GFLOP a "
    "token, of which the 16B takes 15; and its step 1 reserves what step 2 does, without the 14.6 GiB of the 16B's states."
)
REASONS = {
    "TLOG-004": "The Triton kernel of its RMSNorm is not modelled: the norm is counted step by step.",
    "TLOG-061": "Neither network nor layout is said: torchtitan's DeepSeek-V3 16B stands in.",
    "TLOG-053": OTHER_NETWORK,
    **dict.fromkeys(("TLOG-059", "TLOG-060"), OTHER_BATCH),
    **dict.fromkeys(("TLOG-022", "TLOG-025"), UNKNOWN_LOSS),
    **dict.fromkeys(
        ("TLOG-021", "TLOG-024", "TLOG-026", "TLOG-027", "TLOG-028", "TLOG-029", "TLOG-030", "TLOG-031", "TLOG-036",
         "TLOG-037", "TLOG-038"),
        ONE_GRAPH,
    ),
    **dict.fromkeys(
        ("TLOG-063", "TLOG-064", "TLOG-065"),
        f"{ONE_GRAPH} Which products it keeps beside full checkpointing has no word in a job, and its exchanges are fake.",
    ),
}  # fmt: skip
"""Why a row's job is not the job that was run."""
CHANGES: dict[str, dict[str, Any]] = {
    "TLOG-011": {"fsdp2_last_layer_stays": False},
    "TLOG-012": {"fsdp_reshard_after_forward": False},
    "TLOG-018": {"loss_kernel": "chunked_logits", "logits_chunks": 8},
    **{name: {"compiled_regions": "loss"} for name in ("TLOG-056", "TLOG-057", "TLOG-058")},
    "TLOG-060": {"selective_checkpointing_keeps": ["attention", "flex", "reduce_scatter", "all_to_all"]},
}
"""Settings that a row's own note asks for in addition to its conventions."""
LOSS_COMPILED = (
    'deepseek_v3_16b.toml of that time compiles the loss alone (compile.components = ["loss"]), which the reading '
    "overlooked; experts get what the router sends them, and balanced loads are counted."
)
ASSUMED = {
    **dict.fromkeys(("TLOG-056", "TLOG-057", "TLOG-058"), LOSS_COMPILED),
    "TLOG-006": "That it was compiled is the reading's own guess: the same job as it runs eagerly is answered within 1 %.",
}
"""Sentences about a row's own assumptions."""
IN_ONE_SCHEDULE = {"micro_batch_size": 1, "gradient_accumulation_steps": 8}
"""TLOG-058: a local batch of 8 split into 8 micro-batches (pipeline_parallel_microbatch_size = 1)."""
DEEPSEEK_16B = {
    "name": "deepseek-v3-16b-torchtitan", "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
    "tie_word_embeddings": False, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1, "hidden_act": "silu",
}  # fmt: skip
"""torchtitan 0.2.0 models/deepseek_v3/__init__.py, flavor 16B, in the words of a config.json."""
MIXED = {
    "parameters": "float32", "compute": "bfloat16", "gradients": "float32", "optimizer_states": "float32",
}  # fmt: skip


def read_torchtitan_log(path: Path) -> list[Measurement]:
    """Every row of `torchtitan_log.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _row)


def _row(record: Mapping[str, Any]) -> Measurement:
    measured, fake = record["measured"], (record["layout"] or {}).get("backend") == "fake"
    if fake:  # the source's number is of active_bytes, which this row has a column for
        measured = {"peak_active_bytes": measured["peak_allocated_bytes"], **measured}
    row = measurement({**record, "measured": measured}, _reading(record, ("peak_allocated_bytes",) if fake else ()))
    return replace(row, collectives="fake") if fake else row


def _reading(record: Mapping[str, Any], unread: tuple[str, ...]) -> ImportedRow:
    day = DAYS[record["commit"][:9]]
    torch = (record["versions"] or {}).get("torch")
    changes: dict[str, Any] = {
        "versions": {"torchtitan": day.release, **({"torch": torch} if torch else {})},
        "framework_options": {**_options(record), **day.options, **CHANGES.get(record["id"], {})},
        **({"compile": True} if ASSUMED.get(record["id"]) == LOSS_COMPILED else {}),
        **(IN_ONE_SCHEDULE if record["id"] == "TLOG-058" else {}),
    }
    reason = REASONS.get(record["id"])
    return ImportedRow(
        job=row_job(_complete(record), **changes),
        assumptions=(
            *COMMON_ASSUMPTIONS,
            f"A commit of torchtitan is no release; for this one torchtitan {day.release} is assumed: {day.why}.",
            *((ASSUMED[record["id"]],) if record["id"] in ASSUMED else ()),
        ),
        out_of_scope=(reason,) if reason else (),
        unread=unread,
    )


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = (record.get("job") or {}).get("framework_options", {})
    return options


def _complete(record: Mapping[str, Any]) -> dict[str, Any]:
    """The row, with the nearest job's values where it has none; all such rows are out of scope."""
    if record.get("job"):
        return dict(record)
    row = {**record, "framework": "torch"}
    if row["precision"] is not None:
        network = DEEPSEEK_16B if row["model"]["model_type"] == "deepseek_v3" else row["model"]
        return {**row, "model": network}
    layout = row["layout"] or {"data_parallel_size": row["num_gpus"]}
    whole = "deepseek-v3" if "671B" in row["model"]["name"] else DEEPSEEK_16B
    job = {
        "architecture": whole,
        "framework": "torch",
        "micro_batch_size": row["batch"] or 8,
        "sequence_length": row["sequence_length"] or 4096,
        "precision": MIXED,
        "optimizer": {"name": "adamw", "implementation": "fused"},
        "activation_checkpointing": {"mode": "full"},
        "parallelism": {
            "sharding": "fsdp2",
            **{name: size for name, size in layout.items() if name.endswith("_size")},
        },
        "allocator": {"expandable_segments": True},
    }
    return {**row, "job": job}
