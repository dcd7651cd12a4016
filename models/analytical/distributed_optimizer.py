"""Megatron-LM's parameter and gradient buffers and its optimizer states, replicated or sharded over data parallelism.

Sources: megatron-core 0.13.1 `distributed/param_and_grad_buffer.py`, `optimizer/distrib_optimizer.py`.
Every model chunk has one contiguous gradient buffer, in fp32 unless fp16 gradients are asked for. The distributed optimizer
also moves the parameters into a buffer padded alike, and owns 1/n of the fp32 main parameters and of the Adam states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.models.analytical.megatron_parameters import Parameter
from peakcast.units import round_up

FP32 = 4
PARAMETER_ALIGNMENT = 64
"""Elements: parameters start at 128-byte addresses (`_pad_start_of_param_if_needed`)."""
BUCKET_ALIGNMENT = 128
HIGH_BANDWIDTH_BUCKET_ALIGNMENT = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRules:
    """How a chunk's buffer is laid out."""

    sharded: bool
    """Whether the distributed optimizer is in use."""
    shards: int
    """Ranks over which it shards: data × context parallel size, per optimizer instance."""
    bucket_size: int | None = None
    """Elements after which a bucket closes; None for one bucket (no overlap, or not the first stage)."""
    high_bandwidth_padding: bool = False

    @property
    def bucket_divisor(self) -> int:
        """Elements: every bucket's length is a multiple of this."""
        padding = HIGH_BANDWIDTH_BUCKET_ALIGNMENT if self.high_bandwidth_padding else BUCKET_ALIGNMENT
        return math.lcm(self.shards, padding)


def bucket_size(overlap: bool, pipeline_rank: int, data_parallel_size: int, asked: int = 0) -> int | None:
    """Elements per bucket: max(40M, 1M × data-parallel size) with overlap on the first stage, else a single bucket."""
    if not overlap or pipeline_rank > 0:
        return None
    return asked or max(40_000_000, 1_000_000 * data_parallel_size)


def buffer_elements(parameters: Sequence[Parameter], rules: BufferRules) -> int:
    """Elements of the contiguous buffer of `parameters`, padding included. Without sharding there is no padding."""
    if not rules.sharded:
        return sum(parameter.numel for parameter in parameters)
    start = bucket_start = end = 0
    open_bucket = False
    for parameter in reversed(parameters):  # the order in which backward reaches them
        start = round_up(start, PARAMETER_ALIGNMENT)
        if parameter.own_bucket and open_bucket:
            start = bucket_start = round_up(start, rules.bucket_divisor)
        end = start + parameter.numel
        open_bucket = True
        full = rules.bucket_size is not None and end - bucket_start >= rules.bucket_size
        if full or parameter.own_bucket:
            end = bucket_start = round_up(end, rules.bucket_divisor)
            open_bucket = False
        start = end
    return round_up(end, rules.bucket_divisor) if open_bucket else end


def shard_pieces(parameters: Sequence[Parameter], rules: BufferRules) -> list[tuple[Parameter, int]]:
    """(parameter, elements) that this rank's optimizer owns: all of them, or one part of `shards` of the buffer.

    The share of an average rank: Megatron cuts the buffer, not the parameters, so a real rank owns a few whole parameters.
    """
    if not rules.sharded:
        return [(parameter, parameter.numel) for parameter in parameters]
    owned = buffer_elements(parameters, rules) // rules.shards
    pieces = []
    for parameter in reversed(parameters):  # the last rank's end of the buffer is the model's beginning
        if not owned:
            break
        taken = min(parameter.numel, owned)
        if taken:
            pieces.append((parameter, taken))
        owned -= taken
    return pieces
