"""Data-parallel layouts: which part of each tensor a rank holds, what it gathers and when, and what becomes of a
gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import DTYPE_BYTES, MIB
from peakcast.jobs.conventions import conventions, fuses_loss, mixes_precision
from peakcast.jobs.loss import REFERRING
from peakcast.jobs.ranks import ranks_that_differ
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.ddp import DDP
from peakcast.models.ledger.layouts.fsdp1 import FSDP1, FSDP1Settings
from peakcast.models.ledger.layouts.fsdp2 import FSDP2, FSDP2Settings
from peakcast.models.ledger.layouts.looped_experts import expert_by_expert
from peakcast.models.ledger.layouts.module_tree import Block, block_of
from peakcast.models.ledger.layouts.units import Ends, named_ends, units_by_layer
from peakcast.models.ledger.parameters.module_order import in_order_of_modules
from peakcast.networks.families import family_of

if TYPE_CHECKING:
    from peakcast.models.ledger.layouts.zero3_modules import ModuleTurns


def layout_of(
    job: TrainingJob,
    tensors: Sequence[StoredTensor],
    outputs: Sequence[int] = (),
    rank: int | None = None,
    modules: ModuleTurns | None = None,
    ends: Ends | None = None,
) -> Layout:
    """The layout of `job` for the network's `tensors`, on rank 0; no rank holds more. `outputs`: bytes of the tensors that
    the model returns, its logits first, which DDP may copy. For a network whose modules do not follow from its family:
    `modules`, what ZeRO-3 needs to know of them, and `ends`, what FSDP does."""
    parallelism = job.parallelism
    ranks = parallelism.num_replicas
    if parallelism.zero_stage and job.task == "train":  # DeepSpeed's engine has its buckets and main copies on one rank too
        return _zero(job, tensors, conventions(job), rank, modules)
    if ranks == 1:
        return Layout(tensors)
    chosen = conventions(job)
    # with adapters, peft's enable_input_require_grads comes with checkpointing only
    no_gradient_enters = job.finetuning.method != "full" and job.activation_checkpointing.mode == "none"
    waits = bool(chosen["accumulates_without_sync"])
    stays_after_forward = not chosen.get("fsdp_reshard_after_forward", True)
    sharded = [tensor for tensor in tensors if tensor.sharded]
    if parallelism.sharding in ("fsdp2", "hsdp"):
        shards = ranks
        if parallelism.sharding == "hsdp":  # of one sequence, or of as many as the ranks of a group have
            shards = parallelism.context_parallel_size * min(
                parallelism.data_parallel_size, int(chosen["shard_group_size"])
            )
        ordered = in_order_of_modules(sharded, job.architecture)
        units = units_by_layer(
            ordered,
            ends or _named_ends(job, ordered),
            ends_apart=chosen["fsdp2_units"] == "ends",
            first_layer_without_gradient=no_gradient_enters,
        )
        if chosen.get("fsdp2_last_layer_stays"):
            for unit in [unit for unit in units if block_of(unit.modules[0]) is Block.LAYER][-1:]:
                unit.stays_after_forward = True
        if gathers_head_itself(job):
            units = [unit for unit in units if unit.name != "tail"]
        return FSDP2(
            tensors,
            units,
            FSDP2Settings(
                shards=shards,
                replicas=ranks // shards,
                reduce_bytes=reduced_bytes(job),
                waits=waits,
                offloads=job.offload.parameters,
                stays_after_forward=stays_after_forward,
                loss_outside=bool(chosen.get("loss_outside_network")),
                forward_again=_run_again_by_reentrant_checkpoints(job),
            ),
        )
    if parallelism.sharding == "fsdp1":
        reentrant = job.activation_checkpointing.mode != "none" and job.activation_checkpointing.use_reentrant
        around_units = reentrant and bool(chosen.get("checkpoints_around_units"))
        return FSDP1(
            tensors,
            # peft's fsdp_auto_wrap_policy
            units_by_layer(
                sharded,
                ends or _named_ends(job, sharded),
                adapters_apart=job.finetuning.method in ("lora", "qlora"),
                first_layer_without_gradient=no_gradient_enters,
            ),
            FSDP1Settings(
                shards=ranks,
                reduce_bytes=reduced_bytes(job),
                waits=waits,
                # a unit's first forward has no graph where a reentrant checkpoint is around it, so that no hook says that
                # its backward will need it, and none fetches it (torch 2.13 `_runtime_utils.py`
                # _register_pre_backward_hooks, _get_handle_to_prefetch: `_needs_pre_backward_unshard`)
                prefetches="" if around_units else chosen["fsdp1_backward_prefetch"],
                keeps_originals=bool(chosen["fsdp1_use_orig_params"]),
                checkpoints_around_units=around_units,
                broadcasts=bool(chosen["fsdp1_sync_module_states"]),
                receives_ahead=bool(rank and chosen.get("fsdp1_others_on_meta")),
                stays_after_forward=stays_after_forward,
                limits=bool(chosen["fsdp1_limit_all_gathers"]),
                offloads=job.offload.parameters,
            ),
        )
    # the Trainer looks for unused parameters unless it checkpoints (transformers trainer.py `_build_accelerator_args`)
    finds_unused = bool(chosen.get("trainer")) and job.activation_checkpointing.mode == "none"
    return DDP(
        tensors,
        bucket_bytes=int(chosen["ddp_bucket_cap_mib"]) * MIB,
        views=bool(chosen["ddp_gradient_as_bucket_view"]),
        waits=waits,
        split=parallelism.tensor_parallel_size > 1,
        outputs=outputs if finds_unused else (),
    )


def _named_ends(job: TrainingJob, tensors: Sequence[StoredTensor]) -> Ends:
    """What FSDP makes of the ends of a network that the ledger knows."""
    return named_ends(tensors, tied=job.architecture.tie_word_embeddings, norm_apart=not finds_final_norm(job))


def _run_again_by_reentrant_checkpoints(job: TrainingJob) -> frozenset[str]:
    """Names of the layers that reentrant checkpoints recompute."""
    checkpointing = job.activation_checkpointing
    if checkpointing.mode != "full" or not checkpointing.use_reentrant:
        return frozenset()
    every = checkpointing.every_n_layers
    return frozenset(f"layers.{index}" for index in range(0, job.architecture.num_hidden_layers, every))


def _zero(
    job: TrainingJob,
    tensors: Sequence[StoredTensor],
    chosen: Mapping[str, Any],
    rank: int | None,
    modules: ModuleTurns | None,
) -> Layout:
    """The layout of a ZeRO job."""
    from peakcast.models.ledger.layouts.zero import Buckets
    from peakcast.models.ledger.layouts.zero3 import Zero3
    from peakcast.models.ledger.layouts.zero3_modules import Modules
    from peakcast.models.ledger.layouts.zero12 import Zero12

    stage, ranks = job.parallelism.zero_stage, job.parallelism.data_parallel_size
    # every framework uses DeepSpeed's ZeRO, so DeepSpeed's conventions hold where the job's framework has none
    chosen = {**conventions(job.replace(framework="deepspeed", framework_options=FrozenMapping())), **chosen}
    overlaps = stage == 3 if chosen["overlap_comm"] == "auto" else bool(chosen["overlap_comm"])
    buckets = Buckets(
        reduce=int(chosen["reduce_bucket_size"]),
        num_reduce=2 if overlaps and stage < 3 else 1,
        prefetch=int(chosen["stage3_prefetch_bucket_size"]),
        persistence=int(chosen["stage3_param_persistence_threshold"]),
        reuse=int(chosen["stage3_max_reuse_distance"]),
        live=int(chosen["stage3_max_live_parameters"]),
        sub_group=int(chosen["sub_group_size"]),
    )
    contiguous = bool(chosen.get("contiguous_gradients", True))
    offloads, width = job.offload.optimizer, int(DTYPE_BYTES[job.precision.parameters])
    if stage < 3:
        rank = ranks_that_differ(job)[0] if rank is None else rank
        if chosen.get("experts_implementation") == "loop":
            tensors = expert_by_expert(tensors)
        return Zero12(
            tensors,
            stage=stage,
            ranks=ranks,
            element_bytes=width,
            buckets=buckets,
            rank=rank,
            round_robin=bool(chosen["round_robin_gradients"]),
            contiguous=contiguous or offloads,
            offloads=offloads,
        )
    if modules is None:
        leaf = "mlp" if family_of(job.architecture).libraries.deepspeed_leaf else ""
        scored = job.loss.kind in REFERRING and conventions(job).get("preference_logits") != "whole"
        head_of_root = scored or fuses_loss(job)
        sharded = [tensor for tensor in tensors if tensor.sharded]
        modules = Modules(sharded, head_of_root=head_of_root, leaf=leaf, family=job.architecture.model_type)
    return Zero3(
        tensors,
        ranks=ranks,
        element_bytes=width,
        buckets=buckets,
        packs=not job.activation_checkpointing.use_reentrant,
        contiguous=contiguous,
        overlaps=overlaps,
        offloads=offloads,
        offloads_parameters=job.offload.parameters,
        biases_first=family_of(job.architecture).linear.conv1d,  # DeepSpeed replaces torch's Linear, but not Conv1D
        transposes=family_of(job.architecture).linear.transposes_weight,
        modules=modules,
    )


def finds_final_norm(job: TrainingJob) -> bool:
    """Whether accelerate finds the last norm and groups it with the lm_head (`networks/family.py` Modules.final_norm)."""
    full, found = job.finetuning.method == "full", family_of(job.architecture).modules.final_norm
    if job.framework != "huggingface":
        return full
    return found == "found" or (full and found == "found_without_adapters")


def gathers_head_itself(job: TrainingJob) -> bool:
    """Whether the head's weight is an FSDP2 group by itself whose hooks preference training bypasses: accelerate does not
    find the final norm with which the weight would be gathered."""
    apart = conventions(job).get("fsdp2_units") == "ends" and not job.architecture.tie_word_embeddings
    sharded = job.parallelism.sharding in ("fsdp2", "hsdp") and job.parallelism.num_replicas > 1
    return job.loss.kind in REFERRING and not finds_final_norm(job) and sharded and apart


def expert_ranks(job: TrainingJob) -> int:
    """Number of ranks among which the experts are divided before data parallelism; 1 if the layout cannot tell which rank
    has which expert."""
    layout = job.parallelism
    divides = layout.zero_stage == 0 and layout.sharding != "fsdp1"
    return layout.expert_parallel_size if divides else 1


def gathered_dtype(job: TrainingJob) -> str:
    """The dtype in which blocks use the weights; FSDP's mixed precision gathers them in the compute dtype."""
    return job.precision.wide_compute if mixes_precision(job) else job.precision.parameters


def adapters_are_units(job: TrainingJob) -> bool:
    """Whether an adapter's weight has its stored dtype until its own module runs: FSDP1 has a unit for each, and with
    `use_orig_params` the module has its shard again after each use (peft 0.21 `fsdp_auto_wrap_policy`)."""
    sharded = job.parallelism.sharding == "fsdp1" and job.parallelism.num_replicas > 1
    return sharded and bool(conventions(job).get("fsdp1_use_orig_params"))


def adapters_are_whole(job: TrainingJob) -> bool:
    """Whether FSDP1 leaves adapters whole on every rank and hooks reduce their gradients, because fused functions read the
    weights without running the modules that a unit would gather (fms-acceleration `fms_acceleration_foak/utils.py`
    lora_adapters_switch_ddp_from_fsdp)."""
    sharded = job.parallelism.sharding == "fsdp1" and job.parallelism.num_replicas > 1
    return sharded and conventions(job).get("lora_kernel", "eager") != "eager"


def reduced_bytes(job: TrainingJob) -> int | None:
    """Bytes of one element of a gradient while FSDP reduces it under mixed precision; None without mixed precision."""
    if not mixes_precision(job):
        return None
    dtype = str(conventions(job)["fsdp_reduce_dtype"])
    return int(DTYPE_BYTES[job.precision.wide_compute if dtype == "compute" else dtype])
