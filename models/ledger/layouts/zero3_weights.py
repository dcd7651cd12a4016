"""Which of ZeRO-3's weights are whole on this rank, and which are being gathered.

Source: DeepSpeed 0.19.8 `runtime/zero/partition_parameters.py` (`_all_gather_sequential`, `_all_gather_coalesced`) and
`partitioned_param_coordinator.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.run_ahead import Awaited
from peakcast.models.ledger.layouts.zero import BUFFERS, Buckets
from peakcast.models.ledger.layouts.zero3_instants import GatheredBefore, Instants
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3Engine:
    """How an engine gathers and releases."""

    ranks: int
    sizes: Buckets
    packs: bool
    """Whether a checkpoint keeps trained weights that its recomputation has used, so that a release does not free their
    memory (`torch/utils/checkpoint.py`, not with use_reentrant: `x.detach()` in `_recomputation_hook`)."""
    stream: int = 0
    """The stream on which it allocates. If it is not the computing stream, the block of a released weight can be reused
    only when that has passed (`free_param`: `record_stream`)."""
    reassigns: bool = True
    """Whether frozen weights that a recomputation gathers are released by the module whose backward is running, instead of
    by the modules that are recomputed (`ds_recompute_parameters`, since DeepSpeed 0.19.3)."""
    from_host: bool = False
    """Whether the ranks' parts are in host memory. On one rank a weight is its own part, so only then is there a copy to
    make (`NoGatherCoalescedHandle`)."""

    def persists(self, tensor: StoredTensor) -> bool:
        """Whether every rank keeps the whole tensor between modules."""
        return tensor.numel <= self.sizes.persistence

    def padded_bytes(self, tensor: StoredTensor) -> int:
        """Bytes of the gathered tensor, padded to equal parts."""
        if self.ranks == 1 and not self.from_host:
            return 0
        return -(-tensor.numel // self.ranks) * self.ranks * tensor.gathered_bytes


@dataclass(slots=True)
class Gather:
    """An all-gather that has been started. `tensors`: those that have not been used yet, in order."""

    tensors: dict[StoredTensor, None]
    born: int
    coalesced_bytes: tuple[int, ...]
    """Bytes of the flat outputs from which several tensors are copied, one output for each dtype; empty for a single
    tensor, which is gathered in place."""
    arrived: bool = False
    """Whether a module has waited for it."""


class Weights:
    """Weights that are gathered or on their way, and what gathering allocates on a step."""

    def __init__(self, step: Step, engine: Zero3Engine) -> None:
        self.step, self.engine = step, engine
        self.available: dict[StoredTensor, int] = {}
        """Tensor -> the instant from which it is gathered."""
        self.gathers: dict[StoredTensor, Gather] = {}
        self.elements = 0
        """Gathered elements, as DeepSpeed counts them: from 0 each time the network runs forward."""
        self.awaited = Awaited((), 0, 0)
        """What the CPU waits for in the micro-batch that is played."""
        self._passing = GatheredBefore(-1)
        """The bytes gathered in the instant at which the current turns begin."""
        self._for_good: set[StoredTensor] = set()

    def on(self, step: Step) -> Weights:
        """A copy that goes on upon a fork of the step."""
        forked = copy(self)
        forked.step, forked.available, forked.gathers = step, self.available.copy(), self.gathers.copy()
        return forked

    def begin_instant(self, now: int, instants: Instants) -> None:
        """The turns at instant `now` begin. At the instant of the turns before, hold the bytes by which gathering exceeded
        what the instant's operation allocates."""
        at = self._passing.at
        if at == now:
            return
        if self._passing.any:
            beyond = self._passing.more_than(instants.made_at(at))
            self.step.hold("all_gather", BUFFERS, beyond, at, at + 1, stream=self.engine.stream)
        self._passing = GatheredBefore(now)

    def missing(self, tensors: Iterable[StoredTensor]) -> list[StoredTensor]:
        """Those of `tensors` that are neither gathered nor on their way."""
        return [tensor for tensor in tensors if tensor not in self.available and tensor not in self.gathers]

    def gather(self, tensors: Iterable[StoredTensor], now: int) -> None:
        """Start to gather `tensors` together (`all_gather_coalesced`)."""
        wanted = dict.fromkeys(tensors)
        if not wanted:
            return
        engine, whole, flat = self.engine, 0, dict[int, int]()
        for tensor in wanted:
            size = engine.padded_bytes(tensor)
            whole += size
            flat[tensor.gathered_bytes] = flat.get(tensor.gathered_bytes, 0) + size
            self.elements += tensor.numel
        coalesced = tuple(flat.values()) if len(wanted) > 1 < engine.ranks else ()
        self.gathers.update(dict.fromkeys(wanted, Gather(wanted, now, coalesced)))
        self._passing.allocate(whole)
        if engine.from_host and engine.ranks > 1:  # its own parts are copied to the GPU, to be sent
            self._passing.allocate(whole // engine.ranks)
            self._passing.free(whole // engine.ranks)

    def wait(self, tensor: StoredTensor, now: int) -> None:
        """Finish the gather of `tensor` and of all tensors gathered with it. Their flat buffer is freed when the last of
        them is used."""
        gather = self.gathers.pop(tensor, None)
        if gather is None:
            return
        if not gather.arrived:
            gather.arrived = True
            self.available |= dict.fromkeys(gather.tensors, now if gather.coalesced_bytes else gather.born)
            if gather.coalesced_bytes:
                self._passing.allocate(sum(map(self.engine.padded_bytes, gather.tensors)))
        del gather.tensors[tensor]
        if not gather.tensors:
            self._hold_output(gather, now)
            if gather.born == now:
                self._passing.free(sum(gather.coalesced_bytes))
            else:
                self._passing.free_older(sum(gather.coalesced_bytes))

    def release(self, tensor: StoredTensor, now: int) -> None:
        """Release a gathered tensor at instant `now`."""
        born = self.available.pop(tensor, None)
        if born is not None:
            engine = self.engine
            self.elements -= tensor.numel
            category = Category.PARAMETERS if engine.persists(tensor) else BUFFERS
            stream = engine.stream if born else 0  # small ones from the last step were gathered on the computing stream
            reusable = self.awaited.reusable(now) if stream else 0
            self.step.hold("gathered", category, engine.padded_bytes(tensor), born, now, tensor.module, stream, reusable)

    def drop_gathers(self, now: int) -> None:
        """Wait for what was gathered ahead and free it; several tensors gathered together are only then copied out."""
        for gather in {id(gather): gather for gather in self.gathers.values()}.values():
            self._hold_output(gather, now)
            born = now if gather.coalesced_bytes else gather.born
            self.available = dict.fromkeys(gather.tensors, born) | self.available
            for tensor in gather.tensors:
                self.release(tensor, now)
        self.gathers.clear()

    def release_rest(self, now: int, *, small_too: bool) -> None:
        """Release everything, small tensors only if `small_too`."""
        self.drop_gathers(now)
        for tensor in [t for t in self.available if small_too or not self.engine.persists(t)]:
            self.release(tensor, now)
        self.elements = 0

    def keep_small_tensors(self) -> None:
        """Keep the gathered small tensors for good: no optimizer step will partition them again."""
        for tensor in [t for t in self.available if t not in self._for_good]:
            self._for_good.add(tensor)
            size = self.engine.padded_bytes(tensor)
            self.step.hold("gathered", Category.PARAMETERS, size, self.available[tensor], module=tensor.module)

    def _hold_output(self, gather: Gather, ends: int) -> None:
        """Hold the flat outputs of a gather until `ends`."""
        for size in gather.coalesced_bytes if gather.born < ends else ():
            self.step.hold("all_gather.output", BUFFERS, size, gather.born, ends, stream=self.engine.stream)
