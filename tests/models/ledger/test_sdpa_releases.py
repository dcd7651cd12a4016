"""What releases of transformers make of queries, keys, values and masks before they call sdpa, counted by hand.

The library itself says the same: recorded from transformers 4.45.2 and 4.48.3, llama-3.2-1b's step is the ledger's.
"""

from __future__ import annotations

import pytest

from peakcast.api import read
from peakcast.catalog import gpu
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Phase

LAYERS, BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH = 3, 2, 256, 8, 2, 64
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": HEADS * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "intermediate_size": 1024,
    "vocab_size": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
ROW = BATCH * LENGTH * WIDTH * 2
"""Bytes of one head of all tokens in bfloat16."""


def kept(release: str, **changes: object) -> int:
    """Bytes that the layers keep for their backward, without a cache."""
    asked = {"architecture": ARCHITECTURE, "micro_batch_size": BATCH, "sequence_length": LENGTH, **changes}
    asked["framework_options"] = {"outputs_have_cache": False}
    step = ledger(read({**asked, "versions": {"transformers": release, "torch": "2.13.0"}}).job)
    forward_ends = next(i for i, phase in enumerate(step.phases) if phase == Phase.LOSS)
    in_layers = [module.startswith("layers.") for module in step.modules]
    crosses = (step.born < forward_ends) & (step.dies > forward_ends) & (step.born > 0) & in_layers
    return int(step.num_bytes[crosses].sum())


def test_before_4_54_keys_and_values_are_copied_for_every_query_head() -> None:
    assert kept("4.45.2") - kept("5.17.0") == LAYERS * 2 * (HEADS - KEY_HEADS) * ROW


def test_from_4_48_to_4_55_the_result_is_copied_too() -> None:
    # attention keeps its own result, and the output projection the copy
    assert kept("4.48.3") - kept("4.45.2") == LAYERS * HEADS * ROW
    assert kept("4.55.4") - kept("5.17.0") == LAYERS * HEADS * ROW  # copies take the others' places
    assert kept("4.56.2") == kept("5.17.0")


def test_before_4_53_all_layers_share_one_mask_of_numbers() -> None:
    masked = {"batch": {"form": "masked"}}
    each = BATCH * LENGTH * LENGTH * 2
    assert kept("4.53.0", **masked) - kept("4.52.4", **masked) == LAYERS * each


@pytest.mark.parametrize(("release", "shared"), [("4.52.4", True), ("4.53.0", False)])
def test_rows_of_a_mask_are_padded_to_multiples_of_8_for_each_layer(release: str, *, shared: bool) -> None:
    """torch `attention.cpp` preprocess_mask. Published: gpjt/fine-tune-2024-04 at 179f7ac9, Qwen1.5-0.5B with 24 layers has
    13,931 MiB at 2,000 tokens and 14,116 at 2,001, of which 24 × 2,001 × 2,008 × 2 bytes are 184 MiB."""
    aligned, odd = ({"batch": {"form": "masked"}, "sequence_length": length} for length in (256, 257))
    masks = [BATCH * 256 * 256 * 2, BATCH * 257 * 264 * 2]
    per_token = (kept(release, sequence_length=256) - kept(release, sequence_length=128)) // 128
    statistics = 4 * BATCH * HEADS * 32  # the kernel's go in steps of 32 tokens
    grown = kept(release, **odd) - kept(release, **aligned)
    rest = grown - LAYERS * (masks[1] - masks[0] * (not shared))
    assert abs(rest - per_token) <= LAYERS * statistics


@pytest.mark.parametrize("framework", ["huggingface", "torch"])
def test_a_plain_loop_over_an_older_network_keeps_as_much(framework: str) -> None:
    assert kept("4.48.3", framework=framework) > kept("5.17.0", framework=framework)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("torch", "device", "copies"), [("2.5.0", "H100-80GB", 1), ("2.5.1", "H100-80GB", 0),
                                                         ("2.5.0", "A100-80GB", 0), ("2.5.0", None, 0)])  # fmt: skip
def test_torch_2_5_0_copies_what_cudnn_attends_to(torch: str, device: str | None, copies: int, compiled: bool) -> None:
    """cuDNN's result lies head by head and is kept, beside the copy that the output projection reads; not before Hopper,
    nor in a trace."""
    network = {**ARCHITECTURE, "num_key_value_heads": HEADS}
    asked = {"architecture": network, "framework": "torch", "micro_batch_size": BATCH, "sequence_length": LENGTH}
    if compiled:
        asked |= {"compile": True, "framework_options": {"compiled_regions": "layers"}}

    def saved(release: str) -> int:
        job = read({**asked, "versions": {"torch": release, "transformers": "5.0"}}).job
        step = ledger(job, device=gpu(device) if device else None)
        forward_ends = next(i for i, phase in enumerate(step.phases) if phase == Phase.LOSS)
        return int(step.num_bytes[(step.born < forward_ends) & (step.dies > forward_ends)].sum())

    assert saved(torch) - saved("2.6") == copies * LAYERS * HEADS * ROW
