"""LitGPT's networks and recipes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import ReadOptions, translated
from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import Precision
from peakcast.measurements.store import datasets_folder, read_measurements
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

TRAIN = {"global_batch_size": 32, "micro_batch_size": 2, "max_seq_length": 256}
LLAMA = {
    "block_size": 2048, "vocab_size": 32000, "padding_multiple": 64, "n_layer": 22, "n_head": 32, "n_query_groups": 4,
    "n_embd": 2048, "intermediate_size": 5632, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
}  # fmt: skip


def read(num_gpus: int = 1, **values: Any) -> Translation:
    return translated(Pasted(values={"train": TRAIN, "precision": "bf16-true", **values}), ReadOptions(num_gpus=num_gpus))


@pytest.mark.parametrize("section", ["model_config", "model"])
def test_the_fields_of_a_config_are_the_network(section):
    found, known = read(**{section: LLAMA}).job.architecture, catalog.architecture("tinyllama-1.1b")
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size"):
        assert getattr(found, name) == getattr(known, name), name


def test_they_count_more_than_the_name_beside_them():
    named = read(model_name="tiny-llama-1.1b", model_config={**LLAMA, "n_layer": 3})
    assert named.job.architecture.num_hidden_layers == 3


def test_without_them_the_defaults_are_litgpts():
    found = read(model_config={"n_layer": 2}).job.architecture
    assert (found.model_type, found.hidden_size, found.intermediate_size) == ("gpt_neox", 4096, 16384)
    assert found.vocab_size == 50688  # 50,254 up to a multiple of 512


@pytest.mark.parametrize("field", [{"mlp_class_name": "GemmaMLP"}, {"parallel_residual": True}, {"bias": True}])
def test_another_make_of_network_is_refused_by_name(field):
    with pytest.raises(SpecError, match=f"model_config.{next(iter(field))}="):
        read(model_config={**LLAMA, **field})


def test_sharded_accumulation_keeps_full_gradients_of_untied_tables():
    # config_hub/finetune/README.md of LitGPT: gemma-2b/full.yaml on four GPUs, four micro-batches a step, 17.43 GB
    train = {"global_batch_size": 16, "micro_batch_size": 1, "max_seq_length": 512}
    found = read(num_gpus=4, checkpoint_dir="checkpoints/google/gemma-2b", train=train).job
    asked = found.replace(versions=FrozenMapping({"litgpt": "0.4.0", "torch": "2.2"}))
    assert ledger(asked).peak().num_bytes == pytest.approx(17.43e9, rel=0.035)


def test_tied_tables_are_tied():
    tied = read(model_name="tiny-llama-1.1b", train={**TRAIN, "tie_embeddings": True})
    assert tied.job.architecture.tie_word_embeddings
    for name in ("tiny-llama-1.1b", "gemma-2b"):  # the second's checkpoint has one table
        assert not read(model_name=name).job.architecture.tie_word_embeddings


def test_pretraining_and_finetuning_are_other_recipes():
    pretrained = read(4, model_name="tiny-llama-1.1b").job
    assert (pretrained.compile, pretrained.activation_checkpointing.mode) == (True, "none")
    assert pretrained.optimizer.implementation == "fused"
    tuned = read(4, checkpoint_dir="checkpoints/TinyLlama/TinyLlama-1.1B-Chat-v1.0").job
    assert (tuned.compile, tuned.activation_checkpointing.mode) == (False, "full")
    assert tuned.optimizer.implementation == "foreach"


def test_pretraining_fills_the_networks_length_where_none_is_given():
    unsaid = {"train": {"global_batch_size": 32, "micro_batch_size": 2}}
    assert read(model_config={**LLAMA, "block_size": 4096}, **unsaid).job.sequence_length == 4096
    tuned = read(checkpoint_dir="checkpoints/mistralai/Mistral-7B-v0.3", **unsaid)
    assert tuned.job.sequence_length == 2048
    assert any(finding.direction == "more" for finding in tuned.findings if finding.parameter == "train.max_seq_length")


def test_a_mixed_precision_is_autocast_on_one_gpu():
    one = read(model_name="tiny-llama-1.1b", precision="bf16-mixed")
    assert one.job.framework_options["autocast"] is True
    several = read(4, model_name="tiny-llama-1.1b", precision="bf16-mixed")
    assert any("autocast" in sentence for sentence in several.unsupported)


def test_all_devices_of_a_machine_are_asked_for():
    values = {"train": TRAIN, "precision": "bf16-true", "model_name": "tiny-llama-1.1b", "devices": "auto"}
    assert any("devices=auto" in sentence for sentence in translated(Pasted(values=values)).assumptions)


LORA = {"lora_r": 8, "lora_query": True, "lora_key": False, "lora_value": True, "lora_projection": True, "lora_mlp": True}


@pytest.mark.parametrize(
    ("checkpoint", "targets"),
    [
        ("EleutherAI/pythia-1b", ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")),
        ("meta-llama/Llama-2-7b", ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
        ("microsoft/phi-2", ("q_proj", "v_proj", "dense", "fc1", "fc2")),
    ],
)
def test_switches_for_adapters_are_targets_in_every_family(checkpoint, targets):
    job = read(checkpoint_dir=f"checkpoints/{checkpoint}", **LORA).job
    assert job.finetuning.targets == targets
    assert not out_of_scope(job.replace(versions=FrozenMapping()))  # of LitGPT's own networks and adapters, see there
    switches = ["lora_query", "lora_value", "lora_projection", "lora_mlp"]
    tuned = {"method": "lora", "rank": 8, "targets": switches}
    said = job_from_mapping({"architecture": job.architecture, "framework": "torch", "finetuning": tuned})
    assert said.finetuning.targets == targets


@pytest.mark.parametrize(
    ("program", "rank"),
    [("litgpt finetune", 8), ("litgpt finetune_lora", 8), ("lora.py", 8), ("litgpt finetune_full", None)],
)
def test_a_command_says_that_it_is_lora(program, rank):
    values = {"train": TRAIN, "precision": "bf16-true", "checkpoint_dir": "checkpoints/microsoft/phi-2"}
    assert translated(Pasted(values=values, program=program)).job.finetuning.rank == rank


@pytest.mark.parametrize("program", ["litgpt finetune_adapter", "adapter_v2.py"])
def test_its_adapters_are_not_read_as_full_training(program):
    values = {"train": TRAIN, "precision": "bf16-true", "checkpoint_dir": "checkpoints/microsoft/phi-2"}
    found = translated(Pasted(values=values, program=program))
    assert found.job.finetuning.method == "lora"
    assert any("is not modelled; LoRA of rank 8" in sentence for sentence in found.unsupported)


@pytest.mark.parametrize(("verb", "name"), [("finetune_lora", "microsoft/phi-2"), ("pretrain", "pythia-160m")])
def test_the_first_word_of_a_command_is_the_network(verb, name):
    found = translation_of(f"litgpt {verb} {name} --train.micro_batch_size 2 --train.global_batch_size 8")
    assert found.job.architecture.name == name.rpartition("/")[2]


def test_one_matrix_makes_queries_keys_and_values_where_all_weights_train():
    full = read(checkpoint_dir="checkpoints/meta-llama/Llama-2-7b").job
    assert full.architecture.fused_qkv
    assert not read(checkpoint_dir="checkpoints/meta-llama/Llama-2-7b", **LORA).job.architecture.fused_qkv
    assert full.framework_options["logits_chunks"] == 2 * 256 // 128


def test_adapters_take_the_chunks_of_all_sequences_together():
    adapted = read(checkpoint_dir="checkpoints/meta-llama/Llama-2-7b", **LORA).job
    assert adapted.framework_options["logits_chunks"] == adapted.sequence_length // 128


def test_what_sgd_keeps_and_copies():
    train = {"micro_batch_size": 1, "max_seq_length": 64}
    recipe = {"checkpoint_dir": "checkpoints/meta-llama/Llama-3.2-1B", "train": train}
    given = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}}
    optimizer = translation_of({**recipe, "optimizer": given}).job.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 0.1)
    given = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "weight_decay": 0.1}}
    assert not translation_of({**recipe, "optimizer": given}).job.optimizer.weight_decay  # costs nothing


QLORA = {"quantize": "bnb.nf4", "lora_r": 32, "checkpoint_dir": "checkpoints/meta-llama/Llama-2-7b"}


def quantized(version, **changes):
    versions = FrozenMapping({"litgpt": version, "torch": "2.3"})
    return read(**QLORA).job.replace(**{"versions": versions, **changes})


def test_quantized_weights_train_with_paged_states():
    assert quantized("0.4.5").optimizer.name == "paged_adamw_32bit"
    assert read(**{**QLORA, "quantize": None}).job.optimizer.name == "adamw"


def test_lightning_quantizes_the_lm_head_too():
    """32,000 x 4,096 weights, of 4 bits and a scale of 4 bytes for each 64."""
    stored = {one.name: one.numel * one.element_bytes for one in stored_parameters(quantized("0.4.5"))}
    assert stored["lm_head.weight.weight"] == 32000 * 4096 // 2
    assert stored["lm_head.weight.absmax"] == 32000 * 4096 // 64 * 4
    assert "lm_head.weight" in {one.name for one in stored_parameters(quantized("0.4.5", versions=FrozenMapping()))}


@pytest.mark.parametrize(("compute", "sizes"), [("bfloat16", {2, 4}), ("float16", {2})])
def test_its_matrices_become_float16_before_they_are_bfloat16(compute, sizes):
    step = ledger(quantized("0.5.13", precision=Precision(parameters=compute, compute=compute)))
    temporary = re.compile(r"lm_head(\.dequantize(_again)?)?\.temporary")
    made = {size for name, size in zip(step.names, step.num_bytes.tolist(), strict=True) if temporary.fullmatch(name)}
    assert made == {32000 * 4096 * size for size in sizes}


def test_bitsandbytes_inputs_stay_until_the_next_loss_exists():
    """bitsandbytes 0.42 has them as attributes of the graph, to which the loop's `logits` and `loss` refer. Of each of 32
    layers: what query-key-value, output, gate and up, and down read; and the lm_head's."""
    job = quantized("0.4.5")
    step = ledger(job)
    rows, started = job.micro_batch_size * job.sequence_length, step.phases.tolist().index(Phase.FORWARD)
    held = [
        size
        for name, size, born, dies in zip(step.names, step.num_bytes, step.born, step.dies, strict=True)
        if name == "attribute of graph" and born <= started < dies
    ]
    assert sum(held) == rows * 2 * (32 * (3 * 4096 + 11008) + 4096)


def test_the_table_that_releases_from_0_5_on_copy_stays_and_gets_a_gradient():
    kept = {"embed_tokens.weight.before": 32000 * 4096 * 2, "embed_tokens.weight.grad": 32000 * 4096 * 2}
    for version, extra in (("0.4.11", {}), ("0.5.3", kept)):
        step = ledger(quantized(version))
        every = zip(step.names, step.num_bytes.tolist(), step.dies.tolist(), strict=True)
        assert {name: size for name, size, dies in every if name in kept and dies >= len(step.phases)} == extra


PUBLISHED = [
    row
    for name in ("litgpt_finetune", "litgpt_resources")
    for row in read_measurements(datasets_folder() / "published" / f"{name}.csv")
    if row.job.finetuning.quantization and row.peak_allocated_bytes and not row.out_of_scope
]


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row.job.task == "inference"], ids=lambda row: row.case[:7])
def test_published_generations_in_four_bits(row):
    found = ledger(row.job, device=catalog.gpu(row.gpu)).peak().num_bytes
    assert found == pytest.approx(row.peak_allocated_bytes, rel=0.008)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "mistral-7b", "stablelm-base-alpha-3b"])
def test_published_training_in_four_bits(name):
    row = next(row for row in PUBLISHED if f"{name}/qlora.yaml" in row.case)
    found = ledger(row.job, device=catalog.gpu(row.gpu)).peak().num_bytes
    assert found == pytest.approx(row.peak_allocated_bytes, rel=0.03)
