"""Fine-grained activation offloading: which saved tensors leave the GPU, counted by hand.

Source: megatron-core 0.16.1 `transformer/transformer_config.py` (offload_modules), `transformer/attention.py`,
`pipeline_parallel/fine_grained_activation_offload.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.megatron.share import rank_share
from peakcast.models.ledger.scope.scope import scope_findings

S, H, F, HEADS = 2048, 1024, 2816, 16
GPT: dict[str, Any] = {
    "num-layers": 6, "hidden-size": H, "ffn-hidden-size": F, "num-attention-heads": HEADS, "micro-batch-size": 1,
    "seq-length": S, "max-position-embeddings": S, "padded-vocab-size": 8192, "bf16": True, "disable-bias-linear": True,
    "swiglu": True, "position-embedding-type": "rope", "normalization": "RMSNorm", "hidden-dropout": 0,
    "attention-dropout": 0, "attention-backend": "fused",
}  # fmt: skip
STREAM = 2 * S * H
"""Bytes of [sequence, hidden] in bfloat16."""


def job(modules: str, **flags: Any) -> TrainingJob:
    asked = {"fine-grained-activation-offloading": True, "offload-modules": modules} if modules else {}
    return from_megatron({**GPT, **asked, **{n.replace("_", "-"): v for n, v in flags.items()}}, 1).job


def kept(asked: TrainingJob, layer: int = 0) -> int:
    """Bytes that a layer keeps on the GPU from its forward to its backward."""
    template = decoder_layer(rank_share(asked, None, 0).layer_context(layer))
    return int(template.num_bytes[~template.born_backward & template.dies_backward].sum())


@pytest.mark.parametrize(
    ("modules", "tensors"),
    [
        ("[core_attn]", 3),  # query, key and value; the result is the projection's input too, and stays
        ("[core_attn attn_proj]", 4),
        ("[qkv_linear]", 2),  # the stream and, of Transformer Engine's fused norm, what is multiplied
        ("[qkv_linear core_attn attn_proj]", 6),
        ("[mlp_norm]", 0),  # part of the dense feed-forward's first projection
        ("[moe_act expert_fc1]", 0),
    ],
)
def test_what_named_modules_keep_leaves_the_gpu(modules: str, tensors: int) -> None:
    assert kept(job("")) - kept(job(modules)) == tensors * STREAM


def test_the_last_layer_stays_since_its_backward_comes_next() -> None:
    asked = job("[qkv_linear core_attn attn_proj]")
    assert kept(asked, 5) == kept(job(""), 5)
    assert kept(asked, 4) < kept(asked, 5)


def test_small_tensors_stay() -> None:
    """Those of fewer elements than `min-offloaded-tensor-size`; all of these have S · H."""
    assert kept(job("[core_attn]", min_offloaded_tensor_size=S * H + 1)) == kept(job(""))
    assert kept(job("[core_attn]", min_offloaded_tensor_size=S * H)) < kept(job(""))


def test_the_peak_is_lower_by_what_all_layers_but_those_at_hand_keep() -> None:
    whole, less = (megatron_ledger(job(modules)).peak().num_bytes for modules in ("", "[qkv_linear core_attn attn_proj]"))
    assert 4 * 6 * STREAM <= whole - less <= 6 * 6 * STREAM
    assert megatron_ledger(job("[core_attn]")).peak().num_bytes < whole


def reloaded(asked: TrainingJob) -> list[tuple[int, int, int]]:
    """(layer, bytes, instants) of what is back before its own layer's backward, in the order of backward."""
    found = megatron_ledger(asked)
    early = [i for i, name in enumerate(found.names) if name == "reloaded"]
    sizes = ((int(found.modules[i].split(".")[1]), int(found.num_bytes[i])) for i in early)
    return [(*one, int(found.dies[i] - found.born[i])) for one, i in zip(sizes, early, strict=True)]


def test_each_operation_that_saves_a_tensor_gets_a_copy_of_its_own() -> None:
    """Unfused attention saves the scores' softmax [heads, sequence, sequence] for the softmax and for the sum of values."""
    template = decoder_layer(rank_share(job("[core_attn]", attention_backend="unfused"), None, 0).layer_context(0))
    softmax = 2 * HEADS * S * S
    assert [size for one in template.reloads for size in one.num_bytes].count(softmax) == 2
    back = template.born_backward & (template.num_bytes == softmax) & ~template.weight_gradient
    assert [template.names[i] for i in back.nonzero()[0]].count("softmax") == 2


def test_tensors_come_back_one_layer_ahead_after_the_first_step() -> None:
    """Layer 5 stays. When its attention has run backward, layer 4's comes back, and so on down to layer 0: query, key,
    value and result. They are back while the rest of a layer runs backward; then the layer itself counts them."""
    asked = job("[core_attn]")
    found = reloaded(asked)
    assert [(layer, size) for layer, size, _ in found] == [(layer, STREAM) for layer in (4, 3, 2, 1, 0) for _ in range(4)]
    template = decoder_layer(rank_share(asked, None, 0).layer_context(0))
    assert {instants for *_, instants in found} == {template.num_backward - template.in_backward["fused_attention"] - 1}
    assert "reloaded" not in megatron_ledger(asked, step="first").names


def test_the_next_chunk_is_reloaded_only_if_it_has_run_forward() -> None:
    """On the last of two stages each micro-batch runs backward at once: nothing of the next one can come back early."""
    flags = {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
    asked = from_megatron(
        {**GPT, "fine-grained-activation-offloading": True, "offload-modules": "[core_attn]"}
        | {name.replace("_", "-"): value for name, value in flags.items()},
        2,
    ).job
    first, last = (
        {name for name, module in zip(found.names, found.modules, strict=True) if module == f"layers.{layer}"}
        for found, layer in ((megatron_ledger(asked, rank=0), 2), (megatron_ledger(asked, rank=1), 5))
    )
    assert "reloaded" in first  # of the next micro-batch, while the forward of another one runs
    assert "reloaded" not in last


def test_it_is_said_that_copies_take_no_time_here() -> None:
    (found,) = scope_findings(job("[core_attn]"))
    assert (found.code, found.direction) == ("nearly_modelled", "more")
    (found,) = scope_findings(from_megatron({**GPT, "fine-grained-activation-offloading": True}, 1).job)
    assert (found.code, found.direction) == ("not_modelled", "less")


def test_modules_that_megatron_does_not_offload_are_refused() -> None:
    with pytest.raises(SpecError, match="offload_modules"):
        job("[core_attention]")
