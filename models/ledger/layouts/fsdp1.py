"""FSDP1 (`FullyShardedDataParallel`): the tensors of a unit are one flat parameter, of which each rank keeps an equal part.

Source: torch 2.4-2.13 `distributed/fsdp/_flat_param.py` and `_runtime_utils.py`. An all-gather writes directly into the
flat parameter, of which the tensors are views. In backward the gradients of those views are concatenated to a flat gradient
(the backward of `torch.split`), which is then reduced. A tensor that one stream passes to another is recorded on both
(`_no_dispatch_record_stream`): once freed, its block cannot be reused until both are done with it (`run_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.broadcast import Broadcasts
from peakcast.models.ledger.layouts.flat_parameter import FlatParameter
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.layouts.module_tree import BlockKind
from peakcast.models.ledger.layouts.run_ahead import RunAhead
from peakcast.models.ledger.layouts.sharded import ShardedLayout
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.timelines.timeline import Category, Phase

BUFFERS = Category.COMMUNICATION_BUFFERS
PRE_UNSHARD, UNSHARD, POST_BACKWARD = 1, 2, 3
"""Streams besides the computing one, on which narrow parts, gathered parameters and reduced gradients are allocated
(`_init_streams`, `_unshard`, `_post_backward_hook`). The allocator keeps a pool for each, and never gives one stream's
cached blocks to another. Views are made on UNSHARD too (`_use_unsharded_flat_param`), and autograd runs a node on the
stream of its forward (torch `csrc/autograd/input_metadata.cpp`): so the backward of `torch.split` joins gradients there,
and `_post_backward_hook` frees there what was gathered (pytorch#86910)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDP1Settings:
    """How `FullyShardedDataParallel` is asked to wrap the network. `shards`: the ranks that share one model."""

    shards: int
    reduce_bytes: int | None = None
    """Bytes of one element of a gradient while it is reduced; None: its own."""
    waits: bool = False
    """Whether micro-batches before the last are under `no_sync`: they keep full gradients."""
    prefetches: Literal["", "BACKWARD_PRE", "BACKWARD_POST"] = ""
    """`backward_prefetch`: whether the next unit is gathered before a unit's backward, or after the unit has been resharded
    and before its gradients are reduced (`_post_backward_reshard`)."""
    prefetches_forward: bool = False
    """`forward_prefetch`: whether the next unit is gathered when a unit's forward begins, in the order of the first
    micro-batch, in which none is (`get_handle_to_forward_prefetch`)."""
    keeps_originals: bool = False
    """`use_orig_params`: the optimizer updates each tensor's piece instead of the flat parameter."""
    checkpoints_around_units: bool = False
    """Whether checkpoints with `use_reentrant` are around the units, not inside them. Then a frozen layer's input, which
    the recomputation has made a leaf, and its gradient live until backward ends: the hook that reshards the layer refers
    to the leaf's node, the leaf to the hook, and nothing removes it before `_finalize_params`."""
    reshards_frozen: bool = True
    """Whether backward reshards frozen units (`_register_post_backward_reshard_only_hook`), not its end alone."""
    broadcasts: bool = False
    """`sync_module_states`: rank 0 sends its weights to the others while the network is built."""
    receives_ahead: bool = False
    """Whether this rank's weights are on `meta` until they are received (`Broadcasts`)."""
    stays_after_forward: bool = False
    """`ShardingStrategy.SHARD_GRAD_OP`."""
    limits: bool = True
    """`limit_all_gathers`."""
    offloads: bool = False
    """`CPUOffload`: parts, gradients and so the optimizer's states are on the host. A part is copied to the GPU to be
    gathered (`pre_unshard`), and a reduced gradient to the host (`_offload_grad`); on the GPU it stays until backward ends
    (`_saved_grad_shard`, which `prepare_gradient_for_optim` deletes)."""


class FSDP1(ShardedLayout):
    """Units whose tensors are one flat parameter, gathered and reduced on streams of their own. Collectives that the CPU
    waits for record no stream (torch since 2.2, pytorch#111431)."""

    def __init__(self, tensors: Sequence[StoredTensor], units: Sequence[Unit], settings: FSDP1Settings) -> None:
        super().__init__(tensors, units, prefetches=settings.prefetches == "BACKWARD_PRE", waits=settings.waits)
        self.settings = settings
        self.stays_after_forward = settings.stays_after_forward
        self._flat = {
            unit: FlatParameter.of(unit.tensors, settings.shards, keeps_originals=settings.keeps_originals)
            for unit in self.units
        }
        self._ahead = RunAhead(limits=settings.limits)
        self._keeps_inputs = settings.checkpoints_around_units and settings.reshards_frozen
        self._entered = ""
        """The module whose backward, or the recomputation that precedes it, began last."""
        self._done: list[Unit] = []
        """Units whose backward is done."""
        self._ran_before: dict[Unit, Unit | None] = {}
        """For each adapter unit of a layer, and for the layer: the unit whose forward ended just before its own."""
        self._resharded_late: list[int] = []
        """Handles of gathered frozen layers whose backward is done, but which are not resharded yet. One gradient is that
        of a layer's input, whose hook reshards the layer, and of the output of the layer below, whose hook, which was
        registered first and runs first, gathers that one."""
        self._inputs: list[int] = []
        """Handles of frozen layers' inputs and their gradients (`checkpoints_around_units`)."""
        self._offloaded: list[int] = []
        """Handles of reduced gradients that are on the host too."""
        self._waiting: Unit | None = None
        """A unit whose backward is done and whose gradients are joined after the next unit's backward (`finish`)."""
        self._learns_order = False
        """Whether this is the first micro-batch of all, which tells in which order units run."""

    def build(self, step: Step) -> None:
        """Unit after unit, inner ones first: its tensors are copied from the host, made equal on all ranks, and joined to
        one tensor, of which each rank copies its part (`_init_param_handle_from_module`)."""
        self._hold_whole(step)
        sent = Broadcasts(ahead=self.settings.receives_ahead)
        for unit in self.units:
            sizes = [tensor.numel * tensor.element_bytes for tensor in unit.tensors]
            moved = step.allocate("unsharded", Category.OTHER, sizes, unit.name)
            step.moment("move", Phase.INIT)
            sent.copied_from_host(step)
            if self.settings.broadcasts:
                sent.send(step, unit, sizes)
            whole = step.allocate("flat_param.whole", Category.OTHER, [self._flat[unit].whole_bytes], unit.name)
            step.moment("flatten", Phase.INIT)
            if not self.settings.offloads:
                step.hold("flat_param", Category.PARAMETERS, self._flat[unit].part_bytes, step.now, module=unit.name)
            step.moment("shard", Phase.INIT)
            step.free(whole)
            step.free(moved)
        sent.finish(step)
        step.moment("built", Phase.INIT)

    def _hold_whole(self, step: Step) -> None:
        whole = ((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors if not t.sharded)
        step.hold_all(whole, Category.PARAMETERS)

    def hold_resident(self, step: Step) -> None:
        self._hold_whole(step)
        for unit in self.units if not self.settings.offloads else ():
            step.hold("flat_param", Category.PARAMETERS, self._flat[unit].part_bytes, 0, module=unit.name)

    def optimized(self) -> list[TrainedTensor]:
        """In the order of the network's modules; the root's flat parameter is the first. Tensors that are not sharded come
        here too."""
        whole = {tensor: tensor.optimized(tensor.shape) for tensor in self.tensors if tensor.trains and not tensor.sharded}
        if self.settings.offloads:
            return list(whole.values())
        if not self.settings.keeps_originals:
            parts = [
                TrainedTensor("flat_param", unit.name, (self._flat[unit].part_numel,), unit.tensors[0].element_bytes)
                for unit in self.by_module()
                if unit.trained
            ]
            return [*parts, *whole.values()]
        pieces = whole
        for unit in self.units:
            part = self._flat[unit].part_numel
            for tensor, begin in zip(unit.tensors, self._flat[unit].offsets, strict=True):
                if tensor.trains and begin < part:  # rank 0 has the beginning
                    size = min(tensor.numel, part - begin)
                    pieces[tensor] = tensor.optimized((size,))
        return [pieces[tensor] for tensor in self.tensors if tensor in pieces]

    def before_forward(self, step: Step, module: str) -> None:
        super().before_forward(step, module)
        for unit in self._of_module.get(module, []) if self._gathers_ahead() else ():
            if following := self._unit_after(unit, module):
                self.prefetch(step, following, phase=Phase.FORWARD)

    def _unit_after(self, unit: Unit, module: str) -> Unit | None:
        """The unit that runs after `unit`, if that begins with `module`; None for the last."""
        order = self.by_module()
        begins = module == (BlockKind.EMBEDDING.value if unit is self.units[-1] else unit.modules[0])
        return next(iter(order[order.index(unit) + 1 :]), None) if begins else None

    def gather(self, step: Step, unit: Unit, phase: Phase = Phase.BACKWARD) -> None:
        flat = self._flat[unit]
        narrowed = flat.gathered_part_bytes != flat.part_bytes
        copied = [flat.gathered_part_bytes if narrowed or self.settings.offloads else 0]
        narrow = step.allocate("flat_param.narrow_part", BUFFERS, copied, unit.name, stream=PRE_UNSHARD)
        self._gather(step, unit, step.now)
        step.moment("all_gather", phase)
        if self.settings.offloads and self.settings.keeps_originals and not narrowed:
            unit.gathered += narrow  # the parameters are views of it until they are resharded (`flat_param_to`)
        else:
            self._ahead.let_go(step, narrow)

    def _gather(self, step: Step, unit: Unit, born: int) -> None:
        self._ahead.wait(step)
        size = self._flat[unit].gathered_part_bytes * self.settings.shards
        unit.gathered += step.allocate("flat_param.gathered", BUFFERS, [size], unit.name, born=born, stream=UNSHARD)

    def prefetch(self, step: Step, unit: Unit, *, born: int | None = None, phase: Phase = Phase.BACKWARD) -> None:
        if not unit.gathered:
            if born is None:
                self.gather(step, unit, phase)
            else:
                self._gather(step, unit, born)

    def let_go(self, step: Step, unit: Unit, phase: Phase) -> None:
        if phase == Phase.BACKWARD and unit.trained:
            step.free(unit.gathered)  # on the stream that it was allocated on, so its block can be reused at once
            self._ahead.record()
        else:
            self._free_gathered(step, unit.gathered)

    def _free_gathered(self, step: Step, gathered: list[int]) -> None:
        """`_reshard`: free what is gathered."""
        if gathered:
            self._ahead.let_go(step, gathered)
            self._ahead.record()

    def _flatten(self, step: Step, unit: Unit) -> None:
        """Join the unit's gradients to one flat tensor, and add it to that of earlier micro-batches if there is one."""
        size = self._flat[unit].numel * unit.tensors[0].gathered_bytes
        flat = step.allocate("flat_param.grad", Category.GRADIENTS, [size], unit.name, stream=UNSHARD)
        step.moment("cat", Phase.BACKWARD)
        # the gradients are recorded on the stream that joins them (input_buffer.cpp, `add`)
        self._ahead.let_gradients_go([(run, unit.gradients_in(run.template)) for run in unit.runs])
        self.take_gradients(step, unit)
        if unit.accumulated:
            step.free(flat)
        else:
            unit.accumulated = flat

    def reshards_in_backward(self) -> bool:
        """With SHARD_GRAD_OP only in micro-batches that reduce gradients (`_should_free_in_backward`)."""
        return super().reshards_in_backward() and not (self.stays_after_forward and self.waits and not self.last)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        super().begin_micro_batch(step, first=first, last=last)
        self._done.clear()
        self._learns_order = first and bool(self.first_step)
        if self._learns_order:
            self._begin_training(step)

    def _begin_training(self, step: Step) -> None:
        """The first forward allocates the tensor into which each unit will be gathered and empties it, the root's first.
        Under mixed precision there is one in each of both dtypes, and the wide one may be the first forward's peak
        (`init_flat_param_attributes`)."""
        for unit in (self.units[-1], *self.units[:-1]):
            stored, used = self._flat[unit].part_bytes, self._flat[unit].gathered_part_bytes
            mixed = stored != used
            for name, size in (
                ("flat_param.narrow_part", used * mixed),
                ("flat_param.gathered", used * self.settings.shards),
                ("flat_param.wide", stored * self.settings.shards * mixed),
            ):
                made = step.allocate(name, BUFFERS, [size], unit.name)
                step.moment("init_flat_param_attributes", Phase.FORWARD)
                step.free(made)

    def fetch_after(self, step: Step, unit: Unit) -> None:
        self._done.append(unit)
        following = self.unit_before(unit) if self.settings.prefetches == "BACKWARD_POST" else None
        if following is not None and following not in self._done:
            self.prefetch(step, following)

    def finish(self, step: Step, unit: Unit) -> None:
        """A unit that was gathered ahead in forward has its views made before the forward of the unit before it, whose
        backward autograd therefore runs before it joins this unit's gradients (the later a node was made the earlier it
        runs: torch `csrc/autograd/engine.cpp` `CompareNodeTaskTime`)."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._finish(step, waiting)
        if self._gathers_ahead() and unit is not self.by_module()[0]:
            self._waiting = unit
        else:
            self._finish(step, unit)

    def _gathers_ahead(self) -> bool:
        """Whether units are gathered ahead in this micro-batch's forward."""
        return self.settings.prefetches_forward and not self._learns_order

    def _finish(self, step: Step, unit: Unit) -> None:
        if unit.trained:
            self._flatten(step, unit)
        elif not self._keeps_inputs:
            self._resharded_late += unit.gathered
            unit.gathered.clear()
        super().finish(step, unit)

    def before_backward(self, step: Step, module: str) -> None:
        for unit in self._of_module.get(module, []):
            if module == self._entered and self.settings.checkpoints_around_units and not unit.stays_after_forward:
                self._free_gathered(step, unit.gathered)  # a recomputation of a whole unit ends by resharding it
            elif module == unit.modules[-1] and unit.stays_after_forward and unit.gathered:
                self._ahead.wait(step)  # `_unshard` waits before it finds that there is nothing to gather
        super().before_backward(step, module)
        self._entered = module
        if self.settings.reshards_frozen:
            self._free_gathered(step, self._resharded_late)

    def while_forward(self, step: Step, run: BlockRun) -> None:
        """A matrix that is a unit is gathered only for its own product, also in a recomputation. Adapters that are switched
        off do not run."""
        ran = list(self._operations(run, run.template.instants.forward))
        for at, unit in ran:
            self._gather_for_one_operation(step, unit, run.forward_start + at, Phase.FORWARD)
        if ran and self._ran_before.keys().isdisjoint(unit for _, unit in ran):
            self._note_order(run.module, [unit for _, unit in ran])

    def _operations(self, run: BlockRun, instants: Mapping[str, int]) -> Iterator[tuple[int, Unit]]:
        """The units of single operations of the run's block, with the instants of those operations, in their order."""
        units = self._of_operations.get(run.module, ())
        found = {instants[name]: unit for unit in units for name in unit.operations if name in instants}
        return iter(sorted(found.items()))

    def _gather_for_one_operation(self, step: Step, unit: Unit, at: int, phase: Phase) -> None:
        """Gather a unit for a forward operation that ran at the instant `at`, and reshard it after that."""
        with step.within(at):
            if not unit.gathered:
                self.gather(step, unit, phase)
        with step.within(at + 1):
            if not self.stays_after_forward:
                self.let_go(step, unit, Phase.FORWARD)

    def _note_order(self, module: str, ran: Sequence[Unit]) -> None:
        """Note the order in which units' forwards end; backward reaches them in reverse order (`record_post_forward`)."""
        before = super().unit_before(self._of_operations[module][0])
        for unit in (*ran, *self._of_module.get(module, ())):
            self._ran_before[unit], before = before, unit

    def unit_before(self, unit: Unit) -> Unit | None:
        return self._ran_before[unit] if unit in self._ran_before else super().unit_before(unit)

    def _while_backward(self, step: Step, run: BlockRun) -> None:
        """Gather each matrix that is a unit when its own backward begins, and reduce its gradient when that ends. If the
        block is recomputed inside its backward, not in a run of its own, gather the matrices for the recomputation
        first."""
        begins, instants = run.backward_start or 0, run.template.instants
        for at, unit in self._operations(run, instants.again):
            self._gather_for_one_operation(step, unit, begins + at, Phase.BACKWARD)
        for at, unit in self._operations(run, instants.backward):
            with step.within(begins + at):
                if not unit.gathered:
                    self.gather(step, unit)
                if self.prefetches and (following := self.unit_before(unit)):
                    self.prefetch(step, following)
            with step.within(begins + at + 1):
                unit.runs.append(run)
                self.finish(step, unit)

    def after_backward(self, step: Step, run: BlockRun) -> None:
        self._while_backward(step, run)
        super().after_backward(step, run)
        units = self._of_module.get(run.module, ())
        if self._keeps_inputs and any(not (unit.trained or unit.stays_after_forward) for unit in units):
            self._keep_input(step, run)

    def _keep_input(self, step: Step, run: BlockRun) -> None:
        """Keep a frozen layer's input, and the gradient of the input of the layer after it, until backward ends."""
        output_gradient = run.template.output_gradient
        if self._inputs and output_gradient is not None:  # it is kept from here on by the next layer's input, a leaf
            used = (run.backward_start or 0) + int(run.template.dies[output_gradient])
            size = run.template.output_gradient_bytes
            self._inputs += step.allocate("checkpoint.grad", Category.TEMPORARIES, [size], run.module, born=used)
        self._inputs += step.allocate("checkpoint", Category.ACTIVATIONS, [run.template.input_bytes], run.module)

    def end_backward(self, step: Step) -> None:
        super().end_backward(step)
        for handles in (self._resharded_late, self._inputs, self._offloaded):
            step.free(handles)
        self._entered = ""
        self._ahead.catch_up(step)  # the Trainer checks whether the loss is a number (`logging_nan_inf_filter`)

    def keep_full(self, step: Step, unit: Unit) -> None:
        """`no_sync`: the flat gradient stays as it is."""

    def reduce(self, step: Step, unit: Unit) -> None:
        stored, used = unit.tensors[0].element_bytes, unit.tensors[0].gathered_bytes
        width, numel, part = self.settings.reduce_bytes or used, self._flat[unit].numel, self._flat[unit].part_numel
        flat, unit.accumulated = unit.accumulated, []
        sources: list[int] = []
        if width != used:
            wide = step.allocate("flat_param.grad.cast", BUFFERS, [numel * width], unit.name, stream=POST_BACKWARD)
            step.moment("reduce_scatter.cast_in", Phase.BACKWARD)
            sources += wide
        if numel % self.settings.shards:
            padded = [part * self.settings.shards * width]
            sources += step.allocate("flat_param.grad.padded", BUFFERS, padded, unit.name, stream=POST_BACKWARD)
        result = step.allocate("gradient", Category.GRADIENTS, [part * width], unit.name, stream=POST_BACKWARD)
        step.moment("reduce_scatter", Phase.BACKWARD)
        if width != stored:
            narrow = result
            result = step.allocate("gradient", Category.GRADIENTS, [part * stored], unit.name, stream=POST_BACKWARD)
            step.moment("reduce_scatter.cast", Phase.BACKWARD)
            step.free(narrow)
        self._ahead.let_go(step, flat)
        step.free(sources)
        if self.settings.offloads:
            step.moment("offload_grad", Phase.BACKWARD)
            self._offloaded += result
        elif unit.gradient:
            step.free(result)
        else:
            unit.gradient = result

    def release_gradients(self, step: Step) -> None:
        """With `use_orig_params` only the tensors' own `.grad`s are freed; the flat gradient that they are views of stays
        until the root's next forward begins (`_reset_flat_param_grad_info_if_needed`)."""
        if not self.settings.keeps_originals:
            super().release_gradients(step)
