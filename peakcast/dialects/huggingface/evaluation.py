"""What a Trainer's evaluation between steps needs beside training, which the ledger does not count."""

from __future__ import annotations

from peakcast.core.units import GIB
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

EVALUATION = {key: key for key in ("eval_strategy", "evaluation_strategy", "per_device_eval_batch_size")}
"""transformers' arguments of an evaluation, for projects that pass them on under their own names."""
STRATEGIES = ("no", "steps", "epoch")
USUAL_BATCH = 8
"""transformers 5.17 training_args.py: per_device_eval_batch_size."""
LOGIT_BYTES = 10
"""Of each logit when a batch's loss is computed: in bf16, in fp32, and the fp32 log-softmax (5.17 loss/loss_utils.py)."""


def note_evaluation(job: TrainingJob, training: Settings, notes: Notes) -> None:
    """Note an evaluation whose batches are larger than training's."""
    key = "eval_strategy" if training.given("eval_strategy") else "evaluation_strategy"
    strategy = strategy_of(training, key)
    sequences = training.integer("per_device_eval_batch_size", USUAL_BATCH) or USUAL_BATCH
    if strategy == "no" or sequences <= job.micro_batch_size or _is_smaller(job, sequences):
        return
    whole = job.loss.kind == "cross_entropy" and not job.loss.fused_linear_cross_entropy
    name, logits = training.spell("per_device_eval_batch_size"), ""
    if whole and conventions(job).get("loss_kernel", "eager") == "eager":
        size = LOGIT_BYTES * sequences * job.sequence_length * job.architecture.vocab_size
        logits = f" its logits alone take {size / GIB:.1f} GiB;"
    notes.unsupported.append(
        f"Evaluation ({key}={strategy}) is not counted, and passes {name}={sequences} sequences at once, where training "
        f"passes {job.micro_batch_size}:{logits} {name}={job.micro_batch_size} needs less than training.",
        name,
        "more",
    )


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
