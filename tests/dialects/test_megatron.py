"""Megatron-LM flags to jobs: Megatron's defaults, every spelling, layouts worked by hand, errors in the flag's own name."""

import tomllib
from contextlib import suppress
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.errors import SpecError
from peakcast.dialects.megatron import flags as flags
from peakcast.dialects.megatron.job import from_megatron

GPT = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "bf16": True,
}


def job(num_gpus: int = 8, env: dict | None = None, **arguments):
    return from_megatron({**GPT, **arguments}, num_gpus, env).job


def test_megatrons_defaults():
    translation = from_megatron(GPT, 8)
    job, network = translation.job, translation.job.architecture
    assert job.framework == "megatron"
    assert (network.intermediate_size, network.head_dim, network.num_key_value_heads) == (2048, 64, 8)
    assert network.vocab_size == 50304  # GPT-2's 50257, up to a multiple of 128
    assert network.tie_word_embeddings
    assert (network.position_embedding, network.max_position_embeddings) == ("learned", 1024)
    assert (network.normalization, network.hidden_act, network.gated_mlp) == ("layernorm", "gelu", False)
    assert network.fused_qkv
    assert network.attention_bias
    assert network.attention_output_bias
    assert network.mlp_bias
    assert (network.hidden_dropout, network.attention_dropout, network.embedding_dropout) == (0.1, 0.1, 0.1)
    assert (job.micro_batch_size, job.sequence_length, job.gradient_accumulation_steps) == (4, 1024, 1)
    assert job.parallelism.data_parallel_size == 8
    assert (job.optimizer.name, job.optimizer.implementation) == ("adamw", "fused")
    assert job.framework_options == {}
    assert translation.unknown == ()
    assert translation.unsupported == ()
    assert "hidden-dropout is not given; the default of Megatron-LM is 0.1." in translation.assumptions
    assert any("vocab-size is treated as 50257" in sentence for sentence in translation.assumptions)


def test_every_spelling_means_the_same():
    plain = job(**{"tensor-model-parallel-size": 2, "untie-embeddings-and-output-weights": True, "hidden-dropout": 0.01})
    texts = {f"--{key.replace('-', '_')}": str(value).lower() for key, value in GPT.items()}
    texts |= {
        "--tensor_model_parallel_size": "2",
        "untie_embeddings_and_output_weights": "true",
        "--hidden-dropout": "1e-2",
    }
    assert from_megatron(texts, 8).job == plain


def test_a_default_written_out_changes_nothing():
    written = {"transformer-impl": "transformer_engine", "attention-backend": "auto", "tensor-model-parallel-size": 1,
               "num-distributed-optimizer-instances": 1, "overlap-grad-reduce": False, "rotary-percent": 1}  # fmt: skip
    assert job(**written) == job()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bf16": True}, ("bfloat16", "float32", "float32", "float32")),
        ({"bf16": True, "grad-reduce-in-bf16": True}, ("bfloat16", "bfloat16", "float32", "float32")),
        ({"bf16": False, "fp16": True}, ("float16", "float16", "float32", "float32")),
        (
            {"bf16": None, "fp16": True, "accumulate-allreduce-grads-in-fp32": True},
            ("float16", "float32", "float32", "float32"),
        ),
        ({"bf16": None}, ("float32", "float32", "float32", None)),
    ],
)
def test_precision(arguments, expected):
    precision = job(**arguments).precision
    found = (precision.parameters, precision.gradients, precision.optimizer_states, precision.main_parameters)
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "virtual", "layers"),
    [
        ({"pipeline-model-parallel-size": 4}, 1, ()),
        ({"pipeline-model-parallel-size": 4, "num-layers-per-virtual-pipeline-stage": 1}, 3, ()),
        ({"pipeline-model-parallel-size": 2, "num-virtual-stages-per-pipeline-rank": 3}, 3, ()),
        (
            {"pipeline-model-parallel-size": 4, "decoder-first-pipeline-num-layers": 2,
             "decoder-last-pipeline-num-layers": 2},
            1,
            (2, 4, 4, 2),
        ),
        (
            {"num-layers": 6, "pipeline-model-parallel-size": 4, "num-virtual-stages-per-pipeline-rank": 2,
             "account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True},
            2,
            (0, 1, 1, 1, 1, 1, 1, 0),
        ),
        (
            {"num-layers": 14, "pipeline-model-parallel-size": 4, "pipeline-model-parallel-layout": "Et*2|(tt|)*5t|tmL"},
            2,
            (2, 2, 2, 2, 2, 2, 1, 1),
        ),
    ],
)  # fmt: skip
def test_pipeline_splits(arguments, virtual, layers):
    layout = job(**arguments).parallelism
    assert (layout.virtual_pipeline_stages, layout.pipeline_layers) == (virtual, layers)
    assert layout.pipeline_schedule == ("interleaved_1f1b" if virtual > 1 else "1f1b")


def test_the_rest_of_the_layout():
    translation = from_megatron(
        {**GPT, "tensor-model-parallel-size": 2, "context-parallel-size": 2, "sequence-parallel": True,
         "use-distributed-optimizer": True, "global-batch-size": 40, "micro-batch-size": 2,
         "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
        16,
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "INFO"},
    )  # fmt: skip
    layout = translation.job.parallelism
    assert (layout.data_parallel_size, layout.zero_stage, layout.sequence_parallel) == (4, 1, True)
    assert translation.job.gradient_accumulation_steps == 5
    assert translation.job.activation_checkpointing.mode == "full"
    assert translation.job.framework_options == {"cublas_workspace_config": ":4096:8"}
    assert translation.job.allocator.expandable_segments
    assert translation.ignored == ("NCCL_DEBUG",)
    assert not job(
        **{"sequence-parallel": True}
    ).parallelism.sequence_parallel  # Megatron turns it off without tensor ranks


def test_the_flag_of_2021_recomputes_every_layer():
    """`--checkpoint-activations`, which Megatron-DeepSpeed still has."""
    recompute = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    assert job(**{"checkpoint-activations": True}) == job(**recompute)


def test_method_block_with_no_layers_recomputes_nothing():
    block = {"recompute-granularity": "full", "recompute-method": "block"}
    assert job(**block, **{"recompute-num-layers": 0}) == job()
    recompute = job(**block, **{"recompute-num-layers": 2}).activation_checkpointing
    assert (recompute.mode, recompute.method, recompute.num_layers) == ("full", "block", 2)


def test_a_batch_that_ramps_up_is_taken_at_its_full_size():
    translation = from_megatron({**GPT, "global-batch-size": 64, "rampup-batch-size": "16 16 5859375"}, 8)
    assert translation.job == job(**{"global-batch-size": 64})
    assert any("steps after the ramp" in sentence for sentence in translation.assumptions)
    assert not translation.unsupported


@pytest.mark.parametrize(
    ("arguments", "attention", "options"),
    [
        ({}, "sdpa", {}),
        ({"attention-backend": "unfused"}, "eager", {"attention_backend": "unfused"}),
        ({"attention-backend": "flash"}, "flash_attention_2", {"attention_backend": "flash"}),
        ({"transformer-impl": "local"}, "eager", {"transformer_impl": "local"}),
        ({"no-gradient-accumulation-fusion": True}, "sdpa", {"gradient_accumulation_fusion": False}),
        ({"decoupled-lr": 0.0002}, "sdpa", {"decoupled_lr": True}),
        ({"hierarchical-context-parallel-sizes": "[2 2]"}, "sdpa", {"hierarchical_context_parallel_sizes": "2 2"}),
    ],
)
def test_switches_without_a_field_become_framework_options(arguments, attention, options):
    found = job(**arguments)
    assert found.attention == attention
    assert found.framework_options == options


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"fp8-format": "hybrid", "fp8-recipe": "custom"}, "FP8 recipe custom (fp8-recipe) is not modelled; delayed is"),
        ({"fp8-format": "e4m3", "fp8-param-gather": True}, "FP8 parameters (fp8-param-gather)"),
        ({"fp8-format": "hybrid", "no-fp8-wgrad": True}, "Bf16 weight gradients with FP8 products"),
        ({"fp8-format": "hybrid", "first-last-layers-bf16": True, "num-layers-at-start-in-bf16": 1}, "First and last"),
        ({"fp8-format": "hybrid", "bf16": False}, "FP8 over fp32 parameters"),
        ({"use-megatron-fsdp": True, "fsdp-double-buffer": True}, "Megatron-FSDP's double buffers"),
        ({"perform-rl-step": True, "grpo-group-size": 2}, "Reinforcement learning"),
        ({"img-h": 336, "img-w": 336}, "multimodal"),
        ({"hybrid-layer-pattern": "M-M*MG", "num-layers": None}, "hybrid (Mamba) model with the layers G"),
        ({"hybrid-layer-pattern": "M-M*/M*", "num-layers": None}, "hybrid (Mamba) model with multi-token prediction"),
        ({"mamba-num-heads": 8}, "hybrid (Mamba) model without a layer pattern"),
        ({"mtp-num-layers": 2, "mtp-use-repeated-layer": True}, "repeated multi-token-prediction layer"),
        ({"num-layers": 4, "mtp-num-layers": 1, "pipeline-model-parallel-size": 2,
          "pipeline-model-parallel-layout": "Ettm|ttL"}, "before the last stage"),
        ({"optimizer": "muon", "muon-tp-mode": "duplicated"}, "muon-tp-mode=duplicated"),
        ({"optimizer": "lion"}, "optimizer=lion"),
        ({"flextron": True}, "FlexTron"),
        ({"cpu-offloading": True, "cpu-offloading-num-layers": 2}, "Layer offloading"),
        ({"export-kd-teacher-load": "path"}, "Distillation"),
        ({"attention-output-gate": True}, "gate on the output of attention"),
        ({"softmax-type": "learnable"}, "Attention sinks"),
        ({"spec": "some.module layer"}, "custom layer specification"),
    ],
)
def test_what_a_job_cannot_express_is_said(arguments, word):
    translation = from_megatron({**GPT, **arguments}, 8)
    assert any(word in sentence for sentence in translation.unsupported), translation.unsupported
    assert translation.unknown == ()


@pytest.mark.parametrize(("recipe", "option"), [("delayed", {}), ("mxfp8", {"fp8_recipe": "mxfp8"})])
def test_fp8_reaches_the_job(recipe, option):
    asked = {**GPT, "fp8-format": "hybrid", "fp8-recipe": recipe, "fp8-amax-history-len": 1024, "fp8-margin": 0}
    translation = from_megatron(asked, 8)
    assert translation.job.precision.compute == "float8"
    assert translation.job.framework_options == option
    assert (translation.unsupported, translation.unknown) == ((), ())


def test_fp8_that_is_off_is_none():
    assert from_megatron({**GPT, "fp8-format": None, "fp8-recipe": "tensorwise"}, 8).job.precision.compute == "bfloat16"


def test_unknown_flags_are_reported_and_harmless_ones_listed():
    translation = from_megatron({**GPT, "lr": 1e-4, "--brand-new-flag": 3}, 8, {"STRANGE": "1"})
    assert translation.unknown == ("STRANGE", "brand-new-flag")
    assert translation.ignored == ("lr",)
    for key in translation.unknown:
        assert f"{key} is not known here; it is left out, and may matter." in translation.warnings


@pytest.mark.parametrize(
    ("num_gpus", "arguments", "parameter", "message"),
    [
        (6, {"tensor-model-parallel-size": 4}, "num_gpus", r"does not divide num_gpus=6; use a multiple of 4 GPUs"),
        (0, {}, "num_gpus", "num_gpus=0 must be a whole number from 1 to"),
        (8, {"global-batch-size": 30}, "global-batch-size", r"global-batch-size=30 must be a multiple of .* = 32"),
        (8, {"tensor-model-parallel-size": "two"}, "tensor-model-parallel-size", "='two' must be a number"),
        (8, {"tensor-model-parallel-size": 0}, "tensor-model-parallel-size", "=0 must be a whole number of at least 1"),
        (8, {"hidden-size": 1.5}, "hidden-size", "hidden-size=1.5 must be a whole number"),
        (8, {"hidden-size": float("nan")}, "hidden-size", "hidden-size=nan must be a number"),
        (8, {"hidden-size": None}, "hidden-size", "hidden-size is required and missing"),
        (8, {"num-attention-heads": 7}, "num-attention-heads", "does not divide hidden-size=512"),
        (
            12,
            {"num-attention-heads": 8, "tensor-model-parallel-size": 3},
            "tensor-model-parallel-size",
            "num-attention-heads=8",
        ),
        (8, {"group-query-attention": True, "num-query-groups": 3}, "num-query-groups", "num-query-groups=3 must divide"),
        (10, {"pipeline-model-parallel-size": 5}, "pipeline-model-parallel-size", "=5 does not divide num-layers=12"),
        (
            8,
            {"pipeline-model-parallel-size": 2, "num-layers-per-virtual-pipeline-stage": 4},
            "num-layers-per-virtual-pipeline-stage",
            "does not divide the 6 layers of a pipeline stage",
        ),
        (8, {"pipeline-model-parallel-layout": "Ex|L"}, "pipeline-model-parallel-layout", "must be made of E, t, m, L"),
        (8, {"pipeline-model-parallel-layout": "Et*2|tL"}, "pipeline-model-parallel-layout", "has 2 stages and 3 layers"),
        (8, {"context-parallel-size": 2, "seq-length": 1022}, "seq-length", "seq-length=1022 must be a multiple of 4"),
        (8, {"expert-model-parallel-size": 2}, "expert-model-parallel-size", "needs num-experts that it divides"),
        (
            8,
            {"num-experts": 32, "expert-model-parallel-size": 16},
            "expert-model-parallel-size",
            "GPUs of a pipeline stage",
        ),
        (8, {"attention-backend": "flashy"}, "attention-backend", "did you mean 'flash'"),
        (8, {"normalization": "BatchNorm"}, "normalization", "must be one of LayerNorm, RMSNorm"),
        (8, {"swiglu": "maybe"}, "swiglu", "swiglu='maybe' must be true or false"),
        (8, {"fp16": True}, "fp16", "cannot be given together with bf16"),
        (8, {"--bf16": False}, "--bf16", "is given twice"),
        (8, {"num-layers": 10**9}, "num-layers", "must be at most"),
        (8, {"recompute-granularity": "most"}, "recompute-granularity", "must be full or selective"),
        (8, {"num-layers": None, "hybrid-layer-pattern": "ME"}, "num-experts", "must be given for the layers"),
        (8, {"recompute-granularity": "full"}, "recompute-method", "must be uniform or block"),
        (8, {"recompute-granularity": "full", "recompute-method": "block"}, "recompute-num-layers", "must be given"),
        (8, {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 0},
         "recompute-num-layers", "must be at least 1"),
    ],
)
def test_an_impossible_value_is_refused_in_the_flags_own_name(num_gpus, arguments, parameter, message):
    with pytest.raises(SpecError, match=message) as error:
        from_megatron({**GPT, **arguments}, num_gpus)
    assert error.value.parameter == parameter


def test_the_catalog_declares_every_option_with_its_default():
    text = resources.files("peakcast").joinpath("catalog", "frameworks.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text)["megatron"][0]["conventions"]
    assert declared == flags.option_defaults()


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
NAMES = st.sampled_from(sorted({*GPT, *flags.UNSUPPORTED, *flags.TEXTS, *flags.NUMBERS, "moe_layer_freq", "num_experts"}))


@settings(max_examples=200)
@given(arguments=st.dictionaries(NAMES, JUNK | st.just({"a": 1}), max_size=4), num_gpus=st.integers(-1, 64))
def test_junk_is_refused_as_a_spec_error_or_translated(arguments, num_gpus):
    with suppress(SpecError):
        from_megatron({**GPT, **arguments}, num_gpus)


def test_no_flag_has_two_meanings():
    tables = [
        flags.SWITCHES, set(flags.NUMBERS), set(flags.TEXTS), set(flags.TURNED_OFF), flags.IGNORED,
        {*flags.UNSUPPORTED} - {"optimizer_cpu_offload"},
    ]  # fmt: skip
    seen: set[str] = set()
    for table in tables:
        assert not seen & set(table)
        seen |= set(table)


def test_which_adam_is_assumed_is_said_where_transformer_engine_may_be_missing():
    def said(**flags):
        return any("adam_library" in sentence for sentence in from_megatron({**GPT, **flags}, 8).assumptions)

    assert said(**{"transformer-impl": "local"})
    assert not said()
    assert not said(**{"transformer-impl": "local", "optimizer": "sgd"})
