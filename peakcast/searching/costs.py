"""What a plan costs in time: recomputed operations, idle pipeline stages, bytes sent between ranks, bytes offloaded.

Each is a fraction of the time that the step's operations take alone, estimated from data sheets (`catalog/speeds.toml`):
good enough to order plans, but no prediction of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from peakcast.catalog import Device
from peakcast.catalog.speeds import Speed, speed
from peakcast.explaining.collectives import CollectiveCall
from peakcast.explaining.communication import sent_by_call
from peakcast.explaining.groups import CONTEXT, DATA, EXPERT, EXPERT_DATA, GRADIENT, PIPELINE
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Parallelism, TrainingJob
from peakcast.models.ledger.parameters.inventory import num_parameters

FORWARD_SHARE = 1 / 3
"""The forward's part of a step's operations; backward has twice as many (Narayanan et al. 2021, arXiv:2104.04473,
appendix)."""
SPLIT_BUBBLE = 1 / 3
"""Fraction of a 1F1B schedule's bubble that is left if backward is split into two halves (Qi et al. 2023, arXiv:2401.10241,
ZB-H1)."""
PCIE_BYTES_PER_SECOND = 25e9
"""What PCI Express 4 x16 reaches in practice of its 32 GB/s; a rank's share of the host memory's bandwidth is about as
much. A judgement."""
UPDATE_BYTES = 28
"""Bytes per parameter that AdamW on the host reads and writes: two fp32 states and the weight, each read and written, and
the gradient, read once."""
SHORTEST_PIECE = 4096
"""Tokens of a sequence on a context-parallel rank below which attention becomes no faster. A judgement: published layouts
leave 8,192 on each rank (Llama Team 2024, arXiv:2407.21783, table 4: 131,072 on 16)."""
LAYER_ACTIVATIONS = 34
"""Bytes of activations per token and hidden unit of a layer (Korthikanti et al. 2022, arXiv:2205.05198, section 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Extra times as fractions of the time that the step's operations take; `sent_bytes` is what a rank of the first or of
    the last pipeline stage sends per optimizer step, whichever sends more."""

    recompute: float
    bubble: float
    """Time for which pipeline stages are idle: because of the schedule, and because they wait for the slowest stage."""
    sending: float
    """Time of communication that does not overlap with computation."""
    offloading: float
    sent_bytes: int

    @property
    def total(self) -> float:
        """How much longer the step takes than its operations alone: 0.25 means a quarter longer."""
        return (1 + self.recompute) * (1 + self.bubble) - 1 + self.sending + self.offloading


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """Seconds of a step's communication, by the computation with which it can overlap, and the bytes of all of it."""

    in_the_way: float = 0.0
    """Overlaps with nothing: the next operation needs it (tensor, expert and pipeline parallelism)."""
    around_the_ring: float = 0.0
    """Overlaps with attention over the keys and values that have arrived."""
    every_micro_batch: float = 0.0
    """Overlaps with all operations: weights are gathered and gradients are reduced layer by layer."""
    once: float = 0.0
    """Overlaps with the last micro-batch's backward."""
    num_bytes: int = 0

    def most(self, other: CommunicationCost) -> CommunicationCost:
        """The larger of both, part by part."""
        return CommunicationCost(*(max(getattr(self, name), getattr(other, name)) for name in self.__slots__))


def cost(job: TrainingJob, device: Device, sent: CommunicationCost | None = None) -> Cost:
    """The costs of `job` on `device`; `sent`: its communication, if that has been computed already."""
    sent = sent or sending(job, device)
    step, attention = step_seconds(job, device), attention_share(job.architecture, job.sequence_length)
    last_backward = (1 - FORWARD_SHARE) * step / job.gradient_accumulation_steps
    pieces = max(0.0, SHORTEST_PIECE * job.parallelism.context_parallel_size / job.sequence_length - 1)
    exposed = (
        sent.in_the_way
        + (attention * step * pieces if job.parallelism.context_parallel_size > 1 else 0.0)
        + max(0.0, sent.around_the_ring - attention * step)
        + max(0.0, sent.every_micro_batch - step)
        + max(0.0, sent.once - last_backward)
    )
    return Cost(
        recompute=recompute(job),
        bubble=(1 + bubble(job)) * slowest_stage(job) - 1,
        sending=exposed / step,
        offloading=_offload_seconds(job, step) / step,
        sent_bytes=sent.num_bytes,
    )


def order(job: TrainingJob, found: Cost) -> tuple[float, int, int]:
    """The key by which plans are ordered: the extra time, to a thousandth of a step; then how much has to be set up (the
    number of kinds of parallelism and of kinds of offloaded tensors); then the bytes sent."""
    layout, offload = job.parallelism, job.offload
    split = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.context_parallel_size
    kinds = sum(size > 1 for size in (*split, layout.expert_parallel_size))
    kinds += sum((offload.optimizer, offload.parameters, offload.activations))
    return round(found.total, 3), kinds, found.sent_bytes


# -- operations ---------------------------------------------------------------------------------------------------------


def step_seconds(job: TrainingJob, device: Device) -> float:
    """Seconds for which a rank computes in one optimizer step, without recomputation and idle time."""
    layout, a = job.parallelism, job.architecture
    tokens = job.micro_batch_size * job.sequence_length * job.gradient_accumulation_steps * layout.data_parallel_size
    trained = 6 if job.finetuning.method == "full" else 4  # frozen weights have no gradients of their own
    per_token = trained * active_parameters(a) + 3 * _attention_operations(a, job.sequence_length)
    return tokens * per_token / (layout.world_size * speed(device.name).operations_per_second)


def attention_share(architecture: Architecture, sequence_length: int) -> float:
    """Fraction of a step's operations that are attention between tokens."""
    attention = 3 * _attention_operations(architecture, sequence_length)
    return attention / (attention + 6 * active_parameters(architecture))


def _attention_operations(a: Architecture, sequence_length: int) -> int:
    """Operations of attention per token in the forward of all layers: 4·s·h for the scores and the weighted sums, halved by
    the causal mask (Korthikanti et al. 2022, arXiv:2205.05198, section 5)."""
    return 2 * sequence_length * a.num_attention_heads * a.head_dim * a.num_hidden_layers


@lru_cache(maxsize=1024)
def active_parameters(architecture: Architecture) -> int:
    """Parameters that are used for each token: of the routed experts only those to which it is sent."""
    a, moe = architecture, architecture.moe
    if a.kind == "undescribed":
        return 12 * a.num_hidden_layers * a.hidden_size**2
    total = num_parameters(a)
    if moe is None:
        return total
    routed = sum(a.is_moe_layer(layer) for layer in range(a.num_hidden_layers))
    return total - routed * (moe.num_experts - moe.num_experts_per_tok) * 3 * a.hidden_size * moe.moe_intermediate_size


def recompute(job: TrainingJob) -> float:
    """Operations recomputed in backward, as a fraction of a step without recomputation.

    A layer's forward is 24·b·s·h² + 4·b·s²·h operations, its attention scores 4·b·s²·h (Korthikanti et al. 2022,
    arXiv:2205.05198, section 5): full checkpointing recomputes all of it, selective checkpointing the scores.
    """
    checkpointing, a = job.activation_checkpointing, job.architecture
    if checkpointing.mode == "none":
        return 0.0
    if checkpointing.mode == "selective":
        return FORWARD_SHARE * job.sequence_length / (6 * a.hidden_size + job.sequence_length)
    return FORWARD_SHARE / checkpointing.every_n_layers


def bubble(job: TrainingJob) -> float:
    """Idle time of a pipeline stage as a fraction of the time for which it computes: (p − 1) / (v·m) for p stages, v
    virtual stages per rank and m micro-batches (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    layout = job.parallelism
    idle = (layout.pipeline_parallel_size - 1) / job.gradient_accumulation_steps
    if layout.pipeline_schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        return idle / layout.virtual_pipeline_stages
    return idle * SPLIT_BUBBLE


def slowest_stage(job: TrainingJob) -> float:
    """Operations of the pipeline stage with the most, as a multiple of the mean: all others wait for it. The last stage
    also has the output layer; the embedding is a look-up and counts as no operation."""
    a, layout = job.architecture, job.parallelism
    stages, virtual = layout.pipeline_parallel_size, layout.virtual_pipeline_stages
    if stages == 1:
        return 1.0
    table = a.vocab_size * a.hidden_size
    tables = table if a.tie_word_embeddings else 2 * table
    attention = 3 * _attention_operations(a, job.sequence_length) / a.num_hidden_layers
    layer = 6 * max(0, active_parameters(a) - tables) / a.num_hidden_layers + attention
    layers = layout.pipeline_layers or (a.num_hidden_layers // (stages * virtual),) * (stages * virtual)
    work = [sum(layers[stage::stages]) * layer for stage in range(stages)]
    work[-1] += 6 * table
    return max(work) * stages / sum(work)


# -- bytes --------------------------------------------------------------------------------------------------------------


def sending(job: TrainingJob, device: Device) -> CommunicationCost:
    """What a rank of the first or of the last pipeline stage sends per optimizer step, whichever sends more."""
    found, fast = CommunicationCost(), speed(device.name)
    for rank in {0, job.parallelism.world_size - 1}:
        seconds, num_bytes = dict.fromkeys(HIDDEN_BY.values(), 0.0) | {"in_the_way": 0.0, "once": 0.0}, 0
        for call, size in sent_by_call(job, rank):
            hidden = HIDDEN_BY.get(call.axis, "in_the_way")
            hidden = "once" if hidden == "every_micro_batch" and call.once else hidden
            seconds[hidden] += size / _bytes_per_second(call, job.parallelism, device.gpus_per_node, fast)
            num_bytes += size
        found = found.most(CommunicationCost(**seconds, num_bytes=num_bytes))
    return found


HIDDEN_BY = {
    CONTEXT: "around_the_ring",
    DATA: "every_micro_batch",
    GRADIENT: "every_micro_batch",
    EXPERT_DATA: "every_micro_batch",
}
"""Axis of parallelism -> the field of `CommunicationCost` for its communication; that of all other axes is `in_the_way`."""


def _bytes_per_second(call: CollectiveCall, layout: Parallelism, gpus_per_node: int, fast: Speed) -> float:
    """Bandwidth of one rank in `call`. A ring over several nodes uses the network links of all its ranks within a node; a
    rank that sends to one other rank, or to each, uses only its own. Ranks are in the order tp-cp-dp-pp."""
    link, network = fast.link_gb_per_s * 1e9, fast.network_gb_per_s * 1e9
    inside = max(1, min(call.group_size, gpus_per_node // max(1, _stride(call.axis, layout))))
    if inside >= call.group_size:
        return link
    if call.axis == PIPELINE or call.function == "send/recv":
        return network
    if call.axis == EXPERT:
        return network * (call.group_size - 1) / (call.group_size - inside)
    return min(link, inside * network)


_STRIDES: dict[str, Callable[[Parallelism], int]] = {
    CONTEXT: lambda layout: layout.tensor_parallel_size,
    GRADIENT: lambda layout: layout.tensor_parallel_size,
    EXPERT: lambda layout: layout.tensor_parallel_size,
    DATA: lambda layout: layout.tensor_parallel_size * layout.context_parallel_size,
    EXPERT_DATA: lambda layout: layout.tensor_parallel_size * layout.expert_parallel_size,
    PIPELINE: lambda layout: layout.world_size // layout.pipeline_parallel_size,
}


def _stride(axis: str, layout: Parallelism) -> int:
    """Distance in ranks between neighbours of a group along `axis`."""
    return _STRIDES[axis](layout) if axis in _STRIDES else 1


def _offload_seconds(job: TrainingJob, step: float) -> float:
    """Seconds per step for copies to and from host memory and for the optimizer's update on the host."""
    layout, offload, a = job.parallelism, job.offload, job.architecture
    if not (offload.optimizer or offload.parameters or offload.activations):
        return 0.0
    sharded = layout.num_replicas if layout.zero_stage or layout.sharding != "none" else 1
    held = num_parameters(a) if a.kind != "undescribed" else active_parameters(a)
    parameters = held / (layout.tensor_parallel_size * layout.pipeline_parallel_size * sharded)
    moved = 0.0
    if offload.optimizer and job.finetuning.method == "full":
        moved += parameters * (UPDATE_BYTES + 4)  # gradients to the host and weights back, 2 bytes each
    if offload.parameters:
        moved += 2 * 2 * parameters * job.gradient_accumulation_steps
    seconds = moved / PCIE_BYTES_PER_SECOND
    if offload.activations:
        tokens = job.micro_batch_size * job.sequence_length * job.gradient_accumulation_steps
        ranks = layout.tensor_parallel_size * layout.context_parallel_size * layout.pipeline_parallel_size
        out_and_back = 2 * LAYER_ACTIVATIONS * tokens * a.hidden_size * a.num_hidden_layers / ranks
        seconds += max(0.0, out_and_back / PCIE_BYTES_PER_SECOND - step)
    return seconds
