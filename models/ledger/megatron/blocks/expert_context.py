"""How a Megatron-LM rank routes tokens to experts, and its share of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterContext:
    """How the router scores experts and chooses among them."""

    element_bytes: int
    """Bytes of one element of its logits and probabilities."""
    sinkhorn: bool
    """Whether it balances by Sinkhorn's iterations."""
    aux_loss: bool
    """Whether it has balancing losses, however many: they share their scores (`compute_routing_scores_for_aux_loss`)."""
    z_loss: bool
    score_function: Literal["softmax", "sigmoid"]
    pre_softmax: bool
    """Whether the softmax is over all experts, instead of over the chosen ones."""
    expert_bias: bool
    """Whether a bias of each expert, which balances them, takes part in the choice."""
    fusion: bool
    """Whether one kernel computes scores and chooses, and another makes the scores for the auxiliary loss."""
    groups: int
    """Number of groups of experts among which it chooses first (`moe-router-num-groups`); 1 for none."""
    chosen_groups: int
    """Number of groups from which a token's experts come (`moe-router-group-topk`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertContext:
    """One rank's share of a routed feed-forward; its widths are already divided by their tensor-parallel sizes."""

    num_experts: int
    local_experts: int
    top_k: int
    ffn: int
    """Width of one expert's activation on this rank."""
    shared_ffn: int
    """Width of the shared expert's activation on this rank; 0 for none."""
    shared_gate: bool
    expert_parallel_size: int
    expert_tensor_parallel_size: int
    dispatcher: Literal["allgather", "alltoall", "deepep", "hybridep"]
    grouped: bool
    """Whether one grouped product computes all local experts, instead of a loop over them."""
    joined_weights: bool
    """Whether the matrices of all local experts in that product are one parameter (`--moe-use-legacy-grouped-gemm`)."""
    placeholders_anew: bool
    """Whether that product's fused weight gradients return new placeholders to autograd, one for each expert."""
    permute_fusion: bool
    keeps_expert_output: bool
    """Whether returning rows to their tokens saves them (`index_add_`, under deterministic algorithms)."""
    router: RouterContext
    capacity_factor: float
    """Tokens that an expert accepts from a rank, relative to the balanced number; 0 for no limit."""
    pad_to_capacity: bool
    fused_weighted_activation: bool
    """Whether one kernel applies the activation and the probability, and saves only their inputs."""
    worst_case: bool
    """Whether every token of the expert-parallel group goes to this rank's experts, instead of an equal share."""
    recompute_layer: bool
    """`recompute-modules moe`: the whole routed feed-forward is recomputed in backward."""
    recompute_activation: bool
    """`recompute-modules moe_act`: the activation of grouped experts is recomputed in backward."""
    recompute_shared: bool
    """`recompute-modules shared_experts`."""
    overlap_shared: bool
    """`moe-shared-expert-overlap`: the shared expert gathers its input itself and saves it gathered."""

    @property
    def group_size(self) -> int:
        """Number of ranks that exchange tokens: expert tensor × expert parallel."""
        return self.expert_tensor_parallel_size * self.expert_parallel_size

    def capacity(self, tokens: int) -> int:
        """Number of tokens that one expert accepts from a rank with `tokens` tokens (`get_capacity`)."""
        return math.ceil(tokens * self.top_k / self.num_experts * self.capacity_factor)

    def sent_rows(self, tokens: int) -> int:
        """Number of copies of its `tokens` tokens that a rank sends to experts."""
        if self.capacity_factor and self.pad_to_capacity:
            return self.capacity(tokens) * self.num_experts
        if self.capacity_factor:
            return min(tokens * self.top_k, self.capacity(tokens) * self.num_experts)
        return tokens * self.top_k

    def received_rows(self, tokens: int) -> int:
        """Number of copies of tokens that this rank's experts process, with `tokens` tokens on every rank of the group."""
        most = tokens * self.group_size * min(self.top_k, self.local_experts)
        if self.capacity_factor:
            most = min(most, self.capacity(tokens) * self.local_experts * self.group_size)
            if self.pad_to_capacity:
                return self.capacity(tokens) * self.local_experts * self.group_size
        return most if self.worst_case else min(most, self.sent_rows(tokens) * self.expert_tensor_parallel_size)

    def received_tokens(self, tokens: int) -> int:
        """Number of tokens that this rank receives from all `group_size` ranks; a token counts once, however many experts
        here it has."""
        every = tokens * self.group_size
        return every if self.worst_case else round(every * self._chance_of_a_rank())

    def _chance_of_a_rank(self) -> float:
        """Probability that a token chooses any expert of one rank, if all groups are equally likely, and all experts in
        them."""
        size = self.num_experts // self.router.groups
        spanned = max(1, self.local_experts // size)  # groups that have experts of the rank
        inside = min(self.local_experts, size)
        ways = math.comb(self.router.groups, self.router.chosen_groups)
        passed_by = 0.0
        for hit in range(min(spanned, self.router.chosen_groups) + 1):
            others = math.comb(self.router.groups - spanned, self.router.chosen_groups - hit)
            choice = size * self.router.chosen_groups
            missed = math.comb(choice - inside * hit, self.top_k) / math.comb(choice, self.top_k)
            passed_by += math.comb(spanned, hit) * others / ways * missed
        return 1 - passed_by
