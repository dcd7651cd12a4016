"""Context parallelism in Transformer Engine's attention: the memory of ranks that exchange keys and values, or heads.

Source: Transformer Engine 2.8 `pytorch/attention/dot_product_attention/context_parallel.py`: `AttnFuncWithCPAndKVP2P` (p2p,
a2a+p2p), `AttnFuncWithCPAndQKVOA2A` (a2a), `AttnFuncWithCPAndKVAllGather` (all_gather). Each is one autograd function,
whose variables live until it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.tape.operations import NO_SIDE_STREAM, SideStream
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """What the autograd function saves and allocates, in bytes, besides its output and its inputs' gradients. `side`: the
    part of it that is allocated while a second stream is current (`cp_stream`), on which received tensors are
    rearranged."""

    num_saved_inputs: int
    """How many of query, key and value it saves."""
    saves_result: bool
    saved_bytes: tuple[int, ...]
    """Other tensors that it saves for backward, without the statistics of the softmax."""
    forward: tuple[int, ...]
    """Its temporaries in forward that exist at the same time, where these are largest."""
    backward: tuple[int, ...]
    side: SideStream = NO_SIDE_STREAM


def exchanged_attention(
    tape: Tape,
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    context: MegatronContext,
    statistics: list[int],
    kernel_bytes: int,
) -> Tensor:
    """Attention of query, key and value (`operands`) over the tokens of all ranks. `statistics`: of the softmax, saved;
    `kernel_bytes`: what the kernel's backward allocates for itself."""
    query, key, value = (tensor.num_bytes for tensor in operands)
    output = context.rows * context.attended * context.element_bytes
    exchange = _EXCHANGES[context.groups.exchange](context, query, key, value, output)
    return tape.operation(
        name,
        operands,
        Output(output, side=exchange.side),
        saves=Saved(
            operands[: exchange.num_saved_inputs],
            output=exchange.saves_result,
            extra_bytes=[*exchange.saved_bytes, *statistics],
        ),
        forward_temporary_bytes=exchange.forward,
        backward_temporary_bytes=(*exchange.backward, kernel_bytes),
    )


def _ring(context: MegatronContext, query: int, key: int, value: int, output: int) -> ExchangeMemory:
    """A joined pair of keys and values for every turn of the ring, of which one is saved, and the turns' outputs: whole
    ones for this rank's own keys and those of earlier ranks, halves for later ranks, whose keys the first half of the
    tokens does not attend to. Every second turn computes on the second stream. Backward: two buffers, each with a pair and
    its gradient, and a turn's gradients; those of keys and values are summed in the buffers."""
    group = context.groups.ranks_exchanging_heads
    turns, before = context.groups.context_parallel_size // group, context.groups.context_parallel_rank // group
    halves = 0 if context.padding else turns - 1 - before
    outputs = (output,) * (turns - halves) + (output // 2,) * halves
    pair = key + value
    forward = ((pair,) * (turns - 1)) + outputs[0::2]
    side = SideStream(forward_temporaries=outputs[1::2])
    return ExchangeMemory(1, True, (pair,), forward, (2 * pair, 2 * pair, query), side)


def _heads(context: MegatronContext, query: int, key: int, value: int, output: int) -> ExchangeMemory:
    """Each rank gets all tokens for its share of the heads. Sent tensors are copies in the order of ranks. Received ones
    are rearranged into the order of tokens on the second stream, which copies them again, and these copies are saved. The
    output goes back the same way. Copies to send live until everything has been received; the last received tensor lives
    while it is rearranged."""
    inputs = (query, key, value)
    coming = 2 * sum(inputs) + value
    going = sum(inputs) + 4 * output  # the output, the copy to send, the received one, the rearranged copy
    # backward: the gradient in order of tokens; the kernel's gradients, still in variables, and copies of them to send
    side = SideStream(saved_bytes=inputs, result=True, gradients=True, backward_temporaries=(output,))
    forward = (output, output, max(0, coming - going))
    return ExchangeMemory(0, False, (output,), forward, (*inputs, *inputs, value), side)


def _keys(context: MegatronContext, query: int, key: int, value: int, output: int) -> ExchangeMemory:
    """Each rank gathers all keys and values, again in backward, and computes attention in two steps, for its early and for
    its late tokens, whose outputs are saved and copied into one. A step reads the keys up to its own tokens: an early step
    and its late one together read all keys, and half a rank's chunk twice."""
    gathered, values = context.groups.context_parallel_size * (key + value), context.groups.context_parallel_size * value
    read = 2 * gathered if context.padding else gathered + (key + value) // 2
    # gathered tensors are put into the order of tokens, values last, before any output exists
    forward = gathered + max(0, values - 2 * output)
    # gradients of all keys and values, the values' again in the order of ranks; what is gathered; both steps' gradients
    backward = gathered + values + gathered + query + read
    return ExchangeMemory(3, False, (output // 2, output - output // 2), (forward,), (backward - key - value,))


def _heads_then_ring(context: MegatronContext, query: int, key: int, value: int, output: int) -> ExchangeMemory:
    """As `_heads` within a group of ranks, and inside it the ring of `_ring`, whose variables still exist when the output
    goes back. Backward: the saved output and its gradient are exchanged again, and the inputs' gradients go back."""
    heads, ring = (exchange(context, query, key, value, output) for exchange in (_heads, _ring))
    inputs = query + key + value
    ringed = (*ring.forward, *ring.side.forward_temporaries, 3 * output)
    forward = max(heads.forward, ringed, key=sum)
    side = SideStream(saved_bytes=heads.side.saved_bytes, result=True, gradients=True)
    return ExchangeMemory(0, True, (), forward, (2 * output, *ring.backward, inputs), side)


_EXCHANGES = {"p2p": _ring, "a2a": _heads, "all_gather": _keys, "a2a+p2p": _heads_then_ring}
