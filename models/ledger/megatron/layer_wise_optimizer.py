"""Megatron-LM's layer-wise distributed optimizer, which shards Muon: a rank owns whole matrices, because Newton-Schulz
iterations need them whole.

Sources: megatron-core 0.16.1 `optimizer/layer_wise_optimizer.py` `shard_params`, `optimizer/muon.py`; since 0.18 (pull
requests 4509 and 4771) `LayerWiseDistributedOptimizer._compute_per_buffer_param_layout`, unless
`--no-use-layer-wise-param-layout`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from peakcast.core.units import FP32, round_up
from peakcast.models.ledger.megatron.distributed_optimizer import PARAMETER_ALIGNMENT, BufferRules
from peakcast.models.ledger.megatron.parameters import Parameter

FULL_ENOUGH = 0.9
"""A bucket with one large matrix closes once this share of it is filled (`PADDING_FLOOR`)."""
ParameterPieces = list[tuple[Parameter, int]]
"""Parameters, and how many of their elements an optimizer owns."""


@lru_cache(maxsize=64)
def ping_pong(parameters: tuple[Parameter, ...], shards: int) -> list[ParameterPieces]:
    """What the optimizer of each of `shards` ranks owns: tensors sorted by size are dealt out to ranks 0 to n - 1, then
    back from n - 1 to 0, and so on."""
    turns = [*range(shards), *reversed(range(shards))]
    owned: list[Counter[int]] = [Counter() for _ in range(shards)]
    for number, (numel, i) in enumerate(sorted(_tensors(enumerate(parameters)))):
        owned[turns[number % len(turns)]][i] += numel
    return [_pieces(parameters, part) for part in owned]


@lru_cache(maxsize=64)
def packed(parameters: tuple[Parameter, ...], rules: BufferRules) -> tuple[int, list[ParameterPieces]]:
    """The elements of the buffer of `parameters`, and what each rank owns of it. Each bucket has one part per rank, all as
    long as the fullest: its tensors go, the largest first, to the rank that has least so far."""
    elements, owned = 0, [Counter[int]() for _ in range(rules.shards)]
    for bucket in _buckets(parameters, rules):
        loads = [0] * rules.shards
        for numel, i in sorted(_tensors(bucket), key=lambda tensor: -tensor[0]):
            least = loads.index(min(loads))
            loads[least] = round_up(loads[least], PARAMETER_ALIGNMENT) + numel
            owned[least][i] += numel
        part = math.lcm(PARAMETER_ALIGNMENT, rules.bucket_divisor // rules.shards)
        elements += rules.shards * round_up(max(loads), part)
    return elements, [_pieces(parameters, part) for part in owned]


def _tensors(parameters: Iterable[tuple[int, Parameter]]) -> list[tuple[int, int]]:
    """(elements, index of its parameter) of every tensor."""
    return [(p.numel // p.tensors, i) for i, p in parameters for _ in range(p.tensors)]


def _pieces(parameters: Sequence[Parameter], owned: Counter[int]) -> ParameterPieces:
    """`owned`, elements by the index of a parameter, as `Pieces`."""
    return [(parameters[i], numel) for i, numel in sorted(owned.items())]


def _buckets(parameters: Sequence[Parameter], rules: BufferRules) -> Iterable[list[tuple[int, Parameter]]]:
    """Parameters, with their indices, by bucket, in the order in which backward reaches them."""
    bucket: list[tuple[int, Parameter]] = []
    for i, p in reversed(list(enumerate(parameters))):
        bucket.append((i, p))
        if rules.bucket_size is not None:
            largest = max(member.numel // member.tensors for _, member in bucket)
            if sum(member.numel for _, member in bucket) >= max(
                rules.bucket_size, int(rules.shards * largest * FULL_ENOUGH)
            ):
                yield bucket
                bucket = []
    if bucket:
        yield bucket


def orthogonalized_bytes(parameter: Parameter, parts: Sequence[int] = ()) -> int:
    """The most bytes that Muon's update of one tensor of `parameter` allocates at once, apart from its state: the fp32
    result, the scaled result, and that scaled again (`orth_grad * scale_factor * extra_scale_factor`). The Newton-Schulz
    iterations, in bf16, need less. A fused projection is orthogonalized in `parts` (rows of query, key and value): copies
    of all parts, the results so far, and the three of the current part.

    Source: Emerging-Optimizers `muon_utils.py` `newton_schulz`; megatron-core 0.16.1 `optimizer/muon.py`
    `TensorParallelMuon.orthogonalize`.
    """
    whole = FP32 * parameter.numel // parameter.tensors
    if not parts:
        return 3 * whole
    sizes = [whole * part // sum(parts) for part in parts]
    return max(whole + sum(sizes[:i]) + 3 * size for i, size in enumerate(sizes))
