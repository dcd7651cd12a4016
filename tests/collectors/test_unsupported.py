"""A row never claims what was not run: what a stack leaves out, it refuses."""

import pytest

from peakcast.collectors.measure.grid import expand, load_grid
from peakcast.collectors.stacks import deepspeed, unsupported
from peakcast.core.errors import CollectorError

CAMPAIGN = [f"campaign-{part}" for part in ("anchors", "breadth", "layouts", "variants", "limits")]
REFUSED = {
    "task": {"task": "inference"},
    "compile": {"compile": True, "framework": "megatron"},
    "framework_options.compiled_regions": {
        "compile": True, "framework_options": {"compiled_regions": "layers"}, "parallelism.data_parallel_size": 2,
    },
    "offload": {"offload.optimizer": True},
    "framework_options.checkpoints_around_units": {
        "offload.activations": True,
        "framework_options": {"checkpoints_around_units": True},
    },
    "activation_checkpointing.modules": {"activation_checkpointing": {"mode": "selective", "modules": ["mlp"]}},
    "activation_checkpointing.num_layers": {"activation_checkpointing": {"mode": "full", "num_layers": 2}},
    "precision.main_parameters": {"precision.main_parameters": "float32"},
    "precision.compute": {"precision.compute": "float8", "finetuning": {"method": "lora", "rank": 8}},
    "sequence_length": {"sequence_length": 1025},  # GPT-2 has 1024 positions
    "finetuning.adapter_dtype": {"finetuning": {"method": "lora", "rank": 8, "adapter_dtype": "float16"}},
    "framework_options": {"framework_options": {"norms_in_float32": True}},
    "finetuning.quantization": {"finetuning": {"method": "qlora", "rank": 8, "quantization": "gptq"}},
    "framework_options.smooths_labels": {"framework_options": {"smooths_labels": True}},
    "batch.form": {"batch": {"form": "masked"}, "parallelism": {"tensor_parallel_size": 2}},
    "finetuning.method": {
        "framework": "torch",
        "finetuning": {"method": "lora", "rank": 8},
        "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    },
    "parallelism.context_parallel_size": {"parallelism": {"context_parallel_size": 2}, "attention": "eager"},
    "parallelism": {"parallelism": {"data_parallel_size": 8, "zero_stage": 2}},
}


STAGES = {
    "architecture": "llama-3.1-8b",
    "framework": "torch",
    "parallelism": {"pipeline_parallel_size": 2},
    "gradient_accumulation_steps": 2,
}
REFUSED_IN_STAGES = {
    "framework": {"framework": "huggingface"},
    "architecture.kind": {"architecture": "bert-base-uncased", "sequence_length": 512},
    "architecture.tie_word_embeddings": {"architecture": "llama-3.2-1b"},
    "parallelism.pipeline_schedule": {
        "parallelism": {"pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble", "data_parallel_size": 2}
    },
    "finetuning.method": {"finetuning": {"method": "lora", "rank": 8}},
    "loss.fused_linear_cross_entropy": {"loss.fused_linear_cross_entropy": True},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 1},
    "framework_options.liger_kernels": {"framework_options": {"liger_kernels": True}},
    "framework_options.autocast": {"framework_options": {"autocast": True}, "precision.parameters": "float32"},
    "offload.activations": {"offload.activations": True},
    "precision.compute": {"precision.compute": "float8"},
}


def job(**changes):
    return expand({"include": [{"architecture": "gpt2", "sequence_length": 1024} | changes]})[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"context_parallel_size": 2, "sharding": "fsdp1"},
        {"context_parallel_size": 2, "pipeline_parallel_size": 2, "sharding": "fsdp1"},
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "sharding": "fsdp1"},
        {"data_parallel_size": 2, "zero_stage": 1},
    ],
)
def test_a_layout_that_would_be_traced_as_another_is_refused(layout):
    with pytest.raises(CollectorError, match="parallelism="):
        unsupported.check(job(architecture="llama-3.2-1b", parallelism=layout))


@pytest.mark.parametrize(
    "layout", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "data_parallel_size": 2, "sharding": "fsdp2"}]
)
def test_tensor_parallelism_is_let_through_alone_and_with_fsdp2(layout):
    unsupported.check(job(architecture="llama-3.2-1b", parallelism=layout))


def test_every_rule_has_a_case_here():
    assert set(REFUSED) == set(unsupported.SINGLE_GPU)


def test_every_rule_of_stages_has_a_case_here():
    assert set(REFUSED_IN_STAGES) == set(unsupported.PIPELINE)


@pytest.mark.parametrize("parameter", REFUSED_IN_STAGES)
def test_what_a_pipeline_stage_does_not_do_is_refused_by_name(parameter):
    unsupported.check(job(**STAGES))
    asked = job(**STAGES | REFUSED_IN_STAGES[parameter])
    with pytest.raises(CollectorError, match=r"has no collector yet with framework=.*; measure ") as caught:
        unsupported.check(asked)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("name", ["gemma-2-2b", "gpt-neox-20b", "command-r-35b"])
def test_a_network_that_is_not_made_of_llamas_parts_is_not_cut(name):
    """Another name for its parts, or a factor between them."""
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import pipeline
    from peakcast.collectors.stacks.huggingface_model import model_of

    torch = pytest.importorskip("torch")
    asked = job(architecture={"name": name, "num_hidden_layers": 2})
    with torch.device("meta"):
        network = model_of(asked)
    with pytest.raises(CollectorError, match="cannot be cut into stages: its parts must be Llama's"):
        pipeline.cut(network, range(1), asked, first=True, last=False)


@pytest.mark.parametrize(
    ("parameter", "changes"),
    [
        ("framework", {"framework": "megatron"}),
        ("parallelism", {"parallelism": {"data_parallel_size": 2}}),
        ("compile", {"compile": True}),
        ("finetuning.method", {"finetuning": {"method": "lora", "rank": 8}}),
        ("batch.form", {"batch": {"form": "masked"}}),
    ],
)
def test_what_a_generation_does_not_do_is_refused_by_name(parameter, changes):
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import build_inference

    with pytest.raises(CollectorError, match="has no collector with task='inference'; measure") as caught:
        build_inference(job(task="inference", **changes), "cpu")
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("degree", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_compilation_of_a_split_network_is_refused(degree):
    with pytest.raises(CollectorError, match="without tensor and pipeline parallelism"):
        unsupported.check(job(framework="torch", compile=True, parallelism={degree: 2}))


@pytest.mark.parametrize("parameter", REFUSED)
def test_what_the_stack_does_not_do_is_refused_by_name(parameter):
    with pytest.raises(CollectorError, match="has no collector yet") as caught:
        unsupported.check(job(**REFUSED[parameter]))
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": {"mode": "full", "every_n_layers": 2}},
        {"finetuning": {"method": "lora", "rank": 8, "adapter_dtype": "bfloat16"}},
        {"allocator.expandable_segments": True},
        {"precision.compute": "float8"},
        {"finetuning": {"method": "qlora", "rank": 8, "quantization": "nf4"}},
        {"framework_options": {"autocast": True, "adafactor_library": "torch"}},
    ],
)
def test_what_it_does_is_let_through(changes):
    unsupported.check(job(**changes))


@pytest.mark.parametrize("grid", ["quick", "standard", *CAMPAIGN])
def test_every_cell_of_a_shipped_grid_is_something_that_is_done(grid):
    transformers = pytest.importorskip("transformers")
    for cell in load_grid(grid):
        if cell.framework == "megatron":  # what it refuses, only the package can be asked
            continue
        if cell.framework == "deepspeed":
            deepspeed.check(cell)
        else:
            unsupported.check(cell.replace(task="train"))
        assert cell.architecture.model_type in transformers.CONFIG_MAPPING, cell.architecture.name


def test_a_family_whose_code_is_on_the_hub_is_refused_in_a_sentence():
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import build

    with pytest.raises(CollectorError, match=r"model_type='internlm2' is not part of transformers"):
        build(job(architecture="internlm2-1.8b"), "cpu")


def test_every_cell_of_the_grid_of_stacks_is_something_that_is_done():
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import optimizers

    for cell in load_grid("stacks"):
        if cell.framework == "deepspeed":
            deepspeed.check(cell)
        else:
            unsupported.check(cell.replace(task="train"))
            assert any(name == cell.optimizer.name for name, _ in optimizers.BUILDERS)
