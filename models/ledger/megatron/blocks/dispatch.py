"""How tokens of a Megatron-LM mixture of experts get to their experts and back: all-gather, all-to-all, DeepEP or HybridEP.

Source: megatron-core 0.16.1 `transformer/moe/token_dispatcher.py`, `fused_a2a.py`, `moe_utils.py` (`permute`, `unpermute`,
`sort_chunks_by_idxs`), `tensor_parallel/mappings.py`; Transformer Engine 2.8 `pytorch/permutation.py` for the fused forms;
DeepEP's branch hybrid-ep at commit 0237ba62 `deep_ep/hybrid_ep_buffer.py`, `csrc/hybrid_ep/executor/executor.cu`.
"""

from __future__ import annotations

from peakcast.core.units import BOOL, FP32, INT32, INT64
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor


class Dispatch:
    """One dispatch on a tape: `send` returns the experts' rows and their probabilities, `combine` returns the outputs to
    the tokens."""

    def __init__(self, tape: Tape, context: MegatronContext, experts: ExpertContext) -> None:
        self.tape, self.context, self.experts = tape, context, experts
        self.tokens = context.stream_rows
        self.rows = experts.received_rows(self.tokens)
        self.sent = experts.sent_rows(self.tokens)
        self.width = context.hidden * context.element_bytes
        self._alive: list[Tensor] = []
        self._computing: tuple[Tensor, ...] = ()
        """The experts' inputs; variables refer to them until the outputs are ready to be sent back
        (`routed_experts_compute`)."""

    def send(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """[stream_rows, hidden] and [stream_rows, num_experts] to [rows, hidden] and [rows]."""
        ways = {
            "allgather": self._send_by_gathering,
            "alltoall": self._send_by_exchange,
            "deepep": self._send_by_deepep,
            "hybridep": self._send_by_hybridep,
        }
        sent = ways[self.experts.dispatcher](x, probabilities)
        self._computing = sent
        return sent

    def combine(self, output: Tensor) -> Tensor:
        """The experts' [rows, hidden] back to [stream_rows, hidden]."""
        ways = {
            "allgather": self._combine_by_scattering,
            "alltoall": self._combine_by_exchange,
            "deepep": self._combine_by_deepep,
            "hybridep": self._combine_by_hybridep,
        }
        return ways[self.experts.dispatcher](output)

    def release(self) -> None:
        """The layer's forward returns, and with it its variables end."""
        for tensor in self._alive:
            self.tape.hold(tensor)

    # -- all-gather: every rank of the group sees all tokens and takes its experts' ----------------------------------------

    def _send_by_gathering(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, probabilities) of this rank's experts, chosen from the gathered tokens of the group."""
        experts, tape = self.experts, self.tape
        every = self.tokens * experts.group_size
        local = every * experts.local_experts
        if experts.group_size > 1:
            # the tokens go into the global memory buffer; in backward their gradient is reduce-scattered there
            x = tape.operation(
                "dispatch.all_gather", [x], Output(every * self.width, view_of=x, name="global_memory_buffer.view")
            )
            gathered_bytes = every * experts.num_experts * experts.router.element_bytes
            probabilities = tape.operation("dispatch.all_gather_probabilities", [probabilities], gathered_bytes)
        mask = tape.operation("dispatch.local_map", [], local * BOOL)
        chosen = tape.operation("dispatch.local_probabilities", [probabilities], local * experts.router.element_bytes)
        rows = self._permute(x, mask, every, self.rows, local)
        transposed = tape.operation("dispatch.transpose_probabilities", [chosen], local * experts.router.element_bytes)
        selected = tape.operation(
            "dispatch.select_probabilities",
            [transposed],
            self.rows * experts.router.element_bytes,
            saves=Saved([transposed], extra_bytes=[local * BOOL]),
        )
        return rows, selected

    def _combine_by_scattering(self, output: Tensor) -> Tensor:
        """The sums over each token's experts, reduce-scattered to the ranks of the tokens."""
        experts = self.experts
        every = self.tokens * experts.group_size
        gathered = self._unpermute(output, every)
        for tensor in (*self._computing, output):
            self.tape.hold(tensor)
        if experts.group_size == 1:
            return gathered
        return self._reduce_scatter(gathered, every, self.tokens)

    # -- all-to-all: every token goes to its experts' ranks ----------------------------------------------------------------

    def _send_by_exchange(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, probabilities) that arrive at this rank's experts, sorted by expert."""
        experts, tape = self.experts, self.tape
        element = experts.router.element_bytes
        mask = self.tokens * experts.num_experts
        rows = self._permute(x, None, self.tokens, self.sent, mask)
        if experts.permute_fusion:
            with tape.marked(Mark.PERMUTATION):
                chosen = tape.operation("dispatch.permute_probabilities", [probabilities], self.sent * element)
        else:
            transposed = tape.operation("dispatch.transpose_probabilities", [probabilities], mask * element)
            chosen = tape.operation(
                "dispatch.select_probabilities",
                [transposed],
                self.sent * element,
                saves=Saved([transposed], extra_bytes=[mask * BOOL]),
            )
        self._alive += [rows, chosen]
        exchanged = self.rows // experts.expert_tensor_parallel_size
        if experts.expert_parallel_size > 1:
            rows = tape.operation("dispatch.all_to_all", [rows], exchanged * self.width)
            chosen = tape.operation("dispatch.all_to_all_probabilities", [chosen], exchanged * element)
            self._alive += [rows, chosen]
        if experts.expert_tensor_parallel_size > 1:
            rows = tape.operation("dispatch.all_gather", [rows], self.rows * self.width)
            chosen = tape.operation("dispatch.all_gather_probabilities", [chosen], self.rows * element)
        if experts.local_experts > 1:
            rows = self._sort(rows, "dispatch.sort")
            if not self._in_order:
                chosen = tape.operation("dispatch.sort_probabilities", [chosen], self.rows * element)
        return rows, chosen

    def _combine_by_exchange(self, output: Tensor) -> Tensor:
        """The experts' outputs, sent back and added to their tokens."""
        experts, tape, computed = self.experts, self.tape, output
        if experts.local_experts > 1:
            output = self._sort(output, "combine.sort")
        if experts.expert_tensor_parallel_size > 1:
            output = self._reduce_scatter(output, self.rows, self.rows // experts.expert_tensor_parallel_size)
        for tensor in (*self._computing, computed):
            tape.hold(tensor)
        if experts.expert_parallel_size > 1:
            output = tape.operation("combine.all_to_all", [output], self.sent * self.width)
        self._alive.append(output)  # of the layer's forward, while `postprocess` runs
        return self._unpermute(output, self.tokens)

    # -- DeepEP: every token goes to its experts' ranks, once to each, and is copied for their experts there --------------

    def _send_by_deepep(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """`_DeepepManager`. The exchange's handle, which records where tokens went, has a word for each token and rank."""
        experts, tape, arrived = self.experts, self.tape, self.experts.received_tokens(self.tokens)
        local = arrived * experts.local_experts
        chosen = self.tokens * experts.top_k
        weights = tape.operation(
            "dispatch.topk_probabilities",
            [probabilities],
            chosen * FP32,
            saves=Saved(extra_bytes=[chosen * INT64]),
            backward_temporary_bytes=self.tokens * experts.num_experts * experts.router.element_bytes,
        )
        x = tape.operation(
            "dispatch.deepep",
            [x],
            arrived * self.width,
            saves=Saved(extra_bytes=[self.tokens * experts.group_size * (BOOL + INT32) + arrived * INT32]),
        )
        weights = tape.operation("dispatch.deepep_probabilities", [weights], arrived * experts.top_k * FP32)
        self._alive += [x, weights]
        held = tape.operation(
            "dispatch.multihot_probabilities",
            [weights],
            local * FP32,
            # row and column of the chosen entries, which indexing saves; int64 and a mask of the whole map
            saves=Saved(extra_bytes=[4 * self.rows * INT64]),
            forward_temporary_bytes=local * INT64 + arrived * experts.top_k * BOOL,
        )
        self._alive.append(held)
        rows = self._permute(x, None, arrived, self.rows, local)
        with tape.marked(Mark.PERMUTATION):
            return rows, tape.operation("dispatch.permute_probabilities", [held], self.rows * FP32)

    def _combine_by_deepep(self, output: Tensor) -> Tensor:
        """The experts' outputs, added to the tokens that arrived, which DeepEP sends back and adds."""
        experts, tape = self.experts, self.tape
        restored = self._unpermute(output, experts.received_tokens(self.tokens))
        for tensor in (*self._computing, output):
            tape.hold(tensor)
        self._alive.append(restored)
        return tape.operation("combine.deepep", [restored], self.tokens * self.width)

    # -- HybridEP: tokens are sorted by expert on their way, in buffers that PyTorch does not allocate ---------------------

    def _send_by_hybridep(self, x: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """`_HybridEPManager`. The exchange's handle: where each token goes, which of this rank's experts each token of the
        group chose, and the row of each token that arrived for each expert."""
        experts, tape = self.experts, self.tape
        every, arrived = self.tokens * experts.group_size, experts.received_tokens(self.tokens)
        handle = [every * INT32, every * experts.local_experts * BOOL, arrived * experts.local_experts * INT32]
        rows = tape.operation(
            "dispatch.hybridep",
            [x],
            self.rows * self.width,
            gradients=[(x, self.tokens * self.width)],
            saves=Saved(extra_bytes=handle),
            forward_temporary_bytes=every * experts.num_experts * BOOL,  # the routing map of the whole group
        )
        return rows, tape.operation("dispatch.hybridep_probabilities", [probabilities], self.rows * FP32)

    def _combine_by_hybridep(self, output: Tensor) -> Tensor:
        """The experts' outputs, which HybridEP adds to the tokens that arrived, sends back and adds."""
        for tensor in self._computing:
            self.tape.hold(tensor)
        self._alive.append(output)
        return self.tape.operation("combine.hybridep", [output], self.tokens * self.width)

    # -- shared ------------------------------------------------------------------------------------------------------------

    def _permute(self, x: Tensor, mask: Tensor | None, tokens: int, rows: int, map_elements: int) -> Tensor:
        """Rows in the order of their experts. Unfused, backward adds into a new tensor of all tokens."""
        temporary = 0
        if not self.experts.permute_fusion:  # transposed map, arange, nonzero
            temporary = map_elements * BOOL + tokens * INT64 + 2 * rows * INT64
        reads = [x] if mask is None else [x, mask]
        with self.tape.marked(Mark.PERMUTATION):
            return self.tape.operation(
                "dispatch.permute",
                reads,
                rows * self.width,
                saves=Saved(extra_bytes=[_permutation_bytes(self.experts, tokens, rows, map_elements)]),
                gradients=[(x, tokens * self.width)],
                forward_temporary_bytes=temporary,
            )

    def _unpermute(self, output: Tensor, tokens: int) -> Tensor:
        """Add every row to its token; the indices are those of the permutation. `index_add_` saves the rows."""
        saves_output = self.experts.keeps_expert_output
        return self.tape.operation(
            "combine.unpermute",
            [output],
            tokens * self.width,
            saves=[output] if saves_output else [],
            forward_temporary_bytes=tokens * self.width if saves_output else 0,  # zeros are made twice
        )

    def _reduce_scatter(self, x: Tensor, rows: int, kept_rows: int) -> Tensor:
        """Sum `rows` over the group and keep `kept_rows`, in the dtype of the probabilities; x lives until it is done."""
        tape, wide = self.tape, self.context.hidden * self.experts.router.element_bytes
        if wide == self.width:
            return tape.operation("combine.reduce_scatter", [x], kept_rows * self.width)
        output = tape.operation("combine.to_router_dtype", [x], rows * wide)
        output = tape.operation("combine.reduce_scatter", [output], kept_rows * wide)
        output = tape.operation("combine.to_narrow", [output], kept_rows * self.width)
        tape.hold(x)
        return output

    @property
    def _in_order(self) -> bool:
        """Whether rows padded to capacity arrive in the order of local experts, as they do from a single rank."""
        experts = self.experts
        return bool(experts.capacity_factor) and experts.pad_to_capacity and experts.group_size == 1

    def _sort(self, x: Tensor, name: str) -> Tensor:
        """Sort chunks by local expert, or back. Fused, it saves an int32 map of rows unless they are padded."""
        if self._in_order:
            return x
        padded = self.experts.capacity_factor and self.experts.pad_to_capacity
        saved_bytes = [self.rows * INT32] if self.experts.permute_fusion and not padded else []
        return self.tape.operation(name, [x], x.num_bytes, saves=Saved(extra_bytes=saved_bytes))


def _permutation_bytes(experts: ExpertContext, tokens: int, rows: int, map_elements: int) -> int:
    """Bytes of the record of where `rows` copies of `tokens` tokens came from: int64 indices, which index_select saves;
    fused, the map of rows, int32 [tokens, 2·experts + 1]."""
    return (2 * map_elements + tokens) * INT32 if experts.permute_fusion else rows * INT64


def held_by_dispatcher(context: MegatronContext, experts: ExpertContext) -> tuple[int, int]:
    """Bytes that attributes of a layer's dispatcher refer to until its next forward: (of tensors that no graph saves, of
    those that backward needs too)."""
    tokens, element = context.stream_rows, experts.router.element_bytes
    if experts.dispatcher == "allgather":
        rows, every = experts.received_rows(tokens), tokens * experts.group_size
        local = every * experts.local_experts
        return 0, local * BOOL + rows * element + _permutation_bytes(experts, every, rows, local)
    if experts.dispatcher == "hybridep":
        chosen = tokens * experts.num_experts
        return 0, chosen * (BOOL + element) + experts.received_rows(tokens) * FP32
    if experts.dispatcher == "deepep":
        arrived = experts.received_tokens(tokens)
        local = arrived * experts.local_experts
        indices = arrived * experts.top_k * INT64
        permutation_bytes = _permutation_bytes(experts, arrived, experts.received_rows(tokens), local)
        return indices + local * BOOL, local * FP32 + permutation_bytes + tokens * experts.top_k * (INT64 + FP32)
    elements = tokens * experts.num_experts
    permutation_bytes = _permutation_bytes(experts, tokens, experts.sent_rows(tokens), elements)
    return elements * element, elements * BOOL + permutation_bytes
