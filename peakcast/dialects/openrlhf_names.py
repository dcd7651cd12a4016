"""The flags of OpenRLHF since 0.11, which name their section, as the flags that they were before.

Source: openrlhf 0.11.2 cli/train_sft.py, train_dpo.py, train_rm.py, train_ppo_ray.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

SAME = (
    "zero_stage", "param_dtype", "zpg", "adam_offload", "attn_implementation", "use_liger_kernel", "grad_accum_dtype",
    "overlap_comm", "deepcompile", "ring_attn_size", "ring_attn_head_stride", "load_in_4bit", "packing_samples",
)  # fmt: skip
"""Flags of DeepSpeed's section `ds` that kept their names."""
OLDER = {
    **{f"ds.{name}": name for name in SAME},
    "ds.tensor_parallel_size": "ds_tensor_parallel_size", "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.lora.rank": "lora_rank", "ds.lora.alpha": "lora_alpha", "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules", "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "train.micro_batch_size": "micro_train_batch_size", "train.batch_size": "train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch", "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.colocate_all": "colocate_all_models", "train.colocate_actor_ref": "colocate_actor_ref",
    "train.async_enable": "async_train",
    "train.enable_ema": "enable_ema", "data.max_len": "max_len", "rollout.max_new_tokens": "generate_max_len",
    "actor.num_nodes": "actor_num_nodes", "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "vllm.num_engines": "vllm_num_engines", "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.enable_sleep": "vllm_enable_sleep", "algo.kl.init_coef": "init_kl_coef",
    "algo.advantage.estimator": "advantage_estimator", "actor.entropy_coef": "entropy_loss_coef",
    "reward.model_name_or_path": "reward_pretrain", "reward.offload": "ref_reward_offload", "ref.offload": "ref_offload",
    "model.nll_loss_coef": "nll_loss_coef", "model.beta": "beta",
    **{f"{section}.{name}": older for section in ("model", "actor") for name, older in (
        ("model_name_or_path", "model_name_or_path"), ("gradient_checkpointing_enable", "gradient_checkpointing"),
        ("gradient_checkpointing_reentrant", "gradient_checkpointing_use_reentrant"), ("aux_loss_coef", "aux_loss_coef"),
    )},
}  # fmt: skip
"""A flag's name -> what it was before."""
WITHOUT_EFFECT = re.compile(
    r"(ckpt|logger|eval|muon|adam|algo|critic|reward|ref|vllm|rollout)\..*|data\.(?!max_len).*"
    r"|train\.(seed|full_determinism_enable|max_epochs|num_episodes|colocate_critic_reward|async_\w+|partial_rollout_enable"
    r"|ema_beta|agent_func_path)|actor\.(eps_clip\w*|dual_clip|policy_loss_type|loss_agg_mode)|ds\.value_head_prefix"
    r"|model\.(pretrain_mode_enable|ipo_enable|label_smoothing|loss_type)"
)
"""Sections and flags that have no older name and do not affect a step's memory."""


def by_older_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[str], str]]:
    """(`values` by the names of older flags, a function from an older name to the name that the user wrote)."""
    written = {OLDER.get(key, key): key for key in values}
    return {OLDER.get(key, key): value for key, value in values.items()}, lambda key: written.get(key, key)
