"""foundation-model-stack/fms-acceleration's A100 benchmark, as `Measurement` rows.

Source: `scripts/benchmarks/refs/a100_80gb.csv` of that project at commit 876e2ed (Apache-2.0); the facts about it are in
`datasets/README.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.dialects.hf_config import architecture_from_hf_config
from peakcast.dialects.huggingface import from_huggingface
from peakcast.errors import RecordError
from peakcast.fields import FrozenMapping
from peakcast.records import Measurement
from peakcast.units import MIB

SOURCE = "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv"
COMMIT = "876e2ed"
VERSIONS = {
    "torch": "2.4.1",
    "transformers": "4.48.1",
    "accelerate": "1.0.1",
    "peft": "0.13.2",
    "trl": "0.13.0",
    "bitsandbytes": "0.43.3",
    "flash_attn": "2.7.3",
}
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

NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "bigcode/gpt_bigcode-santacoder": ("santacoder", SANTACODER),
    "mistralai/Mistral-7B-v0.1": ("mistral-7b", MISTRAL),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral-8x7b", MIXTRAL),
    "NousResearch/Llama-2-70b-hf": ("llama-2-70b", LLAMA_70B),
    "TheBloke/Mistral-7B-v0.1-GPTQ": ("mistral-7b", {**MISTRAL, "quantization_config": {"group_size": 128}}),
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": ("mixtral-8x7b", {**MIXTRAL, "quantization_config": {"group_size": -1}}),
    "TheBloke/Llama-2-70B-GPTQ": ("llama-2-70b", {**LLAMA_70B, "quantization_config": {"group_size": -1}}),
}
"""Short name and config.json (the keys that matter) of each network, by the source's name. Source: their model cards;
the GPTQ group sizes are those that allocated-after-step fits."""

COMMON_ASSUMPTIONS = (
    "peak_allocated_bytes is the source's mem_peak_torch_mem_alloc_in_bytes, read as the total peak: full bf16 fine-tuning "
    "of Mistral-7B gives 10.00 bytes per parameter (2 weights, 2 gradients, 4 states, 2 foreach temporary).",
    "peak_device_bytes is nvidia-smi's use with what was used when idle subtracted, in whole MiB.",
    "For several GPUs the source gives one number, taken as rank 0's; its nvidia-smi number looks like a mean (odd MiB).",
    "Gradient checkpointing is reentrant, the default of transformers 4.48.",
)
COLUMNS = (
    "model_name_or_path", "num_gpus", "per_device_train_batch_size", "peft_method", "r", "lora_alpha", "lora_dropout",
    "target_modules", "torch_dtype", "bf16", "fp16", "framework_config", "mem_torch_mem_alloc_in_bytes",
    "mem_peak_torch_mem_alloc_in_bytes", "mem_nvidia_mem_reserved",
)  # fmt: skip


def read_fms_a100(path: Path) -> list[Measurement]:
    """Every row of `fms_a100.csv` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise RecordError(f"{path}, line 1: the columns are not {', '.join(COLUMNS)}; restore the source file.")
            rows = []
            for record in reader:
                try:
                    rows.append(_measurement(record))
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(f"{path}, line {reader.line_num}: {error!r}; restore the source file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}; give the folder of the source files.") from error
    return rows


def _measurement(record: Mapping[str, str]) -> Measurement:
    model, setup = record["model_name_or_path"], record["framework_config"]
    name, config = NETWORKS[model]
    num_gpus, lora = int(record["num_gpus"]), record["peft_method"] == "lora"
    batch, method = record["per_device_train_batch_size"], record["peft_method"] or "full"
    quantized, facts = _quantization(setup, config)
    # A position table of 2048 rows cannot take 4096 tokens, and memory per sequence agrees with 2048.
    length = min(SEQUENCE_LENGTH, config.get("n_positions", SEQUENCE_LENGTH))
    if length != SEQUENCE_LENGTH:
        facts.append(f"The packed length is taken as {length}, the size of the position table, not {SEQUENCE_LENGTH}.")
    translation = from_huggingface(
        architecture_from_hf_config(config, name),
        {
            "per_device_train_batch_size": int(record["per_device_train_batch_size"]),
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
            "torch_dtype": record["torch_dtype"],
            "bf16": record["bf16"] == "TRUE",
            "fp16": record["fp16"] == "TRUE",
            "use_flash_attn": True,
            "optim": "adamw_torch",
            "packing": True,
            "max_seq_length": length,
            "weight_decay": 0.01,
            "quantization_config": quantized,
        },
        peft=_adapter(record) if lora else None,
        fsdp={"fsdp_sharding_strategy": "FULL_SHARD", "mixed_precision": "no"} if num_gpus > 1 else None,
        num_gpus=num_gpus,
        versions=VERSIONS,
    )
    options = dict(translation.job.framework_options)
    if setup == "baseline-peft-bnb" and num_gpus == 1:  # trl 0.13 casts no sharded model (`is_sharded_qlora`)
        options["norms_in_float32"] = True
        facts.append("Norms are in fp32, cast by trl: allocated-after-step is larger than accelerated-peft-bnb's by them.")
    if "foak" in setup:
        options["fused_kernels"] = True
    job = translation.job.replace(framework_options=FrozenMapping(options))
    reasons = list(translation.unsupported)
    if "foak" in setup:
        reasons.append("Fused LoRA, cross-entropy and norm kernels (foak) are not modelled.")
    peak = _whole(record, "mem_peak_torch_mem_alloc_in_bytes")
    device = _whole(record, "mem_nvidia_mem_reserved")
    return Measurement(
        job=job,
        gpu="A100-80GB",
        provenance="published",
        source=SOURCE,
        source_version=COMMIT,
        case=f"{model}/{num_gpus} GPUs/batch {batch}/{method}/{setup}",
        collectives="nccl" if num_gpus > 1 else "none",
        outcome="ok" if peak is not None else "out_of_memory",
        peak_allocated_bytes=peak,
        peak_device_bytes=None if device is None else device * MIB,
        steady_allocated_bytes=_whole(record, "mem_torch_mem_alloc_in_bytes"),
        environment={**VERSIONS, "framework_config": setup, "model_name_or_path": model, "idle_subtracted": True},
        assumptions=(*COMMON_ASSUMPTIONS, *facts, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join(reasons),
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


def _whole(record: Mapping[str, str], column: str) -> int | None:
    return int(record[column]) if record[column] else None
