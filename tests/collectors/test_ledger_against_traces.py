"""Optimizers, precisions, adapters and generation traced on fake tensors, against the ledger."""


import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

CUT = {"name": "llama-3.2-1b", "num_hidden_layers": 2}
SMALL_ENDS = {**CUT, "vocab_size": 1024}
"""So that the peaks lie inside the layers."""
FALCON = {"name": "falcon-7b", "num_hidden_layers": 2, "vocab_size": 512, "hidden_size": 512, "num_attention_heads": 8}
BIASED_QWEN = {**FALCON, "name": "qwen2.5-7b"}
BIASED = {"expert_bias": True, "router_bias": True}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 512, **BIASED}
GPT_OSS = {**FALCON, "name": "gpt-oss-20b", "num_key_value_heads": 2, "intermediate_size": 512, "moe": ROUTED}
SINGLE = {"precision.parameters": "float32", "precision.compute": "float32"}
HALF = {"precision.parameters": "float16", "precision.compute": "float16"}
AUTOCAST = {"precision.parameters": "float32", "framework_options": {"autocast": True}}
SCALED = {**AUTOCAST, "precision.compute": "float16"}
FEW_WORDS = {"name": "qwen3-0.6b", "num_hidden_layers": 2, "vocab_size": 512}
FUSED = {"loss.fused_linear_cross_entropy": True}
CHECKPOINTED = {"activation_checkpointing.mode": "full"}
SELECTIVE = {"framework": "torch", "versions": {"torchtitan": "0.2"}, "activation_checkpointing.mode": "selective"}
COMPILED_FLOAT8 = {
    "precision.compute": "float8", "architecture": SMALL_ENDS, "compile": True, "framework": "torch",
    "framework_options": {"compiled_regions": "layers"}, "sequence_length": 1024,
}  # fmt: skip
EVERYWHERE = {"method": "lora", "rank": 16, "targets": ["all-linear"]}
GENERATE = {"task": "inference", "inference": {"prompt_length": 128, "new_tokens": 3}}
LONG = {"task": "inference", "inference": {"prompt_length": 16, "new_tokens": 20}, "micro_batch_size": 64}
CELLS = {
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "adam_loop": {"optimizer": {"name": "adam", "implementation": "loop"}, "framework": "torch"},
    "adam_loop_decaying": {"optimizer": {"name": "adam", "implementation": "loop", "weight_decay": 0.1}},
    "adam_decaying": {"optimizer": {"name": "adam", "weight_decay": 0.1}, "framework": "torch"},
    "sgd_decaying": {"optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.1}},
    "rmsprop_loop_decaying": {"optimizer": {"name": "rmsprop", "implementation": "loop", "weight_decay": 0.1}},
    "adagrad_decaying": {"optimizer": {"name": "adagrad", "weight_decay": 0.1}},
    "adagrad": {"optimizer": {"name": "adagrad"}},
    "rmsprop_loop": {"optimizer": {"name": "rmsprop", "implementation": "loop"}, "framework": "torch"},
    "adafactor_foreach": {"optimizer": {"name": "adafactor"}, "framework": "torch"},
    "adafactor_loop": {"optimizer": {"name": "adafactor", "implementation": "loop"}, "framework": "torch"},
    "adafactor_of_transformers": {"optimizer": {"name": "adafactor"}},
    "adafactor_of_transformers_fp32": {"optimizer": {"name": "adafactor"}, **SINGLE},
    "muon": {"optimizer": {"name": "muon"}},
    "muon_fp32": {"optimizer": {"name": "muon"}, **SINGLE},
    "fp32": SINGLE,
    "fp16_eager": {**HALF, "attention": "eager"},
    "falcon_eager": {"architecture": FALCON | {"num_key_value_heads": 1}, "attention": "eager", "sequence_length": 512},
    "gpt_oss": {"architecture": GPT_OSS, "sequence_length": 256, **CHECKPOINTED},
    "fp16_scaled": SCALED,
    "fp16_scaled_checkpointed": {**SCALED, "activation_checkpointing.mode": "full"},
    "fp16_eager_few_words": {**HALF, "architecture": {**CUT, "vocab_size": 512}, "attention": "eager", **CHECKPOINTED},
    "autocast_eager": {**AUTOCAST, "architecture": FEW_WORDS, "attention": "eager", "sequence_length": 300},
    # outputs are widened after the loss, once autocast's copies of weights are freed
    "autocast_encoder": {**AUTOCAST, "architecture": {"name": "bert-base", "num_hidden_layers": 2}},
    "autocast_encoder_decoder": {
        **AUTOCAST,
        "architecture": {"name": "flan-t5-small", "num_hidden_layers": 2, "num_decoder_layers": 2},
        **CHECKPOINTED,
    },
    "autocast_in_a_plain_loop": {**AUTOCAST, "framework": "torch"},
    "autocast_gelu_new": {**AUTOCAST, "architecture": {"name": "distilgpt2", "num_hidden_layers": 2}},
    "lora_dropout": {"finetuning": {"method": "lora", "rank": 16, "dropout": 0.1}},
    "lora_everywhere_checkpointed": {"finetuning": EVERYWHERE, "architecture": SMALL_ENDS, **CHECKPOINTED},
    "lora_in_bf16": {"finetuning": {**EVERYWHERE, "adapter_dtype": "bfloat16"}},
    "neftune": {"framework_options": {"neftune": True}},
    "neftune_lora": {"framework_options": {"neftune": True}, "finetuning": EVERYWHERE, **CHECKPOINTED},
    "generate": GENERATE,
    "generate_long": LONG,
    "generate_static": {**LONG, "inference.cache": "static"},
    "generate_eager": {**GENERATE, "attention": "eager"},
    "generate_gpt2": {**GENERATE, "architecture": {"name": "distilgpt2", "num_hidden_layers": 2}},
    "lora_everywhere_autocast": {"framework_options": {"autocast": True}, "finetuning": {**EVERYWHERE, "dropout": 0.1}},
}
PACKAGES = {
    "fused_loss_autocast": ("liger_kernel", {**AUTOCAST, "architecture": FEW_WORDS, **FUSED, **CHECKPOINTED}),
    "fused_loss_fp32": ("liger_kernel", {**SINGLE, "architecture": SMALL_ENDS, **FUSED}),
    "lion": ("lion_pytorch", {"optimizer": {"name": "lion"}, "framework": "torch"}),
    "galore": ("galore_torch", {"optimizer": {"name": "galore"}}),
    "adam_mini": ("adam_mini", {"optimizer": {"name": "adam_mini"}}),
    "adam_mini_biased": ("adam_mini", {"optimizer": {"name": "adam_mini"}, "architecture": BIASED_QWEN}),
    "lomo": ("lomo_optim", {"optimizer": {"name": "lomo"}}),
    "adalomo": ("lomo_optim", {"optimizer": {"name": "adalomo"}}),
    "lomo_biased": ("lomo_optim", {"optimizer": {"name": "lomo"}, "architecture": {**GPT_OSS, "num_hidden_layers": 1}}),
    "adalomo_untied": ("lomo_optim", {"optimizer": {"name": "adalomo"}, "architecture": FALCON}),
    "float8": ("torchao", {"precision.compute": "float8", "architecture": SMALL_ENDS}),
    "float8_checkpointed": ("torchao", {"precision.compute": "float8", "architecture": SMALL_ENDS, **CHECKPOINTED}),
    "float8_selective": ("torchao", {"precision.compute": "float8", "architecture": SMALL_ENDS, **SELECTIVE}),
    "float8_in_compiled_layers": ("torchao", COMPILED_FLOAT8),
    "float8_in_compiled_layers_checkpointed": ("torchao", {**COMPILED_FLOAT8, **CHECKPOINTED}),
    "lomo_checkpointed": ("lomo_optim", {"optimizer": {"name": "lomo"}, "activation_checkpointing.mode": "full"}),
}
CELLS |= {name: cell for name, (_, cell) in PACKAGES.items()}


WHOLE = frozenset((
    "adam_loop_decaying", "sgd_decaying", "adafactor_of_transformers_fp32", "muon_fp32",
    "fp16_scaled_checkpointed", "fp16_eager_few_words", "autocast_gelu_new", "autocast_in_a_plain_loop", "neftune_lora",
    "lora_in_bf16", "lora_everywhere_checkpointed", "generate_static", "generate_gpt2", "rmsprop_loop",
    "float8_in_compiled_layers", "falcon_eager", "autocast_eager", "adagrad_decaying", "adam_decaying", "adafactor_loop",
    "fp16_eager", "generate_eager", "autocast_encoder",
))  # fmt: skip
"""Cells that are left to the whole lane, since others have nearly the same operators."""


COMPILED = frozenset(name for name, changes in CELLS.items() if changes.get("compile"))
"""Cells for which Inductor compiles: some ten seconds each."""


def cell(name):
    """A cell's name, with the package that it needs."""
    marks = [pytest.mark.needs(PACKAGES[name][0])] if name in PACKAGES else []
    return pytest.param(name, marks=marks + [pytest.mark.whole] * (name in WHOLE) + [pytest.mark.slow] * (name in COMPILED))


def job(name):
    base = {"architecture": CUT, "sequence_length": 128, "micro_batch_size": 1}
    return expand({"base": base, "include": [CELLS[name]]})[0]


@pytest.mark.parametrize("name", [cell(name) for name in CELLS])
def test_the_ledger_equals_the_trace_phase_by_phase(ledger_equals_trace, name):
    """Within 0.1 % of the phase's peak, in the first and in a steady step, and between steps."""
    for step, (closed_form, trace) in ledger_equals_trace(job(name), rel=1e-3).items():
        assert int(closed_form.totals[-1]) == pytest.approx(int(trace.totals[-1]), rel=1e-3), step


def test_a_sum_of_what_is_not_stepped_would_be_seen(traced):
    """The comparison can fail: with another optimizer's rule it does."""
    other = ledger(job("muon").replace(optimizer=job("sgd").optimizer))
    assert other.peak(Phase.OPTIMIZER_STEP).num_bytes != pytest.approx(
        traced(job("muon"))["steady"].peak(Phase.OPTIMIZER_STEP).num_bytes, rel=1e-3
    )
