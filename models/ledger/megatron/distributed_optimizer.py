"""Megatron-LM's parameter and gradient buffers and its optimizer states, replicated or sharded over data parallelism.

Sources: megatron-core 0.13.1 `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`.

Every model chunk has one contiguous gradient buffer, in fp32 unless fp16 gradients are asked for. The distributed optimizer
also moves the parameters into a buffer with the same padding, and owns 1/n of the fp32 main parameters and of the Adam
states.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from peakcast.core.units import round_up
from peakcast.models.ledger.megatron.parameters import Parameter

PARAMETER_ALIGNMENT = 64
"""In elements: parameters start at 128-byte addresses (`_pad_start_of_param_if_needed`)."""
BUCKET_ALIGNMENT = 128
HIGH_BANDWIDTH_BUCKET_ALIGNMENT = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRules:
    """How a chunk's buffer is laid out."""

    sharded: bool
    """Whether the distributed optimizer is in use."""
    shards: int
    """Number of ranks that share it: data × context parallel size, for each optimizer instance."""
    bucket_size: int | None = None
    """Number of elements after which a bucket closes; None: a single bucket (no overlap, or not the first stage)."""
    high_bandwidth_padding: bool = False

    @property
    def bucket_divisor(self) -> int:
        """Every bucket's length is a multiple of this number of elements."""
        padding = HIGH_BANDWIDTH_BUCKET_ALIGNMENT if self.high_bandwidth_padding else BUCKET_ALIGNMENT
        return math.lcm(self.shards, padding)


def bucket_size(overlap: bool, pipeline_rank: int, data_parallel_size: int, asked: int = 0) -> int | None:
    """Elements per bucket: max(40M, 1M × data-parallel size) with overlap on the first stage, else None, for a single
    bucket."""
    if not overlap or pipeline_rank > 0:
        return None
    return asked or max(40_000_000, 1_000_000 * data_parallel_size)


@lru_cache(maxsize=512)
def laid_out(parameters: tuple[Parameter, ...], rules: BufferRules) -> tuple[list[tuple[Parameter, int]], list[int]]:
    """(parameter, its first element) in the order in which backward reaches them, and the element at which each bucket
    ends."""
    starts: list[tuple[Parameter, int]] = []
    ends: list[int] = []
    start = bucket_start = end = 0
    for parameter in reversed(parameters):
        if rules.sharded:
            start = round_up(start, PARAMETER_ALIGNMENT)
        if parameter.own_bucket and bucket_start < end:
            start = bucket_start = round_up(start, rules.bucket_divisor) if rules.sharded else start
            ends.append(start)
        starts.append((parameter, start))
        end = start + parameter.numel
        full = rules.bucket_size is not None and end - bucket_start >= rules.bucket_size
        if full or parameter.own_bucket:
            end = bucket_start = round_up(end, rules.bucket_divisor) if rules.sharded else end
            ends.append(end)
        start = end
    if bucket_start < end:
        ends.append(round_up(end, rules.bucket_divisor) if rules.sharded else end)
    return starts, ends


def buffer_elements(parameters: Sequence[Parameter], rules: BufferRules) -> int:
    """Elements of the contiguous buffer of `parameters`, padding included. Without sharding there is no padding."""
    return max(laid_out(tuple(parameters), rules)[1], default=0)


def shard_pieces(parameters: Sequence[Parameter], rules: BufferRules, shard: int = 0) -> list[tuple[Parameter, int]]:
    """(parameter, elements) that the optimizer of a rank owns: everything or, if sharded, part `shard` of `shards` of every
    bucket. Megatron divides buckets, not parameters, so only the first and the last parameter of a part may be cut."""
    if not rules.sharded:
        return [(parameter, parameter.numel) for parameter in parameters]
    starts, ends = laid_out(tuple(parameters), rules)
    owned: Counter[int] = Counter()
    bucket_start = 0
    begun = 0
    for end in ends:
        part = (end - bucket_start) // rules.shards
        first = bucket_start + shard % rules.shards * part
        while begun < len(starts) and starts[begun][1] < end:
            parameter, start = starts[begun]
            owned[begun] = max(0, min(first + part, start + parameter.numel) - max(first, start))
            begun += 1
        bucket_start = end
    return [(starts[i][0], numel) for i, numel in sorted(owned.items()) if numel]
