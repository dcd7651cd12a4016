"""The cases of foundation-model-stack/fms-acceleration's benchmark, as jobs: what its tables of every date share.

One case is a network, a number of GPUs, a batch, a method and a `framework_config`, which names the plug-ins in use. What
the benchmark sets for all of them (packed sequences, flash attention, checkpointing, AdamW) is in `_translation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.dialects.hf_config import architecture_from_hf_config
from peakcast.dialects.huggingface import from_huggingface
from peakcast.dialects.translation import Translation
from peakcast.fields import FrozenMapping
from peakcast.spec import TrainingJob

SEQUENCE_LENGTH = 4096

_LLAMA_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
             "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768}  # fmt: skip
MISTRAL = {"model_type": "mistral", **_LLAMA_7B, "sliding_window": 4096}
MIXTRAL = {"model_type": "mixtral", **_LLAMA_7B, "num_local_experts": 8, "num_experts_per_tok": 2}
LLAMA_70B = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 32000,
             "max_position_embeddings": 4096}  # fmt: skip
SANTACODER = {"model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24, "n_head": 16, "n_inner": 8192,
              "vocab_size": 49280, "n_positions": 2048, "multi_query": True, "activation_function": "gelu_pytorch_tanh",
              "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}  # fmt: skip
GRANITE_3B = {"model_type": "granitemoe", "hidden_size": 1536, "num_hidden_layers": 32, "num_attention_heads": 24,
              "num_key_value_heads": 8, "intermediate_size": 512, "vocab_size": 49155, "max_position_embeddings": 4096,
              "tie_word_embeddings": True, "num_local_experts": 40, "num_experts_per_tok": 8}  # fmt: skip
GRANITE_SHARED = {**GRANITE_3B, "model_type": "granitemoeshared", "num_hidden_layers": 40, "num_local_experts": 62,
                  "num_experts_per_tok": 6, "shared_intermediate_size": 1024}  # fmt: skip

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bigcode/gpt_bigcode-santacoder": ("santacoder", SANTACODER),
    "mistralai/Mistral-7B-v0.1": ("mistral-7b", MISTRAL),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", MIXTRAL),
    "NousResearch/Llama-2-70b-hf": ("llama-2-70b", LLAMA_70B),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("mistral-7b", {**MISTRAL, "quantization_config": {"group_size": 128}}),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": ("mixtral-8x7b", {**MIXTRAL, "quantization_config": {"group_size": -1}}),
    "TheBloke/Llama-2-70B-GPTQ": ("llama-2-70b", {**LLAMA_70B, "quantization_config": {"group_size": -1}}),
    "ibm-granite/granite-3.0-3b-a800m-instruct": ("granite-3.0-3b-a800m", GRANITE_3B),
    "ibm/PowerMoE-3b": ("powermoe-3b", {**GRANITE_3B, "vocab_size": 49152}),
    "ibm-research/moe-7b-1b-active-shared-experts": ("moe-7b-1b-active-shared-experts", GRANITE_SHARED),
    "ibm-granite/granite-4.0-tiny-preview": ("granite-4.0-tiny-preview", GRANITE_SHARED),
}
"""Short name and config.json (the keys that matter) of each network, by the source's name. Source: their model cards;
the GPTQ group sizes are those that allocated-after-step fits. The last two stand for what their cards describe (62 experts
of which 6 run, and a shared one); their rows are out of scope."""

NETWORK_REASONS = {
    "ibm-research/moe-7b-1b-active-shared-experts": "The network's shape is assumed: no file at hand gives it.",
    "ibm-granite/granite-4.0-tiny-preview": "The network is a hybrid (Mamba-2) whose shape no file at hand gives.",
}

FSDP = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE", "mixed_precision": "no"}
"""The settings of accelerate for several GPUs."""

COMMON_ASSUMPTIONS = (
    "peak_device_bytes is nvidia-smi's use with what was used when idle subtracted, in whole MiB.",
    "For several GPUs the source gives one number, taken as rank 0's; its nvidia-smi number looks like a mean (odd MiB).",
    "Gradient checkpointing is reentrant, the default of transformers 4.",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A case as a job, the sentences about how it was read, and why it is out of scope (empty if it is not)."""

    job: TrainingJob
    name: str
    assumptions: tuple[str, ...]
    out_of_scope: str


def case_of(record: Mapping[str, str], versions: Mapping[str, str]) -> Case:
    """The case of a line of the benchmark's tables (`record`, its columns as text), run with `versions`.

    Raises: KeyError or ValueError when a column is missing or holds what the benchmark does not write.
    """
    model, setup = record["model_name_or_path"], record["framework_config"]
    config = NETWORKS[model][1]
    quantized, facts = _quantization(setup, config)
    # A position table of 2048 rows cannot take 4096 tokens, and memory per sequence agrees with 2048.
    length = min(SEQUENCE_LENGTH, config.get("n_positions", SEQUENCE_LENGTH))
    if length != SEQUENCE_LENGTH:
        facts.append(f"The packed length is taken as {length}, the size of the position table, not {SEQUENCE_LENGTH}.")
    translation = _translation(record, versions, quantized, length)
    num_gpus = int(record["num_gpus"])
    options = dict(translation.job.framework_options)
    if setup == "baseline-peft-bnb" and num_gpus == 1:  # trl casts no sharded model (`is_sharded_qlora`)
        options["norms_in_float32"] = True
        facts.append("Norms are in fp32, cast by trl: allocated-after-step is larger than accelerated-peft-bnb's by them.")
        if not _is_true(record, "bf16"):
            options["ends_in_float32"] = True
            facts.append("Token table and lm_head are in fp32: trl 0.9.6 narrows them again with bf16=True only.")
    if "foak" in setup:
        options["fused_kernels"] = True
    reasons = [*translation.unsupported, *([NETWORK_REASONS[model]] if model in NETWORK_REASONS else [])]
    if "scattermoe" in setup:
        reasons.append("ScatterMoE's expert kernels and its sharding of experts are not modelled.")
    method, batch = record.get("peft_method") or "full", record["per_device_train_batch_size"]
    return Case(
        job=translation.job.replace(framework_options=FrozenMapping(options)),
        name=f"{model}/{num_gpus} GPUs/batch {batch}/{method}/{setup}",
        assumptions=(*COMMON_ASSUMPTIONS, *facts, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join(reasons),
    )


def _translation(
    record: Mapping[str, str], versions: Mapping[str, str], quantized: Mapping[str, Any] | None, length: int
) -> Translation:
    name, config = NETWORKS[record["model_name_or_path"]]
    num_gpus = int(record["num_gpus"])
    return from_huggingface(
        architecture_from_hf_config(config, name),
        {
            "per_device_train_batch_size": int(record["per_device_train_batch_size"]),
            "gradient_accumulation_steps": int(float(record.get("gradient_accumulation_steps") or 1)),
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "torch_dtype": record["torch_dtype"],
            "bf16": _is_true(record, "bf16"),
            "fp16": _is_true(record, "fp16"),
            "use_flash_attn": True,
            "optim": "adamw_torch",
            "packing": True,
            "max_seq_length": length,
            "weight_decay": 0.01,
            "quantization_config": quantized,
        },
        peft=_adapter(record) if record.get("peft_method") == "lora" else None,
        fsdp=FSDP if num_gpus > 1 else None,
        num_gpus=num_gpus,
        versions=versions,
    )


def _quantization(setup: str, config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The quantization settings of a framework_config, and what was taken for granted about them."""
    if "bnb" in setup:
        facts = ["NF4 with double quantization: allocated-after-step of Mistral-7B fits 0.516 bytes per quantized weight."]
        return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, facts
    if "autogptq" in setup:
        group = config["quantization_config"]["group_size"]
        facts = [
            f"GPTQ with {'groups of ' + str(group) if group > 0 else 'one group per row'}: allocated-after-step fits it."
        ]
        return {"quant_method": "gptq", "bits": 4, "group_size": group}, facts
    return None, []


def _adapter(record: Mapping[str, str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": int(record["r"]),
        "lora_alpha": int(record["lora_alpha"]),
        "lora_dropout": float(record["lora_dropout"]),
        "target_modules": record["target_modules"].split(),
    }


def _is_true(record: Mapping[str, str], column: str) -> bool:
    return record.get(column, "").upper() == "TRUE"
