"""DeepSpeed ZeRO: flat partitions with fp32 main copies, and the buckets in which gradients are reduced.

Read from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py` and
`config.py`. Compared with traces on real CPU tensors (`collectors/grids/agreement-deepspeed.yaml`). Sizes of buckets are in
elements, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from peakcast.models.analytical.layouts.base import Layout, StoredTensor
from peakcast.models.analytical.optimizer_rules.rule import TrainedTensor
from peakcast.models.analytical.step import Run, Step
from peakcast.models.analytical.template import Template
from peakcast.timeline import Category, Phase
from peakcast.units import round_up

BUFFERS = Category.COMMUNICATION_BUFFERS
GATHERING, REDUCING = 1, 2
"""Streams beside the one that computes, with `overlap_comm`: on which stage 3 gathers weights (`__allgather_stream`), and
any stage reduces gradients (`reduction_stream`, `reduce_and_partition_stream`). The allocator keeps a pool for each."""
MAIN_BYTES = 4
"""The main copy and its gradient are fp32, also for an fp32 network (`single_partition_of_fp32_groups`)."""
NORM_BYTES = 8
"""`get_norm_dtype`: each gradient is converted to fp64 for its norm."""
NORM_ELEMENTS = 250_000_000
"""Stage 3 does so with so many elements at a time when the optimizer is offloaded (`_constant_buffered_norm2`)."""
SENDING_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a partition is a multiple of this many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """`zero_optimization`'s sizes, in elements."""

    reduce: int
    num_reduce: int
    """2 with `overlap_comm`."""
    prefetch: int
    persistence: int
    reuse: int
    """`stage3_max_reuse_distance`."""
    live: int
    """`stage3_max_live_parameters`."""
    sub_group: int
    """Stage 3 updates at most about so many elements of a rank at a time."""


def ended_bytes(run: Run, at: int) -> int:
    """Bytes that the backward's operation `at` has let go of when it is done, weights' gradients apart."""
    template = run.template
    ends = template.dies_backward & (template.dies == at + 1) & ~template.weight_gradient
    return int(template.num_bytes[ends].sum())


def made_at(template: Template, weight: int) -> int:
    """The backward instant of the operation that makes a weight's gradient, entry number `weight`; born then, or, where it
    takes the place of what was kept, when that is over."""
    return int(template.dies[weight]) - 1


class Partitions(Layout):
    """What the stages share: main copies, their gradients in the optimizer's step, and norms."""

    holds_main_parameters = True

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        ranks: int,
        element_bytes: int,
        buckets: Buckets,
        offloads: bool,
        biases_first: bool,
    ) -> None:
        super().__init__(tensors)
        self.biases_first = biases_first
        """Whether a matrix's gradient is seen after its bias's: `addmm` hands them on in that order."""
        self.ranks = ranks
        self.element_bytes = element_bytes
        """Of the engine's dtype, in which gradients are sent and kept."""
        self.buckets = buckets
        self.offloads = offloads
        self.trained = [t for t in tensors if t.trains]
        self.gradient_bytes = self.trained[0].element_bytes
        """As backward makes them: adapters may be wider than what they are sent as."""
        self.groups = [group for group in (self._group(decays=True), self._group(decays=False)) if group]
        self._partition_gradients: list[int] = []
        self._norms: list[int] = []
        self._updated = 0
        self._wide: list[int] = []

    def _group(self, *, decays: bool) -> list[StoredTensor]:
        """The Trainer's two groups: with and without weight decay."""
        return [t for t in self.trained if t.decays == decays]

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part of a group."""
        return round_up(sum(t.numel for t in group), SENDING_ALIGNMENT * self.ranks) // self.ranks

    def hold_main(self, step: Step) -> None:
        """The fp32 partitions."""
        for index, group in enumerate(self.groups):
            if not self.offloads:
                size = self.partition(group) * MAIN_BYTES
                step.hold(f"fp32_partition.{index}", Category.MAIN_PARAMETERS, size, 0, module="optimizer")

    def optimized(self) -> list[TrainedTensor]:
        """Nothing on the GPU when the optimizer is offloaded."""
        if self.offloads:
            return []
        return [
            TrainedTensor(f"partition.{index}", "optimizer", (self.partition(group),), MAIN_BYTES, group[0].decays)
            for index, group in enumerate(self.groups)
        ]

    def in_order(self, template: Template) -> list[int]:
        """The weights' gradients of a block, as its backward makes them."""
        size = dict(zip(template.names, template.num_bytes.tolist(), strict=True))

        def after_bias(name: str) -> bool:  # a norm's two are as large as each other
            return self.biases_first and size.get(name.replace(".weight.grad", ".bias.grad"), size[name]) < size[name]

        weights = template.weight_gradient.nonzero()[0].tolist()
        return sorted(weights, key=lambda index: (made_at(template, index), after_bias(template.names[index])))

    def _largest_gradient(self) -> int:
        """Elements of the largest piece of a gradient that this rank holds when backward is over."""
        raise NotImplementedError

    def norm_in_backward(self, step: Step, elements: Iterable[int], now: int, *, more_bytes: int = 0) -> int:
        """When the optimizer is offloaded, a gradient's norm is taken as it leaves (`set_norm_for_param_grad_in_gpu`), one
        after the other; the norms wait for the optimizer's step. `elements`: of this rank's part of each; `more_bytes`: per
        element, of what is there meanwhile. Returns the bytes that this takes in passing."""
        pieces = list(elements)
        self._norms += step.allocate("norm_for_param_grads", Category.TEMPORARIES, [NORM_BYTES] * len(pieces), born=now)
        return max(pieces, default=0) * more_bytes + min(max(pieces, default=0), NORM_ELEMENTS) * NORM_BYTES

    def clip(self, step: Step) -> None:
        size = 0 if self.offloads else self._largest_gradient() * NORM_BYTES
        norm = step.allocate("norm.to_float64", Category.TEMPORARIES, [size])
        step.moment("scaled_global_norm", Phase.GRADIENT_CLIPPING)
        step.free(norm)

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """One flat partition at a time."""
        return [[tensor] for tensor in trained]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """The partition's gradients are flattened, then widened where they are narrower; those of all groups go with the
        last's."""
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
            step.free(self._partition_gradients)

    def _groups_with_gradients(self) -> int:
        """How many groups are updated until none of this rank's gradients is left to be."""
        return len(self.groups)

    def _joins_gradients(self) -> bool:
        """Whether the next partition to be updated has gradients of several tensors: those of one are flattened to a view
        (torch `utils/tensor_flatten.h` flatten_dense_tensors)."""
        return True

    def after_update(self, step: Step) -> None:
        step.free(self._wide)

    def release_gradients(self, step: Step) -> None:
        if self.offloads:
            step.moment("optimizer.step on the host", Phase.OPTIMIZER_STEP)
        step.free(self._partition_gradients)
        step.free(self._norms)
