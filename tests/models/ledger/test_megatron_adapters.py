"""LoRA over Megatron-LM's layers: parameters and saved bytes of one layer, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import Finetuning, TrainingJob
from peakcast.models.ledger.megatron.blocks.ends import embedding
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import layer_context
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.megatron.rank_blocks import RankBlocks
from peakcast.models.ledger.megatron.share import rank_share
from peakcast.models.ledger.scope.scope import scope_findings
from peakcast.timelines.timeline import Category, Phase

LAYERS, S, H, F, VOCABULARY, R = 2, 512, 1024, 4096, 8192, 16
GPT: dict[str, Any] = {
    "num-layers": LAYERS, "hidden-size": H, "ffn-hidden-size": F, "num-attention-heads": 16, "micro-batch-size": 1,
    "seq-length": S, "max-position-embeddings": S, "padded-vocab-size": VOCABULARY, "bf16": True, "swiglu": True,
    "disable-bias-linear": True, "position-embedding-type": "rope", "normalization": "RMSNorm", "hidden-dropout": 0,
    "use-distributed-optimizer": True, "attention-backend": "fused",
}  # fmt: skip
BASE = VOCABULARY * H + LAYERS * (4 * H * H + 3 * H * F + 2 * H) + H
ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def job(
    num_gpus: int = 1, *, targets: tuple[str, ...] = (), dropout: float = 0.0, library: str = "", **flags: Any
) -> TrainingJob:
    made = from_megatron({**GPT, **{name.replace("_", "-"): value for name, value in flags.items()}}, num_gpus).job
    options = {**made.framework_options, **({"adapter_library": library} if library else {})}
    tuning = Finetuning(method="lora", rank=R, targets=targets, dropout=dropout)
    return made.replace(finetuning=tuning, framework_options=FrozenMapping(options))


def kept_bytes(made: TrainingJob) -> int:
    """Bytes that one layer keeps for backward, its input included."""
    template = decoder_layer(layer_context(made, None))
    kept = ~template.born_backward & template.dies_backward
    return int(template.num_bytes[kept].sum())


def test_only_adapters_have_gradients_main_parameters_and_states():
    """H and the projection's width, each times the rank: 1 + 3, 1 + 1, H + 2·F and F + H of the four projections."""
    adapters = LAYERS * R * (4 * H + 2 * H + (H + 2 * F) + (F + H))
    timeline = megatron_ledger(job())
    left = timeline.composition(len(timeline.phases) - 1)
    assert left[Category.MAIN_PARAMETERS] == 4 * adapters
    assert left[Category.OPTIMIZER_STATES] == 8 * adapters
    assert left[Category.GRADIENTS] == 4 * adapters
    assert left[Category.PARAMETERS] == 2 * (BASE + adapters)


TWO = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("library", "elements"),
    [
        # the first matrix by its rank, the second by its outputs; of row-parallel projections the first by its inputs
        ("megatron_bridge", (H + 3 * H) / 2 + (H + H) / 2 + (H + 2 * F) / 2 + (F + H) / 2),
        # one matrix of each is whole
        ("mcore_bridge", H + 3 * H / 2 + H / 2 + H + H + 2 * F / 2 + F / 2 + H),
    ],
)
def test_the_libraries_divide_adapters_over_ranks_in_their_own_ways(library, elements):
    timeline = megatron_ledger(job(2, library=library, **TWO))
    left = timeline.composition(len(timeline.phases) - 1)
    assert left[Category.MAIN_PARAMETERS] == 4 * LAYERS * R * elements


def full(**flags: Any) -> int:
    return kept_bytes(from_megatron({**GPT, **{name.replace("_", "-"): value for name, value in flags.items()}}, 2).job)


RANKS = 4 * S * R * 2
"""Bytes that the second matrices of four adapters save: S tokens of R elements each."""


def test_adapters_on_everything_save_what_training_saves_and_their_ranks():
    assert kept_bytes(job()) == full() + RANKS


def test_frozen_projections_without_adapters_save_no_input():
    """Neither the second norm's output nor the activation; attention saves its own output."""
    assert kept_bytes(job(targets=("linear_qkv",))) == full() - 2 * S * H - 2 * S * F + RANKS // 4


def test_dropout_saves_masks_and_a_copy_where_others_save_the_input_too():
    """Masks of all four inputs, a byte each. Attention also saves its output, and Transformer Engine's norms what they
    return, so what is dropped from these three is a copy."""
    assert kept_bytes(job(dropout=0.1)) == full() + RANKS + S * (3 * H + F) + 3 * 2 * S * H


def test_bridge_saves_gathered_norms_under_sequence_parallelism_and_mcore_bridge_does_not():
    """With two ranks: both norms' outputs gathered beside this rank's half, and ranks of all tokens instead of half."""
    bridge, other = (kept_bytes(job(2, library=name, **TWO)) for name in ("megatron_bridge", "mcore_bridge"))
    assert other == full(**TWO) + RANKS // 2
    assert bridge - other == 2 * S * H * 2 + RANKS // 2


def test_a_frozen_embedding_and_what_precedes_the_first_adapter_have_no_backward():
    made = job(targets=("linear_fc2",))
    context = layer_context(made, None)
    assert embedding(context).num_backward == 0
    blocks = RankBlocks(rank_share(made, None, 0))
    first, second = blocks.layer(0, input_held=False), blocks.layer(1, input_held=False)
    assert "linear_qkv" in second.backward_labels
    assert "linear_qkv" not in first.backward_labels
    kept = ~first.born_backward & first.dies_backward
    assert first.num_bytes[kept].sum() == S * F * 2 + S * R * 2  # the activation and the rank


def test_adapters_of_experts():
    """mcore-bridge has one for each expert of the rank, Megatron-Bridge one for all; both matrices of a pair of projections
    have 2·H + 3·F elements times the rank."""
    routed = {"num_experts": 8, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
    held = {}
    for library in ("megatron_bridge", "mcore_bridge"):
        timeline = megatron_ledger(job(library=library, targets=("linear_fc1", "linear_fc2"), **routed))
        held[library] = timeline.composition(len(timeline.phases) - 1)[Category.MAIN_PARAMETERS]
    pair = 4 * LAYERS * R * (2 * H + 3 * F)
    assert held == {"megatron_bridge": pair, "mcore_bridge": 8 * pair}


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"num_experts": 8, "moe_token_dispatcher_type": "alltoall"}, "finetuning.targets"),
        ({"targets": ("q_proj",)}, "finetuning.targets"),
        ({"fp8_format": "hybrid"}, "framework"),
    ],
)
def test_what_is_not_covered_is_said(change, parameter):
    assert scope_findings(job()) == ()
    assert parameter in {finding.parameter for finding in scope_findings(job(**change))}


# Peaks in MiB of forward, loss and backward, and what is left, of four layers of 1024 on megatron-core 0.16.1 and
# Transformer Engine 2.8 on fake tensors, with the adapters that the two libraries put on their projections.
TRACED: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "bridge": ({}, (512.61, 637.64, 632.60, 276.30)),
    "dropout": ({"dropout": 0.1}, (561.61, 686.64, 681.60, 276.30)),
    "one target": ({"targets": ("linear_qkv",)}, (453.83, 578.86, 573.81, 257.90)),
    "bridge, two ranks": ({"num_gpus": 2, **TWO}, (274.22, 334.75, 331.71, 138.30)),
    "mcore-bridge, two ranks": (
        {"num_gpus": 2, "library": "mcore_bridge", "dropout": 0.1, **TWO},
        (285.75, 346.28, 343.24, 140.58),
    ),
    "recomputed": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        (351.83, 476.86, 474.82, 276.30),
    ),
    "latent": (
        {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "no_rope_fusion": True,
            "targets": ("all-linear",),
            "library": "mcore_bridge",
        },
        (580.96, 705.99, 700.95, 293.89),
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_traces_of_megatrons_layers_with_adapters(name):
    changes, expected = TRACED[name]
    shape = {
        "num_layers": 4, "seq_length": 1024, "max_position_embeddings": 1024, "padded_vocab_size": 32000,
        "hidden_dropout": 0.1, "attention_backend": "auto", "untie_embeddings_and_output_weights": True,
    }  # fmt: skip
    timeline = megatron_ledger(job(**{**shape, **changes}))
    peaks = timeline.phase_peaks()
    found = [*(peaks[phase] for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)), int(timeline.totals[-1])]
    assert [each / 2**20 for each in found] == pytest.approx(expected, abs=0.06)
