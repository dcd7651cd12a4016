"""Norms and up projections that megatron-core makes again in backward (`CheckpointWithoutOutput`), counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import layer_context
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.ledger.tape.template import Template

S, H, HEADS = 1024, 2048, 16
STREAM = S * H * 2
LATENT: dict[str, Any] = {
    "num-layers": 4, "hidden-size": H, "num-attention-heads": HEADS, "micro-batch-size": 1, "seq-length": S, "bf16": True,
    "vocab-size": 32000, "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True,
    "position-embedding-type": "rope", "multi-latent-attention": True, "q-lora-rank": 512, "kv-lora-rank": 256,
    "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "attention-backend": "fused", "rotary-scaling-factor": 1, "max-position-embeddings": S,
}  # fmt: skip


def job(*modules: str, **flags: Any) -> TrainingJob:
    asked = {"recompute-granularity": "selective", "recompute-modules": " ".join(modules)} if modules else {}
    arguments = {**LATENT, **asked, **{name.replace("_", "-"): value for name, value in flags.items()}}
    return from_megatron(arguments, 1).job


def kept_bytes(template: Template) -> int:
    return int(template.num_bytes[~template.born_backward & template.dies_backward].sum())


def layer(*modules: str, **flags: Any) -> Template:
    one = job(*modules, **flags)
    assert out_of_scope(one) == ""
    return decoder_layer(layer_context(one, None))


def test_latent_queries_keys_and_values_are_not_kept():
    """Query and key of 192 elements a head, value of 128; of what was projected down to 256 + 64 the whole is kept, and not
    the copy of 256 from which keys and values are projected."""
    head = S * HEADS * 2
    up = head * (192 + 192 + 128) + S * 256 * 2
    assert kept_bytes(layer()) - kept_bytes(layer("mla_up_proj")) == up - S * (256 + 64) * 2


def test_what_is_made_again_is_there_from_its_readers_backward_on():
    again = layer("mla_up_proj")
    columns = zip(again.names, again.born.tolist(), again.dies.tolist(), again.born_backward, strict=True)
    lives = {name: (born, dies) for name, born, dies, backward in columns if backward}
    core, up = again.in_backward["fused_attention"], again.in_backward["linear_kv_up_proj"]
    for name in ("linear_q_up_proj", "rotary_kv"):  # the query, rotated in place; key and value
        assert lives[name] == (core, core + 1)
    assert lives["kv_contiguous"] == (core, up + 1)


def test_what_is_made_again_is_copied_to_its_reader_and_stays_until_its_own_backward_ends():
    """`ctx.outputs` beside the storages that attention saved; then the gradients that `backward` was called with."""
    again = layer("mla_up_proj")
    head, core, end = S * HEADS * 2, again.in_backward["fused_attention"], again.in_backward["linear_q_up_proj"] + 1
    copies = [i for i, name in enumerate(again.names) if name.endswith(".recomputed")]
    assert sum(int(again.num_bytes[i]) for i in copies) == head * (192 + 192 + 128)
    assert {(int(again.born[i]), int(again.dies[i])) for i in copies} == {(core, end)}


@pytest.mark.parametrize(("flags", "norms"), [({}, 1), ({"num_experts": 4}, 2), ({"transformer_impl": "local"}, 0)])
def test_norms_that_are_modules_of_their_own_are_not_kept(flags: dict[str, Any], norms: int):
    """Before latent attention always, before routed experts too; a dense feed-forward of Transformer Engine contains its
    norm. Each is a [1024, 1, 2048] tensor and its fp32 statistic of a token."""
    if flags.get("transformer_impl"):
        flags = {**flags, "multi_latent_attention": False}
        norms = 2
    assert kept_bytes(layer(**flags)) - kept_bytes(layer("layernorm", **flags)) == norms * (STREAM + 4 * S)


def test_plain_attention_of_transformer_engine_has_no_norm_of_its_own():
    assert kept_bytes(layer(multi_latent_attention=False)) == kept_bytes(layer("layernorm", multi_latent_attention=False))
