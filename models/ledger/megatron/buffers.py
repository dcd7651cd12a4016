"""The contiguous buffers of a Megatron-LM rank's parameters and gradients, and the parts of them that the rank's optimizer
owns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from peakcast.core.units import DTYPE_BYTES, FP8
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.distributed_optimizer import BufferRules, bucket_size, buffer_elements, shard_pieces
from peakcast.models.ledger.megatron.fp8_parameters import MXFP8_BLOCK, is_fp8_parameter
from peakcast.models.ledger.megatron.fsdp import hold_shards, is_fully_sharded
from peakcast.models.ledger.megatron.layer_wise_optimizer import packed, ping_pong
from peakcast.models.ledger.megatron.parameters import Parameter, chunk_parameters
from peakcast.models.ledger.megatron.share import RankShare, activations_share, weights_share
from peakcast.models.ledger.megatron.states import main_parameters
from peakcast.models.ledger.tape.columns import RecordedColumns
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category


def parameters_share(share: RankShare) -> RankShare:
    """The share that all jobs with the same parameters on this rank have: data parallelism divides buffers, not parameters,
    and neither the batch nor what is recomputed changes them."""
    return activations_share(weights_share(share))


def owned_parameters(share: RankShare) -> list[list[Parameter]]:
    """The parameters of each model chunk."""
    return _owned_parameters(parameters_share(share))


@lru_cache(maxsize=512)
def _owned_parameters(share: RankShare) -> list[list[Parameter]]:
    architecture, pipelined = share.job.architecture, share.job.parallelism.pipeline_parallel_size > 1
    ahead = (architecture.num_hidden_layers - 1,) * architecture.num_nextn_predict_layers
    tied = architecture.tie_word_embeddings
    return [
        chunk_parameters(share.layer_context, chunk, tied=tied, pipelined=pipelined, ahead=ahead) for chunk in share.chunks
    ]


def trained_parameters(share: RankShare) -> list[list[Parameter]]:
    """The parameters of each model chunk that train: all of them, or only the adapters."""
    owned = owned_parameters(share)
    return [[p for p in chunk if p.adapter] for chunk in owned] if share.context.frozen else owned


def frozen_parameters(share: RankShare) -> list[Parameter]:
    """The parameters that do not train; they are in no buffer."""
    return [p for chunk in owned_parameters(share) for p in chunk if not p.adapter] if share.context.frozen else []


def buffer_rules(share: RankShare, *, expert: bool = False) -> BufferRules:
    """How the buffers of the rank's chunks are laid out and sharded. `expert`: those of the routed experts, whose replicas
    are the ranks of a stage divided by expert and expert tensor parallelism."""
    layout, convention = share.job.parallelism, share.convention
    replicas = layout.data_parallel_size * layout.context_parallel_size
    shards = replicas
    if expert and share.context.experts is not None:
        shards = replicas * layout.tensor_parallel_size // share.context.experts.group_size
    overlaps, asked = bool(convention.get("overlap_grad_reduce")), int(convention.get("ddp_bucket_size", 0) or 0)
    return BufferRules(
        sharded=layout.zero_stage > 0,
        shards=max(1, shards // int(convention.get("num_distributed_optimizer_instances", 1) or 1)),
        bucket_size=bucket_size(overlaps, share.stage, replicas, asked),
        high_bandwidth_padding=bool(convention.get("ddp_pad_buckets_for_high_nccl_busbw")),
    )


def _place_among_replicas(share: RankShare, *, expert: bool) -> int:
    """The rank's position among those that hold the same parameters, or the same routed experts (megatron-core 0.16.1
    `parallel_state.py`: orders tp-cp-ep-dp-pp and, for experts, tp-ep-dp-pp)."""
    experts = share.context.experts
    if expert and experts is not None:
        return share.shard // experts.group_size
    return share.shard // share.job.parallelism.tensor_parallel_size


def owns_whole_tensors(job: TrainingJob) -> bool:
    """Whether the optimizer is Megatron-LM's layer-wise one, which never divides a matrix."""
    return job.framework == "megatron" and job.optimizer.name == "muon" and job.parallelism.zero_stage > 0


@dataclass(frozen=True, slots=True)
class Buffer:
    """A contiguous buffer: its parameters, its layout rules, its number of elements, and the pieces that this rank's
    optimizer owns."""

    parameters: list[Parameter]
    rules: BufferRules
    elements: int
    pieces: list[tuple[Parameter, int]]
    width: int
    """Bytes of an element of its parameters."""

    @property
    def whole(self) -> list[tuple[Parameter, int]]:
        """Every parameter with all its elements."""
        return [(p, p.numel) for p in self.parameters]


@lru_cache(maxsize=256)
def buffers(share: RankShare) -> list[Buffer]:
    """The contiguous buffers of the rank: for each chunk, one for the parameters that every data-parallel rank has and one
    for those of the routed experts (`distributed_data_parallel.py`: `dense_params`, `expert_parallel_params`); each again
    divided by dtype (`fp8-param-gather`), or with a layer-wise optimizer by whether it owns the parameter whole."""
    found = []
    width = int(DTYPE_BYTES[share.job.precision.parameters])
    layer_wise = owns_whole_tensors(share.job)
    if layer_wise and not share.convention["use_layer_wise_param_layout"]:
        return _dealt_out(share, width)
    for parameters in trained_parameters(share):
        kinds: dict[tuple[bool, bool, bool], list[Parameter]] = {
            kind: [] for kind in itertools.product((False, True), (False, True), (False, True))
        }
        for p in parameters:
            kinds[p.expert, is_fp8_parameter(share, p), layer_wise and p.is_matrix].append(p)
        for (expert, in_fp8, matrices), members in kinds.items():
            if not members:
                continue
            rules, place = buffer_rules(share, expert=expert), _place_among_replicas(share, expert=expert)
            if matrices:
                elements, owned = packed(tuple(members), rules)
                pieces = owned[place % rules.shards]
            else:
                elements, pieces = buffer_elements(members, rules), shard_pieces(members, rules, place)
            found.append(Buffer(members, rules, elements, pieces, FP8 if in_fp8 else width))
    return found


def _dealt_out(share: RankShare, width: int) -> list[Buffer]:
    """The buffers if whole tensors of all chunks are dealt out to the ranks' optimizers, and nothing else is sharded."""
    found = []
    for expert in (False, True):
        rules, place = buffer_rules(share, expert=expert), _place_among_replicas(share, expert=expert)
        chunks = [[p for p in parameters if p.expert == expert] for parameters in trained_parameters(share)]
        owned = ping_pong(tuple(p for members in chunks for p in members), rules.shards)[place % rules.shards]
        whole = replace(rules, sharded=False)
        for members in filter(None, chunks):
            pieces = [(p, numel) for p, numel in owned if p in members]
            found.append(Buffer(members, whole, buffer_elements(members, whole), pieces, width))
    return found


def tensors_of(pieces: Iterable[tuple[Parameter, int]], suffix: str, width: int) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the tensors with the first elements of each parameter, at `width` bytes per element."""
    return [(f"{p.name}{suffix}", p.module, part * width) for p, numel in pieces for part in p.parts(numel)]


def shares_gradient_buffer(share: RankShare) -> bool:
    """Whether MXFP8 parameters are gathered into the gradient buffer and copied from there, so that no parameter lies in
    a buffer (`reuse_grad_buf_for_mxfp8_param_ag`).

    Source: megatron-core 0.16.1 `distributed/param_and_grad_buffer.py` (`_ParamAndGradBuffer.__init__`,
    `finish_param_sync`).
    """
    return share.context.fp8_recipe == "mxfp8" and bool(share.convention.get("fp8_param_gather"))


def parameter_buffer_bytes(share: RankShare, buffer: Buffer) -> int:
    """Bytes of the buffer that parameters are gathered into; 0 if there is none, or if parameters use the gradients'
    buffer."""
    if not buffer.rules.sharded or (buffer.width == FP8 and shares_gradient_buffer(share)):
        return 0
    return buffer.elements * buffer.width


def own_tensors(share: RankShare, buffer: Buffer) -> list[tuple[str, str, int]]:
    """(name, module, bytes) of the parameters that are tensors of their own: MXFP8 ones by rows and by columns, each with a
    scale for every 32 elements."""
    if buffer.rules.sharded and not shares_gradient_buffer(share):
        return []
    if buffer.width == FP8 and shares_gradient_buffer(share):
        return [
            (f"{p.name}{suffix}", p.module, size)
            for p, numel in buffer.whole
            for suffix, size in (("", numel), (".scales", numel // MXFP8_BLOCK))
            for _ in ("rows", "columns")
        ]
    return tensors_of(buffer.whole, "", buffer.width)


@lru_cache(maxsize=512)
def parameters_held(share: RankShare) -> RecordedColumns:
    """`hold_parameters`, recorded."""
    step = Step()
    hold_parameters(step, share)
    return step.record()


def hold_parameters(step: Step, share: RankShare) -> None:
    """Parameters, gradient buffer and fp32 main parameters of every chunk."""
    precision = share.job.precision
    if is_fully_sharded(share):
        for parameters in owned_parameters(share):
            hold_shards(step, share, parameters)
        return
    gradient, main = int(DTYPE_BYTES[precision.gradients]), main_parameters(share)
    frozen = [(p, p.numel) for p in frozen_parameters(share)]
    step.hold_all(tensors_of(frozen, "", int(DTYPE_BYTES[precision.parameters])), Category.PARAMETERS)
    for buffer in buffers(share):
        if size := parameter_buffer_bytes(share, buffer):
            step.hold("parameter_buffer", Category.PARAMETERS, size, 0, module="model")
        step.hold_all(own_tensors(share, buffer), Category.PARAMETERS)
        step.hold("gradient_buffer", Category.GRADIENTS, buffer.elements * gradient, 0, module="model")
        if main.width and not main.made_by_step:
            step.hold_all(tensors_of(buffer.pieces, ".main", main.width), Category.MAIN_PARAMETERS)
