"""One micro-batch of an encoder-decoder: two stacks of layers placed on the step, and the tensors that a whole stack
shares.

Source: transformers 5.17 `models/t5/modeling_t5.py` T5Stack, T5ForConditionalGeneration.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from peakcast.core.units import FP32, INT64
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.embedding import embedding
from peakcast.models.ledger.huggingface.blocks.head import head
from peakcast.models.ledger.huggingface.blocks.t5 import (
    CROSS_POSITION_BIAS,
    ENCODER_STATES,
    POSITION_BIAS,
    T5Layer,
    computes_self_attention_in_steps,
    cross_position_bias_bytes,
    encoder_end,
    position_bias_bytes,
    t5_layer,
)
from peakcast.models.ledger.huggingface.checkpoint import recompute
from peakcast.models.ledger.huggingface.contexts import later_context, target_context
from peakcast.models.ledger.huggingface.model import hold_cast_weights
from peakcast.models.ledger.parameters.t5 import CROSS, SELF
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import FOREVER, BlockRun, Step
from peakcast.timelines.timeline import Category


@dataclass
class _Stack:
    """A stack of layers, encoder or decoder, on a step."""

    timeline: Step
    job: TrainingJob
    contexts: list[HFContext]
    first_index: int
    source_length: int = 0

    def __post_init__(self) -> None:
        self.checkpointed = self.job.activation_checkpointing.mode != "none"
        self.forward: list[BlockRun] = []
        self.backward: dict[int, BlockRun] = {}
        """The run whose backward was placed, by position in the stack."""

    def run_forward(self, keeps_gradients: bool) -> None:
        """Run all layers forward."""
        for place, context in enumerate(self.contexts):
            template = t5_layer(T5Layer(context=context, source_length=self.source_length, first=place == 0))
            module = f"layers.{self.first_index + place}"
            if self.checkpointed:
                self.forward.append(self.timeline.run_without_graph(template, module))
            else:
                self.forward.append(self.timeline.run_forward(template, module, keeps_gradients=keeps_gradients))

    def run_backward(self, keeps_gradients: bool) -> None:
        """Run all layers backward, recomputing checkpointed ones."""
        for place in reversed(range(len(self.forward))):
            run = self.forward[place]
            if self.checkpointed:
                context = self.contexts[place]
                size = context.rows * context.architecture.hidden_size * context.precision.compute_bytes
                narrowed = size if context.precision.compute_bytes < context.stream_bytes else 0
                self.backward[place] = recompute(self.timeline, run, self.job, keeps_gradients, narrowed)
            else:
                self.timeline.run_backward(run)
                self.backward[place] = run

    def at(self, place: int, module: str) -> int:
        """The instant of the operation of `module` in the forward of the layer at `place`."""
        run = self.forward[place]
        return run.forward_start + run.template.in_forward[module]

    def kept_until(self, name: str) -> int:
        """The instant from which no layer keeps the shared tensor `name`; 0 if none ever does. Autograd saves it for
        backward. Under checkpointing it is an argument of the layers' checkpoints, from the second on, as the first layer's
        recomputation makes its own."""
        if self.checkpointed:
            second = self.backward.get(1)
            return self._ended(second) if second is not None else 0
        kept = self.forward[0].template.borrowed[name].kept_until
        return 0 if kept is None else (self.backward[0].backward_start or 0) + kept

    def gradient_from(self, name: str) -> int | None:
        """The instant from which a gradient of the shared tensor `name` exists: in the last layer's backward, which runs
        first. None if it has no gradient."""
        run = self.backward[len(self.forward) - 1]
        made = run.template.borrowed[name].gradient_from
        return None if made is None else (run.backward_start or 0) + made

    @staticmethod
    def _ended(run: BlockRun) -> int:
        """The instant after a run's backward."""
        return (run.backward_start or 0) + run.template.num_backward


def encoder_decoder_micro_batch(
    timeline: Step, job: TrainingJob, context: HFContext, *, keeps_gradients: bool, last: bool
) -> BlockRun:
    """Add forward, loss and backward of one micro-batch; returns the run of its head and loss."""
    architecture, target = job.architecture, target_context(context, job)
    encoder = _Stack(timeline, job, _contexts(context, job, architecture.num_hidden_layers), 0)
    contexts = _contexts(target, job, architecture.num_decoder_layers)
    decoder = _Stack(timeline, job, contexts, architecture.num_hidden_layers, context.sequence)
    micro_batch = _TwoStackMicroBatch(timeline, job, context, target, encoder, decoder, keeps_gradients)
    micro_batch.run_forward()
    micro_batch.run_backward(last=last)
    return micro_batch.loss


@dataclass(slots=True)
class _TwoStackMicroBatch:
    """A micro-batch of an encoder-decoder. `context` is the encoder's, `target` the decoder's."""

    timeline: Step
    job: TrainingJob
    context: HFContext
    target: HFContext
    encoder: _Stack
    decoder: _Stack
    keeps_gradients: bool
    read: BlockRun = field(init=False)
    """The encoder's embedding."""
    states: BlockRun = field(init=False)
    """The encoder's last block, whose output is the encoder's states."""
    shifted: int = 0
    """The instant from which the decoder's inputs, the shifted labels, exist."""
    targets: BlockRun = field(init=False)
    """The decoder's embedding."""
    loss: BlockRun = field(init=False)
    """The head and the loss."""
    returned: int = 0
    """The instant at which the model's forward returns."""

    @property
    def leaf(self) -> bool:
        """Whether `enable_input_require_grads` makes the embedding's output a leaf, which the graph keeps with its
        gradient."""
        return self.job.finetuning.method != "full" and self.decoder.checkpointed

    def run_forward(self) -> None:
        """Run the encoder, then the decoder with head and loss."""
        timeline, keeps = self.timeline, self.keeps_gradients
        encoder, decoder = self.encoder, self.decoder
        self.read = timeline.run_forward(embedding(_embedding_context(encoder)), "embedding", keeps_gradients=keeps)
        encoder.run_forward(keeps)
        self.states = timeline.run_forward(encoder_end(self.context), "head", keeps_gradients=keeps)
        _hold_embeddings(timeline, self.context, self.read, _forward_ends(self.states), self.leaf)
        self.shifted = timeline.now
        self.targets = timeline.run_forward(embedding(_embedding_context(decoder)), "embedding", keeps_gradients=keeps)
        decoder.run_forward(keeps)
        self.loss = timeline.run_forward(head(self.target), "head", keeps_gradients=keeps)
        if self.context.precision.autocast:
            layers = (*encoder.forward, *decoder.forward)
            hold_cast_weights(timeline, layers, self.loss, owned=not decoder.checkpointed)
        self.returned = timeline.now
        _hold_embeddings(timeline, self.target, self.targets, _decoder_returns(self.loss), self.leaf)

    def run_backward(self, *, last: bool) -> None:
        """Run the backward of all, and hold what lives until then. `last`: no other micro-batch follows in this step."""
        timeline, decoder, decoded = self.timeline, self.decoder, _decoder_returns(self.loss)
        forgotten = self._run_backward_of_decoder(decoded)
        bare = timeline.now
        timeline.run_backward(self.states)
        self.encoder.run_backward(self.keeps_gradients)
        _hold_positions(timeline, self.encoder, self.context, _forward_ends(self.states))
        timeline.run_backward(self.read)
        timeline.end_backward()
        if self.leaf:
            size = self.target.rows * self.job.architecture.hidden_size * self.target.precision.weight_bytes
            for name in ("inputs_embeds", "inputs_embeds.grad"):
                timeline.hold(name, Category.ACTIVATIONS, size, bare, timeline.now, "embedding")
        _hold_cross_positions(timeline, decoder, self.target, decoded)
        _hold_cache(timeline, decoder, self.job, self.returned)
        _hold_outputs(timeline, decoder, self.context, self.job, forgotten, last)

    def _run_backward_of_decoder(self, decoded: int) -> int:
        """Run the backward of loss and decoder, whose forward returned at instant `decoded`. Returns the instant from which
        the graph no longer keeps the encoder's output."""
        timeline, decoder, encoded = self.timeline, self.decoder, _forward_ends(self.states)
        timeline.run_backward(self.loss)
        decoder.run_backward(self.keeps_gradients)
        forgotten = _hold_encoder_states(timeline, self.context, decoder, born=encoded - 1, returned=self.returned)
        _hold_positions(timeline, decoder, self.target, decoded)
        timeline.run_backward(self.targets)
        size = self.target.rows * INT64
        timeline.hold("decoder_input_ids", Category.INPUTS, size, self.shifted, timeline.now, "embedding")
        states_gradient = decoder.gradient_from(ENCODER_STATES)
        if states_gradient is not None:  # every layer adds to it; from here on the block of the encoder's end has it
            size = self.context.rows * self.job.architecture.hidden_size * self.context.stream_bytes
            timeline.hold(f"{ENCODER_STATES}.grad", Category.TEMPORARIES, size, states_gradient, timeline.now, "head")
        _hold_causal_mask(timeline, decoder, self.target, encoded, decoded)
        return forgotten


def _contexts(context: HFContext, job: TrainingJob, num_layers: int) -> list[HFContext]:
    """The contexts of a stack's layers. With adapters and without checkpointing, nothing before the first adapter is
    saved."""
    checkpointed = job.activation_checkpointing.mode != "none"
    if checkpointed:
        context = replace(later_context(job, context), backward=replace(context.backward, checkpointed=True))
    bare = job.finetuning.method != "full" and not checkpointed
    first = replace(context, layer=replace(context.layer, input_requires_grad=not bare))
    return [first, *[context] * (num_layers - 1)]


def _embedding_context(stack: _Stack) -> HFContext:
    """The context of a stack's embedding."""
    context = stack.contexts[0]
    return replace(context, backward=replace(context.backward, checkpointed=False))


def _forward_ends(run: BlockRun) -> int:
    """The instant after a run's forward."""
    return run.forward_start + run.template.num_forward


def _decoder_returns(loss: BlockRun) -> int:
    """The instant after the decoder's last norm and dropout."""
    marks = loss.template.forward_marks
    return loss.forward_start + marks.get(Mark.OUTPUT_SCALING, marks[Mark.LM_HEAD])[0]


def _hold_embeddings(timeline: Step, context: HFContext, embedded: BlockRun, returned: int, leaf: bool) -> None:
    """Hold the embeddings that a stack's variable refers to. Without dropout they are its first layer's input, and a leaf
    is kept anyway."""
    if context.architecture.embedding_dropout and not leaf:
        size = context.rows * context.architecture.hidden_size * context.precision.weight_bytes
        timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, _forward_ends(embedded), returned, "embedding")


def _hold_encoder_states(timeline: Step, context: HFContext, decoder: _Stack, born: int, returned: int) -> int:
    """Hold the encoder's output, which every decoder layer saves and the model's outputs refer to. Returns the instant from
    which the graph no longer keeps it."""
    size = context.rows * context.architecture.hidden_size * context.stream_bytes
    kept = timeline.now if decoder.checkpointed else decoder.kept_until(ENCODER_STATES)
    timeline.hold(ENCODER_STATES, Category.ACTIVATIONS, size, born, max(returned, kept), "head")
    return max(returned, kept)


def _hold_positions(timeline: Step, stack: _Stack, context: HFContext, returned: int) -> None:
    """Hold the bias of relative positions that the first layer makes, and its gradient until the table's gradient has been
    computed from it."""
    size, module = position_bias_bytes(context), stack.forward[0].module
    first = stack.forward[0]
    made = first.forward_start + first.template.forward_marks[Mark.RELATIVE_POSITIONS][0]
    kept = stack.kept_until(POSITION_BIAS)
    timeline.hold(POSITION_BIAS, Category.ACTIVATIONS, size, made, max(returned, kept), module)
    if stack.checkpointed:  # the first layer's recomputation makes another
        again = stack.backward[0]
        born = again.forward_start + again.template.forward_marks[Mark.RELATIVE_POSITIONS][0]
        until = again.template.borrowed[POSITION_BIAS].kept_until
        ends = again.forward_start + again.template.num_forward if until is None else (again.backward_start or 0) + until
        timeline.hold(POSITION_BIAS, Category.ACTIVATIONS, size, born, ends, module)
    gradient = stack.gradient_from(POSITION_BIAS)
    if gradient is not None:
        last = stack.backward[0]
        assert last.backward_start is not None
        dies = last.backward_start + last.template.backward_marks[Mark.RELATIVE_POSITIONS][0] + 1
        timeline.hold(f"{POSITION_BIAS}.grad", Category.TEMPORARIES, size, gradient, dies, module)


def _hold_causal_mask(timeline: Step, decoder: _Stack, target: HFContext, born: int, returned: int) -> None:
    """Hold eager attention's additive mask of the decoder [batch, 1, sequence, sequence]; sdpa makes one in each layer."""
    if target.attention.implementation == "eager":
        size = target.batch * target.sequence**2 * target.precision.weight_bytes
        dies = timeline.now if decoder.checkpointed else returned
        timeline.hold("attention_mask", Category.INPUTS, size, born, dies)


def _hold_cross_positions(timeline: Step, decoder: _Stack, target: HFContext, returned: int) -> None:
    """Hold the zeros that the first cross-attention makes for all layers. Under checkpointing they require a gradient
    (`position_bias.requires_grad = True`), and the graph keeps them and that gradient until the loss is freed."""
    size, module = cross_position_bias_bytes(target, decoder.source_length), decoder.forward[0].module
    made = decoder.at(0, f"{CROSS}.v") + 1
    kept = timeline.now if decoder.checkpointed else decoder.kept_until(CROSS_POSITION_BIAS)
    timeline.hold(CROSS_POSITION_BIAS, Category.ACTIVATIONS, size, made, max(returned, kept), module)
    if decoder.checkpointed:
        again = decoder.backward[0]
        born = again.forward_start + again.template.in_forward[f"{CROSS}.v"] + 1
        until = again.template.borrowed[CROSS_POSITION_BIAS].kept_until
        ends = again.forward_start + again.template.num_forward if until is None else (again.backward_start or 0) + until
        timeline.hold(CROSS_POSITION_BIAS, Category.ACTIVATIONS, size, born, ends, module)
        gradient = decoder.gradient_from(CROSS_POSITION_BIAS)
        assert gradient is not None
        timeline.hold(f"{CROSS_POSITION_BIAS}.grad", Category.TEMPORARIES, size, gradient, timeline.now, module)


def _hold_cache(timeline: Step, decoder: _Stack, job: TrainingJob, returned: int) -> None:
    """Hold the cached keys and values of the decoder's self-attentions of which autograd saves copies in their place: the
    outputs refer to them, until `returned` or, from the end of a layer's backward on, as `_hold_outputs` says."""
    for place, (context, run) in enumerate(zip(decoder.contexts, decoder.forward, strict=True)):
        if decoder.checkpointed or not computes_self_attention_in_steps(context):
            continue
        element = context.precision.compute_bytes
        copied = 1 if element == FP32 else 2  # keys are scaled; values in fp32 are saved themselves
        size = copied * context.rows * context.architecture.key_value_size * element
        dropped = conventions(job).get("outputs_dropped")
        dies = returned if dropped else (run.backward_start or 0) + run.template.num_backward
        born = decoder.at(place, f"{SELF}.o") + 1
        timeline.hold("past_key_values", Category.ACTIVATIONS, size, born, dies, run.module)


def outputs_of(job: TrainingJob, context: HFContext) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of what the outputs refer to besides logits, which a plain loop keeps with them: the encoder's
    output; keys and values of both attentions, as the decoder's configuration keeps `use_cache`. Under checkpointing
    instead, through the graph: the zeros of cross-attention, the encoder's embeddings if adapters make them a leaf, and the
    gradients of both."""
    architecture, target = job.architecture, target_context(context, job)
    states = (ENCODER_STATES, "head", context.rows * architecture.hidden_size * context.stream_bytes)
    decoder = range(architecture.num_hidden_layers, architecture.num_layers)
    if job.activation_checkpointing.mode != "none":
        zeros, module = cross_position_bias_bytes(target, context.sequence), f"layers.{decoder[0]}"
        held = [states, (CROSS_POSITION_BIAS, module, zeros), (f"{CROSS_POSITION_BIAS}.grad", module, zeros)]
        leaf = context.rows * architecture.hidden_size * context.precision.weight_bytes
        adapters = job.finetuning.method != "full"
        return held + [(name, module, leaf) for name in ("inputs_embeds", "inputs_embeds.grad")] * adapters
    tokens = 2 * target.batch * (target.sequence + context.sequence)
    size = tokens * architecture.key_value_size * target.precision.compute_bytes
    return [states, *(("past_key_values", f"layers.{layer}", size) for layer in decoder)]


def _hold_outputs(
    timeline: Step, decoder: _Stack, context: HFContext, job: TrainingJob, forgotten: int, last: bool
) -> None:
    """Hold `outputs_of` from the moment backward frees its own references, which for the encoder's output is
    `forgotten`."""
    if conventions(job).get("outputs_dropped"):
        return
    dies = timeline.now if conventions(job).get("trainer") or not last else FOREVER
    ended = {run.module: (run.backward_start or 0) + run.template.num_backward for run in decoder.forward}
    for name, module, size in outputs_of(job, context):
        born = timeline.now if decoder.checkpointed else ended.get(module, 0)
        timeline.hold(name, Category.ACTIVATIONS, size, forgotten if name == ENCODER_STATES else born, dies, module)
