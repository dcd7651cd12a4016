"""The ledger of a Megatron-LM training step on one rank: its turns, and what lives around and between them."""

from __future__ import annotations

from functools import lru_cache

from peakcast.catalog import Device
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.pipeline import warmup_turns
from peakcast.models.ledger.megatron.blocks.dispatch import held_by_dispatcher
from peakcast.models.ledger.megatron.buffers import parameters_held, trained_parameters
from peakcast.models.ledger.megatron.cuda_graphs import (
    captured,
    graphed_bytes_of,
    graphs_own_layers,
    graphs_whole_step,
    hold_gradient_copies,
    hold_inputs_of_graphs,
    hold_read_ahead,
    replayed,
)
from peakcast.models.ledger.megatron.first_runs import FirstRuns
from peakcast.models.ledger.megatron.inputs import hold_saved_batches
from peakcast.models.ledger.megatron.optimizer import hold_previous_gradients, optimizer_stepped, widens_gradients
from peakcast.models.ledger.megatron.persistent import hold_fp8_weights, hold_workspaces
from peakcast.models.ledger.megatron.received import Exchange, hold_received
from peakcast.models.ledger.megatron.share import RankShare, activations_share, rank_share, weights_share
from peakcast.models.ledger.megatron.turns import Turns
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category, Timeline

__all__ = ["megatron_ledger"]


def megatron_ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """Every tensor of one step of `job` on global `rank` (None: the first). `step`: "first" (optimizer states do not exist
    before the optimizer step, nor the backward thread's workspace before its first matrix product), "steady", or one of
    those that CUDA graphs add (`cuda_graphs.py`). With a `device`, it includes what libraries and kernels allocate for
    themselves on that GPU type."""
    share = rank_share(job, device, rank or 0)
    own = graphs_own_layers(share.convention)
    done, turns = _eager_step(share, first=step == "first" or (own and step == "captured"))
    if step == "first" or (step == "steady" and not own):
        return done.timeline()
    hold_inputs_of_graphs(done, share, turns.spans)
    if step != "captured":
        return replayed(done, share)
    if own:
        hold_gradient_copies(done, share, [one for chunk in trained_parameters(share) for one in chunk])
    return captured(done, share)


def _eager_step(share: RankShare, *, first: bool) -> tuple[Step, Turns]:
    """A step without graphs, the `first` or a later one, and its turns."""
    offloads = bool(share.context.offloading.modules)
    weights, turns = weights_share(share), _turns_run(activations_share(share), first_step=first and offloads)
    done = turns.step.fork(parameters_held(weights))
    _hold_deferred(done, turns, first)
    made = turns.first if first else FirstRuns(turns.first.float8)
    hold_workspaces(done, share, made)
    hold_fp8_weights(done, share, made)
    done.run_again(optimizer_stepped(weights, first))
    _hold_exchanged(done, turns)
    _hold_dispatchers(done, turns)
    if graphs_whole_step(share.convention):
        hold_read_ahead(done, share)
    else:
        hold_saved_batches(done, share, turns.spans)
    turns.leaves.hold(done, first=first)
    if not first:
        turns.reloads.hold(done)
    if widens_gradients(share) and not first:
        hold_previous_gradients(done, weights)
    return done, turns


def graphed_bytes(job: TrainingJob) -> int:
    """The most that the parts with CUDA graphs have at once in a steady step of the first rank."""
    share = rank_share(job, None, 0)
    return graphed_bytes_of(_eager_step(share, first=False)[0], share)


@lru_cache(maxsize=64)
def _turns_run(share: RankShare, *, first_step: bool) -> Turns:
    """The forward and backward turns of a rank. `first_step`: whether they are the first step's, which has turns of its own
    only if activations go to the host."""
    return Turns(share, first_step=first_step)


def _hold_deferred(step: Step, turns: Turns, first: bool) -> None:
    """Hold what waits for the end of all turns: the gradient and the input of the output layer, whose graph leads to the
    stage's own input and its gradient; and the buffers into which the inputs are gathered then, which stay.

    Source: megatron-core 0.16.1 `tensor_parallel/layers.py` `embedding_activation_buffer`, `utils.py`
    `drain_embedding_wgrad_compute` (buffers "mpu_0" and "mpu_1").
    """
    context = turns.share.context
    logits, stream = context.rows * context.ends.vocabulary * context.element_bytes, context.stream_bytes
    for number, count in turns.deferred.items():
        start = turns.spans[number].start
        ran = start + turns.blocks.head.backward_marks[Mark.LM_HEAD][0] + 1  # until then the head's template has both
        for name, category, size, born in (
            ("deferred.logits_gradient", Category.LOGITS, logits, ran),
            ("deferred.output_layer_input", Category.ACTIVATIONS, stream, ran),
            ("deferred.input", Category.ACTIVATIONS, stream, step.now),  # `received.py` holds this micro-batch's
            ("deferred.input_gradient", Category.TEMPORARIES, stream, step.now),
        ):
            step.hold(name, category, size, born, step.now, "head")
            step.hold(name, category, (count - 1) * size, start, step.now, "head")  # those of earlier micro-batches
    if turns.deferred and context.groups.sequence_parallel:
        for _ in range(2):
            born, size = step.now if first else 0, context.gathered_bytes
            step.hold("global_memory_buffer", Category.COMMUNICATION_BUFFERS, size, born, module="mpu")


def _hold_exchanged(step: Step, turns: Turns) -> None:
    """Hold inputs from other stages, their gradients, and gradients of outputs."""
    share, layout = turns.share, turns.share.job.parallelism
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_stages
    if stages == 1:
        return
    group, micro_batches = share.micro_batches_in_a_row, len(turns.spans) // (2 * virtual)
    exchange = Exchange(
        chunks=share.chunks,
        num_bytes=share.context.stream_bytes,
        interleaved=virtual > 1,
        overlapped=virtual > 1 and bool(share.convention.get("overlap_p2p_communication", True)),
        returns=turns.step.now,
        warmup=warmup_turns(stages, virtual, share.stage, group, micro_batches, int(share.overlaps_micro_batches)),
        outliving=frozenset(turns.spans[number].turn.micro_batch for number in turns.deferred),
    )
    hold_received(step, turns.spans, exchange)


def _hold_dispatchers(step: Step, turns: Turns) -> None:
    """Hold what attributes of token dispatchers refer to, for the rank's routed layers, from one step into the next.
    Between a layer's forward (or recomputation) and its backward there is a graph, whose entries already include what both
    keep."""
    share, architecture = turns.share, turns.share.job.architecture
    if share.context.experts is None or not turns.spans:
        return
    always, between = held_by_dispatcher(share.context, share.context.experts)
    first, done, hold = turns.spans[0].start, turns.spans[-1].end, step.hold
    graphs = [] if share.context.experts.recompute_layer else [(first, done)]
    layers = [i for chunk in share.chunks for i in chunk.layers if share.is_routed(i)]
    modules = {f"layers.{i}": turns.recomputed.get(i, graphs) for i in layers}
    if share.has_head and share.is_routed(architecture.num_hidden_layers - 1):
        modules |= {f"mtp.{i}": graphs for i in range(architecture.num_nextn_predict_layers)}
    for module, spans in modules.items():
        hold("dispatcher.probabilities", Category.OTHER, always, 0, module=module)
        since = 0
        for start, end in spans:
            hold("dispatcher.routing", Category.OTHER, between, since, start, module)
            since = end
        hold("dispatcher.routing", Category.OTHER, between, since, module=module)
