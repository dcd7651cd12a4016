"""Data-parallel layouts: which part of each tensor a rank holds, what it gathers and when, and what becomes of a
gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from peakcast.core.units import DTYPE_BYTES, MIB
from peakcast.jobs.conventions import conventions, mixes_precision, scores_tokens
from peakcast.jobs.loss import REFERRING
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.ddp import DDP
from peakcast.models.ledger.layouts.fsdp1 import FSDP1, FSDP1Settings
from peakcast.models.ledger.layouts.fsdp2 import FSDP2, FSDP2Settings
from peakcast.models.ledger.layouts.fsdp_units import OutsideLayers, UnitPlace, named_ends, units_by_layer, units_by_module
from peakcast.models.ledger.layouts.module_order import in_order_of_modules
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.ledger.tape.marks import Mark
from peakcast.networks.families import family_of
from peakcast.networks.trained_parts import trained_network

if TYPE_CHECKING:
    from peakcast.models.ledger.layouts.zero3_modules import ModuleTurns


def layout_of(
    job: TrainingJob,
    tensors: Sequence[StoredTensor],
    outputs: Sequence[int] = (),
    rank: int | None = None,
    modules: ModuleTurns | None = None,
    ends: OutsideLayers | None = None,
) -> Layout:
    """The layout of `job` for the network's `tensors`. `rank`: the rank that it is of; None: rank 0, as no rank holds more.
    `outputs`: bytes of the tensors that the model returns, its logits first, which DDP may copy. `modules` and `ends`
    describe the network's modules to ZeRO-3 and to FSDP, if they do not follow from its family."""
    parallelism = job.parallelism
    ranks = parallelism.num_replicas
    if parallelism.zero_stage and job.task == "train":  # DeepSpeed's engine has its buckets and main copies on one rank too
        from peakcast.models.ledger.layouts.zero_of_job import zero_of

        return zero_of(job, tensors, rank, modules)
    if ranks == 1:
        return Layout(tensors)
    if parallelism.sharding in ("fsdp2", "hsdp"):
        return _fsdp2(job, tensors, ends)
    if parallelism.sharding == "fsdp1":
        return _fsdp1(job, tensors, rank, ends)
    return _ddp(job, tensors, outputs)


def _fsdp2(job: TrainingJob, tensors: Sequence[StoredTensor], ends: OutsideLayers | None) -> Layout:
    """The layout of an FSDP2 job, whose groups of ranks may hold replicas of each other (HSDP)."""
    chosen, parallelism = conventions(job), job.parallelism
    ranks = shards = parallelism.num_replicas
    if parallelism.sharding == "hsdp":  # a group of shards includes all ranks that share a sequence
        shards = parallelism.context_parallel_size * min(parallelism.data_parallel_size, int(chosen["shard_group_size"]))
    ordered = in_order_of_modules([tensor for tensor in tensors if tensor.sharded], job.architecture)
    units = units_by_layer(
        ordered,
        ends or _named_ends(job, ordered),
        ends_apart=chosen["fsdp2_units"] == "ends",
        first_layer_without_gradient=_no_gradient_enters(job),
    )
    if chosen.get("fsdp2_last_layer_stays"):
        for unit in [unit for unit in units if block_of(unit.modules[0]) is BlockKind.LAYER][-1:]:
            unit.stays_after_forward = True
    if gathers_head_itself(job):
        units = [unit for unit in units if unit.place is not UnitPlace.TAIL]
    settings = FSDP2Settings(
        shards=shards,
        replicas=ranks // shards,
        reduce_bytes=reduced_bytes(job),
        waits=bool(chosen["accumulates_without_sync"]),
        offloads=job.offload.parameters,
        stays_after_forward=not chosen.get("fsdp_reshard_after_forward", True),
        loss_outside=bool(chosen.get("loss_outside_network")),
        forward_again=_run_again_by_reentrant_checkpoints(job),
    )
    return FSDP2(tensors, units, settings)


def _fsdp1(job: TrainingJob, tensors: Sequence[StoredTensor], rank: int | None, ends: OutsideLayers | None) -> Layout:
    """The layout of an FSDP1 job."""
    chosen, sharded = conventions(job), [tensor for tensor in tensors if tensor.sharded]
    if _mixes_frozen(job):
        sharded = _adapters_after_matrices(in_order_of_modules(sharded, job.architecture))
    reentrant = job.activation_checkpointing.mode != "none" and job.activation_checkpointing.use_reentrant
    around_units = reentrant and bool(chosen.get("checkpoints_around_units"))
    if chosen.get("fsdp1_units") == "modules":
        units = units_by_module(sharded, compiled=job.compile)
    else:
        units = units_by_layer(
            sharded,
            ends or _named_ends(job, sharded),
            adapters_apart=job.finetuning.method in ("lora", "qlora") and not _mixes_frozen(job),
            first_layer_without_gradient=_no_gradient_enters(job) and not _mixes_frozen(job),
        )
        if chosen.get("loss_outside_network"):
            units[-1].hook = Mark.LM_HEAD  # the root's output, on which its hook is, are the logits
    settings = FSDP1Settings(
        shards=job.parallelism.num_replicas,
        reduce_bytes=reduced_bytes(job),
        waits=bool(chosen["accumulates_without_sync"]),
        # a unit's first forward has no graph where a reentrant checkpoint is around it, so that no hook says that
        # its backward will need it, and none fetches it (torch 2.13 `_runtime_utils.py`
        # _register_pre_backward_hooks, _get_handle_to_prefetch: `_needs_pre_backward_unshard`)
        prefetches="" if around_units else chosen["fsdp1_backward_prefetch"],
        prefetches_forward=bool(chosen["fsdp1_forward_prefetch"]),
        keeps_originals=bool(chosen["fsdp1_use_orig_params"]),
        checkpoints_around_units=around_units,
        reshards_frozen=bool(chosen["fsdp1_reshards_frozen"]),
        broadcasts=bool(chosen["fsdp1_sync_module_states"]),
        receives_ahead=bool(rank and chosen.get("fsdp1_others_on_meta")),
        stays_after_forward=not chosen.get("fsdp_reshard_after_forward", True),
        limits=bool(chosen["fsdp1_limit_all_gathers"]),
        offloads=job.offload.parameters,
    )
    return FSDP1(tensors, units, settings)


def _ddp(job: TrainingJob, tensors: Sequence[StoredTensor], outputs: Sequence[int]) -> Layout:
    """The layout of a DDP job. `outputs`: as in `layout_of`."""
    chosen = conventions(job)
    # the Trainer looks for unused parameters unless it checkpoints (transformers trainer.py `_build_accelerator_args`)
    finds_unused = bool(chosen.get("trainer")) and job.activation_checkpointing.mode == "none"
    return DDP(
        tensors,
        bucket_bytes=int(chosen["ddp_bucket_cap_mib"]) * MIB,
        views=bool(chosen["ddp_gradient_as_bucket_view"]),
        waits=bool(chosen["accumulates_without_sync"]),
        split=job.parallelism.tensor_parallel_size > 1,
        outputs=outputs if finds_unused else (),
    )


def _no_gradient_enters(job: TrainingJob) -> bool:
    """Whether the first layer's input requires no gradient. With adapters it requires one only under checkpointing, with
    which peft calls `enable_input_require_grads`."""
    return job.finetuning.method != "full" and job.activation_checkpointing.mode == "none"


def _named_ends(job: TrainingJob, tensors: Sequence[StoredTensor]) -> OutsideLayers:
    """The units that FSDP makes of what is outside the layers, for a network that the ledger knows."""
    tied, scored = job.architecture.tie_word_embeddings, trained_network(job).head != "language_model"
    return named_ends(tensors, tied=tied, norm_apart=not finds_final_norm(job), head_apart=scored)


def _run_again_by_reentrant_checkpoints(job: TrainingJob) -> frozenset[str]:
    """Names of the layers that reentrant checkpoints recompute."""
    checkpointing = job.activation_checkpointing
    if checkpointing.mode != "full" or not checkpointing.use_reentrant:
        return frozenset()
    every = checkpointing.every_n_layers
    return frozenset(f"layers.{index}" for index in range(0, job.architecture.num_hidden_layers, every))


def finds_final_norm(job: TrainingJob) -> bool:
    """Whether accelerate finds the last norm and groups it with the lm_head (`ModuleTraits.final_norm`)."""
    full, found = job.finetuning.method == "full", family_of(job.architecture).modules.final_norm
    if job.framework != "huggingface":
        return full
    return found == "found" or (full and found == "found_without_adapters")


def gathers_head_itself(job: TrainingJob) -> bool:
    """Whether the head's weight is an FSDP2 group by itself whose hooks TRL's trainers bypass: accelerate does not
    find the final norm with which the weight would be gathered."""
    apart = conventions(job).get("fsdp2_units") == "ends" and not job.architecture.tie_word_embeddings
    sharded = job.parallelism.sharding in ("fsdp2", "hsdp") and job.parallelism.num_replicas > 1
    scored = job.loss.kind in REFERRING or scores_tokens(job)
    return scored and not finds_final_norm(job) and sharded and apart


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
    return _fsdp1_shards(job) and bool(conventions(job).get("fsdp1_use_orig_params")) and not _mixes_frozen(job)


def frozen_get_gradients(job: TrainingJob) -> bool:
    """Whether backward computes gradients of frozen weights: FSDP1 uses views of a unit's flat parameter, which requires a
    gradient if any of the unit's weights does (torch 2.1-2.13 `_flat_param.py` _init_flat_param_and_metadata,
    _use_unsharded_views; the docstring of `FullyShardedDataParallel`, `use_orig_params`)."""
    return _fsdp1_shards(job) and _mixes_frozen(job)


def _mixes_frozen(job: TrainingJob) -> bool:
    """Whether a unit of FSDP1 contains both the frozen weights of a layer and its adapters, as it does unless peft's
    auto-wrap policy makes units of the adapters."""
    return job.finetuning.method != "full" and conventions(job).get("fsdp1_units") == "layers_with_adapters"


def _adapters_after_matrices(tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
    """`tensors` with each matrix's adapter behind it, as a module registers them."""
    of_module: dict[tuple[str, str], list[StoredTensor]] = {}
    for tensor in tensors:
        of_module.setdefault((tensor.module, tensor.name.rpartition(".")[0]), []).append(tensor)
    return [tensor for group in of_module.values() for tensor in group]


def _fsdp1_shards(job: TrainingJob) -> bool:
    return job.parallelism.sharding == "fsdp1" and job.parallelism.num_replicas > 1


def adapters_are_whole(job: TrainingJob) -> bool:
    """Whether FSDP1 leaves adapters whole on every rank and hooks reduce their gradients, because fused functions read the
    weights without running the modules that a unit would gather (fms-acceleration `fms_acceleration_foak/utils.py`
    lora_adapters_switch_ddp_from_fsdp)."""
    return _fsdp1_shards(job) and conventions(job).get("lora_kernel", "eager") != "eager"


def reduced_bytes(job: TrainingJob) -> int | None:
    """Bytes of one element of a gradient while FSDP reduces it under mixed precision; None without mixed precision. A job
    of narrow weights can ask for wider sums (`MixedPrecisionPolicy(bfloat16, float32)`)."""
    if not mixes_precision(job):
        asked = job.framework_options.get("fsdp_reduce_dtype", "compute")
        return int(DTYPE_BYTES[asked]) if job.parallelism.sharding in ("fsdp2", "hsdp") and asked != "compute" else None
    dtype = str(conventions(job)["fsdp_reduce_dtype"])
    return int(DTYPE_BYTES[job.precision.wide_compute if dtype == "compute" else dtype])
