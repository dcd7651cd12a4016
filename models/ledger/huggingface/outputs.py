"""What the training loop's variable `outputs` refers to: the logits, what their graph keeps as long as it exists, and the
cache of keys and values unless `use_cache` is off (convention `outputs_have_cache`).

A plain loop assigns `outputs` again only when the next forward has returned, so two sets of logits exist at once. The
Trainer drops them before backward or at its end, depending on its release (conventions `trainer` and `outputs_dropped`).
"""

from __future__ import annotations

from collections.abc import Mapping

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.head import head, logits_bytes_kept_by_outputs
from peakcast.models.ledger.huggingface.blocks.kv_cache import IN_TRAINING, cached_bytes, narrow_cache_widened_bytes
from peakcast.models.ledger.huggingface.contexts import target_context
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.models.ledger.huggingface.model import arguments_of_layers
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import FOREVER, BlockRun, Step
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category


def hold_outputs(
    timeline: Step, job: TrainingJob, context: HFContext, loss: BlockRun, last: bool, layers: Mapping[int, BlockRun]
) -> None:
    """Hold a micro-batch's outputs from forward until now, the end of backward, or, for a plain loop's `last` micro-batch,
    for the rest of the step. `loss`: the run of its head; `layers`: those of its layers."""
    if conventions(job).get("outputs_dropped"):
        return
    target = target_context(context, job)
    dies = timeline.now if conventions(job).get("trainer") or not last else FOREVER
    born = loss.forward_start + loss.template.num_forward
    if "loss" in context.compiled and loss.backward_start is not None:  # until then the compiled loss saves the logits
        born = loss.backward_start + 1 + loss.template.in_backward.get("d_logits", 0)
    timeline.hold("outputs.logits", Category.LOGITS, _logits_bytes(job, target), born, dies, "head")
    for name, num_bytes in _kept_by_graph(job, target):
        timeline.hold(name, Category.ACTIVATIONS, num_bytes, timeline.now, dies, "embedding")
    for run in layers.values() if context.cache.does in IN_TRAINING else ():
        if run.backward_start is not None:
            ends = run.forward_start + run.template.num_forward, run.backward_start + run.template.num_backward
            for born, num_bytes in zip(ends, cached_bytes(run.template), strict=True):
                timeline.hold("outputs.past_key_values", Category.ACTIVATIONS, num_bytes, born, dies, run.module)


def hold_cache_until_loss(
    timeline: Step, job: TrainingJob, context: HFContext, loss: BlockRun, layers: Mapping[int, BlockRun]
) -> None:
    """Hold the cache to which a micro-batch's outputs refer until now, when the Trainer has the loss and drops them.
    `loss`: the run of the head; `layers`: those of the layers."""
    if context.cache.does not in IN_TRAINING or not conventions(job).get("outputs_dropped"):
        return
    left = timeline.now
    widened = loss.forward_start + next(iter(loss.template.forward_marks.get(Mark.WIDENED_OUTPUTS, ())), left)
    for run in layers.values():
        unsaved, saved = cached_bytes(run.template)
        size = unsaved + saved * context.backward.saves_on_cpu
        born = run.forward_start + run.template.num_forward
        timeline.hold("past_key_values", Category.ACTIVATIONS, size, born, left, run.module)
        size = narrow_cache_widened_bytes(context, run.template)
        timeline.hold("past_key_values.to_float32", Category.ACTIVATIONS, size, widened, left, run.module)


def _outputs_made(job: TrainingJob, loss: BlockRun) -> int:
    """The instant at which a micro-batch's outputs exist and the loop's variable drops those of the one before: after the
    loss, unless the loop computes it from what the network returns. `loss`: the run of its head."""
    outside = conventions(job).get("loss_outside_network")
    return loss.forward_start + (loss.template.loss_from if outside else loss.template.num_forward)


def _ended(loss: BlockRun) -> int:
    """The instant from which the graph of the head keeps nothing: the end of its backward."""
    return (loss.backward_start or 0) + loss.template.num_backward


def hold_outputs_of_before(
    timeline: Step, first: bool, *, job: TrainingJob, context: HFContext, start: int, loss: BlockRun
) -> None:
    """Hold what earlier forwards have left behind while a micro-batch, which began at `start`, runs forward. `loss`: its
    head's run; `first`: it is the training's first forward."""
    target, loss_made = target_context(context, job), _outputs_made(job, loss)
    if first:
        # a reference cycle keeps what the first forward had where a network compiled in one call is several graphs: the
        # logits, if the loss is outside the network, and the final norm's output, where hooks divide the network
        if family_of(job.architecture).ends.loss_apart and context.compiled.issuperset(("mask", "loss")):
            logits = logits_bytes_kept_by_outputs(target, widened=False)
            timeline.hold("logits", Category.LOGITS, logits, loss_made + 1, FOREVER, "head")
        if context.divided_by_hooks:
            timeline.hold("final_norm", Category.ACTIVATIONS, context.input_bytes, _ended(loss), FOREVER, "head")
    elif not conventions(job).get("outputs_dropped") and not conventions(job).get("trainer"):
        timeline.hold("outputs.logits", Category.LOGITS, _logits_bytes(job, target), start, loss_made, "head")
        for name, num_bytes in _kept_by_graph(job, target):
            timeline.hold(name, Category.ACTIVATIONS, num_bytes, start, loss_made, "embedding")
        for layer, num_bytes in _cached(job, context).items():
            timeline.hold(
                "outputs.past_key_values", Category.ACTIVATIONS, num_bytes, start, loss_made, f"layers.{layer}"
            )
        if job.architecture.kind == "encoder_decoder":
            from peakcast.models.ledger.huggingface.encoder_decoder import outputs_of

            timeline.hold_all(outputs_of(job, context), Category.ACTIVATIONS, start, loss_made)


def _cached(job: TrainingJob, context: HFContext) -> dict[int, int]:
    """Layer -> bytes of its cached keys and values."""
    if context.cache.does not in IN_TRAINING:
        return {}
    blocks = Blocks(job, context)
    return {index: sum(cached_bytes(blocks.layer(index))) for index in range(job.architecture.num_hidden_layers)}


def _logits_bytes(job: TrainingJob, target: HFContext) -> int:
    """Bytes of `outputs.logits`. Under autocast, accelerate's `convert_outputs_to_fp32` widens them to fp32."""
    return logits_bytes_kept_by_outputs(target, widened=bool(conventions(job).get("trainer")))


def _kept_by_graph(job: TrainingJob, context: HFContext) -> list[tuple[str, int]]:
    """(name, bytes) of what the graph still keeps after backward, as long as `outputs` refers to it: attributes of its
    nodes. peft's enable_input_require_grads makes the embedding's output a leaf, which keeps its gradient; and nodes of
    reentrant checkpoints keep their arguments."""
    checkpointing = job.activation_checkpointing
    kept: list[tuple[str, int]] = []
    if conventions(job).get("trainer"):
        return kept
    if checkpointing.mode == "none":
        return _attributes(job, context)
    if not context.table_trains:
        kept += [("embedding.output", context.input_bytes), ("embedding.output.grad", context.input_bytes)]
    if checkpointing.use_reentrant and job.architecture.kind == "decoder":
        kept += arguments_of_layers(job, Blocks(job, context).contexts)
    return kept


def _attributes(job: TrainingJob, context: HFContext) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors that nodes of the graph have as attributes, which backward does not free."""
    if not context.linears.quantized_keep_input:
        return []
    blocks = Blocks(job, context)
    templates = [*(blocks.layer(index) for index in range(job.architecture.num_hidden_layers)), head(context)]
    return [("attribute of graph", size) for template in templates for size in template.graph_bytes]
