"""The backward of a layer under activation checkpointing: the layer runs forward again, then backward."""

from __future__ import annotations

from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category, Phase


def recompute(
    timeline: Step,
    first: BlockRun,
    job: TrainingJob,
    keeps_gradients: bool,
    narrowed: int = 0,
    *,
    template: Template | None = None,
    input_held: bool = False,
    gradient_held: bool = False,
) -> BlockRun:
    """Add the recomputation and the backward of a checkpointed layer; returns the recomputation's run.

    The checkpoint holds the layer's input from forward to the end of backward or, if activations are offloaded, only while
    the layer runs forward. `narrowed`: bytes of the gradient in a narrower dtype that the residual addition has made before
    the recomputation starts (it saves nothing, so its backward runs first). `template`: of the layer as it runs again;
    None: as it ran first. `input_held`, `gradient_held`: other code already holds the layer's input, or the gradient that
    comes into the layer.
    """
    start, module, template = timeline.now, first.module, template or first.template
    run = timeline.run_forward(template, module, Phase.BACKWARD, keeps_gradients=keeps_gradients)
    run.uses_cached, first.recomputation = True, run
    reentrant = job.activation_checkpointing.use_reentrant
    run.stops_early, recomputed = not reentrant, timeline.now
    timeline.run_backward(run)
    hidden = template.input_bytes
    if job.offload.activations:
        # CheckpointFunction.backward refers to its inputs
        ends = timeline.now if template.keeps_input or reentrant else recomputed
        _hold_offloaded_input(timeline, first, template, start, ends)
    elif not input_held:
        timeline.hold("checkpoint", Category.ACTIVATIONS, hidden, first.forward_start, timeline.now, module)
    # non-reentrant: backward begins, and the first operation that reads a saved tensor starts the recomputation
    late = template.gradient_bytes_at_first_saved if run.stops_early else 0
    after_hooks = max(narrowed, late), template.second_output_bytes  # made once the hooks of the layer's backward have run
    for size, since in ((0 if gradient_held else hidden, start), *((size, run.forward_start) for size in after_hooks)):
        timeline.hold("gradient", Category.TEMPORARIES, size, since, recomputed, module)
    if reentrant:
        _hold_for_function(timeline, run, recomputed, gradient_held=gradient_held)
    return run


def _hold_for_function(timeline: Step, run: BlockRun, recomputed: int, *, gradient_held: bool) -> None:
    """Hold what `CheckpointFunction.backward` refers to until it returns: its recomputed outputs and its arguments, so that
    a second gradient of the output is not added in place, but makes a new tensor."""
    template, hidden = run.template, run.template.input_bytes
    timeline.hold("recomputed_output", Category.ACTIVATIONS, hidden, recomputed, timeline.now, run.module)
    if not gradient_held:
        summed = (run.backward_start or 0) + template.output_gradient_used_until
        timeline.hold("gradient", Category.TEMPORARIES, hidden, summed, timeline.now, run.module)


def _hold_offloaded_input(timeline: Step, first: BlockRun, template: Template, start: int, ends: int) -> None:
    """Hold the input of a layer whose checkpoint is on the host: while the layer first runs forward, and again from `start`
    of its recomputation until before `ends`."""
    begin = first.forward_start
    for born, dies in ((begin, begin + template.num_forward), (start, ends)):
        timeline.hold("checkpoint", Category.ACTIVATIONS, template.input_bytes, born, dies, first.module)
