"""The cases of foundation-model-stack/fms-acceleration's benchmark as jobs; its tables of all dates share them.

A case is a network, a number of GPUs, a batch, a method and a `framework_config`, which names the plug-ins in use. Settings
that all cases share (packed sequences, flash attention, checkpointing, AdamW) are in `_translation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import DTYPE_BYTES, round_up
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.quantization import AS_PARAMETERS
from peakcast.jobs.conventions import adapter_dtype, release
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.config import architecture_from_hf_config

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

TOKENS = {"mistral": 32001, "mixtral": 32001, "llama": 32001, "gpt_bigcode": 49158}
"""model_type -> number of tokens of the tokenizer after fms-hf-tuning has added its own padding token; the token table and
the lm_head are then resized to as many rows. Networks of other types are not resized. Llama's tokenizer has 32,000;
santacoder's has 49,152, an end of text and four for infilling, so its tables shrink.
Source: foundation-model-stack/fms-hf-tuning tuning/sft_trainer.py special_tokens_dict, tuning/data/tokenizer_data_utils.py
tokenizer_and_embedding_resize. After 100 steps, full fine-tuning and LoRA of Mistral-7B on one GPU hold, within 2,048
bytes, what this number of rows needs; a row is 49,152 and 16,384 bytes there."""

NETWORK_REASONS = {
    "ibm-research/moe-7b-1b-active-shared-experts": "The network's shape is assumed: no file at hand gives it.",
    "ibm-granite/granite-4.0-tiny-preview": "The network is a hybrid (Mamba-2) whose shape no file at hand gives.",
}

FSDP = {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_backward_prefetch": "BACKWARD_PRE", "mixed_precision": "no"}
"""The settings of accelerate for several GPUs."""

COMMON_ASSUMPTIONS = (
    "peak_device_bytes is nvidia-smi's use with what was used when idle subtracted, in whole MiB.",
    "For several GPUs the allocated peak is rank 0's, nvidia-smi's number the mean of all (its benchmark.py).",
    "Gradient checkpointing is reentrant, the default of transformers 4.",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A case as a job, with sentences about how it was read and why it is out of scope (empty if it is not)."""

    job: TrainingJob
    name: str
    assumptions: tuple[str, ...]
    out_of_scope: str
    unseen_bytes: int
    """What the run allocates and the source's tracker does not see, between steps and at the peak."""

    def allocated(self, num_bytes: int | None) -> int | None:
        """What was allocated where the tracker saw `num_bytes`; None if it saw nothing."""
        return num_bytes + self.unseen_bytes if num_bytes else None

    def as_read(self, **measured: int | None) -> dict[str, dict[str, int]]:
        """What a row's environment has where the source's numbers are not the row's."""
        found = {name: num_bytes for name, num_bytes in measured.items() if num_bytes}
        return {"as_read": found} if self.unseen_bytes and found else {}


def case_of(
    record: Mapping[str, str],
    versions: Mapping[str, str],
    *,
    rows_multiple_of: int = 1,
    loads_on_hosts: bool = False,
    own_gptq: bool = True,
) -> Case:
    """The case of a line of the benchmark's tables (`record`, its columns as text), run with `versions`.
    `rows_multiple_of`: the rows of token table and lm_head were rounded up to a multiple of this. `loads_on_hosts`: whether
    the plug-ins made every rank load quantised weights on its host, whatever transformers would do. `own_gptq`: whether the
    project's own copy of GPTQModel loads GPTQ's, which asks accelerate for a device map under FSDP too, though it does not
    use it (fms_acceleration_peft/gptqmodel/models/base.py from_quantized, get_balanced_memory), and not AutoGPTQ by a map.

    Raises: KeyError or ValueError when a column is missing or holds something that the benchmark does not write.
    """
    model, setup = record["model_name_or_path"], record["framework_config"]
    config = dict(NETWORKS[model][1])
    quantized, facts = _quantization(setup, config)
    length = _resized(config, rows_multiple_of, facts)
    translation = _translation(record, config, versions, quantized, length)
    num_gpus, job, options = int(record["num_gpus"]), translation.job, dict(translation.job.framework_options)
    if _adapters_are_narrow(job, versions, fused="foak" in setup):
        job = _with_narrow_adapters(job, facts)
    unseen = _unseen_bytes(job, setup, facts)
    options |= _casts(record, facts)
    if "foak" in setup:
        options["fused_kernels"] = True
    if own_gptq and job.finetuning.quantization == "gptq" and num_gpus > 1:
        options["contexts_on_every_gpu"] = True
    if loads_on_hosts and quantized and num_gpus > 1:
        options["fsdp1_others_on_meta"] = False
    method, batch = record.get("peft_method") or "full", record["per_device_train_batch_size"]
    return Case(
        job=job.replace(framework_options=FrozenMapping(options)),
        name=f"{model}/{num_gpus} GPUs/batch {batch}/{method}/{setup}",
        assumptions=(*COMMON_ASSUMPTIONS, *facts, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join((*translation.unsupported, *_reasons(model, setup))),
        unseen_bytes=unseen,
    )


def _resized(config: dict[str, Any], rows_multiple_of: int, facts: list[str]) -> int:
    """Give the network of `config` the rows that its tables have in the run. Returns the length of its sequences."""
    vocabulary = round_up(TOKENS.get(config["model_type"], config["vocab_size"]), rows_multiple_of)
    if vocabulary != config["vocab_size"]:
        facts.append(
            f"Token table and lm_head have {vocabulary} rows: fms-hf-tuning adds a padding token and resizes them."
        )
        config["vocab_size"] = vocabulary
    # A position table of 2048 rows cannot take 4096 tokens, and memory per sequence agrees with 2048.
    length: int = min(SEQUENCE_LENGTH, config.get("n_positions", SEQUENCE_LENGTH))
    if length != SEQUENCE_LENGTH:
        facts.append(f"The packed length is assumed to be {length}, the size of the position table, not {SEQUENCE_LENGTH}.")
    return length


def _unseen_bytes(job: TrainingJob, setup: str, facts: list[str]) -> int:
    """What the source's tracker does not see (`Case.unseen_bytes`)."""
    if job.parallelism.world_size == 1 or "foak" not in setup or not job.finetuning.quantization:
        return 0
    unseen = _adapter_bytes(job)
    facts.append(
        f"The source's allocated memory lacks the adapters' weights, {unseen:,} bytes that are added here: they come "
        "to the GPU between the stages that its tracker adds up (fms_acceleration_foak/utils.py "
        "lora_adapters_switch_ddp_from_fsdp)."
    )
    return unseen


def _casts(record: Mapping[str, str], facts: list[str]) -> dict[str, bool]:
    """Framework options for what trl casts to fp32 in a quantised network, which it does on one GPU only
    (`is_sharded_qlora`)."""
    if record["framework_config"] != "baseline-peft-bnb" or int(record["num_gpus"]) != 1:
        return {}
    facts.append("Norms are in fp32, cast by trl: allocated-after-step is larger than accelerated-peft-bnb's by them.")
    if _is_true(record, "bf16"):
        return {"norms_in_float32": True}
    facts.append("Token table and lm_head are in fp32: trl 0.9.6 narrows them again with bf16=True only.")
    return {"norms_in_float32": True, "ends_in_float32": True}


def _adapter_bytes(job: TrainingJob) -> int:
    """Bytes of the weights of all LoRA adapters: [rank, inputs] and [outputs, rank] beside each target's matrix."""
    network, size = job.architecture, DTYPE_BYTES[adapter_dtype(job)]
    hidden, query, key = network.hidden_size, network.query_size, network.key_value_size
    apart = {"q_proj": hidden + query, "k_proj": hidden + key, "v_proj": hidden + key, "o_proj": query + hidden}
    lengths = {"c_attn": hidden + query + 2 * key} if network.fused_qkv else apart
    each = sum(length for name, length in lengths.items() if name in job.finetuning.targets)
    return int(network.num_hidden_layers * (job.finetuning.rank or 0) * each * size)


def _reasons(model: str, setup: str) -> list[str]:
    """Why the ledger does not cover the network or the setup."""
    reasons = [NETWORK_REASONS[model]] if model in NETWORK_REASONS else []
    if "scattermoe" in setup:
        reasons.append("ScatterMoE's expert kernels and its sharding of experts are not modelled.")
    return reasons


def _with_narrow_adapters(job: TrainingJob, facts: list[str]) -> TrainingJob:
    """`job` with adapters in the dtype of its weights, which is added to the `facts`."""
    narrow = job.precision.parameters
    facts.append(f"Adapters are in {narrow}, the dtype in which FSDP stores quantised weights (peft before 0.12).")
    return job.replace(
        finetuning=replace(job.finetuning, adapter_dtype=narrow),
        precision=replace(job.precision, gradients=narrow, optimizer_states=narrow),
    )


def _adapters_are_narrow(job: TrainingJob, versions: Mapping[str, str], *, fused: bool) -> bool:
    """Whether adapters on quantised weights are in half precision. FSDP stores quantised weights in it
    (`bnb_4bit_quant_storage`), and peft before 0.12 gives adapters the dtype of the weights. From 0.31 on, accelerate casts
    what FSDP trains to fp32, but not adapters that FSDP leaves out (fms_acceleration_peft/framework_plugin_bnb.py; peft
    0.11.1 update_layer)."""
    quantised = job.finetuning.quantization is not None and job.parallelism.world_size > 1
    widened = release(versions["accelerate"]) >= (0, 31) and not fused
    return quantised and release(versions["peft"]) < (0, 12) and not widened


def _translation(
    record: Mapping[str, str],
    config: Mapping[str, Any],
    versions: Mapping[str, str],
    quantized: Mapping[str, Any] | None,
    length: int,
) -> Translation:
    name, num_gpus = NETWORKS[record["model_name_or_path"]][0], int(record["num_gpus"])
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
    """The quantization settings of a framework_config, and sentences about what they assume."""
    if "bnb" in setup:
        facts = ["NF4 with double quantization: allocated-after-step of Mistral-7B fits 0.516 bytes per quantized weight."]
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        return {**four, "bnb_4bit_quant_storage": "bfloat16"}, facts  # the dtype of the network, for FSDP
    if "autogptq" in setup:
        group = config["quantization_config"]["group_size"]
        facts = [
            f"GPTQ with {'groups of ' + str(group) if group > 0 else 'one group per row'}: allocated-after-step fits it."
        ]
        return {"quant_method": "gptq", "bits": 4, "group_size": group, AS_PARAMETERS: True}, facts
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
