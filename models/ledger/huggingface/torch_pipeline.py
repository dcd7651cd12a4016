"""The ledger of one rank of torch's pipeline parallelism: blocks placed on the turns of its schedule.

Source: torch 2.13 `distributed/pipelining/stage.py`, `schedules.py`. A stage has a receive buffer for every micro-batch of
the step, for activations and for gradients, made once and kept. So blocks own neither the input of a stage nor the gradient
that comes into it. A stage's output lives until its micro-batch's backward is done. If a rank has one stage, variables of
the schedule also refer to the logits until the next forward has returned, and to the last gradient sent until the next
backward is done (with GPipe: until it begins). If a rank has several (`_PipelineScheduleRuntime`), each turn is a function
of its own, whose variables end with it.

Zero bubble computes a stage's input gradients first (`stage_backward_input`) and its weights' gradients in a later turn
(`stage_backward_weight`). Between the two, the graph and the gradient that each weight needs stay alive, and the gradient
of the stage's input stays to the end of the step (`clear_runtime_states`). The first stage computes everything in the later
turn.

A checkpointed layer is recomputed for the inputs and then once for every weight, each time as a graph task of its own. What
a task recomputes but does not read stays as long as the graph (torch/utils/checkpoint.py `_checkpoint_hook`:
`recomputed[gid]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peakcast.catalog import Device
from peakcast.core.units import INT64
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.head import head, logits_bytes_kept_by_outputs
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.in_flight import InFlight, NamedGradients, SentGradient, WeightsHalf, kept
from peakcast.models.ledger.huggingface.inputs import hold_parts_of_inputs, hold_shared_inputs
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.models.ledger.huggingface.model import (
    hold_embeddings,
    hold_masks,
    hold_rotary_tables,
    model_ends,
)
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.layouts.base import Layout
from peakcast.models.ledger.layouts.optimizer_step import place_optimizer_step
from peakcast.models.ledger.layouts.pipeline import (
    SPLIT_BACKWARD,
    Chunk,
    Turn,
    pipeline_rank,
    simulated_micro_batches,
    stage_chunks,
    turns_of_rank,
)
from peakcast.models.ledger.layouts.stages import StagedLayout
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import INPUTS_DONE, OUTPUT_GRADIENT, Waiting
from peakcast.models.ledger.tape.workspaces import multiprocessors_of, training_workspaces
from peakcast.timelines.timeline import Category, Phase, Timeline


def pipeline_ledger(
    job: TrainingJob, *, device: Device | None = None, rank: int | None = None, step: str = "steady"
) -> Timeline:
    """Every tensor of one step of `job` on global `rank` (None: the first); the other arguments as in
    `huggingface_ledger`."""
    stage = pipeline_rank(job.parallelism, rank or 0)
    chunks = _chunks(job, stage)
    held = _layout(job, chunks)
    timeline = Step(hooks=held)
    held.hold_resident(timeline)
    timeline.hold_all(training_workspaces(device, job), Category.WORKSPACES)
    sequences = job.gradient_accumulation_steps * job.micro_batch_size
    for name in ("input_ids", "labels"):
        timeline.hold(name, Category.INPUTS, sequences * job.sequence_length * INT64, 0)
    whole_step, start = job.replace(micro_batch_size=sequences), timeline.now
    hold_shared_inputs(timeline, whole_step)
    _Turns(job, block_context(job, multiprocessors_of(device), rank or 0), chunks, timeline, held).run(stage)
    hold_parts_of_inputs(timeline, whole_step, start)
    place_optimizer_step(timeline, job, held, step)
    return timeline.timeline()


def stage_layout(job: TrainingJob, stage: int) -> Layout:
    """The layout, with its tensors, of a rank of pipeline stage `stage`."""
    return _layout(job, _chunks(job, stage))


def _chunks(job: TrainingJob, stage: int) -> tuple[Chunk, ...]:
    """The chunks of pipeline stage `stage`."""
    return stage_chunks(job.architecture.num_hidden_layers, job.parallelism, stage)


def _layout(job: TrainingJob, chunks: tuple[Chunk, ...]) -> Layout:
    """The layout of a rank that has `chunks`."""
    stored, modules = stored_parameters(job), [set(_modules(chunk)) for chunk in chunks]
    parts = [layout_of(job, [tensor for tensor in stored if tensor.module in names]) for names in modules]
    return StagedLayout(parts, modules) if _takes_several(job) else parts[0]


def _takes_several(job: TrainingJob) -> bool:
    """Whether the schedule runs a list of actions on several stages (`_PipelineScheduleRuntime`)."""
    layout = job.parallelism
    return layout.pipeline_schedule in SPLIT_BACKWARD or layout.virtual_pipeline_stages > 1


def _modules(chunk: Chunk) -> list[str]:
    """Names of a chunk's modules."""
    layers = [f"layers.{index}" for index in chunk.layers]
    return ["embedding"] * chunk.is_first + layers + ["head"] * chunk.is_last


class _Turns:
    """Adds the turns of one rank to a step."""

    def __init__(self, job: TrainingJob, context: HFContext, chunks: tuple[Chunk, ...], step: Step, layout: Layout) -> None:
        self.job = job
        self.layout = layout
        self.chunks = chunks
        self.step = step
        self.context = context
        self.blocks = Blocks(job, self.context)
        split = replace(self.context, backward=replace(self.context.backward, in_two_parts=True))
        self.split_blocks = Blocks(job, split)
        self.split: frozenset[tuple[int, int]] = frozenset()
        """(micro-batch, chunk) of every backward that is split in two."""
        self.several = _takes_several(job)
        self.alive: dict[tuple[int, int], InFlight] = {}
        self.begun: set[int] = set()
        """Chunks whose gradients exist."""
        self.sent: list[SentGradient] = []
        self.named: InFlight | None = None
        """The micro-batch whose logits the schedule's variable refers to."""

    def run(self, stage: int) -> None:
        """Add all turns of pipeline rank `stage`, and the buffers that exist during the whole step."""
        layout, micro_batches = self.job.parallelism, self.job.gradient_accumulation_steps
        simulated = simulated_micro_batches(layout, stage, micro_batches)
        self.layout.begin_turns()
        turns = turns_of_rank(layout, stage, simulated)
        halves = (turn for turn in turns if turn.half == "inputs" and not self.chunks[turn.chunk].is_first)
        self.split = frozenset((turn.micro_batch, turn.chunk) for turn in halves)
        for index, turn in enumerate(turns):
            self.layout.before_turn(self.step, turns[index:])
            self._run(turn)
            self.layout.after_turn(self.step, turns[index:])
        self._release_sent(len(self.sent))
        self.layout.end_turns(self.step)
        if self.named is not None:
            self._hold_logits(self.named.unwound, self.step.now)
        size = self.context.input_bytes
        for index, chunk in enumerate(self.chunks):
            received = [] if chunk.is_first else ["input"] * micro_batches
            received += [] if chunk.is_last else ["output.grad"] * (micro_batches - simulated)
            buffers = ((f"received.{name}", f"chunk.{index}", size) for name in received)
            self.step.hold_all(buffers, Category.COMMUNICATION_BUFFERS)

    def _run(self, turn: Turn) -> None:
        """Add one turn."""
        if turn.forward:
            self._forward(turn)
        elif not turn.half or (turn.half == "weights" and self.chunks[turn.chunk].is_first):
            self._backward(turn)
        elif turn.half == "weights":
            self._backward_of_weights(turn)
        elif not self.chunks[turn.chunk].is_first:
            self._backward_of_inputs(turn)

    def _forward(self, turn: Turn) -> None:
        """Run a chunk forward on a micro-batch."""
        chunk, step = self.chunks[turn.chunk], self.step
        ends = self.split_blocks if (turn.micro_batch, turn.chunk) in self.split else self.blocks
        blocks = self.blocks if self.blocks.checkpointed[0] else ends
        state = InFlight(step.now, 0, {})
        if chunk.is_first:
            state.embedded = step.run_forward(blocks.embedding(), "embedding")
        state.runs = blocks.forward(step, chunk.layers, input_held=not chunk.is_first)
        state.body_ends = step.now
        if chunk.is_last:
            state.loss = step.run_forward(head(ends.context), "head")
            state.body_ends = model_ends(state.loss)
            self._name_logits(state, state.loss)
        if state.embedded is not None:
            offloads = self.job.offload.activations
            hold_embeddings(step, blocks.contexts, state.embedded, blocks.checkpointed[0], offloads, state.body_ends)
        state.ended = step.now
        self.layout.end_forward(step)
        self.alive[turn.micro_batch, turn.chunk] = state

    def _backward(self, turn: Turn) -> None:
        """Run a chunk backward on a micro-batch, in one piece."""
        chunk, step = self.chunks[turn.chunk], self.step
        state, keeps = self.alive.pop((turn.micro_batch, turn.chunk)), turn.chunk not in self.begun
        self.begun.add(turn.chunk)
        if self.job.parallelism.pipeline_schedule == "gpipe":  # `ops = get_bwd_recv_ops()`; 1F1B assigns after the backward
            self._release_sent(len(self.sent))
        if state.loss is not None:
            state.loss.keeps_gradients = keeps
            step.run_backward(state.loss)
        self.blocks.backward(
            step, state.runs, keeps_gradients=keeps, input_held=not chunk.is_first, gradient_held=not chunk.is_last
        )
        again = [run.recomputation for run in state.runs.values() if run.recomputation]
        self._hold_masks(state, [(run.backward_start or 0) + run.template.num_backward for run in again[:1]])
        hold_rotary_tables(step, self.job, self.context, state.start)
        if state.embedded is not None:
            state.embedded.keeps_gradients = keeps
            step.run_backward(state.embedded)
        ended = step.now
        step.end_backward()
        self.layout.end_backward(step)
        module, size = f"chunk.{turn.chunk}", self.context.input_bytes
        state.unwound = step.now
        if state.loss is not None:
            self._hold_logits(state.ended, step.now)
        self._release_sent(len(self.sent))
        if not chunk.is_first and not self.several:
            self.sent.append(SentGradient(turn.chunk, ended))
        if not chunk.is_last:
            # the next stage, if it is on this rank, reads this output instead of a receive buffer
            step.hold("output", Category.ACTIVATIONS, 0 if chunk.to_here else size, state.ended, step.now, module)
            self._hold_received_gradient(state, module)

    def _backward_of_inputs(self, turn: Turn) -> None:
        """Run the first half of a split backward: the gradients of inputs."""
        step, state, chunk = self.step, self.alive[turn.micro_batch, turn.chunk], self.chunks[turn.chunk]
        if state.loss is not None:
            step.run_backward(state.loss)
        size, module = self.context.input_bytes, f"chunk.{turn.chunk}"
        for index, run in reversed(state.runs.items()):
            if not self.blocks.checkpointed[index]:
                step.run_backward(run)
                continue
            begins, template = step.now, self.split_blocks.layer(index, input_held=True)
            again = state.again[index] = step.run_forward(template, run.module, Phase.BACKWARD)
            if chunk.is_last or index != max(state.runs):
                step.hold("gradient", Category.TEMPORARIES, size, begins, step.now, run.module)
            step.run_backward(again)
            self._hold_recomputed(again, {one: (again.backward_start or 0) + one.inputs_until for one in kept(template)})
        if not chunk.from_here:  # else it replaces the receive buffer of this rank's other stage
            step.hold("input.grad", Category.TEMPORARIES, size, step.now, module=module)
        step.end_backward()
        self.layout.end_backward(step)
        state.unwound = step.now
        if state.loss is not None:
            self._hold_logits(state.ended, step.now)

    def _hold_recomputed(self, again: BlockRun, dies: dict[Waiting, int]) -> None:
        """Hold the saved tensors of a recomputed layer until their instants in `dies`. The recomputation stops once all
        saved tensors exist."""
        for one, end in dies.items():
            if one.born < again.template.num_recomputed:
                born = again.forward_start + one.born
                self.step.hold(one.name, Category(one.category), one.num_bytes, born, end, again.module)

    def _backward_of_weights(self, turn: Turn) -> None:
        """Run the second half of a split backward: the gradients of weights."""
        chunk, step = self.chunks[turn.chunk], self.step
        state, begun = self.alive.pop((turn.micro_batch, turn.chunk)), turn.chunk in self.begun
        self.begun.add(turn.chunk)
        blocks = [WeightsHalf(run, state.again.get(index, run)) for index, run in state.runs.items()]
        blocks += [WeightsHalf(state.loss, state.loss)] if state.loss else []
        for last in blocks[-1:]:
            last.on_top = True
        self._run_weights(blocks, begun=begun)
        step.end_backward()
        size = self.context.input_bytes
        for block in blocks:
            self._hold_waiting(block, state.unwound, received=not chunk.is_last and block.on_top)
            self._hold_recomputed_for_weights(block)
            if block.checkpointed and block is not blocks[0]:
                step.hold("checkpoint", Category.ACTIVATIONS, size, block.run.forward_start, step.now, block.run.module)
        self._hold_masks(state, [step.now] if state.again else [])
        hold_rotary_tables(step, self.job, self.context, state.start)
        if not chunk.is_last:
            module = f"chunk.{turn.chunk}"
            # the next stage, if it is on this rank, reads this output instead of a receive buffer
            step.hold("output", Category.ACTIVATIONS, 0 if chunk.to_here else size, state.ended, step.now, module)
            step.hold("received.output.grad", Category.COMMUNICATION_BUFFERS, size, 0, module=module)

    def _run_weights(self, blocks: Sequence[WeightsHalf], *, begun: bool) -> None:
        """Run the turn of each weight. `begun`: an earlier micro-batch has made gradients. A variable refers to the last
        gradients until the next ones exist."""
        step, last = self.step, NamedGradients(0, 0)
        for block in blocks:
            for template in block.templates:
                if block.checkpointed:
                    again = step.run_without_graph(block.inputs.template, block.run.module, Phase.BACKWARD)
                    again.stops_early = True
                    block.recomputed.append(again)
                keeps = not self.layout.has_gradient(block.run.module, template, begun=begun)
                step.run_backward(step.run_forward(template, block.run.module, Phase.BACKWARD, keeps_gradients=keeps))
                if not keeps:
                    step.hold("weight.grad", Category.GRADIENTS, last.num_bytes, last.born, step.now, block.run.module)
                last = NamedGradients(int(template.num_bytes[template.gradient_columns].sum()), step.now)
                block.ended.append(step.now)

    def _hold_recomputed_for_weights(self, block: WeightsHalf) -> None:
        """Hold what the recomputation for each weight saves: its own graph saves everything until it ends (checkpoint.py
        _recomputation_hook)."""
        for number, again in enumerate(block.recomputed):
            dies = dict.fromkeys(kept(again.template), again.forward_start + again.template.num_forward)
            until = {one: block.until(one) for one in dies}
            dies |= {one: self.step.now for one in dies if until[one] is None}
            dies |= {one: block.ended[turn] for one, turn in until.items() if turn is not None and turn >= number}
            self._hold_recomputed(again, dies)

    def _hold_masks(self, state: InFlight, dies: list[int]) -> None:
        """Hold the masks, which each stage makes for itself. `dies`: when the last checkpointed layer, which takes the mask
        as an argument, no longer refers to it."""
        hold_masks(self.step, self.blocks.contexts, state.start, state.body_ends, dies)

    def _hold_waiting(self, block: WeightsHalf, inputs_done: int, *, received: bool) -> None:
        """Hold what waited for a block's weights. `inputs_done`: when the inputs' backward was done. `received`: the
        gradient that came into the block has a buffer of its own."""
        run, ended = block.inputs, block.ended
        for one in block.waiting:
            if (received and one.name == OUTPUT_GRADIENT) or (block.checkpointed and not one.born_backward):
                continue  # (a checkpointed block recomputes its saved tensors for each weight)
            until = block.until(one)
            dies = self.step.now if until is None or until >= len(ended) else ended[until]  # frozen weights have no turns
            if until == INPUTS_DONE:
                dies = inputs_done
            born = one.born + ((run.backward_start or 0) if one.born_backward else run.forward_start)
            self.step.hold(one.name, Category(one.category), one.num_bytes, born, dies, run.module)

    def _release_sent(self, count: int) -> None:
        """End the first `count` sent gradients: the schedule's variable now refers to another."""
        for sent in self.sent[:count]:
            size = self.context.input_bytes
            self.step.hold("input.grad", Category.TEMPORARIES, size, sent.born, self.step.now, f"chunk.{sent.chunk}")
        del self.sent[:count]

    def _hold_received_gradient(self, state: InFlight, module: str) -> None:
        """Hold the buffer of the gradient that came in, except while the last layer's own entries include it."""
        size, buffers = self.context.input_bytes, Category.COMMUNICATION_BUFFERS
        if not state.runs:  # the embedding alone
            self.step.hold("received.output.grad", buffers, size, 0, module=module)
            return
        last = state.runs[max(state.runs)]
        run = last.recomputation or last
        added, begins = run.template.output_gradient_used_until, run.backward_start or 0
        self.step.hold("received.output.grad", buffers, size, 0, begins, module)
        self.step.hold("received.output.grad", buffers, size, begins + added, module=module)

    def _name_logits(self, state: InFlight, loss: BlockRun) -> None:
        """The schedule's variable refers to the logits of `state` from the moment they exist, and no longer to those
        before."""
        if self.named is not None and self.named.unwound:
            self._hold_logits(self.named.unwound, loss.forward_start + loss.template.loss_from)
        if not self.several:
            self.named = state

    def _hold_logits(self, born: int, dies: int) -> None:
        """Hold the logits that the schedule returns, from `born` until before `dies`."""
        size = logits_bytes_kept_by_outputs(self.context, widened=True)
        self.step.hold("output", Category.LOGITS, size, born, dies, "head")
