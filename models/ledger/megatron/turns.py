"""The forward and backward turns of one Megatron-LM rank: blocks placed on the instants of its pipeline schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from peakcast.models.ledger.layouts.module_tree import layer_index
from peakcast.models.ledger.layouts.pipeline import Chunk, Turn, representative_micro_batches, schedule
from peakcast.models.ledger.megatron.blocks.layer import ENCODER_HIDDEN_STATES
from peakcast.models.ledger.megatron.blocks.primitives import dropout_mask_bytes
from peakcast.models.ledger.megatron.buffers import owned_parameters
from peakcast.models.ledger.megatron.first_runs import FirstRuns
from peakcast.models.ledger.megatron.fsdp import is_fully_sharded, whole_buckets
from peakcast.models.ledger.megatron.inputs import hold_inputs
from peakcast.models.ledger.megatron.leaves import Leaves
from peakcast.models.ledger.megatron.optimizer import widens_gradients
from peakcast.models.ledger.megatron.rank_blocks import RankBlocks, receives
from peakcast.models.ledger.megatron.received import Span
from peakcast.models.ledger.megatron.reloading import ReloadsAhead
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.timelines.timeline import Category, Phase


@dataclass(slots=True)
class _Checkpoint:
    """A group of checkpointed layers: its first forward instant, the instant after its last, and its layers."""

    begin: int
    end: int
    layers: range
    received: bool
    """Whether its input was received from another stage, and is held as a received tensor."""


@dataclass(slots=True)
class _MicroBatch:
    """A micro-batch of one chunk, between its forward turn and its backward turn."""

    start: int
    runs: list[list[BlockRun] | _Checkpoint]
    """Consecutive runs of one template, and checkpointed groups."""
    end: int = 0


def _alternate(turns: Sequence[Iterator[bool]]) -> None:
    """Run turns together: a block of each in turn until all are at their last, where they yield True, then these."""
    running = list(turns)
    while running:
        running = [turn for turn in running if not next(turn)]
    for turn in turns:
        deque(turn, maxlen=0)


class Turns:
    """The turns of one rank, placed on a step."""

    def __init__(self, share: RankShare, *, first_step: bool = False) -> None:
        self.share = share
        self.fully_sharded = whole_buckets(share, owned_parameters(share)[0]) if is_fully_sharded(share) else None
        self.step = Step(hooks=self.fully_sharded) if self.fully_sharded is not None else Step()
        self.blocks = RankBlocks(share, first_step=first_step)
        self.alive: dict[tuple[int, int], _MicroBatch] = {}
        self.spans: list[Span] = []
        self.first = FirstRuns(float8=bool(share.context.fp8_recipe))
        self.deferred: dict[int, int] = {}
        """By the number of their backward's span: micro-batches whose output layer's weight gradients wait for the end."""
        self.is_first_backward = False
        self.recomputed: dict[int, list[tuple[int, int]]] = {}
        """By checkpointed layer, (begin, end) of each recomputation and backward of its group."""
        self.leaves = Leaves(share.context.stream_bytes)
        self.dispatched: dict[int, _MicroBatch] = {}
        """Where micro-batches overlap, by routed layer: the micro-batch that its dispatcher sent last."""
        self.reloads = ReloadsAhead()
        if widens_gradients(share):
            self.step.moment("zero_grad", Phase.FORWARD)
        for together in self._turns_together():
            _alternate([self._forward(turn) if turn.forward else self._backward(turn) for turn in together])
            if self.fully_sharded is not None and not together[-1].forward:
                self.fully_sharded.end_of_backward(self.step)
        if self.fully_sharded is not None:
            self.fully_sharded.end_of_step(self.step)

    # -- forward and backward -----------------------------------------------------------------------------------------

    def _turns(self) -> Sequence[Turn]:
        """The turns to simulate."""
        layout = self.share.job.parallelism
        sizes = layout.pipeline_parallel_size, layout.virtual_pipeline_stages, self.share.stage
        group, micro_batches = self.share.micro_batches_in_a_row, self.share.job.gradient_accumulation_steps
        steps = representative_micro_batches(*sizes, micro_batches, group)
        if not self.share.overlaps_micro_batches:
            return schedule(*sizes, steps, group)
        return schedule(*sizes, min(steps + group, micro_batches), group, early=1)

    def _forward_checkpoint(self, layers: range, *, received: bool) -> _Checkpoint:
        """Run checkpointed layers forward, without a graph. `received`: as in `_Checkpoint`."""
        step, runs = self.step, list[BlockRun]()
        begin = step.now
        for layer in layers:
            template = self.blocks.layer(layer, layer == layers[0], without_graph=True)
            runs.append(step.run_without_graph(template, f"layers.{layer}"))
            self._dispatched(layers, runs[-1], begin)
        self._hold_masks(runs)
        return _Checkpoint(begin, step.now, layers, received=received)

    def _turns_together(self) -> Iterator[Sequence[Turn]]:
        """The turns, one after the other; where micro-batches overlap, a forward together with the backward after it."""
        turns = list(self._turns())
        while turns:
            size = 1
            if self.share.overlaps_micro_batches and turns[0].forward and turns[1:] and not turns[1].forward:
                size = 2
            yield turns[:size]
            del turns[:size]

    def _forward(self, turn: Turn) -> Iterator[bool]:
        """Add a forward turn, block by block."""
        chunk, step = self.share.chunks[turn.chunk], self.step
        state = _MicroBatch(step.now, [])
        if chunk.is_first:
            state.runs.append([step.run_forward(self.blocks.embedding, "embedding", keeps_gradients=False)])
        yield from self._waits(self.share.context.stream_bytes)
        for layers, checkpointed in self.blocks.checkpointed(chunk.layers):
            if checkpointed:
                state.runs.append(self._forward_checkpoint(layers, received=receives(chunk, layers[0])))
            else:
                for template, modules, after_encoder in self.blocks.alike(chunk, layers):
                    if after_encoder:
                        state.runs += self._run_between_stacks()
                    runs = step.run_forward_in_turn(template, modules, keeps_gradients=False)
                    state.runs.append(runs)
                    for run, at in product(runs, template.forward_marks.get(Mark.RECOMPUTED_EXPERTS, ())):
                        i = layer_index(run.module)
                        self.leaves.dispatched_anew(range(i, i + 1), run.forward_start + at, None)
                    if self.share.overlaps_micro_batches:
                        self._dispatched_half(runs[0], state)
                        yield from self._waits(self.share.context.stream_bytes)
        if chunk.is_last:
            yield from self._end_forward(state)
        else:
            yield True
            sent = step.moment("send_forward", Phase.FORWARD)
            step.hold("output_tensor", Category.ACTIVATIONS, self.share.context.stream_bytes, sent, sent + 1)
        state.end = step.now
        if chunk.is_first and chunk.layers and self.blocks.embeds_constants:
            self._hold_embedded(state)
        self.spans.append(Span(turn, state.start, step.now))
        if chunk.is_last and len(self.share.chunks) > 1:  # the next input is requested before the backward
            step.moment("receive_forward", Phase.LOSS)
        self.alive[turn.micro_batch, turn.chunk] = state

    def _waits(self, num_bytes: int) -> Iterator[bool]:
        """Let the turn that runs beside this one go on; the output of this one's last block, of `num_bytes`, waits."""
        since = self.step.now
        yield False
        if self.step.now > since:
            self.step.hold("handed_on", Category.ACTIVATIONS, num_bytes, since, self.step.now)

    def _end_forward(self, state: _MicroBatch) -> Iterator[bool]:
        """Add the blocks after the network's last layer to a forward turn."""
        *halves, head = self.blocks.ending
        for template, after in zip(halves, self.blocks.ending[1:], strict=True):
            state.runs.append([self.step.run_forward(template, "head", keeps_gradients=False)])
            yield from self._waits(after.input_bytes)
        yield True
        state.runs.append([self.step.run_forward(head, "head", keeps_gradients=False)])

    def _dispatched_half(self, run: BlockRun, state: _MicroBatch) -> None:
        """Where micro-batches overlap: after a half layer with a dispatcher has run forward, note that its dispatcher now
        references the graph of this micro-batch."""
        for at in run.template.forward_marks.get(Mark.DISPATCH, ())[:1]:
            layer = layer_index(run.module)
            self.dispatched[layer] = state
            self.leaves.dispatched_anew(range(layer, layer + 1), run.forward_start + at, state.start)

    def _note_leaf(self, run: BlockRun, state: _MicroBatch, chunk: Chunk) -> None:
        """Where micro-batches overlap: attention begins with a leaf, the layer's detached input (megatron-core 0.17.1
        `pipeline_parallel/utils.py`, `ScheduleNode`). If its backward has just run, only the layer's dispatcher refers to
        it, unless that has sent another micro-batch since."""
        if run.module != "head" and Mark.ATTENTION_ADD in run.template.forward_marks:
            layer = layer_index(run.module)
            self.leaves.lower_backward_ended(self.step.now)
            if self.dispatched.get(layer) is state:
                self.leaves.backward_ended(range(layer, layer + 1), self.step.now, received=receives(chunk, layer))

    def _run_between_stacks(self) -> list[list[BlockRun]]:
        """Run what is between an encoder's last layer and its decoder's first."""
        blocks = self.blocks.between_stacks()
        return [[self.step.run_forward(template, module, keeps_gradients=False)] for template, module in blocks]

    def _hold_embedded(self, state: _MicroBatch) -> None:
        """Hold the output of a frozen embedding: no operation saves it, but a variable of the model's forward references it
        (megatron-core 0.17.1 `gpt_model.py`, `decoder_input`). Until the first layer ends, the tensor is an entry of that
        layer."""
        layers = state.runs[1]
        assert isinstance(layers, list)
        born, size = layers[0].forward_start + layers[0].template.num_forward, self.share.context.stream_bytes
        self.step.hold("decoder_input", Category.ACTIVATIONS, size, born, state.end, "embedding")

    def _hold_masks(self, group: Sequence[BlockRun]) -> None:
        """Hold the dropout masks of a checkpointed group's runs. Residuals are added under `enable_grad`
        (megatron-core 0.16.1 `transformer_layer.py`, `bias_dropout_add_exec_handler`), so the graph of a bias keeps masks
        to the end of the group."""
        context, step = self.share.context, self.step
        if not (context.linear_bias and context.hidden_dropout > 0):
            return
        added = (run.forward_start + at for run in group for at in run.template.forward_marks.get(Mark.RESIDUAL_ADD, ()))
        for instant in added:
            step.hold("dropout_mask", Category.ACTIVATIONS, dropout_mask_bytes(context), instant + 1, step.now)

    def _backward(self, turn: Turn) -> Iterator[bool]:
        """Add a backward turn, block by block."""
        state, step = self.alive.pop((turn.micro_batch, turn.chunk)), self.step
        share = self.share
        chunk, context, started = share.chunks[turn.chunk], share.context, step.now
        self.is_first_backward = turn.micro_batch == 0
        # the loss has no matrix products, so the output layer's is the first
        self.first.note_product(started + (self.blocks.head.backward_marks[Mark.LM_HEAD][0] if chunk.is_last else 0))
        if not chunk.is_last:
            step.moment("receive_backward", Phase.BACKWARD)
            step.hold("output_tensor_gradient", Category.TEMPORARIES, context.stream_bytes, started, started + 1)
            yield False
        summed = 0
        for place, runs in reversed(list(enumerate(state.runs))):
            if chunk.is_first and place == 0:
                yield True
            added = self._run_group_backward(runs, state, chunk, keeps_gradient=bool(summed) or chunk.is_last)
            if place == len(state.runs) - 1:
                of_last = step.now
            summed = summed or added
            if place:
                yield False
        if not chunk.is_first:
            yield True
        self.leaves.lower_backward_ended(step.now)
        if self.share.overlaps_micro_batches and not chunk.is_last and chunk.layers:
            self._hold_leaves_of_output(chunk.layers[-1], of_last)
        if self.share.target is not None:
            self._hold_encoder_states([run for runs in state.runs if isinstance(runs, list) for run in runs])
        if chunk.is_first and chunk.is_last and self._adds_tied_gradients():
            self._hold_tied_gradient(started)
        self.spans.append(Span(turn, started, step.now, summed))
        hold_inputs(step, share, chunk, state.start, state.end)
        if chunk.is_last and self.share.convention.get("defer_embedding_wgrad_compute"):
            self._defer_output_layer()
        if not chunk.is_first:
            step.moment("send_backward", Phase.BACKWARD)

    def _run_group_backward(
        self, runs: list[BlockRun] | _Checkpoint, state: _MicroBatch, chunk: Chunk, *, keeps_gradient: bool
    ) -> int:
        """Run consecutive runs of one template, or a checkpointed group, backward. `keeps_gradient`: as in `_recompute`.
        Returns the instant from which the sum with the incoming gradient exists."""
        if isinstance(runs, _Checkpoint):
            summed = self._recompute(runs, keeps_gradient=keeps_gradient)
            self.leaves.lower_backward_ended(self.step.now)
            if any(self.share.is_routed(layer) for layer in runs.layers):
                self.leaves.backward_ended(runs.layers, self.step.now, received=runs.received)
            return summed
        self._run_backward(runs)
        for run in reversed(runs) if self.share.context.offloading.modules else ():
            self.reloads.ran_backward(run, state.end)
        if self.share.overlaps_micro_batches:
            self._note_leaf(runs[0], state, chunk)
        return self._summed(runs[-1])

    def _run_backward(self, runs: Sequence[BlockRun]) -> None:
        """Run consecutive runs of one template backward, the last one first."""
        start = self.step.now
        self.step.run_backward_in_turn(runs)
        instants, marks = runs[0].template.in_backward, runs[0].template.backward_marks
        if Mark.RECOMPUTED_EXPERTS in marks or Mark.RECOMPUTED_FEED_FORWARD in marks:
            for run in reversed(runs):
                self._note_recomputed_parts(run, run.backward_start or 0)
        if self.is_first_backward:
            self.first.note_backward(instants, start)

    def _note_recomputed_parts(self, run: BlockRun, start: int) -> None:
        """Note the recomputed parts of a layer whose backward began at `start`."""
        marks = run.template.backward_marks
        layer = layer_index(run.module)
        for at in marks.get(Mark.RECOMPUTED_EXPERTS, ()):
            used = start + marks[Mark.FEED_FORWARD_NORM][0] + 1  # the input is the norm's output, whose gradient that reads
            self.leaves.dispatched_anew(range(layer, layer + 1), start + at, None)
            self.leaves.backward_ended(range(layer, layer + 1), used, received=False)
            self.leaves.lower_backward_ended(used)
        for at in marks.get(Mark.RECOMPUTED_FEED_FORWARD, ()):
            self.first.note_recomputed(layer, start + at)

    @staticmethod
    def _summed(run: BlockRun) -> int:
        """The instant at which a layer's backward adds the incoming gradient to that of its feed-forward."""
        template, start = run.template, run.backward_start or 0
        return start + template.backward_marks.get(Mark.ATTENTION_ADD, (template.num_backward,))[0]

    def _adds_tied_gradients(self) -> bool:
        """Whether autograd adds the two gradients of a table that both ends use. Where micro-batches overlap, each end has
        a graph of its own, whose gradient goes into the buffer at once."""
        tied = self.share.job.architecture.tie_word_embeddings
        return tied and not (self.share.context.frozen or self.share.overlaps_micro_batches)

    def _hold_tied_gradient(self, started: int) -> None:
        """Hold the output layer's gradient of a table that both ends use: it waits for the embedding's, which is added to
        it in place. A cached placeholder, to which other code refers, cannot be added to in place, so the sum is a new
        tensor."""
        context, step = self.share.context, self.step
        size = context.ends.vocabulary * context.hidden * context.element_bytes
        cached = context.weight_gradients.fused and context.weight_gradients.cached_output_placeholder
        born = step.now - 1 if cached else started + self.blocks.head.backward_marks[Mark.LM_HEAD][0] + 1
        step.hold("tied_weight.grad", Category.GRADIENTS, size, born, step.now, "embedding")

    def _hold_leaves_of_output(self, layer: int, since: int) -> None:
        """Where micro-batches overlap and the last layer is routed: hold, until the turn ends, the leaves of the graph
        behind a chunk's output. These are the residual stream and the outputs of the shared expert and of the experts, with
        their gradients. The schedule references the output until then, but has freed its memory (megatron-core 0.16.1
        `deallocate_output_tensor`)."""
        context = self.share.layer_context(layer)
        if context.experts is None:
            return
        count = 2 if context.experts.shared_ffn else 1
        rows = context.experts.sent_rows(context.stream_rows) * context.hidden * context.element_bytes
        size, now, module = count * context.stream_bytes, self.step.now, f"layers.{layer}"
        self.step.hold("output.leaves", Category.ACTIVATIONS, size, since, now, module)
        # the experts' output is freed, but its gradient is not
        self.step.hold("output.leaves.grad", Category.TEMPORARIES, size + rows, since, now, module)

    def _hold_encoder_states(self, runs: list[BlockRun]) -> None:
        """Hold the encoder's final hidden states, which every decoder layer saves and adds to the gradient of. In float8 a
        layer saves a copy of its own, and nothing reads the states after the last layer's forward."""
        end = next((place for place, run in enumerate(runs) if run.module == "encoder"), None)
        if end is None:  # it is recomputed, or on another stage; both are out of scope
            return
        # the decoder's embedding is between them, the head comes after
        encoder_end, decoder_layers = runs[end], runs[end + 2 : -1]
        first, last = (layer.template.borrowed[ENCODER_HIDDEN_STATES] for layer in (decoder_layers[0], decoder_layers[-1]))
        assert last.gradient_from is not None
        assert encoder_end.backward_start is not None
        size, hold = self.share.context.stream_bytes, self.step.hold
        born = encoder_end.forward_start + encoder_end.template.num_forward
        if first.kept_until is None:
            last_read = decoder_layers[-1].forward_start + decoder_layers[-1].template.num_forward
        else:
            last_read = (decoder_layers[0].backward_start or 0) + first.kept_until
        hold(ENCODER_HIDDEN_STATES, Category.ACTIVATIONS, size, born, last_read, "encoder")
        gradient = (decoder_layers[-1].backward_start or 0) + last.gradient_from
        hold(f"{ENCODER_HIDDEN_STATES}.grad", Category.TEMPORARIES, size, gradient, encoder_end.backward_start, "encoder")

    def _defer_output_layer(self) -> None:
        """`--defer-embedding-wgrad-compute`: note which micro-batches' output-layer gradients wait for the end: the first
        ones, up to `--wgrad-deferral-limit` (0: all). The first simulated micro-batch represents all that are not
        simulated."""
        share, micro_batches = self.share, self.share.job.gradient_accumulation_steps
        limit = min(int(share.convention.get("wgrad_deferral_limit", 0) or 0) or micro_batches, micro_batches)
        placed = len(self._turns()) // (2 * len(share.chunks))
        stands_for = 1 if self.deferred else micro_batches - placed + 1
        if count := min(stands_for, limit - sum(self.deferred.values())):
            self.deferred[len(self.spans) - 1] = count

    def _recompute(self, checkpoint: _Checkpoint, *, keeps_gradient: bool) -> int:
        """Add the backward of a checkpointed group: all its layers forward again, then backward. The checkpoint holds the
        input and the incoming gradient (`keeps_gradient`: unless other code does). Returns the instant from which the sum
        with that gradient exists."""
        step, start, size = self.step, self.step.now, self.share.context.stream_bytes
        runs = []
        for i in checkpoint.layers:
            template = self.blocks.layer(i, i == checkpoint.layers[0])
            self.first.note_recomputed(i, step.now)
            runs.append(step.run_forward(template, f"layers.{i}", Phase.BACKWARD, keeps_gradients=False))
            self._dispatched(checkpoint.layers, runs[-1])
        recomputed = step.now
        for run in reversed(runs):
            self._run_backward([run])
        for i in checkpoint.layers:
            self.recomputed.setdefault(i, []).append((start, step.now))
        summed = self._summed(runs[-1])
        if keeps_gradient:
            step.hold("gradient", Category.TEMPORARIES, size, summed, step.now, "checkpoint")
        lives = [(size, checkpoint.begin, step.now)]
        if self.share.convention.get("distribute_saved_activations"):  # it is whole only while the group's layers run
            part = size // self.share.context.groups.tensor_parallel_size
            lives = [(size, checkpoint.begin, checkpoint.end), (part, checkpoint.end, start), (size, start, step.now)]
        for held, born, dies in () if checkpoint.received else lives:
            step.hold("checkpoint", Category.ACTIVATIONS, held, born, dies, "checkpoint")
        step.hold("gradient", Category.TEMPORARIES, size, start, recomputed, "checkpoint")
        step.hold("recomputed_output", Category.ACTIVATIONS, size, recomputed, step.now, "checkpoint")
        return summed

    def _dispatched(self, layers: range, run: BlockRun, replaced: int | None = None) -> None:
        """Note that a layer of the checkpointed group `layers` has run. If it is the group's last routed layer, its
        dispatcher now references new probabilities, and nothing references the graph of the group's earlier recomputation
        any more."""
        routed = [layer for layer in layers if self.share.is_routed(layer)]
        if routed and run.module == f"layers.{routed[-1]}":
            at = run.template.forward_marks[Mark.DISPATCH][0]
            self.leaves.dispatched_anew(layers, run.forward_start + at, replaced)
