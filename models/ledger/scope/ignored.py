"""Settings of a job that no ledger reads: for each, what it would change, and in which direction.

A convention that no ledger reads is listed here, or in `CANNOT_MATTER` of `tests/models/ledger/test_every_setting.py`
with the reason why it cannot matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from peakcast.core.findings import Direction, Finding
from peakcast.core.units import format_gib
from peakcast.jobs.conventions import adapter_dtype, conventions, default_of, sums_in_float32
from peakcast.jobs.spec import DECAYING_GRADIENTS, Precision, TrainingJob
from peakcast.models.ledger.scope import facts
from peakcast.models.ledger.scope.fact import Fact
from peakcast.networks.families import family_of
from peakcast.networks.trained_parts import passed_over

DEFAULT = Precision()
WIDTH = {"float32": 4, "float8": 1}
"""Bytes of an element, for dtypes whose elements do not have two."""
_BUFFERS = "keeps communication buffers of Transformer Engine on the GPU (userbuffers)"
_BACKEND = "chooses among attention kernels whose workspaces differ; give framework_options.attention_backend instead"
IGNORED: dict[str, dict[str, tuple[str, Direction]]] = {
    "megatron": {
        "tp_comm_overlap": (_BUFFERS, "more"),
        "fp16_lm_cross_entropy": ("computes the loss in float16, where the answer has float32", "less"),
        "empty_unused_memory_level": ("empties the allocator's cache between steps", "less"),
        "overlap_param_gather_with_optimizer_step": ("gathers parameters while the optimizer steps", "either"),
        "nvte_flash_attn": (_BACKEND, "either"),
        "nvte_fused_attn": (_BACKEND, "either"),
        "nvte_norm_fwd_use_cudnn": ("takes cuDNN's norms, whose workspaces differ", "either"),
        "nvte_norm_bwd_use_cudnn": ("takes cuDNN's norms, whose workspaces differ", "either"),
        "nvte_cutedsl_fused_grouped_mlp": ("fuses the experts' products, which then save other tensors", "either"),
        "torch_nccl_avoid_record_streams": ("changes when the allocator may use a communicated block again", "either"),
        "use_mnnvl": ("changes the buffers of the communication between nodes", "either"),
    },
}
"""Framework -> convention -> what a job that sets it other than its default changes, and in which direction."""


# fmt: off
IDLE: tuple[tuple[str, tuple[str, ...], Fact, str], ...] = (
    ("finetuning", ("rank", "alpha", "targets", "modules_to_save", "dropout", "adapter_dtype"), ~facts.adapts,
     "finetuning.method='full' has no adapters (lora has)"),
    ("activation_checkpointing", ("every_n_layers", "modules", "num_layers"), ~facts.checkpoints,
     "activation_checkpointing.mode='none'"),
    ("inference", ("prompt_length", "new_tokens", "cache"), facts.trains, "task='train'"),
    ("optimizer", ("momentum",), ~facts.optimizer("sgd"), "sgd alone has a momentum"),
    ("optimizer", ("weight_decay",), ~facts.optimizer(*DECAYING_GRADIENTS), "its weight decay costs no memory"),
    ("parallelism", ("sequence_parallel",), ~facts.tensor_parallel, "parallelism.tensor_parallel_size=1"),
    ("parallelism", ("sharding",), ~facts.replicated, "there is one replica, of which nothing is sharded"),
    ("offload", ("parameters",), facts.zero & ~facts.zero3 & ~facts.megatron,
     "DeepSpeed offloads parameters with zero_stage=3 only"),
)
# fmt: on
"""(group, settings of it, when they have no effect, why). A user who sets them may have meant a different job."""


def ignored_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """A finding for each setting of `job` that is not counted or has no effect."""
    found = []
    for name, (effect, direction) in IGNORED.get(job.framework, {}).items():
        value = job.framework_options.get(name)
        if value is not None and value != default_of(job.framework, name):
            found.append(_ignored(f"framework_options.{name}", value, f"it {effect}", direction))
    megatrons = _of_megatron(job) if job.framework == "megatron" else _of_torch(job)
    return (*found, *megatrons, *_expert_tensor_parallel(job), *_idle(job), *_passed_over(job))


def _ignored(parameter: str, value: object, why: str, direction: Direction) -> Finding:
    return Finding("setting_ignored", parameter, direction, f"{parameter}={value!r} is not counted: {why}.")


def _of_megatron(job: TrainingJob) -> Iterator[Finding]:
    """Settings that the ledger of Megatron-LM does not count."""
    if job.compile:
        yield _ignored("compile", True, "the answer is for Megatron's own fused kernels", "either")
    if job.loss.fused_linear_cross_entropy:
        why = "Megatron makes whole logits; framework_options.cross_entropy_loss_fusion is its own fusion"
        yield _ignored("loss.fused_linear_cross_entropy", True, why, "less")
    if conventions(job).get("moe_token_dispatcher_type") == "flex":
        why = "tensors are counted; DeepEP's or HybridEP's own buffers on the GPU, which PyTorch does not allocate, are not"
        yield _ignored("framework_options.moe_token_dispatcher_type", "flex", why, "more")


def _eager_loss_of_torchtitan(job: TrainingJob) -> Iterator[Finding]:
    """A loss that is not compiled, of a network whose own files in torchtitan compile the loss alone."""
    if "torchtitan" in job.versions and family_of(job.architecture).libraries.torchtitan_compiles_loss and not job.compile:
        copy = job.num_tokens * job.architecture.vocab_size * WIDTH["float32"]
        why = (
            "torchtitan's own files for this network compile the loss alone (compile.components), which saves up to two "
            f"copies of the logits, {format_gib(copy)} each; to say so, set compile: true with "
            "framework_options.compiled_regions: loss"
        )
        yield _ignored("compile", False, why, "less")


def _of_torch(job: TrainingJob) -> Iterator[Finding]:
    """Settings that the ledger of Hugging Face and torch jobs does not count."""
    yield from _eager_loss_of_torchtitan(job)
    precision, recomputation = job.precision, job.activation_checkpointing
    trained = precision.parameters if job.finetuning.method == "full" else adapter_dtype(job)
    updated = precision.main_parameters or trained
    for name, of, why in (
        ("gradients", trained, "gradients have the dtype of their parameters"),
        ("optimizer_states", updated, "the optimizer and its parameters decide the dtype of its states"),
    ):
        value = getattr(precision, name)
        if name == "gradients" and sums_in_float32(job):
            continue
        if job.task == "train" and value not in (of, precision.parameters, getattr(DEFAULT, name)):
            direction: Direction = "more" if WIDTH.get(value, 2) > WIDTH.get(of, 2) else "less"
            yield _ignored(f"precision.{name}", value, f"under framework={job.framework!r} {why}", direction)
    if precision.compute not in (precision.parameters, DEFAULT.compute, "float8") and not conventions(job).get("autocast"):
        wider = WIDTH.get(precision.compute, 2) > WIDTH.get(precision.parameters, 2)
        why = f"weights of {precision.parameters} compute in their own dtype without framework_options.autocast"
        yield _ignored("precision.compute", precision.compute, why, "more" if wider else "either")
    if recomputation.mode == "full" and (recomputation.num_layers is not None or recomputation.method != "uniform"):
        why = "recompute-num-layers and its method are Megatron's; activation_checkpointing.every_n_layers is counted here"
        yield _ignored("activation_checkpointing.num_layers", recomputation.num_layers, why, "more")


def _idle(job: TrainingJob) -> Iterator[Finding]:
    """Settings that have no effect because of another setting (`IDLE`), where they differ from their defaults."""
    for group, names, holds, why in IDLE:
        for name in names if holds(job) else ():
            value, parameter = getattr(getattr(job, group), name), f"{group}.{name}"
            if value != type(getattr(job, group)).__dataclass_fields__[name].default:
                yield Finding("setting_without_effect", parameter, "either", f"{parameter}={value!r} has no effect: {why}.")


def _passed_over(job: TrainingJob) -> Iterator[Finding]:
    """Names in `modules_to_save` of ends that the network does not have."""
    if facts.adapts(job) and (names := passed_over(job)):
        own = family_of(job.architecture).names
        yield Finding(
            "setting_without_effect",
            "finetuning.modules_to_save",
            "either",
            f"finetuning.modules_to_save names {', '.join(names)}, which {job.architecture.name!r} does not have: peft "
            f"ignores them, and nothing is counted for them. It has {own.table[0]} and {own.head[0]}.",
        )


def _expert_tensor_parallel(job: TrainingJob) -> tuple[Finding, ...]:
    """Whether `expert_tensor_parallel_size` is ignored, or has no effect."""
    layout, name = job.parallelism, "parallelism.expert_tensor_parallel_size"
    size = layout.expert_tensor_parallel_size
    if size in (None, layout.tensor_parallel_size):
        return ()
    if job.architecture.moe is None:
        sentence = f"{name}={size} has no effect: {job.architecture.name!r} has no experts."
        return (Finding("setting_without_effect", name, "either", sentence),)
    if job.framework != "megatron":
        sentence = f"{name}={size} is counted with framework='megatron' only."
        return (Finding("setting_ignored", name, "either", sentence),)
    return ()
