"""NVIDIA/Megatron-LM's functional-test golden values, as `Measurement` rows.

Source: `megatron_ci.jsonl` (each row names the commit it is from); the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.conventions import conventions
from peakcast.measurements.records import Measurement

VOCABULARIES: dict[tuple[str, int], tuple[int, str]] = {
    ("GPTSentencePieceTokenizer", 6144): (256000, "Nemotron-4's; allocated-after-step on GB200 fits 256000 to 0.01 %"),
    ("GPTSentencePieceTokenizer", 7168): (129280, "DeepSeek-V3's, 40 times make-vocab-size-divisible-by=3232"),
}
"""(tokenizer type, hidden size) -> vocabulary and reason, for types that alone do not determine it."""

NUM_GPUS_FROM: dict[str | None, str] = {
    "recipe": "",
    "8 taken": "num_gpus=8 is assumed: no recipe of this case is known, and nearly all recorded ones ran on 8 GPUs.",
    "after-step bytes": "num_gpus is the multiple of the layout whose model states explain allocated_bytes_after_step.",
    None: "num_gpus is the fewest that the layout needs: the recipe is not public.",
}
"""Where the number of GPUs comes from -> a sentence about what is assumed then."""

FAMILY_REASONS = {"multimodal-llava": "A multimodal model is not modelled."}

COPIED_FROM_H100 = "all values are those of the H100 row, whose workspace of 32 MiB an A100 does not have"

CONTRADICTIONS: dict[tuple[str, str, str], str] = {
    (
        "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances",
        "A100-80GB",
        "lts",
    ): "older than num-distributed-optimizer-instances=2: what stays after a step is, to 2 MiB, that of one instance",
    ("gpt3_15b_8t_release_sm_gb200", "A100-80GB", "lts"): "all values are those of gpt3_15b_8t_release_sm, another layout",
    ("gpt3_15b_8t_release_sm_gb200", "H100-80GB", "dev"): "all values are those of another case: its peak is two thirds "
    "of the GB200 row's of the same arguments",
    ("hybrid_mr_mcore_te_tp1_pp1_cp1_dgx_a100_1N8G", "A100-80GB", "lts"): "all values are those of a GPT case",
    ("hybrid_mr_mcore_te_tp2_pp1_cp1_dgx_a100_1N8G", "A100-80GB", "lts"): "all values are those of a GPT case",
    ("hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G", "A100-80GB", "dev"): COPIED_FROM_H100,
    ("hybrid_mr_mcore_te_tp1_pp4_cp1_dgx_a100_1N8G", "A100-80GB", "lts"): COPIED_FROM_H100,
}
"""Rows whose values cannot belong to their own configuration, by case, GPU type and environment."""

SAVED_BATCHES = ("2026-05-26", "2026-07-08")
"""First and last day on which Megatron-LM's main branch saved batches on the GPU: values of 25 May do not have them, those
of 8 July do; no value between that day and the change that removed them could tell. Main was called 0.18 at the beginning
and 0.19 at the end, but differs from the releases of those numbers (convention `saves_batches_on_gpu`)."""

LAYER_WISE_LAYOUT = "2026-05-21"
"""Day of the first value with the shard-aligned layout of the layer-wise optimizer. Values of 9 May fit the earlier layout,
as do releases before 0.18, which is main's number on both days (convention `use_layer_wise_param_layout`)."""

PREDICTIONS_END_WITH_LOSS = "2026-01-30"
"""Day of the first value without the logits of the last token predicted ahead beside the last ones (pull request 2363,
which makes their loss a function). Main was still called 0.16: first steps of fine_grained_offloading on GB200 (0.16) and,
in April, on H100 (0.18) peak at the same byte; release 0.16.1 keeps them (convention `predicted_logits_outlive_loss`)."""

FSDP_OF_TODAY = "2026-01-01"
"""Values of Megatron-FSDP before this day are of older code, which main ran while it was called 0.16: their first steps do
not have optimizer states yet, all later ones do (convention `fsdp_reduces_each_gradient`)."""

OVERLAPPED_LAYERS_ARE_RELEASED = "2025-11-13"
"""Day on which pull request 2236 was opened, after which layers that overlap no longer keep their parts' inputs and
outputs. Main was called 0.16, and release 0.16.0 has it (convention `overlapped_layers_are_released`)."""

ONE_NODE = {("GB200", "_1node"): 4}
"""(GPU type, end of a case's name) -> number of GPUs, for cases whose recipe does not say it. All 27 others with such names
have this number, and `allocated_bytes_after_step` fits it."""

FROM_STATES = {
    "deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": 32,
    "deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm": 32,
}
"""Case -> number of GPUs, for cases whose recipe is not public and whose layout would run on fewer: the multiple of the
layout whose weights, gradients and states explain `allocated_bytes_after_step` (54.5 GiB; the ledger has 54.3 with 32 GPUs
and 74.1 with 16)."""

COMMON_ASSUMPTIONS = (
    "The values are of the last rank, world size − 1, as the tests log them.",
    "steady_allocated_bytes is allocated_bytes.all.current after a step, which step is not recorded.",
)
PEAK_OF_ALL_STEPS = "peak_allocated_bytes is the allocator's peak since the start, never reset, over all logged steps."
PEAK_OF_TEN_STEPS = (
    "peak_allocated_bytes is the allocator's peak over the first ten steps: routing drifts over the thousands of steps of "
    "a release case."
)


def read_megatron_ci(path: Path) -> list[Measurement]:
    """Every row of `megatron_ci.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _measurement)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    translation, facts = _translate(record)
    family, job = record["family"], translation.job
    reasons = list(translation.unsupported)
    if family in FAMILY_REASONS and not any(FAMILY_REASONS[family].split("(")[0] in reason for reason in reasons):
        reasons.append(FAMILY_REASONS[family])
    run = "second_run" if record["second_run"] else "first_run"
    peak = "peak_allocated_bytes_steps_to_10" if _is_release(record) else "peak_allocated_bytes"
    return Measurement(
        job=job,
        gpu=record["gpu"],
        provenance="published",
        source=record["source"],
        source_version=record["commit"],
        case="/".join((record["case"], str(record["platform"]), record["environment"], run)),
        rank=job.parallelism.world_size - 1,
        collectives="nccl",
        peak_allocated_bytes=_bytes(record, peak),
        first_step_peak_allocated_bytes=_bytes(record, "peak_allocated_bytes_step_1"),
        steady_allocated_bytes=_bytes(record, "allocated_bytes_after_step"),
        environment={
            "platform": record["platform"],
            "container": record["environment"],
            "second_run": record["second_run"],
            "env_vars": record["env_vars"] or {},
            "family": family,
            "logged_steps": record["steps"],
            "recorded_num_gpus": _num_gpus(record),
        },
        assumptions=(*COMMON_ASSUMPTIONS, *facts, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join(reasons),
        spoiled=tuple(_spoiled(record)),
        observed=record["value_since"],
    )


def _spoiled(record: Mapping[str, Any]) -> Iterator[str]:
    """Why the numbers of `record` do not count."""
    if record["second_run"]:
        yield "a run resumed from a checkpoint: loading it may have set the peak"
    num_gpus, fewest = _num_gpus(record), _fewest_gpus(record["arguments"])
    if num_gpus is None:
        yield "the number of GPUs is not recorded"
    elif num_gpus % fewest:
        yield f"num_gpus={num_gpus} of its recipe cannot hold the layout, which needs {fewest}"
    if contradiction := CONTRADICTIONS.get((record["case"], record["gpu"], record["environment"])):
        yield contradiction


def _is_release(record: Mapping[str, Any]) -> bool:
    return "release" in record["case"]


def _translate(record: Mapping[str, Any]) -> tuple[Translation, list[str]]:
    """The translation, and sentences about values that were filled in."""
    arguments = dict(record["arguments"])
    facts = [PEAK_OF_TEN_STEPS if _is_release(record) else PEAK_OF_ALL_STEPS]
    if record["family"] == "bert":  # what pretrain_bert.py trains; no flag says so
        arguments["bert-binary-head"] = True
    known = VOCABULARIES.get((str(arguments.get("tokenizer-type")), int(arguments.get("hidden-size") or 0)))
    if known and "vocab-size" not in arguments:
        arguments["vocab-size"] = known[0]
        facts.append(f"vocab-size is assumed to be {known[0]}: {known[1]}.")
    recorded, fewest = _num_gpus(record), _fewest_gpus(arguments)
    if record["case"] in FROM_STATES:
        facts.append(NUM_GPUS_FROM["after-step bytes"])
    elif recorded != record["num_gpus"]:
        facts.append(f"num_gpus={recorded} is assumed, as of all cases of one node of {record['gpu']} that have recipes.")
    elif assumed := NUM_GPUS_FROM[record["num_gpus_from"]]:
        facts.append(assumed)
    num_gpus = fewest if recorded is None or recorded % fewest else recorded
    translation = from_megatron(arguments, num_gpus, record["env_vars"], _versions(record))
    return _as_of_its_day(translation, record["value_since"]), facts


def _as_of_its_day(translation: Translation, day: str) -> Translation:
    """`translation` with the conventions of the main branch on `day`, if they differ from the release with its number."""
    job = translation.job
    then = {"saves_batches_on_gpu": SAVED_BATCHES[0] <= day <= SAVED_BATCHES[1]}
    if job.optimizer.name == "muon":
        then["use_layer_wise_param_layout"] = day >= LAYER_WISE_LAYOUT
    if job.architecture.num_nextn_predict_layers:
        then["predicted_logits_outlive_loss"] = day < PREDICTIONS_END_WITH_LOSS
    if job.framework_options.get("use_megatron_fsdp"):
        then["fsdp_reduces_each_gradient"] = day >= FSDP_OF_TODAY
    if job.framework_options.get("overlap_moe_expert_parallel_comm"):
        then["overlapped_layers_are_released"] = day >= OVERLAPPED_LAYERS_ARE_RELEASED
    held = conventions(job)
    options = {name: value for name, value in then.items() if held[name] != value}
    if not options:
        return translation
    return replace(translation, job=job.replace(framework_options=FrozenMapping({**job.framework_options, **options})))


def _num_gpus(record: Mapping[str, Any]) -> int | None:
    """The recorded number of GPUs; if the source only assumed one, the number that the case's name implies (`ONE_NODE`)."""
    named = (number for (gpu, end), number in ONE_NODE.items() if record["gpu"] == gpu and record["case"].endswith(end))
    recorded: int | None = FROM_STATES.get(record["case"], record["num_gpus"])
    return next(named, recorded) if record["num_gpus_from"] == "8 taken" else recorded


def _fewest_gpus(arguments: Mapping[str, Any]) -> int:
    """The fewest GPUs on which the layout of `arguments` can run."""
    tensor, context, pipeline, experts = (
        int(arguments.get(f"{name}-parallel-size", 1))
        for name in ("tensor-model", "context", "pipeline-model", "expert-model")
    )
    expert_tensor = int(arguments.get("expert-tensor-parallel-size", tensor))
    return pipeline * math.lcm(tensor * context, experts * expert_tensor if experts > 1 else 1)


def _versions(record: Mapping[str, Any]) -> dict[str, str]:
    """Versions at the commit that set the value: megatron-core's, and the tag of NVIDIA's PyTorch image."""
    return {"megatron_core": record["megatron_core"], "ngc_pytorch": str(record["container"]).removesuffix("-py3")}


def _bytes(record: Mapping[str, Any], key: str) -> int | None:
    value = record[key]
    if value is not None and (value < 0 or int(value) != value):
        raise SpecError(f"{key}={value!r} must be a whole number of bytes, at least 0.", parameter=key, value=value)
    return None if value is None else int(value)
