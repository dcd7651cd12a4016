"""NVIDIA/Megatron-LM's functional-test golden values, as `Measurement` rows.

Source: `megatron_ci.jsonl` (each row names the commit it is from); the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.dialects.megatron import from_megatron
from peakcast.dialects.translation import Translation
from peakcast.errors import SpecError
from peakcast.fields import FrozenMapping
from peakcast.records import Measurement
from peakcast.spec import TrainingJob

VOCABULARIES: dict[tuple[str, int], tuple[int, str]] = {
    ("GPTSentencePieceTokenizer", 6144): (256000, "Nemotron-4's; allocated-after-step on GB200 fits 256000 to 0.01 %"),
    ("GPTSentencePieceTokenizer", 7168): (129280, "DeepSeek-V3's, 40 times make-vocab-size-divisible-by=3232"),
}
"""Vocabulary by tokenizer type and hidden size, where the type alone does not settle it, and why."""

NUM_GPUS: dict[tuple[str, str], tuple[int, str]] = {
    ("bert_release_sm", ""): (64, "the fewest that the layout needs"),
    ("deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release", ""): (64, "the fewest that the layout needs"),
    ("deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release", ""): (16, "the fewest that the layout needs"),
    ("deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm", ""): (16, "the fewest that the layout needs"),
    ("gpt3_15b_8t_release", "A100-80GB"): (192, "what allocated-after-step implies"),
    ("gpt3_15b_8t_release", "H100-80GB"): (128, "what allocated-after-step implies"),
    ("gpt3_15b_8t_release_sm", "A100-80GB"): (192, "what allocated-after-step implies"),
    ("gpt3_15b_8t_release_sm", ""): (128, "what allocated-after-step implies"),
    ("gpt3_15b_8t_release_sm_gb200", ""): (64, "what allocated-after-step on GB200 implies"),
    ("gpt_grpo_tp4_pp1_dp2_8b_cudagraphs_throughput", ""): (8, "tp4 × dp2 of the case's name"),
    ("gpt_grpo_tp4_pp1_dp2_8b_throughput_github", ""): (8, "tp4 × dp2 of the case's name"),
    ("mixtral_8x22b_tp2pp8ep8vpp1_release", ""): (128, "what allocated-after-step implies"),
    ("nemotron3_super_release_gb200", ""): (64, "the fewest that the layout needs"),
    ("nemotron3_super_release_gb200_sm", ""): (64, "the fewest that the layout needs"),
}
"""GPUs of the cases that ran on more nodes than the recorded one, by case and GPU type ("" for every other), and why."""

FAMILY_REASONS = {
    "hybrid": "A hybrid (Mamba) model is not modelled.",
    "nemotron": "A hybrid (Mamba) model is not modelled.",
    "multimodal-llava": "A multimodal model is not modelled.",
}

CONTRADICTIONS: dict[tuple[str, str, str], str] = {
    ("gpt3_15b_8t_release_sm_gb200", "A100-80GB", "lts"): "all values are those of gpt3_15b_8t_release_sm, another layout",
    ("gpt3_15b_8t_release_sm_gb200", "H100-80GB", "dev"): "its peak is two thirds of the GB200 row's of the same arguments",
    ("hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G", "A100-80GB", "lts"): "all values are those of a GPT case",
    ("hybrid_mr_mcore_te_tp2_pp1_cp1_dgx_a100_1N8G", "A100-80GB", "lts"): "all values are those of a GPT case",
    ("hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G", "H100-80GB", "dev"): "all values are those of the A100 row",
}
"""Rows whose values cannot be their own configuration's, by case, GPU type and environment."""

STALE_TOLERANCE = 0.05
"""A row further than this from the newer container's rows of the same job and GPU type was recorded with other code."""

COMMON_ASSUMPTIONS = (
    "The values are of the last rank, world size − 1, as the tests log them.",
    "peak_allocated_bytes is the allocator's peak since the start, never reset, over all logged steps.",
    "steady_allocated_bytes is allocated_bytes.all.current after a step, which step is not recorded.",
)


def read_megatron_ci(path: Path) -> list[Measurement]:
    """Every row of `megatron_ci.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return _mark_stale(read_jsonl(path, _measurement))


def _measurement(record: Mapping[str, Any]) -> Measurement:
    translation, facts, unknown_size = _translate(record)
    family, gpu = record["family"], record["gpu"]
    job = _job(translation.job, record)
    reasons = list(translation.unsupported)
    if family in FAMILY_REASONS and not any(FAMILY_REASONS[family].split("(")[0] in reason for reason in reasons):
        reasons.append(FAMILY_REASONS[family])
    spoiled = []
    if record["second_run"]:
        spoiled.append("a run resumed from a checkpoint: loading it may have set the peak")
    if unknown_size:
        spoiled.append(f"the number of GPUs is not recorded: num_gpus={record['num_gpus']} cannot hold the job")
    contradiction = CONTRADICTIONS.get((record["case"], gpu, record["environment"]))
    if contradiction:
        spoiled.append(contradiction)
    run = "second_run" if record["second_run"] else "first_run"
    return Measurement(
        job=job,
        gpu=gpu,
        provenance="published",
        source=record["source"],
        source_version=record["commit"],
        case="/".join((record["case"], str(record["platform"]), record["environment"], run)),
        rank=job.parallelism.world_size - 1,
        collectives="nccl",
        peak_allocated_bytes=_bytes(record, "peak_allocated_bytes"),
        first_step_peak_allocated_bytes=_bytes(record, "peak_allocated_bytes_step_1"),
        steady_allocated_bytes=_bytes(record, "allocated_bytes_after_step"),
        environment={
            "platform": record["platform"],
            "container": record["environment"],
            "second_run": record["second_run"],
            "env_vars": record["env_vars"] or {},
            "family": family,
            "logged_steps": record["steps"],
            "recorded_num_gpus": record["num_gpus"],
        },
        assumptions=(*COMMON_ASSUMPTIONS, *facts, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join(reasons),
        spoiled=tuple(spoiled),
    )


def _translate(record: Mapping[str, Any]) -> tuple[Translation, list[str], bool]:
    """The translation, the sentences about what was filled in, and whether the number of GPUs was."""
    arguments = dict(record["arguments"])
    facts = []
    if record["family"] == "bert":  # what pretrain_bert.py trains; no flag says so
        arguments["bert-binary-head"] = True
    known = VOCABULARIES.get((str(arguments.get("tokenizer-type")), int(arguments.get("hidden-size") or 0)))
    if known and "vocab-size" not in arguments:
        arguments["vocab-size"] = known[0]
        facts.append(f"vocab-size is taken as {known[0]}: {known[1]}.")
    case, gpu = record["case"], record["gpu"]
    filled = NUM_GPUS.get((case, gpu)) or NUM_GPUS.get((case, ""))
    if filled:
        facts.append(f"num_gpus is taken as {filled[0]}: {filled[1]}.")
    return from_megatron(arguments, filled[0] if filled else record["num_gpus"], record["env_vars"]), facts, bool(filled)


def _job(job: TrainingJob, record: Mapping[str, Any]) -> TrainingJob:
    options = FrozenMapping({**job.framework_options, "container": record["environment"]})
    return job.replace(framework_options=options)


def _bytes(record: Mapping[str, Any], key: str) -> int | None:
    value = record[key]
    if value is not None and (value < 0 or int(value) != value):
        raise SpecError(f"{key}={value!r} must be a whole number of bytes, at least 0.", parameter=key, value=value)
    return None if value is None else int(value)


def _mark_stale(rows: list[Measurement]) -> list[Measurement]:
    """`rows`, with those marked whose peak contradicts newer rows of the same job on the same GPU type.

    Golden values are renewed case by case, so an old container's may be of older code: many are those that the same job
    has with attention-backend=unfused.
    """
    newer: dict[tuple[str, TrainingJob], list[int]] = defaultdict(list)
    for row in rows:
        if row.environment["container"] == "dev" and not row.spoiled and row.peak_allocated_bytes:
            newer[row.gpu, _without_container(row.job)].append(row.peak_allocated_bytes)
    marked = []
    for row in rows:
        peaks = sorted(newer.get((row.gpu, _without_container(row.job)), ()))
        if peaks and row.peak_allocated_bytes and row.environment["container"] != "dev" and not row.spoiled:
            error = row.peak_allocated_bytes / peaks[len(peaks) // 2] - 1
            if abs(error) > STALE_TOLERANCE:
                reason = f"its peak is {error:+.1%} from the newer container's rows of the same job: an older golden value"
                row = replace(row, spoiled=(*row.spoiled, reason))
        marked.append(row)
    return marked


def _without_container(job: TrainingJob) -> TrainingJob:
    options = {key: value for key, value in job.framework_options.items() if key != "container"}
    return job.replace(framework_options=FrozenMapping(options))
