"""What preference training adds to a step: a reference model, its forward while the policy's graph exists, and results per
token.

Source: trl 1.16.0 `trainer/dpo_trainer.py` DPOTrainer.__init__ and _compute_loss, likewise `kto_trainer.py`. The policy
runs forward first. Then the reference runs under no_grad: a copy of the network in the policy's dtype, or the policy itself
with its adapters switched off and without checkpointing. Under autocast the copy's weights are cast and cached, because its
parameters still require gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peakcast.core.units import FP32, INT64
from peakcast.jobs.conventions import scores_tokens
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import (
    SHIFTED_WITH_NLL,
    HFContext,
    autocast_copy_bytes,
    is_cast_by_autocast,
)
from peakcast.models.ledger.huggingface.blocks.embedding import embedding_variables
from peakcast.models.ledger.huggingface.blocks.head import head
from peakcast.models.ledger.huggingface.blocks.preference_heads import (
    scored_rows,
    variables_bytes,
    vocabulary_part_bytes,
    widened_bytes,
)
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.models.ledger.huggingface.model import hold_buffers, hold_masks, hold_rotary_tables, model_ends
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts import gathers_head_itself, layout_of
from peakcast.models.ledger.layouts.fsdp2 import FSDP2
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.networks.families import family_of
from peakcast.networks.trained_parts import trained_network
from peakcast.timelines.timeline import Category, Phase

SWITCHED_OFF = ("none",)
"""Adapter targets that match no module: the adapters are switched off."""
NAME = "reference."


def as_trained(job: TrainingJob) -> TrainingJob:
    """`job` with the network as its trainer builds it: with its `nn.Dropout`s switched off (trl 1.16.0 `trainer/utils.py`
    disable_dropout_in_model), which only GRPO leaves on; for a classifier without a table shared with the head."""
    if (network := trained_network(job)).head != "language_model":
        network = replace(network, tie_word_embeddings=False)
    job = job if network is job.architecture else job.replace(architecture=network)
    if job.loss.kind in ("cross_entropy", "grpo"):
        return job
    switched_off: dict[str, Any] = dict.fromkeys(family_of(network).modules.dropouts, 0.0)
    network = replace(network, **switched_off)
    return job.replace(architecture=network, finetuning=replace(job.finetuning, dropout=0.0))


def hold_reference(timeline: Step, job: TrainingJob) -> None:
    """Hold the parameters and large buffers of the frozen copy, if there is one."""
    if job.reference == "model":
        kept = Step()
        layout_of(_reference_job(job), stored_parameters(_reference_job(job))).hold_resident(kept)
        hold_buffers(kept, job)
        held = kept.timeline()
        rows = zip(held.names, held.modules, held.categories.tolist(), held.num_bytes.tolist(), strict=True)
        weights = [(name, NAME + module, size) for name, module, kind, size in rows if kind == Category.PARAMETERS]
        timeline.hold_all(weights, Category.REFERENCE_PARAMETERS)


def reference_forward(timeline: Step, job: TrainingJob, policy: HFContext, start: int) -> None:
    """Add what happens between the policy's head and its backward. `start`: the instant at which the micro-batch begins."""
    if job.loss.kind == "reward":
        return
    born, tokens = timeline.now, policy.rows * INT64
    if job.loss.kind == "grpo":  # its reference ran when completions were generated; prompt and completion are joined
        timeline.hold_all((("input_ids", "", tokens), ("attention_mask", "", tokens)), Category.INPUTS, start, born)
    elif job.loss.kind == "kto":  # every prompt again, with the completion of another
        kl = [(f"KL_{name}", "", tokens) for name in ("input_ids", "attention_mask", "completion_mask")]
        timeline.hold_all(kl, Category.INPUTS)
    if job.reference in ("model", "adapter_off") and job.loss.kind != "grpo":
        begin, copied = timeline.now, job.reference == "model"
        for _ in range(2 if job.loss.kind == "kto" else 1):  # KTO's second is for prompts with another's completion
            _run(timeline, _reference_job(job), NAME if copied else "")
        timeline.phases[begin:] = bytes((Phase.LOSS,)) * (timeline.now - begin)  # gathering its weights included
    if policy.loss.shifts_logits:  # a variable refers to the policy's logits until backward
        timeline.hold("logits", Category.LOGITS, widened_bytes(policy), born, timeline.now)
    held = variables_bytes(policy)
    if held:  # as the policy's and the reference's outputs do, both until the loss is returned
        timeline.hold("outputs.logits", Category.LOGITS, held, born, timeline.now, "head")
    if policy.loss.token_scores == SHIFTED_WITH_NLL:  # and another to a loss of the chosen half, with its log-softmax
        timeline.hold("nll_loss.log_softmax", Category.LOGITS, widened_bytes(policy) // 2, born, timeline.now)
    scored = scored_rows(policy) if scores_tokens(job) else 0
    per_token = [("log_probs", "head", scored * FP32), ("entropy", "head", scored * FP32), ("is_top1", "head", scored)]
    if job.loss.kind != "cross_entropy":  # trl 1.16.0 SFTTrainer.__init__ asks for the other three alone
        per_token.append(("mean_logits", "head", scored * FP32))
        timeline.hold("labels", Category.INPUTS, tokens, start, timeline.now)
    timeline.hold_all(per_token, Category.LOGITS, born, timeline.now)


def _reference_job(job: TrainingJob) -> TrainingJob:
    """The job as the reference model runs it."""
    tuning = job.finetuning
    off = Finetuning() if job.reference == "model" else replace(tuning, targets=SWITCHED_OFF)
    return job.replace(finetuning=off, activation_checkpointing=ActivationCheckpointing())


def forward_beforehand(timeline: Step, job: TrainingJob) -> None:
    """Add KTO's forward of every prompt with another's completion, of which only the log-probability remains."""
    unchecked = job.replace(activation_checkpointing=ActivationCheckpointing())
    begin = timeline.now
    _run(timeline, unchecked, prefix="", phase=Phase.FORWARD)
    timeline.phases[begin:] = bytes((Phase.FORWARD,)) * (timeline.now - begin)  # its head included


def _run(timeline: Step, job: TrainingJob, prefix: str, phase: Phase = Phase.LOSS) -> None:
    """Add a network's forward that saves nothing. `prefix`: "" for the policy itself, whose layout gathers it."""
    context = block_context(job, None)
    blocks, start = Blocks(job, context), timeline.now
    shards = _gathered_whole(timeline, job) if prefix == NAME else None
    embedded = timeline.run_without_graph(blocks.embedding(), f"{prefix}embedding", phase)
    runs = [
        timeline.run_without_graph(blocks.layer(layer), f"{prefix}layers.{layer}", phase)
        for layer in range(job.architecture.num_hidden_layers)
    ]
    made = head(context)
    last = timeline.run_without_graph(made, f"{prefix}head", phase)
    hold_whole_head(timeline, job, last)
    ends = model_ends(last)
    is_input, sizes = embedding_variables(context)
    after = runs[0] if is_input and runs else embedded
    for size in sizes:
        born = after.forward_start + after.template.num_forward
        timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, born, ends, f"{prefix}embedding")
    hold_masks(timeline, blocks.contexts, start, ends, [])
    hold_rotary_tables(timeline, job, context, start)
    scores = last.template.forward_marks.get(Mark.LOG_PROBABILITIES, ()) if context.loss.token_scores else ()
    exits = last.forward_start + scores[0] if scores else timeline.now  # whole logits are what the network returns
    _hold_casts(timeline, job, context, runs, prefix, exits)
    _fetch(timeline, job, prefix, [(run.module.removeprefix(prefix), run) for run in (embedded, *runs, last)])
    if shards is not None:
        shards.reshard(timeline)
        shards.end_forward(timeline)


def _gathered_whole(timeline: Step, job: TrainingJob) -> FSDP2 | None:
    """FSDP2's copy is one group (`prepare_fsdp`, trl 1.16.0 `models/utils.py`): all of it is gathered before it runs, and
    the output of its all-gather lives until the root's forward, which is the copy's own, ends. Returns the copy's layout;
    None for another."""
    tensors = stored_parameters(job)
    layout = layout_of(job, tensors)
    if not isinstance(layout, FSDP2):
        return None
    layout.units = [Unit(NAME.rstrip("."), (), tuple(tensors))]
    layout.gather(timeline, layout.units[0], Phase.LOSS)
    return layout


def _fetch(timeline: Step, job: TrainingJob, prefix: str, runs: list[tuple[str, BlockRun]]) -> None:
    """Gather the reference's weights. ZeRO-3's copy has an engine of its own (`prepare_deepspeed`), which gathers what each
    module needs. FSDP1's is read from `prepare_fsdp` and compared with no trace: its units are gathered block by block."""
    if prefix == NAME and job.parallelism.sharding == "fsdp1" and job.parallelism.num_replicas > 1:
        for name, run in runs:
            size = sum(t.numel * t.gathered_bytes for t in stored_parameters(job) if t.module == name)
            dies = run.forward_start + run.template.num_forward
            timeline.hold("gathered", Category.COMMUNICATION_BUFFERS, size, run.forward_start, dies, run.module)
    if prefix == NAME and job.parallelism.zero_stage == 3:
        from peakcast.models.ledger.layouts.zero3 import Zero3

        policy = timeline.hooks
        assert isinstance(policy, Zero3)
        if policy.reference is None:
            made = layout_of(job, stored_parameters(job))
            assert isinstance(made, Zero3)
            policy.reference, made.first_step = made, policy.first_step
        policy.reference.run_forward_alone(timeline, runs)


def hold_whole_head(timeline: Step, job: TrainingJob, head: BlockRun) -> None:
    """Hold the head's weight until now if FSDP2 has it as a group of its own: its module does not run, so TRL gathers it
    (`full_tensor` in trl 1.16.0 `trainer/utils.py`), again for each forward."""
    if not gathers_head_itself(job):
        return
    weights = [t for t in stored_parameters(job) if t.of_lm_head]
    size = sum(t.numel * t.element_bytes for t in weights)
    timeline.hold("gathered", Category.COMMUNICATION_BUFFERS, size, model_ends(head), timeline.now, "head")
    if any(t.element_bytes != t.gathered_bytes for t in weights):  # gathered in its stored dtype, then narrowed in parts
        part = vocabulary_part_bytes(job.architecture, weights[0].gathered_bytes)
        forward, backward = head.template.forward_marks, head.template.backward_marks
        made = [(head.forward_start + at, part) for at in forward.get(Mark.LOG_PROBABILITIES, ())]
        if head.backward_start is not None and head.backward_start >= 0:  # there a variable refers to the last part
            made += [(head.backward_start + at, 2 * part) for at in backward.get(Mark.LOG_PROBABILITIES, ())]
        for now, num_bytes in made:
            timeline.hold("lm_head.weight.part", Category.TEMPORARIES, num_bytes, now, now + 1, "head")


def _hold_casts(
    timeline: Step, job: TrainingJob, context: HFContext, runs: list[BlockRun], prefix: str, exits: int
) -> None:
    """Hold the narrow copies of weights that require gradients, which autocast caches until the network's forward ends, at
    `exits`. (Adapters that are switched off are not modules of the network that runs.)"""
    switched_off = job.finetuning.targets == SWITCHED_OFF
    size, tensors = autocast_copy_bytes(context), () if switched_off else stored_parameters(job)
    for run in runs:
        born = run.forward_start + run.template.num_forward
        of_run = (t for t in tensors if prefix + t.module == run.module and t.trains)
        wide = [t for t in of_run if is_cast_by_autocast(context, t.name, t.shape)]
        cached = size * sum(t.numel for t in wide)
        timeline.hold("autocast_cache", Category.TEMPORARIES, cached, born, max(exits, born), run.module)
