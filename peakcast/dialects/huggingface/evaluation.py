"""What a Trainer's evaluation between steps needs beside training, which the ledger does not count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.units import DTYPE_BYTES, GIB
from peakcast.core.versions import release, resolved
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

EVALUATION = {key: key for key in ("eval_strategy", "evaluation_strategy", "per_device_eval_batch_size")}
"""transformers' arguments of an evaluation, for projects that pass them on under their own names."""
STRATEGIES = ("no", "steps", "epoch")
USUAL_BATCH = 8
"""transformers 5.17 training_args.py: per_device_eval_batch_size."""
LIGERS_LOSS = ("use_liger_kernel", "use_liger", "liger_loss")
"""Arguments that ask for Liger's fused loss; the last one is what readers of other projects put in its place."""
LOGIT_BYTES = 10
"""Of each logit when a batch's loss is computed: in bf16, in fp32, and the fp32 log-softmax (5.17 loss/loss_utils.py)."""


def note_evaluation(job: TrainingJob, training: Settings, notes: Notes) -> None:
    """Note an evaluation whose batches are larger than training's, or that makes logits where training makes none."""
    key = "eval_strategy" if training.given("eval_strategy") else "evaluation_strategy"
    strategy = strategy_of(training, key)
    sequences = training.integer("per_device_eval_batch_size", USUAL_BATCH) or USUAL_BATCH
    ligers = {name for name in LIGERS_LOSS if training.switch(name)}
    if strategy == "no":
        return
    name, size = training.spell("per_device_eval_batch_size"), _logits_bytes(job, sequences)
    if ligers and _fuses_in_training_alone(job) and size > _least_of_training(job):
        notes.unsupported.append(
            f"Evaluation ({key}={strategy}) is not counted, and Liger's loss makes whole logits there (it fuses lm_head "
            f"and loss in training mode alone): those of {name}={sequences} take {size / GIB:.1f} GiB beside weights and "
            "optimizer states. trl from 0.29 on does without.",
            name,
            "more",
        )
        return
    if sequences <= job.micro_batch_size or _is_smaller(job, sequences):
        return
    whole = job.loss.kind == "cross_entropy" and not job.loss.fused_linear_cross_entropy
    logits = ""
    if whole and conventions(job).get("loss_kernel", "eager") == "eager":
        logits = f" its logits alone take {size / GIB:.1f} GiB;"
    notes.unsupported.append(
        f"Evaluation ({key}={strategy}) is not counted, and passes {name}={sequences} sequences at once, where training "
        f"passes {job.micro_batch_size}:{logits} {name}={job.micro_batch_size} needs less than training.",
        name,
        "more",
    )


def note_kept_logits(job: TrainingJob, training: Mapping[str, Any], notes: Notes) -> None:
    """Note that a Trainer with `compute_metrics` keeps the logits of all batches on the GPU until its evaluation has ended
    (transformers 5.17 trainer.py evaluation_loop: all_preds), unless `eval_accumulation_steps` moves them before."""
    settings = Settings(training, Notes(), "training")
    key = "eval_strategy" if settings.given("eval_strategy") else "evaluation_strategy"
    apart = settings.switch("prediction_loss_only") or settings.switch("batch_eval_metrics")
    if strategy_of(settings, key) == "no" or apart or job.architecture.head != "language_model":
        return
    sequences = settings.integer("per_device_eval_batch_size", USUAL_BATCH) or USUAL_BATCH
    returned = "float32" if job.framework_options.get("autocast") else job.precision.compute
    size = DTYPE_BYTES[returned] * sequences * job.sequence_length * job.architecture.vocab_size
    moved = settings.integer("eval_accumulation_steps")
    until = f"until {moved} batches of them are moved to the host" if moved else "until the evaluation has ended"
    notes.unsupported.append(
        f"compute_metrics keeps the logits of every evaluated batch on the GPU {until}, which is not counted: "
        f"{size / GIB:.2f} GiB for each of {sequences} sequences. preprocess_logits_for_metrics can shrink them "
        "first (logits.argmax(-1)); eval_accumulation_steps=1 keeps one batch's.",
        "eval_accumulation_steps",
        "more",
    )


def _logits_bytes(job: TrainingJob, sequences: int) -> int:
    """Bytes of all logits of so many sequences while their loss is computed."""
    return LOGIT_BYTES * sequences * job.sequence_length * job.architecture.vocab_size


def _fuses_in_training_alone(job: TrainingJob) -> bool:
    """Whether training with Liger's fused loss evaluates without it (liger_kernel 0.8.5 transformers/model/llama.py:
    `skip_logits = self.training and ...`; trl since 0.29 asks for it, trainer/sft_trainer.py compute_loss). Cut cross
    entropy, which is counted as Liger's, fuses in both."""
    asks = release(resolved(job.versions).get("trl", "")) >= (0, 29)
    return job.loss.fused_linear_cross_entropy and not asks


def _least_of_training(job: TrainingJob) -> int:
    """Bytes that a training step surely needs beside weights and optimizer states, and an evaluation does not: the
    gradients of layers that train, or each layer's input."""
    architecture = job.architecture
    width, layers = architecture.hidden_size, architecture.num_hidden_layers
    inputs = int(job.num_tokens * width * layers * DTYPE_BYTES[job.precision.compute])
    if job.finetuning.method != "full" or job.parallelism.sharding != "none" or job.parallelism.zero_stage > 1:
        return inputs
    in_layer = 2 * width * width + 3 * width * architecture.intermediate_size
    return inputs + int(layers * in_layer * DTYPE_BYTES[job.precision.parameters])


def strategy_of(settings: Settings, key: str, default: str = "no") -> str:
    """When it evaluates; YAML makes false of `no`. Raises: SpecError for what transformers does not know."""
    word = settings.text(key, default).lower()
    if word not in (*STRATEGIES, "false", ""):
        raise settings.refuse(key, f"must be one of {', '.join(STRATEGIES)}")
    return word if word in STRATEGIES else "no"


def _is_smaller(job: TrainingJob, sequences: int) -> bool:
    """Whether an evaluation of so many `sequences` at once surely needs less than training: of a network without logits of
    the vocabulary it holds one layer's activations at a time, training those of all layers."""
    keeps_all = job.activation_checkpointing.mode == "none" and job.finetuning.method == "full"
    layers = job.architecture.num_hidden_layers if job.architecture.head != "language_model" and keeps_all else 0
    return 2 * sequences <= layers * job.micro_batch_size
