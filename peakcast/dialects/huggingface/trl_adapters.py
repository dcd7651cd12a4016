"""What TRL's trainers cast before they train adapters of a network that bitsandbytes has quantised.

Source: trl 1.0.0, 1.14.2 and 1.16.0 `trainer/sft_trainer.py` and `dpo_trainer.py` ("the PEFT adapter weights are converted
to bf16"); 0.11.4, 0.15.2, 0.19.1 and 0.24.0 `models/utils.py` prepare_peft_model, peft_module_casting_to_bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import resolved
from peakcast.dialects.common.translation import Notes
from peakcast.dialects.huggingface.trl_defaults import Default, has_default
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

NARROWS = Default("bfloat16", (1, 0), (4, 56))


def with_casts_of_trl(job: TrainingJob, versions: Mapping[str, Any], notes: Notes) -> TrainingJob:
    """`job` as TRL's trainers cast it: from 1.0 on adapters are in bfloat16; before, norms in float32, and without bfloat16
    or 4 bits embedding and head too. Under DeepSpeed and FSDP what these cast themselves holds."""
    kind, layout = job.finetuning.quantization, job.parallelism
    if kind not in ("nf4", "int8") or "unsloth" in resolved(versions) or job.framework != "huggingface":
        return job
    sharded = layout.sharding != "none" and layout.world_size > 1
    if sharded and not (layout.sharding == "fsdp2" and kind == "nf4" and has_default(NARROWS, versions)):
        return job
    if has_default(NARROWS, versions):
        notes.assumptions.append("trl (since 1.0) makes adapters of quantised networks bfloat16.")
        return job.replace(
            finetuning=replace(job.finetuning, adapter_dtype="bfloat16"),
            precision=replace(job.precision, gradients="bfloat16", optimizer_states="bfloat16"),
        )
    notes.assumptions.append("trl before 1.0 widens the norms of quantised networks to float32 (prepare_peft_model).")
    if not conventions(job).get("autocast"):
        return prepared_for_kbit_training(job)
    narrow_ends = kind == "nf4" and job.precision.compute == "bfloat16"
    widened = {"norms_in_float32": True, **({} if narrow_ends else {"ends_in_float32": True})}
    return job.replace(framework_options=FrozenMapping({**job.framework_options, **widened}))


def prepared_for_kbit_training(job: TrainingJob) -> TrainingJob:
    """`job` after peft's prepare_model_for_kbit_training (peft 0.21 utils/other.py), which makes float32 of all 16-bit
    weights that are not quantised. Without autocast all is in float32 then, attention too, but products of 4-bit layers."""
    widened: dict[str, Any] = {"ends_in_float32": True, "norms_in_float32": True}
    if not conventions(job).get("autocast"):
        multiplies = job.framework_options.get("quantized_compute_dtype", job.precision.compute)
        widened = {"quantized_compute_dtype": multiplies} if job.finetuning.quantization == "nf4" else {}
        job = job.replace(precision=replace(job.precision, parameters="float32", compute="float32"))
    return job.replace(framework_options=FrozenMapping({**job.framework_options, **widened}))


def without_cache(job: TrainingJob) -> TrainingJob:
    """`job` of a program that switches off the cache (`model.config.use_cache = False`) which its release of transformers
    fills in training."""
    if not conventions(job).get("outputs_have_cache"):
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, "outputs_have_cache": False}))


def trl_computes_in(training: Mapping[str, Any]) -> str:
    """The dtype in which TRL's own scripts let 4-bit layers multiply: that of the weights, by default float32 (trl 1.16
    trainer/utils.py `get_quantization_config`, trainer/model_config.py)."""
    return str(training.get("dtype") or training.get("torch_dtype") or "float32")
