"""DeepSpeed ZeRO: flat partitions with fp32 main copies, and the buckets in which gradients are reduced.

Read from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py` and `config.py`.
Compared with traces on real CPU tensors (`collectors/grids/agreement-deepspeed.yaml`). Bucket sizes are in elements, as
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from peakcast.core.units import round_up
from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.gradient_tensors import larger_than_their_bias
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category, Phase

BUFFERS = Category.COMMUNICATION_BUFFERS
GATHERING, REDUCING = 1, 2
"""Streams besides the computing one that `overlap_comm` adds: stage 3 gathers weights on one (`__allgather_stream`), and
every stage reduces gradients on the other (`reduction_stream`, `reduce_and_partition_stream`). The allocator keeps a pool
for each."""
MAIN_BYTES = 4
"""Bytes of an element of the main copy and of its gradient: fp32, even for an fp32 network
(`single_partition_of_fp32_groups`)."""
NORM_BYTES = 8
"""`get_norm_dtype`: each gradient is converted to fp64 to compute its norm."""
NORM_ELEMENTS = 250_000_000
"""How many elements stage 3 converts at a time if the optimizer is offloaded (`_constant_buffered_norm2`)."""
SENDING_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: the length of a partition is a multiple of this number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """The sizes in `zero_optimization`, in elements."""

    reduce: int
    num_reduce: int
    """Number of reduce buckets: 2 with `overlap_comm`."""
    prefetch: int
    persistence: int
    reuse: int
    """`stage3_max_reuse_distance`."""
    live: int
    """`stage3_max_live_parameters`."""
    sub_group: int
    """Stage 3 updates about this many elements of a rank at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroSettings:
    """The settings of DeepSpeed's engine that every ZeRO stage uses."""

    ranks: int
    element_bytes: int
    """Bytes of the engine's dtype, in which gradients are sent and kept."""
    buckets: Buckets
    contiguous: bool
    """Whether gradients are copied into a bucket and, under stages 1 and 2, those of this rank's partition into
    `grads_in_partition`; otherwise they wait where backward made them."""
    offloads: bool
    """Whether the optimizer runs on the host."""
    biases_first: bool
    """Whether a matrix's gradient reaches its hook after its bias's, the order in which `addmm` returns them."""
    scales_loss: bool
    """Whether the loss is scaled (fp16), so that every step looks for infinite gradients (`has_overflow`)."""


def made_at(template: Template, weight: int) -> int:
    """The backward instant of the operation that makes a weight's gradient, which is entry number `weight`. The gradient is
    born then or, if it replaces a saved tensor, when the operation is done."""
    return int(template.dies[weight]) - 1


class Partitions(Layout):
    """What the stages share: main copies, their gradients in the optimizer step, and norms."""

    holds_main_parameters = True

    def __init__(self, tensors: Sequence[StoredTensor], settings: ZeroSettings) -> None:
        super().__init__(tensors)
        self.ranks, self.element_bytes, self.buckets = settings.ranks, settings.element_bytes, settings.buckets
        self.contiguous, self.offloads = settings.contiguous, settings.offloads
        self._biases_first, self._scales_loss = settings.biases_first, settings.scales_loss
        self.trained = [t for t in tensors if t.trains]
        self.gradient_bytes = self.trained[0].element_bytes
        """Bytes of an element as backward makes it; adapters' gradients may be wider than what is sent."""
        self.groups = [group for group in (self._group(decays=True), self._group(decays=False)) if group]
        self._partition_gradients: list[int] = []
        self._norms: list[int] = []
        self._orders: dict[int, list[int]] = {}
        """By id of a template, as all the following: results of `in_order`."""
        self._ended_bytes: dict[int, list[int]] = {}
        """Bytes that backward frees before each instant."""
        self._updated = 0
        self._wide: list[int] = []

    def _group(self, *, decays: bool) -> list[StoredTensor]:
        """One of the Trainer's two groups, with or without weight decay."""
        return [t for t in self.trained if t.decays == decays]

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part of a group."""
        return round_up(sum(t.numel for t in group), SENDING_ALIGNMENT * self.ranks) // self.ranks

    def hold_main(self, step: Step) -> None:
        """Hold the fp32 partitions."""
        for index in range(len(self.groups)):
            self._hold_main_of(step, index, born=0)

    def _hold_main_of(self, step: Step, index: int, *, born: int) -> None:
        if not self.offloads:
            size = self.partition(self.groups[index]) * MAIN_BYTES
            step.hold(f"fp32_partition.{index}", Category.MAIN_PARAMETERS, size, born, module="optimizer")

    def build_main(self, step: Step, index: int) -> None:
        """Make the fp32 partition of a group from a clone of its narrow one (`.clone().float()`)."""
        size = 0 if self.offloads else self.partition(self.groups[index]) * self.element_bytes
        clone = step.allocate("partition.clone", Category.OTHER, [size])
        step.moment("clone", Phase.INIT)
        self._hold_main_of(step, index, born=step.now)
        step.moment("to_float32", Phase.INIT)
        step.free(clone)

    def build_gradients(self, step: Step, elements: Iterable[int]) -> None:
        """Make fp32 gradients of so many elements for an update that is never made, and free them
        (`initialize_optimizer_states`)."""
        sizes = [] if self.offloads else [count * MAIN_BYTES for count in elements]
        made = step.allocate("partition.grad", Category.OTHER, sizes)
        step.moment("initialize_optimizer_states", Phase.INIT)
        step.free(made)
        step.moment("built", Phase.INIT)

    def optimized(self) -> list[TrainedTensor]:
        """The partitions that the optimizer updates; none on the GPU if it is offloaded."""
        if self.offloads:
            return []
        return [
            TrainedTensor(f"partition.{index}", "optimizer", (self.partition(group),), MAIN_BYTES, group[0].decays)
            for index, group in enumerate(self.groups)
        ]

    def in_order(self, template: Template) -> list[int]:
        """Indices of the weights' gradients of a block, in the order in which its backward makes them."""
        if id(template) not in self._orders:
            self._orders[id(template)] = self._order(template)
        return self._orders[id(template)]

    def ended_bytes(self, run: BlockRun, at: int) -> int:
        """Bytes that the backward operation at instant `at` of its block frees when it is done, apart from weights'
        gradients."""
        template = run.template
        if id(template) not in self._ended_bytes:
            ends = template.dies_backward & ~template.weight_gradient
            freed = np.zeros(int(template.dies.max(initial=0)) + 1, dtype=np.int64)
            np.add.at(freed, template.dies[ends], template.num_bytes[ends])
            self._ended_bytes[id(template)] = freed.tolist()
        freed_at = self._ended_bytes[id(template)]
        return freed_at[at + 1] if at + 1 < len(freed_at) else 0

    def _order(self, template: Template) -> list[int]:
        """As `in_order`, whose results are kept by template."""
        after_bias = larger_than_their_bias(template) if self._biases_first else set()
        weights = template.gradient_columns.tolist()
        return sorted(weights, key=lambda index: (made_at(template, index), index in after_bias))

    def _largest_gradient(self) -> int:
        """Elements of the largest piece of a gradient that this rank holds after backward."""
        raise NotImplementedError

    def norm_in_backward(
        self, step: Step, elements: Iterable[int], now: int, *, more_bytes: int = 0, at_a_time: int | None = None
    ) -> int:
        """If the optimizer is offloaded, each gradient's norm is computed before it is copied to the host
        (`set_norm_for_param_grad_in_gpu`), one after the other, and the norms are kept until the optimizer step.
        `elements`: of this rank's part of each gradient; `more_bytes`: bytes per element of what else exists meanwhile;
        `at_a_time`: how many elements are converted at once, by default a whole part. Returns the bytes of the
        temporaries."""
        pieces = list(elements)
        self._norms += step.allocate("norm_for_param_grads", Category.TEMPORARIES, [NORM_BYTES] * len(pieces), born=now)
        most = max(pieces, default=0)
        return most * more_bytes + min(most, at_a_time or most) * NORM_BYTES

    def _overflow_check(self) -> tuple[list[int], int]:
        """The bytes of the tensors with which all gradients on the GPU are searched for infinite ones, and their stream."""
        raise NotImplementedError

    def clip(self, step: Step) -> None:
        if self._scales_loss and not self.offloads:
            sizes, stream = self._overflow_check()
            looked = step.allocate("has_overflow", Category.TEMPORARIES, sizes, stream=stream)
            step.moment("has_overflow", Phase.GRADIENT_CLIPPING)
            step.free(looked)
        size = 0 if self.offloads else self._largest_gradient() * NORM_BYTES
        norm = step.allocate("norm.to_float64", Category.TEMPORARIES, [size])
        step.moment("scaled_global_norm", Phase.GRADIENT_CLIPPING)
        step.free(norm)

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """One flat partition at a time."""
        return [[tensor] for tensor in trained]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """Add flattening the partition's gradients and, if they are narrower than fp32, widening them. The gradients of all
        groups are freed with the last group."""
        sizes = [t.numel * self.element_bytes for t in group] if self._joins_gradients() else []
        flat = step.allocate("partition.flat_gradient", Category.GRADIENTS, sizes)
        step.moment("flatten", Phase.OPTIMIZER_STEP)
        if self.element_bytes == MAIN_BYTES:
            self._wide, flat = flat, []
        else:
            self._wide = step.allocate("fp32_partition.grad", Category.GRADIENTS, [t.num_bytes for t in group])
        step.moment("to_float32", Phase.OPTIMIZER_STEP)
        step.free(flat)
        self._updated += 1
        if self._updated == self._groups_with_gradients():
            step.free(self._partition_gradients.copy())
            self._partition_gradients = []

    def _groups_with_gradients(self) -> int:
        """How many groups have been updated when none of this rank's gradients is needed any more."""
        return len(self.groups)

    def _joins_gradients(self) -> bool:
        """Whether the next partition to be updated has gradients of several tensors; flattening the gradient of a single
        one gives a view (torch `utils/tensor_flatten.h` flatten_dense_tensors)."""
        return True

    def after_update(self, step: Step) -> None:
        step.free(self._wide)

    def release_gradients(self, step: Step) -> None:
        if self.offloads:
            step.moment("optimizer.step on the host", Phase.OPTIMIZER_STEP)
        step.free(self._partition_gradients.copy())
        step.free(self._norms.copy())
