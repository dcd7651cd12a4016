"""What savers keep and free, counted by hand."""

from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import ActivationCheckpointing, Loss, Offload, TrainingJob
from peakcast.models.baseline.host import host_bytes
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.blocks.fused_loss import fused_loss_chunk
from peakcast.models.ledger.huggingface.host import pinned_activation_bytes
from peakcast.timelines.timeline import Category, Phase

TOKENS, H, K, F, V, A, LAYERS = 1024, 512, 256, 1536, 4096, 8, 3
GROUPED = Architecture(
    name="grouped",
    model_type="mistral",
    hidden_size=H,
    num_hidden_layers=LAYERS,
    num_attention_heads=A,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=F,
    vocab_size=V,
)
FULL, SELECTIVE = ActivationCheckpointing(mode="full"), ActivationCheckpointing(mode="selective")
KERNEL_STATE = 4 * A * TOKENS + 2 * 512
"""Attention's fp32 statistics and its two random numbers, which take 512 bytes each."""


def job(**changes):
    return TrainingJob(**{"architecture": GROUPED, "sequence_length": TOKENS, "framework": "torch", **changes})


def at_lm_head(job):
    """Bytes that live when the lm_head begins: what the layers left behind and nothing in passing."""
    timeline = ledger(job)
    instant = next(i for i, label in enumerate(timeline.labels) if label.startswith("lm_head"))
    return timeline, int(timeline.totals[instant])


def difference(one, other):
    return at_lm_head(one)[1] - at_lm_head(other)[1]


def test_selective_checkpointing_keeps_matrix_products_and_attention():
    matmuls = 2 * TOKENS * (H + 2 * K + H + 2 * F + H)  # q, k and v, o, gate and up, down
    attention = 2 * TOKENS * H + KERNEL_STATE
    kept = difference(job(activation_checkpointing=SELECTIVE), job(activation_checkpointing=FULL))
    assert kept == LAYERS * (matmuls + attention)


def test_torchtitan_recomputes_every_second_product():
    odd = 2 * TOKENS * (H + K + F + H)  # q, v, gate, down of q k v o gate up down
    titan = job(versions=FrozenMapping({"torchtitan": "0.2"}), activation_checkpointing=SELECTIVE)
    kept = difference(titan, titan.replace(activation_checkpointing=FULL))
    assert kept == LAYERS * (odd + 2 * TOKENS * H + KERNEL_STATE)


def test_offloaded_checkpoints_leave_the_gpu_and_are_pinned_in_powers_of_two():
    there, away = job(activation_checkpointing=FULL), job(activation_checkpointing=FULL, offload=Offload(activations=True))
    assert difference(there, away) == LAYERS * 2 * TOKENS * H
    assert pinned_activation_bytes(away) == [2 * TOKENS * H] * LAYERS
    odd = away.replace(sequence_length=1000)
    assert host_bytes(odd, ledger) == LAYERS * 2**20  # 1000 · 512 · 2 bytes take 2^20


def test_save_on_cpu_leaves_no_activation_of_a_layer_on_the_gpu():
    timeline, _ = at_lm_head(job(offload=Offload(activations=True)))
    instant = timeline.labels.index("lm_head")
    alive = (timeline.born <= instant) & (timeline.dies > instant) & (timeline.categories == Category.ACTIVATIONS)
    assert not [timeline.modules[i] for i in alive.nonzero()[0] if timeline.modules[i].startswith("layers.")]
    # every weight goes along
    copies = pinned_activation_bytes(job(offload=Offload(activations=True)))
    assert copies.count(2 * H * F) == 3 * LAYERS  # gate, up and down


def test_a_window_that_the_sequence_fills_costs_a_mask_and_copies_of_the_key_heads():
    architecture = replace(GROUPED, sliding_window=TOKENS)
    masked = job(architecture=architecture)
    per_layer = 2 * TOKENS**2 + 2 * 2 * TOKENS * (H - K)  # additive mask; k and v at all heads
    assert difference(masked, job()) == LAYERS * per_layer
    assert difference(job(architecture=replace(architecture, sliding_window=TOKENS + 1)), job()) == 0
    timeline, _ = at_lm_head(masked)
    assert TOKENS**2 in timeline.num_bytes[[name == "attention_mask" for name in timeline.names]]


def test_multi_query_attention_without_a_kernel_keeps_fp32_scores():
    """Falcon-7B: no fused kernel takes one key head for many (where-memory-goes C)."""
    falcon = replace(GROUPED, model_type="falcon", num_key_value_heads=1, fused_qkv=True, gated_mlp=False,
                     parallel_block=True, normalization="layernorm")  # fmt: skip
    one, two = (ledger(job(architecture=falcon, sequence_length=tokens)) for tokens in (512, 1024))
    scores = [{int(n) for n in t.num_bytes} for t in (one, two)]
    assert 4 * A * 512**2 in scores[0]
    assert 4 * A * 1024**2 in scores[1]


def test_a_chunk_of_the_fused_loss_is_the_documented_example():
    """liger_kernel ops/fused_linear_cross_entropy.py: BT = 4096·4, V = 32000, H = 4096 gives 2048."""
    assert fused_loss_chunk(16384, 4096, 32000) == 2048
    assert fused_loss_chunk(100, 4096, 4096) == 100


def test_the_fused_loss_keeps_the_gradients_of_the_hidden_states_and_of_the_weight():
    fused = job(loss=Loss(fused_linear_cross_entropy=True))
    timeline = ledger(fused)
    last = int((timeline.phases == Phase.LOSS).nonzero()[0][-1])
    alive = (timeline.born <= last) & (timeline.dies > last)
    names = [timeline.names[i] for i in alive.nonzero()[0]]
    kept = [n for i, n in zip(alive.nonzero()[0], timeline.num_bytes[alive], strict=True)
            if timeline.names[i] == "lm_head.fused_linear_cross_entropy.saved"]  # fmt: skip
    assert sorted(kept) == sorted([2 * TOKENS * H, 2 * V * H])
    assert "log_softmax" not in names


def test_one_range_of_liger_releases_made_a_wide_copy_of_the_weights_gradient():
    def loss_peak(version):
        versions = FrozenMapping({"liger_kernel": version})
        fused = job(framework="huggingface", loss=Loss(fused_linear_cross_entropy=True), versions=versions)
        return ledger(fused).peak(Phase.LOSS).num_bytes

    assert loss_peak("0.8.0") - loss_peak("0.8.5") == 6 * V * H
    assert loss_peak("0.6.1") == loss_peak("0.8.5")


def test_ligers_layer_keeps_twelve_widths_instead_of_twenty():
    """where-memory-goes F1: 12h + 4k + 6f + 4a + 8 bytes per token."""
    liger = FrozenMapping({"liger_kernels": True})
    two, three = (
        at_lm_head(job(architecture=replace(GROUPED, num_hidden_layers=n), framework_options=liger)) for n in (2, 3)
    )
    parameters = 2 * H * H + 2 * H * K + 3 * H * F + 2 * H
    per_layer = three[1] - two[1] - 6 * parameters  # weight and two states, bfloat16 each
    assert per_layer == TOKENS * (12 * H + 4 * K + 6 * F + 4 * A + 8) + 1024


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_never_raises_what_forward_leaves_behind(mode):
    assert difference(job(), job(activation_checkpointing=ActivationCheckpointing(mode=mode))) > 0
