"""How long Megatron-LM's pipeline schedules reference the tensors that stages send each other: inputs, gradients of inputs,
gradients of outputs.

Source: megatron-core 0.16.1 `pipeline_parallel/schedules.py` (`forward_backward_pipelining_without_interleaving`,
`..._with_interleaving`), whose variables refer to tensors beyond their use. The model keeps its last input
(`set_input_tensor`), which keeps its gradient, until the chunk's next forward, even into the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.models.ledger.layouts.pipeline import Chunk, Turn
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category


@dataclass(frozen=True, slots=True)
class Span:
    """A turn on the instants of a step: its first instant, and the instant after its last computation."""

    turn: Turn
    start: int
    end: int
    summed: int = 0
    """For a backward: the instant at which the incoming gradient has been added to another tensor, so that only variables
    still reference it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How a rank exchanges tensors of `num_bytes` with its neighbours."""

    chunks: Sequence[Chunk]
    num_bytes: int
    interleaved: bool
    overlapped: bool
    """Whether the next input is requested as soon as a forward is done, before the backward that follows it."""
    warmup: int
    """Number of forward turns before forward and backward alternate."""
    returns: int
    """The instant at which the schedule returns."""
    outliving: frozenset[int]
    """Micro-batches whose graph of the last chunk lives until the schedule returns, and with it the chunk's input and its
    gradient."""


def hold_received(step: Step, spans: Sequence[Span], exchange: Exchange) -> None:
    """Hold, on a `step` with the turns `spans`, the tensors that were received and those that are sent back."""
    forwards = [span for span in spans if span.turn.forward]
    backwards = [span for span in spans if not span.turn.forward]
    _hold_inputs(step, spans, forwards, backwards, exchange)
    _hold_output_gradients(step, forwards, backwards, exchange)
    if exchange.interleaved:
        _hold_outputs(step, forwards[exchange.warmup :], backwards, exchange)


def _hold_inputs(
    step: Step, spans: Sequence[Span], forwards: Sequence[Span], backwards: Sequence[Span], exchange: Exchange
) -> None:
    """Hold received inputs and their gradients."""
    size = exchange.num_bytes
    of_turn = {(span.turn.micro_batch, span.turn.chunk): index for index, span in enumerate(backwards)}
    for chunk, part in enumerate(exchange.chunks):
        if part.is_first:
            continue
        module, own = f"chunk.{chunk}", [index for index, span in enumerate(forwards) if span.turn.chunk == chunk]
        step.hold("input_tensor", Category.ACTIVATIONS, size, 0, forwards[own[0]].start, module)
        step.hold("input_tensor.grad", Category.TEMPORARIES, size, 0, forwards[own[0]].start, module)
        for index, following in zip(own, [*own[1:], None], strict=True):
            span = forwards[index]
            number = of_turn[span.turn.micro_batch, chunk]
            backward = backwards[number]
            replaced = step.now if following is None else forwards[following].start
            dies = max(replaced, _released(spans, backward, exchange))
            graph_lives_on = part.is_last and span.turn.micro_batch in exchange.outliving
            # a variable of the warm-up refers to the last input of it
            if graph_lives_on or (exchange.overlapped and index == exchange.warmup):
                dies = max(dies, exchange.returns)
            born = forwards[index - 1].end if exchange.overlapped and index else span.start
            step.hold("input_tensor", Category.ACTIVATIONS, size, born, dies, module)
            # the variable of the last sent gradient is reassigned when the next backward has returned
            renamed = backwards[number + 1].end if number + 1 < len(backwards) else exchange.returns
            step.hold("input_tensor.grad", Category.TEMPORARIES, size, backward.end, max(dies, renamed), module)


def _released(spans: Sequence[Span], backward: Span, exchange: Exchange) -> int:
    """The instant from which no variable refers to a micro-batch's graph, and so to its input. Without interleaving,
    `output_tensor` does until the next forward has returned."""
    following = next((span for span in spans if span.start > backward.start), None)
    if not exchange.interleaved and following is not None and following.turn.forward:
        return following.end
    return backward.end + 1


def _hold_output_gradients(step: Step, forwards: Sequence[Span], backwards: Sequence[Span], exchange: Exchange) -> None:
    """Hold received gradients of outputs. While a backward runs, its own entries include the incoming gradient until it is
    added to another."""
    for index, span in enumerate(backwards):
        if exchange.chunks[span.turn.chunk].is_last:
            continue
        module, size = f"chunk.{span.turn.chunk}", exchange.num_bytes
        if exchange.interleaved:  # it is received right after the backward before, one forward early
            before = backwards[index - 1].end if index else forwards[exchange.warmup - 1].end if exchange.warmup else 0
            step.hold("output_tensor_grad", Category.COMMUNICATION_BUFFERS, size, before, span.start, module)
            dies = min(span.end + 1, exchange.returns)
        else:  # a variable refers to it until the next is received
            dies = backwards[index + 1].start if index + 1 < len(backwards) else exchange.returns
        step.hold("output_tensor_grad", Category.COMMUNICATION_BUFFERS, size, span.summed, dies, module)


def _hold_outputs(step: Step, forwards: Sequence[Span], backwards: Sequence[Span], exchange: Exchange) -> None:
    """Hold outputs that were sent. The interleaved schedule empties one (`deallocate_output_tensor`) after the backward
    that follows; without interleaving, and in the warm-up, it is emptied at once."""
    for forward, backward in zip(forwards, backwards, strict=False):
        chunk = forward.turn.chunk
        if not exchange.chunks[chunk].is_last:
            dies = min(backward.end + 1, exchange.returns)
            step.hold("output_tensor", Category.ACTIVATIONS, exchange.num_bytes, forward.end, dies, f"chunk.{chunk}")
