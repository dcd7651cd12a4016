"""Attention over a sequence that several ranks share: torch's ring of flash attention, its variables followed line by line.

Every rank has one piece from the front and one from the back of the sequence (`_HeadTailLoadBalancer`), its head and its
tail, and gets the keys and values of the other ranks in turn: of ranks before it, the heads for all its queries; of ranks
after it, everything for the queries of its tail. Results are merged in fp32. Source: torch 2.13
`distributed/tensor/experimental/_context_parallel/_attention.py`, _templated_ring_attention, _SDPAMerger,
_templated_ring_attention_backward, _AllGatherRotater, _AllToAllRotater.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.core.units import FP32
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.tape.local_variables import Locals


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that share a sequence, as seen from the one at `position`."""

    ranks: int = 1
    position: int = 0
    gathers: bool = True
    """Whether the keys and values of all ranks are gathered at once (`allgather`) or passed from rank to rank
    (`alltoall`)."""

    @property
    def copies_output(self) -> bool:
        """Whether the layer copies the output because it is laid out head by head, which it is after partial results were
        merged."""
        return self.position < self.ranks - 1


ALONE = Ring()


def ring_of(job: TrainingJob, rank: int) -> Ring:
    """The ring of global `rank`. Tensor-parallel ranks are innermost, then those that share a sequence."""
    layout = job.parallelism
    if layout.context_parallel_size == 1:
        return ALONE
    return Ring(
        ranks=layout.context_parallel_size,
        position=rank // layout.tensor_parallel_size % layout.context_parallel_size,
        gathers=conventions(job)["context_parallel_rotation"] == "allgather",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingTensors:
    """Bytes of a rank's queries; of its keys (its values have as many); of one element; of the fp32 softmax statistics."""

    query: int
    key: int
    element: int
    statistics: int

    @property
    def wide_query(self) -> int:
        """Bytes of the queries in fp32."""
        return self.query // self.element * FP32

    @property
    def wide_key(self) -> int:
        """Bytes of the keys in fp32."""
        return self.key // self.element * FP32


def forward_bytes(ring: Ring, tensors: RingTensors) -> int:
    """The most bytes that the forward allocates at once besides queries, keys and values, including its output and
    statistics."""
    run, both = Locals(), 2 * tensors.key
    run.let("key, value", tensors.key, tensors.key)
    for turn in range(ring.ranks):
        _receive(run, turn)
        if turn < ring.ranks - 1:
            run.let("next_kv", both)
            _send(run, ring, turn, both)
            run.free("next_kv")
        run.rename("key, value", "k, v")
        partial = turn > ring.position
        query, statistics = tensors.query >> partial, tensors.statistics >> partial
        run.let("out, logsumexp", query, *([statistics] if turn else []))
        wide = tensors.wide_query >> partial
        run.let("step.out", wide if tensors.element < FP32 else 0)
        if not turn:
            run.let("_lse", tensors.statistics)
            run.rename("step.out", "_out")
            continue
        _merge(run, wide, statistics)
        if partial:
            run.let("_lse", tensors.statistics)
            run.let("_out", tensors.wide_query)
        else:
            run.rename("lse", "_lse")
            run.rename("new_out", "_out")
        run.free("step.out", "lse", "new_out")
    run.let("results.out", tensors.query)
    return run.most_bytes()


def _merge(run: Locals, wide: int, statistics: int) -> None:
    """`_merge_one`: out - sigmoid(block_lse - lse) * (out - block_out), and lse - logsigmoid(lse - block_lse)."""
    run.let("difference", statistics)
    run.let("weight", statistics)
    run.free("difference")
    run.let("distance", wide)
    run.let("weighted", wide)
    run.free("weight", "distance")
    run.let("new_out", wide)
    run.free("weighted")
    run.let("difference", statistics)
    run.let("logarithm", statistics)
    run.free("difference")
    run.let("lse", statistics)
    run.free("logarithm")


def backward_bytes(ring: Ring, tensors: RingTensors) -> int:
    """The most bytes during the backward, including the gradients of queries, keys and values, besides the saved tensors
    and the incoming gradient."""
    run, both, wide = Locals(), 2 * tensors.key, 2 * tensors.wide_key
    run.let("grad_query", tensors.wide_query)
    run.let("grad_key, grad_value", tensors.wide_key, tensors.wide_key)
    run.let("key, value", tensors.key, tensors.key)
    for turn in range(ring.ranks):
        behind, heads = turn > ring.position, 0 < turn <= ring.position
        _receive(run, turn)
        if turn < ring.ranks - 1:
            run.let("next_kv", both)
            _send(run, ring, turn, both)
        run.rename("key, value", "k, v")
        if behind:
            run.let("lse", tensors.statistics // 2)
        else:
            run.free("lse")
        key = tensors.key >> heads
        run.let("grad_query_, grad_key_, grad_value_", tensors.query >> behind, key, key)
        if heads:
            run.rename("dkv", "next_grad_kv")
            run.free("grad_key, grad_value")
            run.let("grad_key, grad_value", tensors.wide_key, tensors.wide_key)
        elif turn:  # views of what has been received
            run.free("next_grad_kv")
            run.rename("dkv", "grad_key, grad_value")
        else:
            run.let("flat", tensors.wide_key, tensors.wide_key)  # they have the keys' layout, so `flatten` copies
        run.let("sent", wide)
        run.free("flat")
        run.let("dkv", wide)
        run.rename("sent", "next_grad_kv")
        if behind:
            run.let("grad_query", tensors.wide_query)
    run.let("grad_query", tensors.query)
    run.let("next_grad_kv", both)
    return run.most_bytes()


def _receive(run: Locals, turn: int) -> None:
    """`next_buffer`: a part of what was gathered, or what has been received."""
    if turn:
        run.rename("arriving", "key, value")


def _send(run: Locals, ring: Ring, turn: int, both: int) -> None:
    """`exchange_buffers`: gathered once, or passed on in each turn."""
    if not ring.gathers:
        run.let("arriving", both)
    elif not turn:
        run.let("gathered", ring.ranks * both)
