"""No setting is passed over in silence: changed from its default on a job that it suits, each field of a job changes the
numbers, or is said in a finding, or is refused, or stands here with the reason why it cannot matter."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.conventions import default_of, known_conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.ledger.scope.ignored import IGNORED
from peakcast.models.prediction.device_scope import device_findings
from peakcast.models.prediction.predict import known_of, predict
from peakcast.models.prediction.verdict import limits

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096,
}  # fmt: skip
ROUTED = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
PLAIN: dict[str, Any] = {"architecture": LLAMA, "micro_batch_size": 2, "sequence_length": 256}
LARGER = {**PLAIN, "micro_batch_size": 4, "sequence_length": 2048}
RECOMPUTES = {**PLAIN, "activation_checkpointing": {"mode": "full"}}
LORA = {**PLAIN, "finetuning": {"method": "lora", "rank": 8}}
QLORA = {**PLAIN, "finetuning": {"method": "qlora", "rank": 8, "quantization": "nf4"}}
GENERATES = {**PLAIN, "task": "inference", "inference": {"prompt_length": 64, "new_tokens": 64}}
MEGATRON = {**PLAIN, "framework": "megatron", "gradient_accumulation_steps": 4}
STAGES = {**MEGATRON, "parallelism": {"pipeline_parallel_size": 2}}
EXPERTS = {**MEGATRON, "architecture": ROUTED, "parallelism": {"data_parallel_size": 4, "tensor_parallel_size": 2}}

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "task": (GENERATES, "train"),
    "framework": (PLAIN, "torch"),
    "versions": (PLAIN, {"transformers": "4.40"}),
    "micro_batch_size": (PLAIN, 4),
    "sequence_length": (PLAIN, 512),
    "decoder_sequence_length": ({**PLAIN, "architecture": T5}, 64),
    "batch.form": ({**PLAIN, "attention": "eager"}, "padding_free"),
    "batch.num_tokens": ({**PLAIN, "batch": {"form": "padding_free"}, "attention": "flash_attention_2"}, 100),
    "batch.shortest_sequence": (LARGER, 16),
    "batch.seed": ({**LARGER, "batch": {"shortest_sequence": 16}}, 3),
    "gradient_accumulation_steps": (PLAIN, 2),
    "precision.parameters": (PLAIN, "float32"),
    "precision.compute": (PLAIN, "float8"),
    "precision.gradients": (MEGATRON, "float32"),
    "precision.optimizer_states": (MEGATRON, "float32"),
    "precision.main_parameters": (PLAIN, "float32"),
    "optimizer.name": (PLAIN, "sgd"),
    "optimizer.implementation": (PLAIN, "loop"),
    "optimizer.momentum": ({**PLAIN, "optimizer": {"name": "sgd"}}, 0.9),
    "optimizer.weight_decay": ({**PLAIN, "optimizer": {"name": "sgd"}}, 0.1),
    "finetuning.method": ({**PLAIN, "finetuning": {"rank": 8}}, "lora"),
    "finetuning.rank": (LORA, 16),
    "finetuning.targets": (LORA, ["q_proj"]),
    "finetuning.dropout": (LORA, 0.1),
    "finetuning.adapter_dtype": (LORA, "bfloat16"),
    "finetuning.quantization": (QLORA, "int8"),
    "finetuning.double_quantization": (QLORA, True),
    "finetuning.frozen": (PLAIN, ["embed_tokens"]),
    "finetuning.modules_to_save": (LORA, ["lm_head"]),
    "finetuning.settings": ({**PLAIN, "finetuning": {"method": "fourierft"}}, {"n_frequency": 2000}),
    "attention": (PLAIN, "eager"),
    "activation_checkpointing.mode": (PLAIN, "full"),
    "activation_checkpointing.use_reentrant": (RECOMPUTES, True),
    "activation_checkpointing.every_n_layers": (RECOMPUTES, 2),
    "activation_checkpointing.num_layers": ({**MEGATRON, "activation_checkpointing": {"mode": "full"}}, 2),
    "activation_checkpointing.method": (
        {**MEGATRON, "activation_checkpointing": {"mode": "full", "num_layers": 2}},
        "block",
    ),
    "activation_checkpointing.modules": ({**MEGATRON, "activation_checkpointing": {"mode": "selective"}}, ["mlp"]),
    "loss.fused_linear_cross_entropy": (PLAIN, True),
    "loss.kind": (PLAIN, "dpo"),
    "loss.completion_length": ({**PLAIN, "loss": {"kind": "grpo"}}, 16),
    "loss.reference": ({**PLAIN, "loss": {"kind": "dpo"}}, "precomputed"),
    "compile": (PLAIN, True),
    "parallelism.data_parallel_size": (PLAIN, 2),
    "parallelism.sharding": ({**PLAIN, "parallelism": {"data_parallel_size": 2}}, "fsdp2"),
    "parallelism.tensor_parallel_size": (MEGATRON, 2),
    "parallelism.sequence_parallel": ({**MEGATRON, "parallelism": {"tensor_parallel_size": 2}}, True),
    "parallelism.pipeline_parallel_size": (MEGATRON, 2),
    "parallelism.pipeline_schedule": (STAGES, "gpipe"),
    "parallelism.virtual_pipeline_stages": (STAGES, 2),
    "parallelism.pipeline_layers": (STAGES, [1, 3]),
    "parallelism.context_parallel_size": (MEGATRON, 2),
    "parallelism.expert_parallel_size": (EXPERTS, 2),
    "parallelism.expert_tensor_parallel_size": (EXPERTS, 1),
    "parallelism.zero_stage": ({**PLAIN, "framework": "deepspeed", "parallelism": {"data_parallel_size": 2}}, 2),
    "offload.parameters": ({**PLAIN, "parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"}}, True),
    "offload.optimizer": ({**PLAIN, "parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"}}, True),
    "offload.activations": (PLAIN, True),
    "allocator.expandable_segments": (PLAIN, True),
    "allocator.max_split_size_mb": (PLAIN, 20),
    "allocator.roundup_power2_divisions": ({**PLAIN, "sequence_length": 300}, "4"),
    "allocator.per_process_memory_fraction": (PLAIN, 0.5),
    "allocator.large_segment_size_mb": (PLAIN, 64),
    "inference.prompt_length": (GENERATES, 128),
    "inference.new_tokens": (GENERATES, 128),
    "inference.cache": (GENERATES, "static"),
    "other_memory_fraction": (PLAIN, 0.5),
    "framework_options": (PLAIN, {"liger_kernels": True}),
}
"""Field -> a job that it suits, and another value of it."""
CANNOT_MATTER = {
    "images.per_sequence": "the ledger has no images; recipes have (test_images_traced.py)",
    "images.height": "as above",
    "images.width": "as above",
    "architecture": "the network is no setting; its tests are those of its families",
    "finetuning.alpha": "a factor of the adapters' output, which has the size of what it scales",
    "allocator.max_non_split_rounding_mb": "acts on cached blocks beyond max_split_size_mb alone (test_allocator.py)",
    "allocator.garbage_collection_threshold": "acts only where memory is nearly full (test_allocator.py has such runs)",
}
"""Field -> why a change of it need not be seen."""


def fields_of(cls: Any, prefix: str = "") -> Iterator[str]:
    example = TrainingJob(architecture=catalog.architecture("gpt2"))
    for field in dataclasses.fields(cls):
        value = getattr(example, field.name) if not prefix else None
        if dataclasses.is_dataclass(value) and field.name != "architecture":
            yield from fields_of(type(value), f"{field.name}.")
        else:
            yield prefix + field.name


FIELDS = tuple(fields_of(TrainingJob))


def changed(mapping: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    return {**mapping, name: changed(mapping.get(name, {}), rest, value) if rest else value}


@functools.cache
def device() -> Any:
    return catalog.gpu("H100-80GB")


def seen(mapping: Mapping[str, Any]) -> Any:
    """All that an answer to the job rests on, or why there is none."""
    try:
        job = job_from_mapping(mapping)
        found = baseline(job, device())
    except SpecError as error:
        return error.message
    numbers = {name: value for name, value in vars_of(found).items() if name != "rank"}
    return numbers, known_of(job), limits(job, device())


def vars_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def test_every_field_has_its_case_or_its_reason() -> None:
    assert set(CASES) | set(CANNOT_MATTER) == set(FIELDS)
    assert not set(CASES) & set(CANNOT_MATTER)


@pytest.mark.parametrize("path", CASES)
def test_a_changed_field_is_seen(path: str) -> None:
    mapping, value = CASES[path]
    assert seen(changed(mapping, path, value)) != seen(mapping)


# -- conventions ----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_MEMORY = {
    "apply_layernorm_1p": "a norm's weight is stored less one",
    "calculate_per_token_loss": "what the loss is divided by",
    "ddp_average_in_collective": "where gradients are divided: in the reduction, or before it in place",
    "decoupled_lr": "the learning rate of the embedding and the head",
    "cuda_device_max_connections": "in which order kernels are started",
    "nccl_algo": "buffers of NCCL, of which all are an estimate",
    "nccl_nvls_enable": "buffers of NCCL, of which all are an estimate",
    "overlap_p2p_communication_warmup_flush": "tensors in flight are counted as sent at once",
    "overlap_param_gather": "parameters are gathered into the buffer that holds them in any case",
    "ddp_num_buckets": "where the one buffer of gradients is divided",
    "persist_layer_norm": "which kernel runs; it saves the same tensors",
    "rotary_interleaved": "which elements of a head are paired",
    "te_rng_tracker": "states of random numbers",
    "use_flash_attn": "the dialect sets a job's attention by it",
    "container": "a name by which importers know versions",
    "moe_router_num_groups": "masks of tokens × experts, gone before the experts run",
    "moe_router_group_topk": "masks of tokens × experts, gone before the experts run",
    "allgather_bucket_size": "DeepSpeed's stages 1 and 2 gather in place",
}
"""Conventions that no ledger reads -> why they cannot matter. Those that may are in `ignored.IGNORED`."""


@functools.cache
def sources() -> str:
    """The text of the ledgers and of what stands around them."""
    listed = subprocess.run(["git", "ls-files", "models/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    skipped = ("models/ledger/scope/ignored.py",)
    read = [name for name in listed.stdout.split() if name not in skipped]
    read += ["peakcast/jobs/conventions.py", "peakcast/dialects/common/job_file.py"]
    return "\n".join((ROOT / name).read_text() for name in read)


@pytest.mark.parametrize("framework", ["huggingface", "torch", "deepspeed", "megatron"])
def test_every_convention_is_read_or_said_or_cannot_matter(framework: str) -> None:
    names = known_conventions(framework)
    libraries = {name for name in names if name.endswith("_library")}  # read by their optimizer's name
    unread = {name for name in names if f'"{name}"' not in sources()} - libraries
    assert unread <= set(IGNORED.get(framework, {})) | set(WITHOUT_MEMORY)


@pytest.mark.parametrize("framework", ["huggingface", "torch", "deepspeed", "megatron"])
def test_a_convention_that_is_a_word_has_choices(framework: str) -> None:
    free = {"container", "cublas_workspace_config", "nccl_algo", "cuda_device_max_connections", "nccl_nvls_enable"}
    for name in known_conventions(framework):  # but for environment variables, as they are written
        if isinstance(default_of(framework, name), str) and name not in free:
            with pytest.raises(SpecError, match=f"framework_options.{name}='banana' must be (one of|a text like)"):
                job_from_mapping({**PLAIN, "framework": framework, "framework_options": {name: "banana"}})


@pytest.mark.parametrize("name", IGNORED["megatron"])
def test_an_option_that_is_ignored_is_said(name: str) -> None:
    default = default_of("megatron", name)
    value = not default if isinstance(default, bool) else 2 if isinstance(default, int) else "1"
    said = known_of(job_from_mapping({**MEGATRON, "framework_options": {name: value}}))
    assert [finding.parameter for finding in said if finding.code == "setting_ignored"] == [f"framework_options.{name}"]
    assert not known_of(job_from_mapping({**MEGATRON, "framework_options": {name: default}}))


@pytest.mark.parametrize("framework", ["huggingface", "torch", "deepspeed", "megatron"])
def test_every_convention_refuses_a_value_of_another_kind(framework: str) -> None:
    for name in known_conventions(framework):
        for value in (None, [1], -3, "banana" if not isinstance(default_of(framework, name), str) else 7):
            with pytest.raises(SpecError, match=rf"framework_options\.{name}=.* must be ") as refused:
                job_from_mapping({**PLAIN, "framework": framework, "framework_options": {name: value}})
            assert refused.value.parameter == f"framework_options.{name}"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"framework_options": {"loop": "banana"}}, "framework_options.loop='banana' must be one of 'calls', 'trainer'"),
        ({"finetuning": {"method": "lora", "rank": 8, "dropout": 1.5}}, "finetuning.dropout=1.5 must be"),
        ({"finetuning": {"quantization": "nf4"}}, "quantised weights cannot train"),
        ({"decoder_sequence_length": 64}, "length of an encoder-decoder's targets"),
        ({"batch": {"shortest_sequence": 16, "seed": -1}}, "batch.seed=-1 must not be negative"),
    ],
)
def test_what_contradicts_the_job_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError) as refused:
        job_from_mapping({**PLAIN, **changes})
    assert said in refused.value.message


def test_expert_tensor_parallelism_of_a_dense_network_is_said_to_do_nothing() -> None:
    (finding,) = known_of(job_from_mapping({**MEGATRON, "parallelism": {"expert_tensor_parallel_size": 4}}))
    assert (finding.code, finding.parameter) == ("setting_without_effect", "parallelism.expert_tensor_parallel_size")


@pytest.mark.parametrize(
    ("mapping", "path", "value", "code"),
    [
        (PLAIN, "precision.gradients", "float32", "setting_ignored"),
        (PLAIN, "precision.optimizer_states", "float32", "setting_ignored"),
        (PLAIN, "precision.compute", "float32", "setting_ignored"),
        (RECOMPUTES, "activation_checkpointing.num_layers", 2, "setting_ignored"),
        (MEGATRON, "compile", True, "setting_ignored"),
        (MEGATRON, "loss.fused_linear_cross_entropy", True, "setting_ignored"),
        (PLAIN, "finetuning.rank", 16, "setting_without_effect"),
        (PLAIN, "finetuning.dropout", 0.1, "setting_without_effect"),
        (PLAIN, "activation_checkpointing.every_n_layers", 2, "setting_without_effect"),
        (PLAIN, "optimizer.momentum", 0.9, "setting_without_effect"),
        (PLAIN, "inference.new_tokens", 5, "setting_without_effect"),
        (PLAIN, "parallelism.sequence_parallel", True, "setting_without_effect"),
        (PLAIN, "parallelism.sharding", "fsdp2", "setting_without_effect"),
    ],
)
def test_a_setting_that_does_not_suit_the_job_is_said(mapping: dict[str, Any], path: str, value: Any, code: str) -> None:
    assert not known_of(job_from_mapping(mapping))
    said = known_of(job_from_mapping(changed(mapping, path, value)))
    assert [(finding.code, finding.parameter) for finding in said] == [(code, path)]


def test_states_of_main_parameters_have_their_dtype() -> None:
    wide = {"main_parameters": "float32", "optimizer_states": "float32"}
    assert not known_of(job_from_mapping(changed(PLAIN, "precision", {**PLAIN.get("precision", {}), **wide})))


def test_what_a_chip_cannot_do_is_said() -> None:
    flash = job_from_mapping({**PLAIN, "attention": "flash_attention_2"})
    eight = job_from_mapping({**PLAIN, "precision": {"compute": "float8"}})
    for job, old, new, parameter in (
        (flash, "V100-32GB", "A100-80GB", "attention"),
        (eight, "A100-80GB", "H100-80GB", "precision.compute"),
    ):
        (finding,) = device_findings(job, catalog.gpu(old))
        assert (finding.code, finding.parameter) == ("run_would_fail", parameter)
        assert old in finding.sentence
        assert not device_findings(job, catalog.gpu(new))
        assert predict(job, catalog.gpu(old)).fits == "uncertain"
