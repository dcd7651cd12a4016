"""Context parallelism of Transformer Engine's attention: what ranks hold that exchange keys, heads or turns of a ring.

Source: Transformer Engine 2.8 `pytorch/attention/dot_product_attention/context_parallel.py`: `AttnFuncWithCPAndKVP2P`
(p2p, a2a+p2p), `AttnFuncWithCPAndQKVOA2A` (a2a), `AttnFuncWithCPAndKVAllGather` (all_gather). Each is one autograd
function, whose variables live until it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.models.analytical.blocks.megatron_context import MegatronContext
from peakcast.models.analytical.operations import NO_SIDE_STREAM, SideStream
from peakcast.models.analytical.tape import Tape, Tensor


@dataclass(frozen=True, slots=True)
class Exchanging:
    """What the function allocates beside its result and its inputs' gradients, in bytes. What it makes while a second
    stream is the current one (`cp_stream`), which puts in order what has come, is in `side`."""

    keeps_inputs: int
    """How many of query, key and value."""
    keeps_result: bool
    kept: tuple[int, ...]
    """What else it keeps for backward, beside statistics of the softmax."""
    forward: tuple[int, ...]
    """At most at once in forward, beside what is kept."""
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
    """Attention of query, key and value, `operands`, over the tokens of all ranks. `statistics`: of the softmax, kept;
    `kernel_bytes`: what the kernel's backward allocates inside itself."""
    query, key, value = (tensor.num_bytes for tensor in operands)
    output = context.rows * context.attended * context.element_bytes
    exchange = _EXCHANGES[context.exchange](context, query, key, value, output)
    return tape.operation(
        name,
        operands,
        output,
        saves=operands[: exchange.keeps_inputs],
        saves_output=exchange.keeps_result,
        extra_saved_bytes=[*exchange.kept, *statistics],
        forward_temporary_bytes=exchange.forward,
        backward_temporary_bytes=(*exchange.backward, kernel_bytes),
        side=exchange.side,
    )


def _ring(context: MegatronContext, query: int, key: int, value: int, output: int) -> Exchanging:
    """A joined pair of keys and values for every turn of the ring, of which one is kept, and the turns' outputs: whole ones
    of this rank's own keys and of ranks' before it, halves of those behind it, whose first tokens see nothing of them.
    Every second turn computes on the second stream. Backward: two buffers, each of a pair and its gradient, and a turn's
    gradients, of which keys' and values' are summed there."""
    group = context.ranks_exchanging_heads
    turns, before = context.context_parallel_size // group, context.context_parallel_rank // group
    halves = 0 if context.padding else turns - 1 - before
    outputs = (output,) * (turns - halves) + (output // 2,) * halves
    pair = key + value
    forward = ((pair,) * (turns - 1)) + outputs[0::2]
    return Exchanging(
        1, True, (pair,), forward, (2 * pair, 2 * pair, query), SideStream(forward_temporaries=outputs[1::2])
    )


def _heads(context: MegatronContext, query: int, key: int, value: int, output: int) -> Exchanging:
    """Each rank gets all tokens of its share of the heads. What is sent is a copy in order of ranks; what comes is put into
    the order of tokens on the second stream, copies again, which are kept. The result goes back the same way. Copies to
    send live until all have come, and the last of what came while it is put into order."""
    inputs = (query, key, value)
    coming = 2 * sum(inputs) + value
    going = sum(inputs) + 4 * output  # the result, the copy to send, what came, the copy that is handed on
    # backward: the gradient in order of tokens; the kernel's gradients, still named, and copies of them to send
    side = SideStream(saved_bytes=inputs, result=True, gradients=True, backward_temporaries=(output,))
    forward = (output, output, max(0, coming - going))
    return Exchanging(0, False, (output,), forward, (*inputs, *inputs, value), side)


def _keys(context: MegatronContext, query: int, key: int, value: int, output: int) -> Exchanging:
    """Each rank gathers all keys and values, once more in backward, and attends in two steps, of its early and of its late
    tokens, whose results are kept and copied into one. A step reads the keys up to its own: an early step and its late
    one together read all keys and a chunk of half a rank's twice."""
    gathered, values = context.context_parallel_size * (key + value), context.context_parallel_size * value
    read = 2 * gathered if context.padding else gathered + (key + value) // 2
    # what was gathered is put into the order of tokens, values last, when no result is there yet
    forward = gathered + max(0, values - 2 * output)
    # all keys' gradients, values' a second time in the order of ranks; the gathered; both steps' gradients
    backward = gathered + values + gathered + query + read
    return Exchanging(3, False, (output // 2, output - output // 2), (forward,), (backward - key - value,))


def _heads_then_ring(context: MegatronContext, query: int, key: int, value: int, output: int) -> Exchanging:
    """As `_heads` among the ranks of a group, and inside it the ring of `_ring`, whose variables are there when the result
    goes back. Backward: the result, which is kept, and its gradient come again, the inputs' gradients go."""
    heads, ring = (exchange(context, query, key, value, output) for exchange in (_heads, _ring))
    inputs = query + key + value
    ringed = (*ring.forward, *ring.side.forward_temporaries, 3 * output)
    forward = max(heads.forward, ringed, key=sum)
    side = SideStream(saved_bytes=heads.side.saved_bytes, result=True, gradients=True)
    return Exchanging(0, True, (), forward, (2 * output, *ring.backward, inputs), side)


_EXCHANGES = {"p2p": _ring, "a2a": _heads, "all_gather": _keys, "a2a+p2p": _heads_then_ring}
