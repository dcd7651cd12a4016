"""FSDP2 (`fully_shard`) and HSDP: every tensor is split by rows (dimension 0), each part padded to the same size.

Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, `_fsdp_collectives.py`, `_fsdp_param.py`; 2.4-2.11
allocate the same. An all-gather goes into one buffer, from which each tensor is copied into a storage of its own; in
forward the buffer is freed only after the next unit's copy-out. A reduce-scatter's input lives until the next unit's input
is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.ledger.layouts.sharded import ShardedLayout
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.update_in_backward import ParameterKey
from peakcast.timelines.timeline import Category, Phase

BUFFERS = Category.COMMUNICATION_BUFFERS
ALL_GATHER_COPY_IN, REDUCE_SCATTER, ALL_REDUCE = 1, 2, 3
"""Streams besides the computing one (`FSDPCommContext.lazy_init`), each with a pool of its own in the allocator."""
_SIZING = attrgetter("shape", "sharded", "expert_ranks", "element_bytes", "gathered_bytes", "sent_bytes", "trains")
"""The attributes of a tensor on which the sizes of its unit depend."""


@dataclass(frozen=True, slots=True)
class _GroupSizes:
    """Bytes of tensors that are gathered at once. `alone`: no other rank shares them. `copied`: copies of this rank's parts
    that are made first. `whole`: what the ranks that share each tensor gather."""

    alone: bool
    whole: list[int]
    copied: list[int]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a unit: of its groups, and the number of trained elements in this rank's parts and in all ranks' parts
    together."""

    groups: list[_GroupSizes]
    part: int
    whole: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP2Settings:
    """How `fully_shard` is asked to shard the network. `shards`: the ranks that share one model."""

    shards: int
    replicas: int = 1
    """How many groups of such ranks reduce gradients together: HSDP."""
    reduce_bytes: int | None = None
    """Bytes of one element of a gradient while it is reduced; None: its own."""
    waits: bool = False
    """Whether micro-batches before the last keep full gradients (`set_requires_gradient_sync`)."""
    offloads: bool = False
    """`CPUOffloadPolicy`: parts, their gradients and the optimizer's states are in host memory."""
    stays_after_forward: bool = False
    """`reshard_after_forward=False`."""
    loss_outside: bool = False
    """Whether the loss is not a part of the network's forward, which then ends before it."""
    forward_again: frozenset[str] = frozenset()
    """Modules whose recomputation counts as a forward for the hooks: reentrant checkpointing calls the module before its
    backward has begun (`FSDPState._pre_forward`; otherwise the state is already that of backward, and the hooks return at
    once)."""


class FSDP2(ShardedLayout):
    """Units whose tensors are split by rows, gathered through one buffer and reduced from another."""

    updates_as_reduced = True

    def __init__(self, tensors: Sequence[StoredTensor], units: Sequence[Unit], settings: FSDP2Settings) -> None:
        super().__init__(tensors, units, prefetches=True, waits=settings.waits)
        self.settings = settings
        self.stays_after_forward = settings.stays_after_forward
        self.prefetches_forward = any(tensor.expert_ranks > 1 for tensor in tensors)
        """Whether a unit's forward starts the gather of the next one: torchtitan 0.3 `apply_fsdp`, if experts are
        divided."""
        self._entered = ""
        """The module whose backward, or the recomputation before it, began last."""
        self._sizes: dict[Unit, _Sizes] = {}
        self._alike: dict[tuple[Any, ...], _Sizes] = {}
        """The sizes of units, by those attributes of their tensors."""
        self._parts: dict[tuple[bool, tuple[int, ...], int], tuple[tuple[int, ...], int]] = {}
        self._optimized: list[TrainedTensor] = []
        """What the optimizer updates, filled when it is first needed; copies of this layout share it."""
        self._copied_out: list[int] = []
        """The last all-gather's output, kept until the next copy-out (`comm_ctx.all_gather_state`)."""
        self._reduced_from: list[int] = []
        """The last reduce-scatter's input (`comm_ctx.reduce_scatter_states`)."""
        self._all_reduced: list[int] = []
        """What HSDP's replicas reduced together, if it is not the gradient itself; kept until backward ends
        (`_all_reduce_state` of each parameter group, `finalize_backward`)."""

    # -- sizes ------------------------------------------------------------------------------------------------------------

    def part(self, tensor: StoredTensor) -> tuple[int, ...]:
        """Shape of one rank's padded part; the whole shape if the tensor is not sharded."""
        return self._part_and_numel(tensor)[0]

    def _part_numel(self, tensor: StoredTensor) -> int:
        """Elements of one rank's padded part."""
        return self._part_and_numel(tensor)[1]

    def _part_and_numel(self, tensor: StoredTensor) -> tuple[tuple[int, ...], int]:
        """`part` and its elements; cached by shape, because layers are alike."""
        alike = tensor.sharded, tensor.shape, tensor.expert_ranks
        if (found := self._parts.get(alike)) is None:
            part = self._part(tensor)
            found = self._parts[alike] = part, math.prod(part)
        return found

    def _part(self, tensor: StoredTensor) -> tuple[int, ...]:
        """`part`, computed."""
        if not tensor.sharded:
            return tensor.shape
        rows, *rest = tensor.shape or (1,)
        shards = self._shards(tensor)
        if tensor.expert_ranks > 1 and shards > rows:  # torchtitan 0.3 `apply_fsdp`: Shard(1) for experts
            return (rows, -(-rest[0] // shards), *rest[1:])
        return (-(-rows // shards), *rest)

    def _shards(self, tensor: StoredTensor) -> int:
        """Number of ranks that share a tensor, among those with the same experts."""
        return max(1, self.settings.shards // tensor.expert_ranks)

    def _sizes_of(self, unit: Unit) -> _Sizes:
        """The sizes of a unit; cached, because each micro-batch needs them several times and layers are alike."""
        if (found := self._sizes.get(unit)) is None:
            alike = tuple(map(_SIZING, unit.tensors))
            if (found := self._alike.get(alike)) is None:
                parts = [self._part_numel(t) for t in unit.trained]
                whole = sum(part * self._shards(t) for part, t in zip(parts, unit.trained, strict=True))
                groups = [self._group_sizes(group) for group in _groups(unit)]
                found = self._alike[alike] = _Sizes(groups, sum(parts), whole)
            self._sizes[unit] = found
        return found

    def _group_sizes(self, group: Sequence[StoredTensor]) -> _GroupSizes:
        """The sizes of tensors that are gathered at once."""
        # no other rank shares these tensors, as with experts divided over all ranks: they are copied without an all-gather
        alone = group[0].expert_ranks > 1 and self._shards(group[0]) == 1
        parts = [self._part_numel(t) for t in group]
        sent = [t.sent_bytes or t.gathered_bytes for t in group]
        whole = [part * self._shards(t) * size for part, t, size in zip(parts, group, sent, strict=True)]
        copied = [
            part * size
            for part, t, size in zip(parts, group, sent, strict=True)
            if self.settings.offloads or size != t.element_bytes
        ]
        # copied from the host one by one, or narrowed into one tensor (`_get_param_all_gather_inputs`)
        return _GroupSizes(alone, whole, copied if self.settings.offloads else [sum(copied)])

    # -- memory kept between steps ----------------------------------------------------------------------------------------

    def hold_resident(self, step: Step) -> None:
        if self.settings.offloads:
            return
        parts = ((t.name, t.module, self._part_numel(t) * t.element_bytes) for t in self.tensors)
        step.hold_all(parts, Category.PARAMETERS)

    def optimized(self) -> list[TrainedTensor]:
        if not self._optimized and not self.settings.offloads:
            self._optimized += [t.optimized(self.part(t)) for t in self.tensors if t.trains]
        return self._optimized.copy()

    # -- gathering --------------------------------------------------------------------------------------------------------

    def gather(self, step: Step, unit: Unit, phase: Phase = Phase.BACKWARD) -> None:
        ahead = bool(unit.sent)
        for group in self._sizes_of(unit).groups:
            if not ahead:
                self._all_gather(step, unit, group, phase)
            unit.gathered += step.allocate("gathered", BUFFERS, group.whole, unit.name)
            step.moment("all_gather.copy_out", phase)
            sent = [] if group.alone else [unit.sent.pop(0)]
            if phase == Phase.BACKWARD and self.settings.forward_again.isdisjoint(unit.modules):
                step.free(sent)
            else:  # `wait_for_unshard` refers to the previous one until it returns
                step.free(self._copied_out)
                self._copied_out = sent

    def _all_gather(self, step: Step, unit: Unit, group: _GroupSizes, phase: Phase) -> None:
        """Start an all-gather: copies of this rank's parts, if those are wider, and the output of all ranks."""
        if group.alone:
            return
        casts = step.allocate("all_gather.cast", BUFFERS, group.copied, unit.name, stream=ALL_GATHER_COPY_IN)
        self._send(step, unit, group, step.now)
        step.moment("all_gather", phase)
        step.free(casts)

    def _send(self, step: Step, unit: Unit, group: _GroupSizes, born: int) -> None:
        """Allocate the output of an all-gather from instant `born` on."""
        if group.alone:
            return
        size = sum(group.whole)
        unit.sent += step.allocate("all_gather.output", BUFFERS, [size], unit.name, born=born, stream=ALL_GATHER_COPY_IN)

    def prefetch(self, step: Step, unit: Unit, *, born: int | None = None, phase: Phase = Phase.BACKWARD) -> None:
        if not unit.gathered and not unit.sent:
            for group in self._sizes_of(unit).groups:
                if born is None:
                    self._all_gather(step, unit, group, phase)
                else:
                    self._send(step, unit, group, born)

    def before_backward(self, step: Step, module: str) -> None:
        if module in self.settings.forward_again and module != self._entered:
            for unit in self._of_module.get(module, []):
                if not unit.gathered:
                    self.gather(step, unit)
        else:  # a forward that ends with this module frees the buffer at its end; backward starts the next gather
            step.free(self._copied_out)
            super().before_backward(step, module)
        self._entered = module

    def before_forward(self, step: Step, module: str) -> None:
        super().before_forward(step, module)
        for unit in self._of_module.get(module, []) if self.prefetches_forward else []:
            if unit is not self.units[-1]:
                self.prefetch(step, self.units[self.units.index(unit) + 1], phase=Phase.FORWARD)

    def while_forward(self, step: Step, run: BlockRun) -> None:
        super().while_forward(step, run)
        if self.settings.loss_outside and block_of(run.module) is BlockKind.HEAD:
            with step.within(run.forward_start + run.template.loss_from):
                self.end_forward(step)

    def after_forward(self, step: Step, module: str) -> None:
        super().after_forward(step, module)
        if block_of(module) is BlockKind.HEAD:
            self.end_forward(step)

    def end_forward(self, step: Step) -> None:
        """When the root's forward ends, the last copied-out buffer is freed."""
        step.free(self._copied_out)

    # -- reducing ---------------------------------------------------------------------------------------------------------

    def reduce(self, step: Step, unit: Unit) -> None:
        if unit.accumulated:
            self.take_gradients(step, unit)
        step.free(self._reduced_from)
        stored, used = unit.trained[0].element_bytes, unit.trained[0].gathered_bytes
        width = self.settings.reduce_bytes or used
        last = unit.trained[-1]
        last_bytes = last.numel * last.gradient_parts * (width if unit.accumulated else used)
        self._reduced_from = self._copy_in(step, unit, width)
        # `foreach_reduce` first iterates over gradients (torch 2.6 and later); its variable `unsharded_grad` refers to the
        # last one until it returns: of a large vocabulary on few ranks, that is the step's peak
        referenced = step.allocate("gradient.last", Category.GRADIENTS, [last_bytes], unit.name)
        result = self._reduce_scatter(step, unit, width, stored)
        self._update(step, unit)
        step.free(referenced)
        used_up = bool(unit.gradient or self.settings.offloads or self.updates)
        if used_up and self.settings.replicas > 1 and width == stored:
            self._all_reduced += result
        elif used_up:  # it has been added to the existing part, copied to the host, or applied
            step.free(result)
        else:
            unit.gradient = result

    def _copy_in(self, step: Step, unit: Unit, width: int) -> list[int]:
        """Copy the unit's full gradients into one tensor, the input of the reduce-scatter, and free them."""
        source = step.allocate("reduce_scatter.input", BUFFERS, [self._sizes_of(unit).whole * width], unit.name)
        step.moment("reduce_scatter.copy_in", Phase.BACKWARD)
        self.take_gradients(step, unit)
        step.free(unit.accumulated)
        return source

    def _reduce_scatter(self, step: Step, unit: Unit, width: int, stored: int) -> list[int]:
        """Reduce to this rank's part, of `width` bytes an element, and cast that to the `stored` bytes of its weights."""
        numel, replicated = self._sizes_of(unit).part, self.settings.replicas > 1
        result = step.allocate("gradient", Category.GRADIENTS, [numel * width], unit.name, stream=REDUCE_SCATTER)
        step.moment("reduce_scatter", Phase.BACKWARD)
        if width == stored:
            return result
        stream = ALL_REDUCE if replicated else REDUCE_SCATTER
        cast = step.allocate("gradient", Category.GRADIENTS, [numel * stored], unit.name, stream=stream)
        step.moment("reduce_scatter.cast", Phase.BACKWARD)
        if replicated:
            self._all_reduced += result
        else:
            step.free(result)
        return cast

    def _update(self, step: Step, unit: Unit) -> None:
        """`_post_accumulate_grad_hooks`, which `foreach_reduce` calls for one parameter after the other on the stream that
        reduces. The gradients are views of one tensor, which is freed when all have been applied."""
        stream = ALL_REDUCE if self.settings.replicas > 1 else REDUCE_SCATTER
        for tensor in unit.trained if self.updates else ():
            own = self.updates[ParameterKey(tensor.module, tensor.name)]
            for name, module, num_bytes in own.states:
                step.hold(name, Category.OPTIMIZER_STATES, num_bytes, step.now, module=module, stream=stream)
            temporary = Category.OPTIMIZER_TEMPORARIES
            step.hold("update", temporary, own.num_bytes, step.now, step.now + 1, "optimizer", stream)
            step.moment("update", Phase.BACKWARD)

    def take_parts(self, step: Step, unit: Unit) -> None:
        if any(t.gradient_parts > 1 for t in unit.trained):
            width = self.settings.reduce_bytes or unit.trained[0].gathered_bytes
            parts = step.allocate("gradient.part", Category.GRADIENTS, (t.numel * width for t in unit.trained), unit.name)
            step.moment("gradient.redistribute", Phase.BACKWARD)
            self.take_gradients(step, unit)
            step.free(unit.accumulated)
            unit.accumulated = parts

    def keep_full(self, step: Step, unit: Unit) -> None:
        """`to_accumulated_grad_if_needed`: widen each gradient to the dtype in which it will be reduced."""
        used = unit.trained[0].gathered_bytes
        width = self.settings.reduce_bytes or used
        if width == used or not unit.runs:
            return
        self.take_gradients(step, unit)
        if unit.accumulated:  # added in place to the existing gradients
            return
        sizes = [t.numel * t.gradient_parts for t in unit.trained]
        narrow = [step.allocate("gradient.full", Category.GRADIENTS, [size * used], unit.name) for size in sizes]
        wide: list[int] = []
        for size, gradient in zip(sizes, narrow, strict=True):
            wide += step.allocate("gradient.full", Category.GRADIENTS, [size * width], unit.name)
            step.moment("gradient.widen", Phase.BACKWARD)
            step.free(gradient)
        unit.accumulated = wide

    def end_turns(self, step: Step) -> None:
        super().end_turns(step)
        step.free(self._reduced_from)
        step.free(self._all_reduced)

    def end_backward(self, step: Step) -> None:
        super().end_backward(step)
        self._entered = ""
        step.free(self._reduced_from)
        step.free(self._all_reduced)


def _groups(unit: Unit) -> list[list[StoredTensor]]:
    """The tensors of a unit that are gathered at once: experts divided over ranks are on another mesh than the rest."""
    divided = [[t for t in unit.tensors if (t.expert_ranks > 1) == expert] for expert in (False, True)]
    return [group for group in divided if group]
