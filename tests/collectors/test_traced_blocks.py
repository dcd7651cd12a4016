"""Block by block against the trace of the real library: families, savers, losses."""


import pytest

from peakcast.collectors.measure.grid import expand

pytest.importorskip("transformers")

SMALL = {"vocab_size": 8192, "num_hidden_layers": 2}
LLAMA = {"name": "llama-3.2-1b", **SMALL}
FULL, SELECTIVE = {"mode": "full"}, {"mode": "selective"}
LORA = {"method": "lora", "rank": 16}
CELLS = {
    "window_shorter_than_the_sequence": {"architecture": {"name": "mistral-7b", **SMALL, "sliding_window": 256}},
    "windows_on_some_layers": {"architecture": {"name": "gemma-3-1b", "num_hidden_layers": 7}, "sequence_length": 1024},
    "softcap_in_eager": {"architecture": {"name": "gemma-2-2b", "num_hidden_layers": 2}, "attention": "eager"},
    "multipliers": {"architecture": {"name": "granite-3.1-2b", "num_hidden_layers": 2}},
    "written_out_layer_norm": {"architecture": {"name": "command-r-35b", **SMALL, "num_hidden_layers": 1}},
    "multi_query_falls_to_math": {"architecture": {"name": "falcon-7b", **SMALL}, "micro_batch_size": 2},
    "math_recomputed": {"architecture": {"name": "falcon-7b", **SMALL}, "activation_checkpointing": FULL},
    "expanded_heads": {"architecture": {"name": "falcon-40b", **SMALL, "num_hidden_layers": 1}},
    "grouped_heads_in_fp32": {
        "architecture": LLAMA, "precision.parameters": "float32", "precision.compute": "float32",
    },
    "tied_and_accumulating": {"architecture": LLAMA, "gradient_accumulation_steps": 2},
    "softmax_in_its_own_dtype": {"architecture": {"name": "gpt2", "num_hidden_layers": 2}, "attention": "eager"},
    "inline_feed_forward": {"architecture": {"name": "opt-1.3b", **SMALL}, "activation_checkpointing": FULL},
    "parallel_block": {"architecture": {"name": "pythia-1b", **SMALL}, "micro_batch_size": 2},
    "rotary_in_fp32": {"architecture": {"name": "olmo-2-1b", **SMALL}, "activation_checkpointing": FULL},
    "adapters_by_default": {"architecture": {"name": "phi-2", **SMALL}, "finetuning": LORA},
    "adapters_checkpointed": {
        "architecture": {"name": "gpt2", "num_hidden_layers": 2}, "finetuning": LORA, "activation_checkpointing": FULL,
    },
    "autocast_checkpointed": {
        "architecture": LLAMA, "precision.parameters": "float32", "framework_options": {"autocast": True},
        "activation_checkpointing": FULL,
    },
    "autocast_over_narrow_weights": {  # norms answer in fp32, whatever the weights are
        "architecture": {"name": "gpt2", "num_hidden_layers": 2}, "framework_options": {"autocast": True},
    },
    "autocast_over_narrow_weights_checkpointed": {
        "architecture": LLAMA, "framework_options": {"autocast": True}, "activation_checkpointing": FULL,
    },
    "reentrant": {"architecture": LLAMA, "activation_checkpointing": {**FULL, "use_reentrant": True}},
    "eager_checkpointed": {"architecture": LLAMA, "attention": "eager", "activation_checkpointing": FULL},
    "selective": {"architecture": LLAMA, "activation_checkpointing": SELECTIVE},
    "selective_every_second_layer": {
        "architecture": LLAMA, "activation_checkpointing": {**SELECTIVE, "every_n_layers": 2},
    },
    "selective_every_second_matmul": {
        "architecture": LLAMA, "activation_checkpointing": SELECTIVE, "framework": "torch",
        "versions": {"torchtitan": "0.2"},
    },
    "selective_with_masks": {
        "architecture": {"name": "mistral-7b", **SMALL, "sliding_window": 256}, "activation_checkpointing": SELECTIVE,
    },
    "checkpoints_on_the_host": {
        "architecture": LLAMA, "activation_checkpointing": FULL, "offload": {"activations": True},
    },
    "activations_on_the_host": {"architecture": LLAMA, "offload": {"activations": True}},
    "encoder": {"architecture": {"name": "bert-base", "num_hidden_layers": 2}, "sequence_length": 512},
    "encoder_eager": {
        "architecture": {"name": "bert-base", "num_hidden_layers": 2},
        "sequence_length": 512,
        "attention": "eager",
        "activation_checkpointing": FULL,
    },
    "grouped_experts": {"architecture": {"name": "olmoe-1b-7b", **SMALL}},
    "fp32_routing_weights": {"architecture": {"name": "mixtral-8x7b", **SMALL, "num_hidden_layers": 1}},
    "latent_attention": {"architecture": {"name": "moonlight-16b-a3b", **SMALL}, "sequence_length": 1024},
}  # fmt: skip
LIGER = {"framework_options": {"liger_kernels": True}, "loss.fused_linear_cross_entropy": True}
WITH_LIGER = {
    "kernels_and_loss": {"architecture": LLAMA, **LIGER},
    "liger_checkpointed": {"architecture": LLAMA, **LIGER, "activation_checkpointing": FULL},
    "frozen_head": {"architecture": LLAMA, **LIGER, "finetuning": LORA},
    "liger_accumulating": {"architecture": {"name": "llama-3.1-8b", **SMALL}, **LIGER, "gradient_accumulation_steps": 2},
    "liger_autocast": {
        "architecture": LLAMA, **LIGER, "precision.parameters": "float32",
        "framework_options": {"liger_kernels": True, "autocast": True},
    },
    "kernels_by_version": {
        "architecture": LLAMA, "loss.fused_linear_cross_entropy": True, "versions": {"liger_kernel": "0.8.5"},
    },
    "gradients_not_in_place": {"architecture": {"name": "gemma-2-2b", "num_hidden_layers": 2}, **LIGER},
    "fused_projections": {"architecture": {"name": "phi-3-mini", "num_hidden_layers": 2}, **LIGER},
}  # fmt: skip


WHOLE = frozenset((
    "windows_on_some_layers", "softcap_in_eager", "expanded_heads", "softmax_in_its_own_dtype", "parallel_block",
    "adapters_by_default", "autocast_over_narrow_weights", "autocast_over_narrow_weights_checkpointed", "reentrant",
    "eager_checkpointed", "selective_every_second_layer", "selective_every_second_matmul", "selective_with_masks",
    "encoder", "fp32_routing_weights", "tied_and_accumulating", "multi_query_falls_to_math", "activations_on_the_host",
    "grouped_heads_in_fp32", "autocast_checkpointed", "checkpoints_on_the_host",
))  # fmt: skip
"""Cells that are left to the whole lane, since others have nearly the same operators; the grids of `peakcast verify` have
most of their families and settings."""


def job(cell):
    return expand({"base": {"sequence_length": 640}, "include": [cell]})[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.whole] * (name in WHOLE)) for name in CELLS])
def test_the_ledger_equals_the_trace(ledger_equals_trace, name):
    """Within 0.1 % in every phase of the first and of a steady step."""
    ledger_equals_trace(job(CELLS[name]), rel=1e-3)


@pytest.mark.needs("liger_kernel")
@pytest.mark.parametrize("name", WITH_LIGER)
def test_with_liger_the_ledger_equals_the_trace(ledger_equals_trace, name):
    """Its kernels do nothing in a trace; what it allocates around them is seen."""
    ledger_equals_trace(job(WITH_LIGER[name]), rel=1e-3)
