"""Reads Megatron-LM runs in the forms that users have: the flags of a launch script or command line, and the experimental
--yaml-cfg file.

Source: NVIDIA/Megatron-LM megatron/training/yaml_arguments.py (`load_yaml`, `core_transformer_config_from_yaml`),
examples/gpt3/gpt_config.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import FALSE, Notes, Settings, Translation, words
from peakcast.dialects.megatron import flags as flags
from peakcast.dialects.megatron.job import from_megatron

SECTIONS = ("language_model", "model_parallel")
RENAMED = {
    "fp8": "fp8_format", "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}  # fmt: skip
"""Fields of TransformerConfig in the YAML's sections -> their flags, if the names differ."""
SWITCHED_OFF = {
    "add_bias_linear": "disable_bias_linear", "bias_swiglu_fusion": "no_bias_swiglu_fusion",
    "bias_activation_fusion": "no_bias_gelu_fusion", "masked_softmax_fusion": "no_masked_softmax_fusion",
    "persist_layer_norm": "no_persist_layer_norm", "bias_dropout_fusion": "no_bias_dropout_fusion",
    "apply_rope_fusion": "no_rope_fusion", "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
}  # fmt: skip
"""Fields that are true by default -> the flags that switch them off."""
NO_FLAG = words("""
    init_method output_layer_init_method memory_efficient_layer_norm fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad clone_scatter_output_in_embedding moe_token_dropping perform_initialization
    use_cpu_initialization params_dtype timers async_tensor_model_parallel_allreduce tp_comm_split_ag
    tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_bulk_wgrad tp_comm_bulk_dgrad
    finalize_model_grads_func pipeline_dtype grad_scale_func enable_autocast autocast_dtype variable_seq_lengths
    batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p no_sync_func grad_sync_func param_sync_func
    pipeline_model_parallel_split_rank _cpu_offloading_context cpu_offloading_weights cpu_offloading_activations
    barrier_with_l1_time deallocate_pipeline_outputs layernorm_epsilon bert_binary_head
""")
"""Fields of the sections that do not affect memory, or that only refine a feature that is off."""
ACTIVATIONS = ("gelu", "swiglu", "squared_relu")
"""Values of `activation_func`."""
GPU_VARIABLES = ("NCCL_", "NVTE_", "CUDA_", "CUBLAS_", "CUDNN_", "TORCH_", "PYTORCH_", "NVSHMEM_", "USE_MNNVL")
"""Prefixes of environment variables that can affect a GPU's memory."""


NEWER = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Newer name of an environment variable (PyTorch 2.9) -> the older one."""


def with_gradient_dtype(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` for a library in which gradients have the parameters' dtype if
    `accumulate_allreduce_grads_in_fp32` is false. Megatron-LM's own launcher accumulates in fp32 under bf16 all
    the same, unless `grad_reduce_in_bf16` is given."""
    narrow = str(fields.get("accumulate_allreduce_grads_in_fp32", True)).lower() in FALSE
    return {**fields, "grad_reduce_in_bf16": True} if narrow else fields


def from_megatron_flags(pasted: Pasted) -> Translation:
    """The job of Megatron-LM flags, by name; a `yaml_cfg` among them is read too. Raises: SpecError."""
    notes = Notes()
    values = {str(key).lstrip("-").replace("-", "_"): value for key, value in pasted.values.items()}
    if "yaml_cfg" in values:
        path = values.pop("yaml_cfg")
        values = {**flags_of_yaml(pasted.file(path, "megatron_yaml", "yaml-cfg"), notes), **values}
    return _translated(values, pasted, notes)


def from_megatron_yaml(pasted: Pasted) -> Translation:
    """The job of a Megatron-LM --yaml-cfg file. Raises: SpecError."""
    notes = Notes()
    return _translated(flags_of_yaml(pasted.values, notes), pasted, notes)


def flags_of_yaml(values: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """A --yaml-cfg mapping as flags: the fields of its sections under the names of their flags, without those that are
    false or null.

    Raises: SpecError.
    """
    fields = dict(values)
    for section in SECTIONS:
        inner = fields.pop(section, None) or {}
        if not isinstance(inner, Mapping):
            raise SpecError(f"{section} must be a mapping of settings.", parameter=section, value=inner)
        fields |= inner
    # command-line flags come last, with dashes, and have priority
    written = {str(name).lower().replace("-", "_"): str(name) for name in fields}
    values = {key: fields[name] for key, name in written.items()}
    settings = Settings(values, notes, "Megatron-LM", lambda key: written.get(key, key))
    out: dict[str, Any] = {SWITCHED_OFF[key]: True for key in SWITCHED_OFF if not settings.switch(key, True)}
    activation = settings.one_of("activation_func", "gelu", ACTIVATIONS)
    gated = settings.switch("gated_linear_unit") or settings.switch("swiglu") or activation == "swiglu"
    out |= {"swiglu": True} if gated else {"squared_relu": True} if activation == "squared_relu" else {}
    dense = not settings.raw("num_experts") and not settings.raw("num_moe_experts")
    for key in settings.left():
        value = settings.raw(key)
        off = value is False or (value in ("", 0) and key in flags.UNSUPPORTED)
        if off or key in NO_FLAG or (dense and key.startswith("moe_")):
            notes.ignored.append(settings.spell(key))
        else:
            out[RENAMED.get(key, key)] = value
    for key in ("num_experts", "num_moe_experts"):
        if settings.raw(key):
            out["num_experts"] = settings.raw(key)
    return out


def _size(values: Mapping[str, Any], key: str) -> int:
    """A degree of parallelism; 1 if it is not given or not a number (which is refused later)."""
    text = str(values.get(key, "1"))
    return int(text) if text.isdecimal() and len(text) < 6 and int(text) else 1


def _translated(values: dict[str, Any], pasted: Pasted, notes: Notes) -> Translation:
    env = {NEWER.get(name, name): value for name, value in pasted.env.items() if name.startswith(GPU_VARIABLES)}
    notes.ignored += sorted(name for name in pasted.env if not name.startswith(GPU_VARIABLES))
    if pasted.model is not None:
        raise SpecError(
            "Megatron-LM's flags say what is trained; --model cannot change it. Change the flags instead.",
            parameter="model",
            value=pasted.model,
        )
    for key in ("num_layers", "hidden_size", "num_attention_heads", "micro_batch_size"):
        if str(values.get(key, "missing")).strip().lower() in (FALSE - {"0", "no"}) or values.get(key) is True:
            raise SpecError(
                f"{key.replace('_', '-')} has no value in {pasted.where}: its variable is not set. Write the number in.",
                parameter=key.replace("_", "-"),
            )
    tensor, context, pipeline, experts = (
        _size(values, f"{name}_parallel_size") for name in ("tensor_model", "context", "pipeline_model", "expert_model")
    )
    group = experts * (_size(values, "expert_tensor_parallel_size") if "expert_tensor_parallel_size" in values else tensor)
    least = pipeline * math.lcm(tensor * context, group if experts > 1 else 1)
    num_gpus = pasted.gpus(notes, least, ", the least for this layout")
    if pasted.program.endswith("pretrain_bert.py"):
        values.setdefault("bert_binary_head", True)
    return notes.finish(notes.include(from_megatron(values, num_gpus, env, pasted.versions.of("megatron"))))
