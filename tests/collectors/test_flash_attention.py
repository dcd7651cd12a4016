"""flash-attn's functions in a trace: kernels that do nothing, and around them what transformers really does."""

import pytest

from peakcast.collectors.measure.grid import expand

NETWORK = {"name": "llama-3.2-1b", "num_hidden_layers": 2, "vocab_size": 4096}
FORMS = {
    "rows": {},
    "joined": {"batch": {"form": "padding_free", "num_tokens": 1500}, "activation_checkpointing.mode": "full"},
    "padded": {"batch": {"form": "masked", "num_tokens": 1500}},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_ledger_equals_the_trace(ledger_equals_trace, form):
    cell = {"architecture": NETWORK, "sequence_length": 512, "micro_batch_size": 4, "attention": "flash_attention_2"}
    (job,) = expand({"include": [cell | FORMS[form]]})
    ledger_equals_trace(job, rel=1e-3)


def test_a_mask_by_position_that_was_offloaded_comes_back_for_every_layer(ledger_equals_trace):
    """GPT-2's layers take the batch's mask as a tensor, which a checkpoint saves, and offloading then moves, like any."""
    network = {"name": "g", "model_type": "gpt2", "n_layer": 3, "n_embd": 128, "n_head": 4, "vocab_size": 1000}
    cell = {"architecture": network, "sequence_length": 512, "micro_batch_size": 4, "attention": "flash_attention_2"}
    again = {"activation_checkpointing": {"mode": "full", "use_reentrant": True}, "offload.activations": True}
    (job,) = expand({"include": [cell | FORMS["padded"] | again]})
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.parametrize("network", ["phi-1.5", "opt-125m"])
def test_rotated_parts_and_masks_of_ones(ledger_equals_trace, network):
    """Where each head is joined of a rotated and another part, flash attention's output lies head by head like its queries,
    and is copied. OPT makes a mask of ones, which transformers drops."""
    cell = {"architecture": {"name": network, "num_hidden_layers": 2, "vocab_size": 512}, "attention": "flash_attention_2"}
    (job,) = expand({"include": [cell | {"sequence_length": 256, "micro_batch_size": 2}]})
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.parametrize("width", [64, 20])
def test_what_is_kept_is_what_the_package_keeps(width):
    """Of 10 tokens of 4 heads and 2 key heads, by hand; a width of 20 is padded to 24."""
    torch = pytest.importorskip("torch")
    from peakcast.collectors.tracing.flash_attention_stub import flash_attn_varlen_func

    query = torch.zeros(10, 4, width, dtype=torch.bfloat16, requires_grad=True)
    key, value = (torch.zeros(10, 2, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept = []

    def keep(tensor):
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = flash_attn_varlen_func(query, key, value, None, None, 6, 6, causal=True)
    padded = -(-width // 8) * 8
    assert sorted(kept) == sorted([*[10 * 4 * padded * 2] * 2, *[10 * 2 * padded * 2] * 2, 10 * 4 * 4, 2 * 8])
    output.sum().backward()
    assert (output.shape, query.grad.shape, key.grad.shape) == (query.shape, query.shape, key.shape)
