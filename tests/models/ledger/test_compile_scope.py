"""Which compiled steps the ledger answers for: each other kind is named, and pointed at the trace."""

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope, scope_findings
from peakcast.timelines.timeline import Phase

UNTIED = {"architecture": "llama-2-7b"}
LAYERS = {"framework_options": {"compiled_regions": "layers"}}
AUTOCAST = {
    "precision": {"parameters": "float32", "compute": "bfloat16"},
    "framework_options": {"autocast": True},
}
SHARDS = {"parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"}}
COVERED = {
    "whole": UNTIED,
    "whole, with one table": {},
    "whole, in a loop that keeps the model's outputs": {"framework": "torch"},
    "layers": LAYERS,
    "torchtitan": {"framework": "torch", "versions": {"torchtitan": "0.2"}},
    "accumulated": {**LAYERS, "gradient_accumulation_steps": 4},
    "checkpointed": {**LAYERS, "activation_checkpointing": {"mode": "full"}},
    "whole, checkpointed": {"activation_checkpointing": {"mode": "full"}},
    "whole, with a small vocabulary": {"architecture": {"name": "llama-2-7b", "vocab_size": 1024}},
    "whole, with adapters": {"finetuning": {"method": "lora", "rank": 8, "targets": ["all-linear"]}},
    "layers with adapters": {**LAYERS, "finetuning": {"method": "lora", "rank": 8, "targets": ["all-linear"]}},
    "layers with bfloat16 adapters": {**LAYERS, "finetuning": {"method": "lora", "rank": 8, "adapter_dtype": "bfloat16"}},
    "torchtune's adapters, checkpointed": {
        "framework": "torch",
        "versions": {"torchtune": "0.6.1"},
        "finetuning": {"method": "lora", "rank": 8, "adapter_dtype": "bfloat16"},
        "activation_checkpointing": {"mode": "full"},
    },
    "whole, of Gemma": {"architecture": "gemma-2b"},
    "whole, of Gemma 2": {"architecture": "gemma-2-2b"},
    "whole, of GPT-2": {"architecture": "gpt2", "sequence_length": 512},
    "whole, of Phi-3, checkpointed": {
        "architecture": "phi-3-mini",
        "sequence_length": 1024,
        "activation_checkpointing": {"mode": "full"},
    },
    "whole, of GPT-2 without dropout": {"architecture": "cerebras-gpt-1.3b"},
    "Phi-3's layers in shards": {
        "framework": "torch",
        "versions": {"torchtitan": "0.2"},
        "architecture": "phi-3-mini",
        "sequence_length": 1024,
        "precision": {"parameters": "float32", "compute": "bfloat16"},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
    },
    "layers of Gemma 3": {**LAYERS, "architecture": "gemma-3-1b", "sequence_length": 256},
    "layers of Phi-3, checkpointed": {
        **LAYERS,
        "architecture": "phi-3-mini",
        "sequence_length": 1024,
        "activation_checkpointing": {"mode": "full"},
    },
    "layers in float8": {**LAYERS, "precision": {"compute": "float8"}, "activation_checkpointing": {"mode": "full"}},
    "whole, in float8": {"precision": {"compute": "float8"}},
    "whole, of Gemma in float8": {"architecture": "gemma-2b", "precision": {"compute": "float8"}},
    "layers of Phi-3 in float8": {
        **LAYERS,
        "architecture": "phi-3-mini",
        "sequence_length": 1024,
        "precision": {"compute": "float8"},
    },
    "Trainer with bf16 and torch_compile": AUTOCAST,
    "the same, checkpointed": {**AUTOCAST, "activation_checkpointing": {"mode": "full"}},
    "the same in shards": {**AUTOCAST, **SHARDS},
    "the same in shards, checkpointed, with adapters": {
        **AUTOCAST,
        **SHARDS,
        "activation_checkpointing": {"mode": "full"},
        "finetuning": {"method": "lora", "rank": 8, "dropout": 0.1},
    },
    "the same, layer by layer": {**AUTOCAST, "framework_options": {"autocast": True, "compiled_regions": "layers"}},
    "torchtitan's layers in shards": {
        "framework": "torch",
        "versions": {"torchtitan": "0.2"},
        "precision": {"parameters": "float32", "compute": "bfloat16"},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
        "activation_checkpointing": {"mode": "selective"},
    },
}
NAMED = {
    "several ranks": {"parallelism": {"data_parallel_size": 8}},
    "a network in shards with accelerate of 'phi-3-mini'": {**SHARDS, "architecture": "phi-3-mini"},
    "a network in shards with products in float8": {**SHARDS, "precision": {"compute": "float8"}},
    "of 'mixtral-8x7b'": {"architecture": "mixtral-8x7b"},
    "layers in shards with accelerate of 'gpt2'": {
        **AUTOCAST,
        "architecture": "gpt2",
        "framework_options": {"autocast": True, "compiled_regions": "layers"},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
    },
    "full checkpointing of layers of 'gpt2'": {
        **LAYERS,
        "architecture": "gpt2",
        "activation_checkpointing": {"mode": "full"},
    },
    "adapters of layers of 'qwen3-0.6b'": {
        **LAYERS,
        "architecture": "qwen3-0.6b",
        "finetuning": {"method": "lora", "rank": 8},
    },
    "adapters of a whole network of 'phi-3-mini'": {
        "architecture": "phi-3-mini",
        "finetuning": {"method": "lora", "rank": 8, "targets": ["qkv_proj"]},
    },
    "checkpointing of some layers": {"activation_checkpointing": {"mode": "full", "every_n_layers": 2}},
    "or of some operations": {"activation_checkpointing": {"mode": "selective"}},
    "checkpointing of a whole network of 'qwen3-0.6b'": {
        "architecture": "qwen3-0.6b",
        "activation_checkpointing": {"mode": "full"},
    },
    "reentrant": {**LAYERS, "activation_checkpointing": {"mode": "full", "use_reentrant": True}},
    "other weights": {"precision": {"parameters": "float32", "compute": "float32"}},
    "or float32 under autocast": {"framework_options": {"autocast": True}},
    "autocast of a whole network of 'gemma-2b'": {**AUTOCAST, "architecture": "gemma-2b"},
    "without accelerate": {
        **AUTOCAST,
        "framework": "torch",
        "framework_options": {"autocast": True, "compiled_regions": "layers"},
    },
    "adapters on several ranks": {
        **LAYERS,
        "finetuning": {"method": "lora", "rank": 8},
        "parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"},
    },
    "other than full around what is compiled": {
        **LAYERS,
        "finetuning": {"method": "lora", "rank": 8},
        "activation_checkpointing": {"mode": "full"},
    },
    "plain ones without dropout": {"finetuning": {"method": "lora", "rank": 8, "dropout": 0.1}},
    "adapters that are not float32": {
        "finetuning": {"method": "lora", "rank": 8, "adapter_dtype": "bfloat16"},
        "framework_options": {"adapter_dtype": "bfloat16"},
    },
    "float8 of a whole network of 'gemma-3-1b'": {
        "architecture": "gemma-3-1b",
        "sequence_length": 256,
        "precision": {"compute": "float8"},
    },
    "float8 in layers of 'gemma-3-1b'": {
        **LAYERS,
        "architecture": "gemma-3-1b",
        "sequence_length": 256,
        "precision": {"compute": "float8"},
    },
    "float8 in layers with checkpointing of 'phi-3-mini'": {
        **LAYERS,
        "architecture": "phi-3-mini",
        "sequence_length": 1024,
        "precision": {"compute": "float8"},
        "activation_checkpointing": {"mode": "full"},
    },
    "attention='eager'": {"attention": "eager"},
    "sliding window": {"architecture": "mistral-7b", "sequence_length": 8192},
}


def job(**changes):
    return expand({"include": [{"architecture": "llama-3.2-1b", "compile": True, **changes}]})[0]


@pytest.mark.parametrize("name", COVERED)
def test_what_equals_its_trace_is_covered(name):
    assert out_of_scope(job(**COVERED[name])) == ""


@pytest.mark.parametrize("words", NAMED)
def test_every_other_kind_is_named_and_pointed_at_the_trace(words):
    reason = out_of_scope(job(**NAMED[words]))
    assert reason.startswith("compile=true")
    assert words in reason
    assert "peakcast explain --trace" in reason


def test_nothing_compiled_nothing_said():
    assert out_of_scope(job(compile=False, framework_options={"compiled_regions": "layers"})) == ""


def alive_at_the_loss(**changes):
    """(name, module) of what lives while the loss of layers compiled with adapters is computed."""
    timeline = ledger(job(**LAYERS, finetuning={"method": "lora", "rank": 8, **changes}))
    at = next(instant for instant, phase in enumerate(timeline.phases) if phase == Phase.LOSS)
    lives = zip(timeline.names, timeline.modules, timeline.born, timeline.dies, strict=True)
    return {(name, module) for name, module, born, dies in lives if born <= at < dies}


def test_a_first_layer_whose_input_has_no_gradient_saves_the_sum_after_attention_in_its_place():
    alive = alive_at_the_loss()
    assert {("middle", "layers.0"), ("hidden_states", "layers.1")} <= alive
    assert not {("hidden_states", "layers.0"), ("middle", "layers.1")} & alive


def test_only_adapters_that_are_wider_than_products_read_copies():
    assert ("norm_1.wide", "layers.1") in alive_at_the_loss()
    assert not any(name.endswith(".wide") for name, _ in alive_at_the_loss(adapter_dtype="bfloat16"))


def test_a_network_compiled_whole_has_its_loss_inside_and_keeps_less():
    eager, whole, layers = (ledger(job(**changes)) for changes in ({"compile": False}, {}, LAYERS))
    assert Phase.LOSS not in whole.phase_peaks()
    peaks = [one.peak(Phase.BACKWARD).num_bytes for one in (whole, layers, eager)]
    assert peaks == sorted(set(peaks))


@pytest.mark.parametrize(
    ("changes", "torch", "said"),
    [
        ({"finetuning": {"method": "lora", "rank": 8}}, "2.5", True),
        ({"optimizer": {"name": "adafactor"}}, "2.5", True),
        ({"optimizer": {"name": "adafactor"}}, "2.6", False),
        ({"optimizer": {"name": "adafactor"}, "compile": False}, "2.5", False),
        ({}, "2.5", False),  # AdamW's states, which the first step lacks, are larger than any copy
    ],
)
def test_copies_that_kernels_are_timed_on_are_said_where_they_can_be_the_peak(changes, torch, said):
    findings = scope_findings(job(**changes, versions={"torch": torch}))
    assert any("times the variants of a kernel" in finding.sentence for finding in findings) == said


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_scales_are_said_to_need_more(recipe):
    """What a tensorwise scale or bf16 counts is there in any case."""
    eight = {**LAYERS, "framework": "torch", "precision": {"compute": "float8"}}
    asked = job(**{**eight, "framework_options": {"compiled_regions": "layers", "float8_recipe": recipe}})
    (finding,) = scope_findings(asked)
    assert finding.parameter == "framework_options.float8_recipe"
    assert "more than counted" in finding.sentence
    alike = job(**(eight if recipe == "rowwise" else {**LAYERS, "framework": "torch"}))
    assert ledger(asked).phase_peaks() == ledger(alike).phase_peaks()
