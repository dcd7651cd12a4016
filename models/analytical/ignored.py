"""Settings of a job that no ledger looks at, each said by name: what it would change, and which way.

A convention that no ledger reads is here or in `CANNOT_MATTER` of `tests/models/analytical/test_every_setting.py`, with the
reason why it cannot matter.
"""

from __future__ import annotations

from peakcast.conventions import default_of
from peakcast.findings import Direction, Finding
from peakcast.spec import TrainingJob

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


def ignored_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """A finding for each setting of `job` that is not taken into account."""
    found = []
    for name, (effect, direction) in IGNORED.get(job.framework, {}).items():
        value = job.framework_options.get(name)
        if value is not None and value != default_of(job.framework, name):
            sentence = f"framework_options.{name}={value!r} is not counted: it {effect}."
            found.append(Finding("setting_ignored", f"framework_options.{name}", direction, sentence))
    return (*found, *_expert_tensor_parallel(job))


def _expert_tensor_parallel(job: TrainingJob) -> tuple[Finding, ...]:
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
