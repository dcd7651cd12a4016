"""slime's commands: Megatron-LM's flags for a policy's update by reinforcement learning, and slime's own for rollouts.

Source: THUDM/slime slime/backends/megatron_utils/arguments.py (`_set_default_megatron_args`: bfloat16 and the distributed
optimizer; `validate_args`: sequences of varying length, the all-to-all dispatcher), scripts/run-qwen3-4B.sh.
"""

from __future__ import annotations

import re

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation
from peakcast.dialects.megatron.launch import from_megatron_flags

OWN = re.compile(
    r"(actor|critic|rollout|ref|sglang|eval|n_samples|over_sampling|dynamic_sampling|wandb|hf|prompt|input|label|metadata|rm"
    r"|reward|custom|kl|eps|entropy|tis|update|buffer|router|use_slime_router|offload_(train|rollout))_?.*"
    r"|colocate|debug_.*|num_rollout|num_epoch|apply_chat_template.*|balance_data|advantage_estimator|use_kl_loss|use_tis"
    r"|use_dynamic_batch_size|max_tokens_per_gpu|log_probs_.*|use_wandb|use_routing_replay|gamma|lambd|normalize_advantages"
    r"|qkv_format|train_backend|train_memory_margin_bytes|megatron_to_hf_mode|loss_type|num_steps_per_rollout|no_save_optim"
    r"|use_rollout_.*|num_gpus_per_node|tool_key|multimodal_keys|save_debug_.*|load_debug_.*|allgather_cp|calculate_.*"
)
"""slime's own flags, which do not affect the memory of the update or are read here."""


def from_slime(pasted: Pasted) -> Translation:
    """The job of the policy's update. Raises: SpecError naming the flag, its value, the rule and the way out."""
    notes = Notes()
    values = {str(key).replace("-", "_"): value for key, value in pasted.values.items()}
    settings = Settings(values, notes, "slime", lambda key: key.replace("_", "-"))
    own = {key for key in values if OWN.fullmatch(key) and not key.startswith("rotary")}
    flags = {key: value for key, value in values.items() if key not in own}
    flags.setdefault("bf16", not settings.switch("fp16"))
    flags.update(
        use_distributed_optimizer=True, moe_token_dispatcher_type=values.get("moe_token_dispatcher_type", "alltoall")
    )
    if settings.switch("use_dynamic_batch_size"):
        tokens = settings.size("max_tokens_per_gpu") * settings.size("context_parallel_size", 1)
        flags |= {"micro_batch_size": 1, "seq_length": tokens}
        flags.pop("global_batch_size", None)
        notes.assumptions.append(f"use-dynamic-batch-size fills micro-batches up to {tokens} tokens (max-tokens-per-gpu).")
    elif not settings.given("seq_length"):
        raise SpecError(
            "seq-length is not given: the update's micro-batches are as long as their samples; add the length of the "
            "longest prompt with its answer, or use-dynamic-batch-size with max-tokens-per-gpu.",
            parameter="seq-length",
        )
    nodes, each = settings.size("actor_num_nodes", 1), settings.integer("actor_num_gpus_per_node")
    num_gpus = pasted.num_gpus or (nodes * each if each else None)
    _note_other_phases(settings)
    notes.ignored += [settings.spell(key) for key in sorted(own)]
    inner = Pasted(
        values=flags, where=pasted.where, folder=pasted.folder, num_gpus=num_gpus, model=pasted.model, env=pasted.env,
        versions=pasted.versions,
    )  # fmt: skip
    return notes.finish(notes.include(from_megatron_flags(inner)))


def _note_other_phases(settings: Settings) -> None:
    """Say that only the update is counted, and where generation and the reference are meanwhile."""
    settings.notes.unsupported.append(
        "The loss over log-probabilities of Megatron's vocabulary-parallel logits is not modelled; the cross entropy's is "
        "assumed.",
        "advantage-estimator",
    )
    held = settings.number("sglang_mem_fraction_static", 0.0)
    beside = f"SGLang ({settings.spell('sglang_mem_fraction_static')}={held:g}) " if held else "SGLang "
    beside += "leaves the GPU during it (colocate)" if settings.switch("colocate") else "generates on GPUs of its own"
    settings.notes.warnings.append(
        f"The number is that of the policy's update; {beside}, and the reference's weights wait in host memory.",
        "colocate",
        "more",
    )
