"""Megatron-LM's layers from before megatron-core's, counted by hand and held against a table of real runs."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.catalog import gpu
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import GIB, MIB
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import layer_context

LLAMA_7B_SIZED: dict[str, Any] = {
    "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 10880, "num-attention-heads": 32, "seq-length": 2048,
    "max-position-embeddings": 2048, "tokenizer-type": "GPT2BPETokenizer", "swiglu": True, "bf16": True,
    "attention-dropout": 0.1, "hidden-dropout": 0.1, "use-flash-attn": True, "use-distributed-optimizer": True,
}  # fmt: skip


def job(micro_batch_size: int, tensor: int = 1, pipeline: int = 1, **flags: Any) -> TrainingJob:
    """Eight micro-batches on each rank of 8 GPUs."""
    arguments = {
        **LLAMA_7B_SIZED,
        "micro-batch-size": micro_batch_size,
        "global-batch-size": 8 * micro_batch_size * (8 // (tensor * pipeline)),
        "tensor-model-parallel-size": tensor,
        "pipeline-model-parallel-size": pipeline,
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    return from_megatron(arguments, 8).job


def kept_mib(one: TrainingJob) -> float:
    template = decoder_layer(layer_context(one, None))
    return float(template.num_bytes[~template.born_backward & template.dies_backward].sum()) / MIB


def test_what_a_layer_keeps_by_hand():
    """A [2048, 4, 4096] tensor in bf16 is 64 MiB, of the feed-forward's width 170. Inputs and outputs of both norms; copies
    of q, k, v, flash's output and its copy; an fp32 statistic per token and head; two masks of a byte; gate and up, SiLU
    of the gate and the product. Norms' statistics (fp32 mean and deviation per token) and the random state are 0.25 MiB."""
    stream, wide = 64, 170
    assert kept_mib(job(4, use_legacy_models=True)) == pytest.approx(
        4 * stream + 5 * stream + 1 + 2 * stream // 2 + 4 * wide, abs=0.26
    )


@pytest.mark.parametrize(
    ("micro_batch_size", "tensor", "pipeline", "measured_gib"),
    [(2, 1, 1, 69.1), (4, 2, 1, 55.7), (2, 1, 2, 49.8), (4, 8, 1, 28.8)],
)
@pytest.mark.parametrize("asked", [{"use_legacy_models": True}, {"transformer_impl": "local", "versions": "0.5.0"}])
def test_measured_on_eight_h800(
    micro_batch_size: int, tensor: int, pipeline: int, measured_gib: float, asked: dict[str, Any]
):
    """Peaks that a user measured on the first stage of 8 H800 (GiB with one digit); nothing is fitted."""
    flags = {name: value for name, value in asked.items() if name != "versions"}
    one = job(micro_batch_size, tensor, pipeline, **flags)
    if "versions" in asked:
        arguments = {
            **LLAMA_7B_SIZED, "micro-batch-size": micro_batch_size, "tensor-model-parallel-size": tensor,
            "global-batch-size": 64 * micro_batch_size, "pipeline-model-parallel-size": pipeline,
        }  # fmt: skip
        one = from_megatron(arguments, 8, versions={"megatron_core": asked["versions"]}).job
    found = baseline(one, gpu("H100-80GB"), 0)
    assert found.replayed_allocated_bytes == pytest.approx(measured_gib * GIB, rel=0.005)


def test_legacy_models_of_transformer_engines_layers_keep_what_megatron_cores_keep():
    """Both are made of Transformer Engine's LayerNormLinear, DotProductAttention, Linear and LayerNormMLP."""
    engine = {"transformer_impl": "transformer_engine", "no_masked_softmax_fusion": True}
    assert kept_mib(job(4, use_legacy_models=True, **engine)) == kept_mib(job(4, **engine))


def test_legacy_models_of_transformer_engines_layers_are_modelled():
    """What was unsupported is said to be taken from megatron-core's layers."""
    flags = {**LLAMA_7B_SIZED, "micro-batch-size": 1, "use-legacy-models": True, "transformer-impl": "transformer_engine"}
    translation = from_megatron(flags, 8)
    assert not translation.unsupported
    assert any("counted as megatron-core's layers" in sentence for sentence in translation.assumptions)
    assert translation.job.framework_options["transformer_impl"] == "transformer_engine"


def test_releases_before_megatron_core_was_the_default_are_legacy():
    def options(versions: dict[str, str], **flags: Any) -> Any:
        return from_megatron({**LLAMA_7B_SIZED, "micro-batch-size": 1, **flags}, 8, versions=versions).job.framework_options

    assert options({"megatron_core": "0.6.0"})["use_legacy_models"]
    assert "use_legacy_models" not in options({"megatron_core": "0.6.0"}, **{"use-mcore-models": True})
    assert "use_legacy_models" not in options({"megatron_core": "0.7.0"})
    assert "use_legacy_models" not in options({})


def test_the_loss_has_a_second_fp32_copy_before_core_0_8():
    """Of 4,096 tokens times 50,304 logits, 4 bytes each."""
    old, new = (
        baseline(
            job(2, use_legacy_models=True).replace(versions=FrozenMapping({"megatron_core": release})),
            gpu("H100-80GB"),
            0,
        ).peak_allocated_bytes
        for release in ("0.7.0", "0.8.0")
    )
    assert old - new == 2 * 2048 * 50304 * 4


def test_flash_attention_without_the_legacy_layer_is_said_to_do_nothing():
    plain = {**LLAMA_7B_SIZED, "micro-batch-size": 1, "transformer-impl": "local"}
    translation = from_megatron(plain, 8)
    assert any("use-flash-attn does nothing" in sentence for sentence in translation.warnings)
    assert translation.job.attention == "eager"
    assert not from_megatron({**plain, "use-legacy-models": True}, 8).warnings


def test_one_sample_is_not_copied_from_one_order_to_another():
    """With one sample [sequence, 1, ...] and [1, sequence, ...] are one: flash attention's output is not copied, query,
    key and value only where they are parts of the projection; a tensor of [2048, 1, 4096] is 16 MiB."""
    one, two = (kept_mib(job(size, use_legacy_models=True)) for size in (1, 2))
    assert two - 2 * one == pytest.approx(2 * 16, abs=0.01)  # of two samples one copy of the output more
    rotary = {"transformer_impl": "transformer_engine", "attention_backend": "flash", "position_embedding_type": "rope"}
    one, two = (kept_mib(job(size, **rotary)) for size in (1, 2))
    assert two - 2 * one == pytest.approx(2 * 16, abs=0.01)
