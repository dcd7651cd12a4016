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
    run.stops_early = not job.activation_checkpointing.use_reentrant
    recomputed = timeline.now
    timeline.run_backward(run)
    hidden, begin = template.input_bytes, first.forward_start
    if job.offload.activations:
        timeline.hold("checkpoint", Category.ACTIVATIONS, hidden, begin, begin + template.num_forward, module)
        held_by_function = job.activation_checkpointing.use_reentrant  # CheckpointFunction.backward refers to its inputs
        ends = timeline.now if template.keeps_input or held_by_function else recomputed
        timeline.hold("checkpoint", Category.ACTIVATIONS, hidden, start, ends, module)
    elif not input_held:
        timeline.hold("checkpoint", Category.ACTIVATIONS, hidden, begin, timeline.now, module)
    # non-reentrant: backward begins, and the first operation that reads a saved tensor starts the recomputation
    late = template.gradient_bytes_at_first_saved if run.stops_early else 0
    after_hooks = max(narrowed, late), template.second_output_bytes  # made once the hooks of the layer's backward have run
    for size, since in ((0 if gradient_held else hidden, start), *((size, run.forward_start) for size in after_hooks)):
        timeline.hold("gradient", Category.TEMPORARIES, size, since, recomputed, module)
    if job.activation_checkpointing.use_reentrant:  # CheckpointFunction.backward refers to its recomputed outputs
        timeline.hold("recomputed_output", Category.ACTIVATIONS, hidden, recomputed, timeline.now, module)
        if not gradient_held:  # ... and to its arguments, so adding a second gradient makes a new tensor
            summed = (run.backward_start or 0) + template.output_gradient_used_until
            timeline.hold("gradient", Category.TEMPORARIES, hidden, summed, timeline.now, module)
    return run
