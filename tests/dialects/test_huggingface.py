"""Hugging Face settings to jobs: the Trainer's defaults, peft, FSDP, and no key left unexplained."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.errors import PeakcastError, SpecError
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Precision

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def translate(num_gpus: int = 1, peft=None, deepspeed=None, fsdp=None, versions=None, **training):
    return from_huggingface(LLAMA, training, peft, deepspeed, fsdp, num_gpus, versions=versions)


def test_the_trainers_defaults_are_taken_and_said():
    translation = from_huggingface(LLAMA)
    job = translation.job
    assert (job.framework, job.micro_batch_size, job.gradient_accumulation_steps) == ("huggingface", 8, 1)
    assert (job.sequence_length, job.attention, job.compile) == (1024, "sdpa", False)
    assert (job.optimizer.name, job.optimizer.implementation) == ("adamw", "fused")
    assert job.activation_checkpointing.mode == "none"
    assert (job.precision.parameters, job.precision.gradients, job.precision.optimizer_states) == ("bfloat16",) * 3
    said = " ".join(translation.assumptions)
    for words in ("per_device_train_batch_size is not given", "max_length is not given", "loaded as bfloat16", "fused"):
        assert words in said
    assert translation.unknown == translation.unsupported == ()


@pytest.mark.parametrize(("form", "said"), [({}, True), ({"packing": True}, False), ({"block_size": 512}, False)])
def test_lengths_that_change_are_said(form, said):
    found = [finding for finding in translate(**form).findings if finding.code == "reserved_beyond_replay"]
    assert [(finding.parameter, finding.direction) for finding in found] == [("batch.shortest_sequence", "more")] * said


def test_attention_is_eager_before_sdpa_came():
    releases = ({"transformers": "4.35.2"}, {"transformers": "4.36"}, None)
    assert [translate(versions=given).job.attention for given in releases] == ["eager", "sdpa", "sdpa"]


def test_weights_whose_dtype_nothing_says_may_be_narrower():
    untold = {key: value for key, value in LLAMA.items() if key not in ("dtype", "torch_dtype")}
    (found,) = [one for one in from_huggingface(untold).findings if one.parameter == "torch_dtype"]
    assert (found.direction, "in 16 bits" in found.sentence) == ("less", True)
    told = from_huggingface(untold, {"torch_dtype": "bfloat16"}).findings
    assert not [one for one in told if one.parameter == "torch_dtype"]


def test_the_defaults_of_transformers_4():
    job = translate(versions={"transformers": "4.48.1"}, gradient_checkpointing=True).job
    assert job.optimizer.implementation == "foreach"
    assert job.activation_checkpointing.use_reentrant
    assert not translate(gradient_checkpointing=True).job.activation_checkpointing.use_reentrant
    explicit = translate(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}).job
    assert explicit.activation_checkpointing.use_reentrant


@pytest.mark.parametrize(
    ("training", "compute", "autocast"),
    [
        ({"bf16": True, "torch_dtype": "float32"}, "bfloat16", True),
        ({"bf16": True, "dtype": "bfloat16"}, "bfloat16", True),
        ({"fp16": True, "torch_dtype": "torch.float32"}, "float16", True),
        ({"torch_dtype": "float32"}, "float32", None),
    ],
)
def test_bf16_is_autocast_over_whatever_weights(training, compute, autocast):
    job = translate(**training).job
    assert job.precision.compute == compute
    assert job.framework_options.get("autocast") == autocast


def test_texts_are_read_as_values():
    job = translate(per_device_train_batch_size="2", bf16="true", torch_dtype="float32", torch_compile="false").job
    assert (job.micro_batch_size, job.precision.compute, job.compile) == (2, "bfloat16", False)


def test_lora_and_qlora():
    lora = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    job = translate(peft=lora).job
    tuning = job.finetuning
    assert (tuning.method, tuning.rank, tuning.alpha, tuning.targets) == ("lora", 16, 32.0, ("q_proj", "v_proj"))
    assert (job.precision.parameters, job.precision.optimizer_states) == ("bfloat16", "float32")
    four_bit = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    job = translate(peft={**lora, "target_modules": "all-linear"}, quantization_config=four_bit, bf16=True).job
    assert (job.finetuning.method, job.finetuning.quantization, job.finetuning.double_quantization) == (
        "qlora",
        "nf4",
        True,
    )
    assert job.finetuning.targets == ("all-linear",)
    assert job.framework_options == {"autocast": True}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    job = translate(peft=lora, quantization_config=gptq).job
    assert (job.finetuning.quantization, job.framework_options["gptq_group_size"]) == ("gptq", -1)
    assert translate(peft={"r": 8}, load_in_8bit=True).job.finetuning.quantization == "int8"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("use_bdlora", {"nblocks": 2}, "block-diagonal LoRA"),
        ("bias", "all", "Trained biases"),
        ("peft_type", "XLORA", "peft_type=XLORA"),
        ("target_modules", ".*proj", "is a pattern"),
    ],
)
def test_what_peft_can_and_a_job_cannot(key, value, words):
    translation = translate(peft={"r": 8, key: value})
    assert any(words.lower() in sentence.lower() for sentence in translation.unsupported), translation.unsupported


def test_modules_that_train_beside_the_adapters_are_the_jobs():
    found = translate(peft={"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]})
    assert found.job.finetuning.modules_to_save == ("embed_tokens", "lm_head")
    assert not found.unsupported


def test_fsdp1_keeps_what_decides_its_buffers():
    strategy = {
        "fsdp_version": 1,
        "fsdp_backward_prefetch": "backward_pre",
        "fsdp_use_orig_params": True,
        "limit_all_gathers": False,
    }
    options = translate(num_gpus=8, fsdp=strategy).job.framework_options
    assert options["fsdp1_backward_prefetch"] == "BACKWARD_PRE"
    assert options["fsdp1_use_orig_params"] is True
    assert options["fsdp1_limit_all_gathers"] is False
    never = translate(num_gpus=8, fsdp={"fsdp_backward_prefetch": "NO_PREFETCH"}).job.framework_options
    assert not never.get("fsdp1_backward_prefetch")


@pytest.mark.parametrize(
    ("arguments", "sharding"),
    [
        ({}, "none"),
        ({"fsdp": {"fsdp_sharding_strategy": "FULL_SHARD"}}, "fsdp1"),
        ({"fsdp": {"fsdp_config": {"fsdp_version": 2}, "num_processes": 2, "mixed_precision": "bf16"}}, "fsdp2"),
        ({"fsdp": {"fsdp_sharding_strategy": 4}}, "hsdp"),
        ({"fsdp": "no_shard"}, "no_shard"),
    ],
)
def test_layouts_over_gpus(arguments, sharding):
    translation = translate(num_gpus=2, **arguments)
    assert translation.job.parallelism.data_parallel_size == 2
    assert translation.job.parallelism.sharding == sharding
    assert translation.unknown == ()


def test_accelerate_widens_trained_weights_where_fsdp_mixes_precisions():
    fsdp = {"fsdp_sharding_strategy": "FULL_SHARD"}
    told = translate(num_gpus=8, fsdp=fsdp, torch_dtype="bfloat16", bf16=True)
    assert told.job.precision == Precision(
        parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32"
    )
    assert told.job.framework_options["autocast"] is True
    assert any("widens weights of bfloat16" in sentence for sentence in told.assumptions)
    assert translate(num_gpus=8, fsdp=fsdp, torch_dtype="bfloat16").job.precision.parameters == "bfloat16"
    assert translate(num_gpus=8, torch_dtype="bfloat16", bf16=True).job.precision.parameters == "bfloat16"
    adapters = {"r": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    adapted = translate(num_gpus=8, fsdp=fsdp, peft=adapters, dtype="bfloat16", bf16=True)
    assert adapted.job.precision.parameters == "bfloat16"


@pytest.mark.parametrize(
    ("weights", "asks", "version", "quantization", "adapters"),
    [
        ("bfloat16", {}, 1, None, "bfloat16"),
        ("float32", {}, 2, None, "float32"),  # those of the layers that they are on
        ("float16", {}, 2, None, "float16"),
        ("bfloat16", {"bf16": True}, 1, None, None),  # what trains is widened
        ("bfloat16", {"bf16": True}, 2, None, None),
        ("bfloat16", {"bf16": True}, 1, {"load_in_4bit": True}, None),
        ("bfloat16", {"bf16": True}, 2, {"load_in_4bit": True}, "bfloat16"),  # but there: `model_has_params4bit`
        ("bfloat16", {"bf16": True}, 2, {"load_in_8bit": True}, "float32"),
    ],
)
def test_accelerate_widens_adapters_too_where_fsdp_mixes_precisions(weights, asks, version, quantization, adapters):
    peft = {"r": 8, "target_modules": ["q_proj"], "autocast_adapter_dtype": False}
    fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    told = translate(num_gpus=8, fsdp=fsdp, peft=peft, dtype=weights, quantization_config=quantization, **asks)
    assert told.job.finetuning.adapter_dtype == adapters
    assert any("widens adapters" in sentence for sentence in told.assumptions) == (adapters is None)
    alone = translate(peft=peft, dtype=weights, quantization_config=quantization, **asks)
    assert alone.job.finetuning.adapter_dtype == (adapters or "bfloat16")


def test_fsdp_from_training_arguments():
    training = {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"transformer_layer_cls_to_wrap": ["X"]}}
    translation = from_huggingface(LLAMA, training, num_gpus=4)
    assert translation.job.parallelism.sharding == "fsdp1"
    assert translation.job.offload.parameters
    assert translation.unknown == ()
    partly = translate(num_gpus=2, fsdp={"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_forward_prefetch": True})
    assert partly.job.framework_options["fsdp_reshard_after_forward"] is False
    assert conventions(partly.job)["fsdp1_forward_prefetch"]


def test_unknown_keys_are_reported_and_harmless_ones_listed():
    translation = translate(
        learning_rate=1e-4, brand_new=1, peft={"r": 8, "task_type": "CAUSAL_LM", "odd": 2},
        deepspeed={"zero_optimization": {"stage": 1, "strange": 1}, "new_block": {}},
    )  # fmt: skip
    assert translation.unknown == ("brand_new", "new_block", "odd", "zero_optimization.strange")
    assert translation.ignored == ("learning_rate", "task_type")
    for key in translation.unknown:
        assert f"{key} is not known here; it is left out, and may matter." in translation.warnings


@pytest.mark.parametrize(
    ("key", "usual", "other"),
    [
        ("torch_compile_mode", "default", "reduce-overhead"),
        ("torch_compile_backend", "inductor", "cudagraphs"),
        ("half_precision_backend", "auto", "apex"),
    ],
)
def test_what_changes_the_step_is_no_key_without_weight(key, usual, other):
    assert translate(**{key: usual}).unsupported == ()
    (sentence,) = translate(**{key: other}).unsupported
    assert key in sentence
    assert sentence.endswith("is not modelled.")


def test_the_buckets_of_ddp_are_read():
    assert translate(ddp_bucket_cap_mb=100, num_gpus=2).job.framework_options["ddp_bucket_cap_mib"] == 100


def test_modules_left_without_adapters_are_said():
    found = translate(peft={"r": 8, "exclude_modules": ["lm_head"]})
    assert any("exclude_modules" in sentence for sentence in found.unsupported)


@pytest.mark.slow
def test_every_key_of_the_installed_training_arguments_is_known():
    transformers = pytest.importorskip("transformers")
    fields = transformers.TrainingArguments.__dataclass_fields__
    given = dict.fromkeys(fields)
    values = {"optim": "sgd", "bf16": True, "gradient_checkpointing": True, "fsdp": "", "torch_empty_cache_steps": 2,
              "use_liger_kernel": True, "neftune_noise_alpha": 5.0}  # fmt: skip
    harmless = {name: "x" for name in fields if name not in _WITH_MEANING}
    assert translate(**{**given, **harmless, **values}).unknown == ()


def test_what_offloaded_activations_leave_on_the_gpu_is_a_finding_without_checkpoints():
    asked = {"activation_offloading": True, "per_device_train_batch_size": 2}
    assert any("15 bytes" in one for one in translate(**asked).unsupported)
    assert not any("15 bytes" in one for one in translate(**asked, gradient_checkpointing=True).unsupported)


_WITH_MEANING = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "bf16", "fp16", "deepspeed", "fsdp",
    "fsdp_config", "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "use_liger_kernel",
    "label_smoothing_factor", "auto_find_batch_size", "parallelism_config", "ddp_bucket_cap_mb", "weight_decay",
    "per_device_eval_batch_size", "eval_strategy",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "parameter", "message"),
    [
        ({"optim": "adamw_torhc"}, "optim", "did you mean 'adamw_torch'"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size", "must be a whole number of at least 1"),
        ({"torch_dtype": "int3"}, "torch_dtype", "must be one of float32, bfloat16, float16"),
        ({"bf16": True, "fp16": True}, "fp16", "cannot be given together"),
        ({"deepspeed": "ds.json"}, "deepspeed", "is a path; give the mapping"),
        ({"deepspeed": {"zero_optimization": {"stage": 4}}}, "zero_optimization.stage", "must be 0, 1, 2 or 3"),
        ({"fsdp": {"fsdp_sharding_strategy": "HALF"}, "num_gpus": 2}, "fsdp_sharding_strategy", "must be one of"),
        ({"peft": {"r": "many"}}, "r", "must be a number"),
        ({"peft": [1]}, "peft", "must be a mapping"),
        ({"num_gpus": 0}, "num_gpus", "whole number from 1"),
    ],
)
def test_an_impossible_value_is_refused_by_its_own_key(arguments, parameter, message):
    as_training_argument = isinstance(arguments.get("deepspeed"), str)
    call = (lambda: from_huggingface(LLAMA, arguments)) if as_training_argument else (lambda: translate(**arguments))
    with pytest.raises(SpecError, match=message) as error:
        call()
    assert error.value.parameter == parameter


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
NAMES = sorted(_WITH_MEANING | {"max_length", "torch_dtype", "attn_implementation", "quantization_config", "packing"})


@settings(max_examples=200)
@pytest.mark.slow
@given(
    training=st.dictionaries(st.sampled_from(NAMES), JUNK | st.just({"stage": "x"}), max_size=3),
    peft=st.none() | st.dictionaries(st.sampled_from(["r", "target_modules", "bias", "lora_alpha"]), JUNK, max_size=3),
    deepspeed=st.none() | st.dictionaries(st.sampled_from(["zero_optimization", "bf16"]), JUNK, max_size=2),
    fsdp=st.none() | st.dictionaries(st.sampled_from(["fsdp_sharding_strategy", "fsdp_version"]), JUNK, max_size=2),
)
def test_junk_is_refused_as_a_spec_error_or_translated(training, peft, deepspeed, fsdp):
    with suppress(SpecError):
        from_huggingface(LLAMA, training, peft, deepspeed, fsdp, 2)


def test_an_unknown_network_is_refused_by_name():
    with pytest.raises(PeakcastError, match="no-such-network"):
        from_huggingface("no-such-network")


@pytest.mark.parametrize(
    ("training", "name", "options"),
    [
        ({"optim": "adamw_torch_8bit"}, "adamw_8bit", {"adamw_8bit_library": "torchao"}),
        ({"optim": "adamw_bnb_8bit"}, "adamw_8bit", {}),
        ({"optim": "galore_adamw", "optim_args": "rank=64, update_proj_gap=100"}, "galore", {"galore_rank": 64}),
        ({"optim": "paged_lion_8bit"}, "paged_lion_8bit", {}),
        ({"optim": "paged_ademamix_8bit"}, "paged_ademamix_8bit", {}),
        ({"optim": "sgd", "label_smoothing_factor": 0.1}, "sgd", {"smooths_labels": True}),
        ({"optim": "rmsprop_bnb"}, "rmsprop", {"rmsprop_library": "bitsandbytes"}),
        ({"optim": "rmsprop_bnb_8bit"}, "rmsprop_8bit", {}),
        ({"optim": "adalomo", "neftune_noise_alpha": 5}, "adalomo", {"neftune": True}),
    ],
)
def test_optimizers_and_what_they_need_to_be_told(training, name, options):
    job = translate(**training).job
    assert (job.optimizer.name, dict(job.framework_options)) == (name, options)

@pytest.mark.parametrize(
    ("training", "form"),
    [
        ({}, "rows"),
        ({"packing": True}, "rows"),  # trl's version is not known: as many tokens
        ({"packing": True, "packing_strategy": "bfd"}, "padding_free"),
        ({"packing": True, "packing_strategy": "wrapped"}, "rows"),
        ({"padding_free": True}, "padding_free"),
        ({"neat_packing": True, "packing": True}, "masked"),
    ],
)
def test_packing_is_the_form_of_the_batch(training, form):
    assert translate(**training).job.batch.form == form


def test_a_padding_free_batch_without_flash_attention_is_warned_of():
    warned = translate(padding_free=True, attn_implementation="sdpa")
    assert any("mask of tokens" in warning for warning in warned.warnings)
    assert not translate(padding_free=True, attn_implementation="flash_attention_2").warnings


def test_a_teacher_beside_the_student_is_refused():
    with pytest.raises(SpecError, match="teacher_model_name_or_path='Qwen/Qwen3-8B' is a teacher"):
        from_huggingface("gpt2", {"teacher_model_name_or_path": "Qwen/Qwen3-8B"})


def test_it_is_said_that_nothing_is_sharded_where_nothing_says_so():
    arguments = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 1, "learning_rate": 1e-4}
    said = [any("nothing is sharded" in sentence for sentence in translation.assumptions) for translation in (
        translation_of(arguments, ReadOptions(num_gpus=8)),
        translation_of(arguments),
        translation_of({**arguments, "fsdp": "full_shard"}, ReadOptions(num_gpus=8)),
    )]  # fmt: skip
    assert said == [True, False, False]


@pytest.mark.parametrize(("accelerate", "version", "waits"), [("1.10.1", 2, False), ("1.11", 2, True), ("1.10.1", 1, True)])
def test_old_accelerate_reduces_every_micro_batch_of_fsdp2(accelerate, version, waits):
    fsdp = {"fsdp_version": version, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    job = translate(4, fsdp=fsdp, versions={"accelerate": accelerate}, gradient_accumulation_steps=2).job
    assert conventions(job)["accumulates_without_sync"] is waits
