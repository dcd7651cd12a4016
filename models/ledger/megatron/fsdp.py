"""Megatron-FSDP with everything sharded (`--data-parallel-sharding-strategy optim_grads_params`): what a rank keeps of its
buckets, and when it has whole ones.

A bucket has the parameters of one transformer layer, with its routed experts in a bucket of their own, and again those
that are FP8 (`fp8-param-gather`); or parameters outside layers. FP8 weights are gathered by rows. Their copies by columns
are made while a layer is at work, in forward and in backward, and let go of with its buckets. MXFP8 weights have a bucket
for either layout, of which backward gathers that by columns. Source: megatron-core 0.16.1
`distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py` (`_get_parameter_groups`, `AllGatherPipeline`,
`GradReducePipeline`), `megatron_fsdp.py` (`_register_fsdp_hooks`, `finish_grad_sync`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

from peakcast.core.units import DTYPE_BYTES, FP8, FP32, round_up
from peakcast.models.ledger.megatron.distributed_optimizer import bucket_size
from peakcast.models.ledger.megatron.fp8_parameters import (
    is_fp8_parameter,
    mxfp8_scale_bytes,
    reads_either_layout,
)
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Hooks, Step
from peakcast.timelines.timeline import Category

ENDS = ("embedding", "head")
_EXPERTS = ".experts."
LEAST_IN_FLIGHT = 10**9
"""In elements, unless two layers have more: `suggested_communication_unit_size`, which is called a cap there. Pull request
7134 of Megatron-LM (September 2026) makes it one; no release with that was read."""
GATHERS = 1
"""The stream on which buckets are allocated and gathered (`side_stream_for_param_gather`)."""


@dataclass(frozen=True, slots=True)
class FSDPParameterGroup:
    """Parameters that are gathered together and whose gradients are reduced together."""

    modules: frozenset[str]
    elements: int
    """Elements of all its parameters, padded so that every rank has equally many rows."""
    shards: int
    narrow: bool = False
    """Whether its parameters are FP8."""
    expert: bool = False
    """Whether they are those of routed experts."""

    @property
    def is_unit(self) -> bool:
        """Whether it belongs to a layer, so that it is freed after use."""
        return not self.modules & set(ENDS)

    @property
    def shard_elements(self) -> int:
        """Elements of the part that this rank keeps."""
        return self.elements // self.shards


def is_fully_sharded(share: RankShare) -> bool:
    """Whether Megatron-FSDP shards parameters, gradients and states of this job."""
    return bool(share.convention.get("use_megatron_fsdp"))


@lru_cache(maxsize=64)
def fsdp_parameter_groups(
    parameters: tuple[Parameter, ...],
    shards: int,
    expert_shards: int,
    largest: int | None,
    narrow: frozenset[str] = frozenset(),
) -> tuple[FSDPParameterGroup, ...]:
    """The buckets of a model in the order of their numbers: first those outside layers, divided after `largest` elements,
    then the layers' own. `narrow`: names of the parameters that are FP8."""
    outside = [p for p in parameters if p.module in ENDS]
    parts: list[list[Parameter]] = [[]]
    for p in outside:
        parts[-1].append(p)
        if largest is not None and sum(member.numel for member in parts[-1]) >= largest:
            parts.append([])
    inside = [p for p in parameters if p.module not in ENDS]
    for _, layer in groupby(inside, key=lambda p: p.module):
        alike: dict[tuple[bool, bool], list[Parameter]] = {}
        for p in layer:
            alike.setdefault((_EXPERTS in p.name, p.name in narrow), []).append(p)
        parts += alike.values()
    return tuple(
        _bucket(part, expert_shards if part[0].expert else shards, narrow=part[0].name in narrow) for part in parts if part
    )


def _bucket(parameters: Sequence[Parameter], shards: int, *, narrow: bool) -> FSDPParameterGroup:
    """The bucket of these parameters."""
    chunk = 0
    for p in sorted(parameters, key=_row, reverse=True):
        row, tensor = _row(p), p.numel // p.tensors
        fits = row == chunk or tensor < chunk or (chunk and chunk % row == 0 and tensor % chunk == 0)
        chunk = chunk if fits else math.lcm(chunk or row, row)
    total = sum(p.numel for p in parameters)
    modules, expert = frozenset(p.module for p in parameters), _EXPERTS in parameters[0].name
    return FSDPParameterGroup(modules, round_up(total, shards * chunk), shards, narrow, expert)


def _row(p: Parameter) -> int:
    """Elements of a row of the parameter, by which ranks divide it."""
    return math.prod(p.shape[1 + p.stacked :])


def buckets_of(share: RankShare, parameters: Sequence[Parameter]) -> tuple[FSDPParameterGroup, ...]:
    """The buckets of this rank's model."""
    layout, convention = share.job.parallelism, share.convention
    shards = layout.data_parallel_size * layout.context_parallel_size
    experts = share.context.experts
    expert_shards = shards if experts is None else max(1, shards * layout.tensor_parallel_size // experts.group_size)
    asked = int(convention.get("ddp_bucket_size", 0) or 0)
    largest = bucket_size(bool(convention.get("overlap_grad_reduce")), 0, shards, asked)
    narrow = frozenset(p.name for p in parameters if is_fp8_parameter(share, p))
    return fsdp_parameter_groups(tuple(parameters), shards, expert_shards, largest, narrow)


def gathers_both_layouts(share: RankShare) -> bool:
    """Whether FP8 weights have a bucket by rows and one by columns."""
    return share.context.fp8_recipe == "mxfp8"


def hold_shards(step: Step, share: RankShare, parameters: Sequence[Parameter]) -> None:
    """Hold this rank's parts of all parameters, in the model's dtype and in fp32, and of their gradients, which are one
    buffer. The scales of MXFP8 weights stay whole: only their elements are in buckets (`DataParallelBuffer.set_item`)."""
    found, precision = buckets_of(share, parameters), share.job.precision
    for p in parameters if gathers_both_layouts(share) else ():
        if is_fp8_parameter(share, p):
            step.hold(f"{p.name}.scales", Category.PARAMETERS, mxfp8_scale_bytes(p), 0, module=p.module)
    weight, gradient = int(DTYPE_BYTES[precision.parameters]), int(DTYPE_BYTES[precision.gradients])
    for bucket in found:
        module = min(bucket.modules)
        if bucket.narrow:
            for _ in range(1 + gathers_both_layouts(share)):
                step.hold("parameter_shard", Category.PARAMETERS, bucket.shard_elements * FP8, 0, module=module)
        else:
            step.hold("parameter_shard", Category.PARAMETERS, bucket.shard_elements * weight, 0, module=module)
        if weight != FP32:
            step.hold("parameter_shard.main", Category.MAIN_PARAMETERS, bucket.shard_elements * FP32, 0, module=module)
    elements = sum(bucket.shard_elements for bucket in found)
    step.hold("gradient_shards", Category.GRADIENTS, elements * gradient, 0, module="model")


@dataclass
class WholeBuckets(Hooks):
    """Gathers buckets before modules run, frees those of layers after, and holds gradients until they are reduced."""

    buckets: tuple[FSDPParameterGroup, ...]
    weight_bytes: int
    gradient_bytes: int
    fuses_gradients: bool
    in_flight: int
    """Elements whose gradients may wait for reduction, and twice the elements that are gathered ahead
    (`suggested_communication_unit_size`)."""
    experts_first: bool = False
    """Whether the gradients of a layer's routed experts come before its others, as they do unless an expert is shared."""
    columns: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the copies by columns that a module's FP8 weights have while it is at work."""
    _columns: dict[str, list[int]] = field(default_factory=dict)
    _gathered: dict[int, list[int]] = field(default_factory=dict)
    _gradients: dict[int, list[int]] = field(default_factory=dict)
    _waiting: list[int] = field(default_factory=list)
    """Buckets whose reduction has started, oldest first."""

    def before_forward(self, step: Step, module: str) -> None:
        self._gather(step, module, ahead=1)
        self._make_columns(step, module)

    def after_forward(self, step: Step, module: str) -> None:
        self._release(step, module)

    def before_backward(self, step: Step, module: str) -> None:
        if module not in ENDS:
            self._gather(step, module, ahead=-1)
            self._make_columns(step, module)
            self._take_gradients(step, module, step.now, experts_only=self.experts_first)

    def after_backward(self, step: Step, run: BlockRun) -> None:
        if run.module in ENDS:  # a fused product writes into the bucket; other gradients are copied, the last norm's first
            at = (run.backward_start or 0) + run.template.backward_marks.get(Mark.LM_HEAD, (0,))[0]
            self._take_gradients(step, run.module, at if self.fuses_gradients else step.now)
        else:
            self._take_gradients(
                step, run.module, (run.backward_start or 0) + run.template.backward_marks.get(Mark.DISPATCH, (0,))[0]
            )
        self._release(step, run.module)
        for number in self._numbers(run.module):
            if self.buckets[number].is_unit:
                while sum(self.buckets[i].elements for i in self._waiting) > self.in_flight:
                    step.free(self._gradients.pop(self._waiting.pop(0)))
                reduced = self.buckets[number].shard_elements * self.gradient_bytes
                step.hold("reduced_gradients", Category.COMMUNICATION_BUFFERS, reduced, step.now - 1, step.now, run.module)
                self._waiting.append(number)

    def end_of_backward(self, step: Step) -> None:
        """Wait for all reductions (`_root_post_backward`)."""
        for handles in self._gradients.values():
            step.free(handles)
        self._gradients.clear()
        self._waiting.clear()

    def end_of_step(self, step: Step) -> None:
        """Free what is still gathered before the optimizer runs (`finish_grad_sync`)."""
        for handles in self._gathered.values():
            step.free(handles)
        self._gathered.clear()

    def _numbers(self, module: str) -> list[int]:
        """Numbers of the buckets of `module`."""
        return [i for i, bucket in enumerate(self.buckets) if module in bucket.modules]

    def _gather(self, step: Step, module: str, *, ahead: int) -> None:
        """Gather the buckets of `module`, and those that follow by number, up or down, as `all_gather_params` does."""
        wanted = self._numbers(module)
        if not wanted:  # a stage's input from another stage, which no parameter makes
            return
        following = wanted[-1] + 1 if ahead > 0 else wanted[0] - 1
        size = 0
        while 0 <= following < len(self.buckets) and size < self.in_flight // 2:
            size += self.buckets[following].elements
            wanted.append(following)
            following += ahead
        for number in wanted:
            if number not in self._gathered:
                width = FP8 if self.buckets[number].narrow else self.weight_bytes
                size_bytes = self.buckets[number].elements * width
                self._gathered[number] = step.allocate(
                    "gathered_parameters", Category.PARAMETERS, [size_bytes], module, stream=GATHERS
                )

    def _take_gradients(self, step: Step, module: str, born: int, *, experts_only: bool = False) -> None:
        """Allocate the whole buckets into which the gradients of `module` are written. `experts_only`: if it has routed
        experts, theirs alone."""
        numbers = self._numbers(module)
        experts = [number for number in numbers if self.buckets[number].expert]
        for number in (experts or numbers) if experts_only else numbers:
            if number not in self._gradients:
                size = self.buckets[number].elements * self.gradient_bytes
                self._gradients[number] = step.allocate("whole_gradients", Category.GRADIENTS, [size], module, born=born)

    def _make_columns(self, step: Step, module: str) -> None:
        """Make the copies by columns of the FP8 weights of `module`. In forward each projection makes its own; here they
        all begin with the layer."""
        size = self.columns.get(module, 0)
        if size and module not in self._columns:  # a recomputed layer has them already
            self._columns[module] = step.allocate("weight_columns", Category.OTHER, [size], module)

    def _release(self, step: Step, module: str) -> None:
        """Free the buckets of `module`, if they are a layer's, and its copies by columns."""
        step.free(self._columns.pop(module, []))
        for number in self._numbers(module):
            if self.buckets[number].is_unit and number in self._gathered:
                step.free(self._gathered.pop(number))


def whole_buckets(share: RankShare, parameters: Sequence[Parameter]) -> WholeBuckets:
    """The hooks for this rank's model."""
    precision, found = share.job.precision, buckets_of(share, parameters)
    layers = share.job.architecture.num_hidden_layers
    two_layers = 2 * (sum(bucket.elements for bucket in found if bucket.is_unit) // layers)
    moe, columns = share.job.architecture.moe, Counter[str]()
    if not (reads_either_layout(share) or gathers_both_layouts(share)):
        for p in parameters:
            columns[p.module] += p.numel * FP8 * is_fp8_parameter(share, p)
    return WholeBuckets(
        found,
        int(DTYPE_BYTES[precision.parameters]),
        int(DTYPE_BYTES[precision.gradients]),
        share.context.weight_gradients.fused,
        max(two_layers, LEAST_IN_FLIGHT),
        moe is not None and not moe.shared_expert_intermediate_size,
        columns,
    )
