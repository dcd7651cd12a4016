"""Adds an optimizer to a step: main parameters, states, gradient clipping, the step's temporaries, `zero_grad`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.module_order import in_order_of_modules
from peakcast.models.ledger.optimizers.choice import adamw_rule, optimizer_options, optimizer_rule
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options, TrainedTensor
from peakcast.models.ledger.tape.columns import RecordedColumns
from peakcast.models.ledger.tape.local_variables import Locals
from peakcast.models.ledger.tape.step import Step
from peakcast.models.ledger.tape.update_in_backward import ParameterKey, ParameterOptimizer, UpdateInBackward
from peakcast.timelines.timeline import Category, Phase

LM_HEAD_WEIGHT = ParameterKey("head", "lm_head.weight")
TOKEN_TABLE_WEIGHT = ParameterKey("embedding", "embed_tokens.weight")
SCALAR_BYTES = FP32
"""One number, which the allocator rounds to 512 bytes. clip_grad_norm_ makes one per gradient and no larger tensor."""


def place_optimizer_step(timeline: Step, job: TrainingJob, layout: Layout, step: str) -> None:
    """Add everything from the end of backward to the end of the step, for the tensors that this rank updates under
    `layout`."""
    rule, options, trained = optimizer_rule(job), optimizer_options(job, step), layout.optimized()
    if rule.updates_in_backward and trained and not layout.updates:
        timeline.update_in_backward = _updates(job, rule, trained, options)
    _clip(timeline, job, () if rule.updates_in_backward else trained)
    layout.clip(timeline)
    timeline.hold_all(((name, "optimizer", size) for name, size in rule.shared), Category.OPTIMIZER_STATES)
    for frozen in (t.optimized(t.shape) for t in layout.tensors if rule.has_states_of_frozen and not t.trains):
        timeline.hold_all(_states(rule, [frozen], options), Category.OPTIMIZER_STATES)
    updated = trained if layout.holds_main_parameters else _main_parameters(timeline, job, trained)
    taken = [tensor for tensor in updated if rule.takes(tensor)]
    others = [tensor for tensor in updated if not rule.takes(tensor)]
    for part, tensors in ((rule, taken), (adamw_rule(job), others)):
        if rule.updates_in_backward == "at_once":
            if not options.first_step or part.built_with_optimizer:
                timeline.hold_all(_states(part, tensors, options), Category.OPTIMIZER_STATES)
            continue
        for group in part.groups(tensors) if part.groups else _groups(job, layout, tensors):
            if group:
                layout.before_update(timeline, group)
                timeline.run_again(_stepped(part, tuple(group), options))
                layout.after_update(timeline)
    layout.release_gradients(timeline)
    timeline.gradients_die = timeline.moment("zero_grad", Phase.OPTIMIZER_STEP)


def hand_updates(job: TrainingJob, layout: Layout, step: str) -> None:
    """Give `layout` what each update during backward allocates, if updates run together with the layout's reductions."""
    rule = optimizer_rule(job)
    if layout.updates_as_reduced and rule.updates_in_backward == "at_once":
        alone = _updates(job, rule, layout.optimized(), optimizer_options(job, step)).alone
        layout.updates = {one.parameter: one for one in alone}


def _updates(job: TrainingJob, rule: OptimizerRule, trained: Sequence[TrainedTensor], options: Options) -> UpdateInBackward:
    """What each update during backward allocates."""
    tied = {LM_HEAD_WEIGHT: TOKEN_TABLE_WEIGHT} if job.architecture.tie_word_embeddings else {}
    if rule.updates_in_backward == "one_behind":
        width = trained[0].element_bytes
        return UpdateInBackward(rule.update_fp32_copies(width) * FP32 // width, tied)
    alone = []
    for tensor in trained:
        own, run = rule if rule.takes(tensor) else adamw_rule(job), Locals()
        own.step(run, [tensor], options)
        makes = options.first_step and not own.built_with_optimizer
        states = tuple(_states(own, [tensor], options)) if makes else ()
        alone.append(ParameterOptimizer(ParameterKey(tensor.module, tensor.name), run.most_bytes(), states))
    return UpdateInBackward(tied=tied, alone=tuple(alone))


def _states(rule: OptimizerRule, tensors: Iterable[TrainedTensor], options: Options) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the states of `tensors`."""
    return [(f"{t.name}.{name}", t.module, size) for t in tensors for name, size in rule.states(t, options)]


def _clip(timeline: Step, job: TrainingJob, trained: Sequence[TrainedTensor]) -> None:
    """Add clip_grad_norm_ (torch 2.13 nn/utils/clip_grad.py), which makes one norm per gradient and scales in place. With
    fp16 under autocast, GradScaler.unscale_ runs before it (torch/amp/grad_scaler.py), in place too; its scalars live until
    update()."""
    clip = timeline.moment("clip_grad_norm_", Phase.GRADIENT_CLIPPING)
    norms = ((f"{tensor.name}.norm", tensor.module, SCALAR_BYTES) for tensor in trained)
    timeline.hold_all(norms, Category.TEMPORARIES, clip, clip + 1)
    summed = ((f"{tensor.name}.grad.sum", tensor.module, tensor.num_bytes) for tensor in trained if tensor.sums_gradient)
    timeline.hold_all(summed, Category.TEMPORARIES, clip, clip + 1)
    if conventions(job).get("autocast") and job.precision.compute == "float16":
        for name in ("grad_scaler.scale", "grad_scaler.growth_tracker"):
            timeline.hold(name, Category.OTHER, SCALAR_BYTES, 0)
        for name in ("grad_scaler.inverse_scale", "grad_scaler.found_inf"):
            timeline.hold(name, Category.OTHER, SCALAR_BYTES, clip)


def _main_parameters(timeline: Step, job: TrainingJob, trained: Sequence[TrainedTensor]) -> list[TrainedTensor]:
    """The tensors that the optimizer updates: copies in the dtype of the main parameters, if the job has them."""
    if job.precision.main_parameters is None:
        return list(trained)
    width = int(DTYPE_BYTES[job.precision.main_parameters])
    masters = [replace(tensor, element_bytes=width) for tensor in trained]
    timeline.hold_all(((f"{t.name}.main", t.module, t.num_bytes) for t in masters), Category.MAIN_PARAMETERS)
    return masters


def _groups(job: TrainingJob, layout: Layout, tensors: list[TrainedTensor]) -> Iterable[list[TrainedTensor]]:
    """The parameter groups. The Trainer makes two, with and without weight decay; a plain loop makes one, in the order of
    `module_order.py`."""
    by_decay = bool(conventions(job).get("trainer"))
    groups = layout.update_groups(tensors, by_decay=by_decay)
    return groups if by_decay else [in_order_of_modules(group, job.architecture) for group in groups]


@lru_cache(maxsize=64)
def _stepped(rule: OptimizerRule, group: tuple[TrainedTensor, ...], options: Options) -> RecordedColumns:
    """The step of one parameter group, as a recording: its states, made in its first step if not before, and its
    temporaries, moment by moment."""
    run, step = Locals(), Step()
    rule.step(run, group, options)
    run.leave()
    step.moment("before", Phase.OPTIMIZER_STEP)
    begin = step.now
    for label in run.labels or [""]:
        step.moment(f"optimizer.step {label}".rstrip(), Phase.OPTIMIZER_STEP)
    made = [begin + moment for moment in run.states_made] or [begin] * len(group)
    exist = not options.first_step or rule.built_with_optimizer
    instants = [0] * len(group) if exist else made
    for born, together in itertools.groupby(zip(group, instants, strict=True), key=lambda pair: pair[1]):
        step.hold_all(_states(rule, (tensor for tensor, _ in together), options), Category.OPTIMIZER_STATES, born)
    for name, size, born, dies in run.lives:
        step.hold(name, Category.OPTIMIZER_TEMPORARIES, size, begin + born, begin + dies, "optimizer")
    return step.record()
