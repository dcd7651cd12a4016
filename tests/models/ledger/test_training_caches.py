"""What the cache of transformers 4, which training fills, holds until the Trainer has the loss, against traces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB
from peakcast.dialects.huggingface.trl_adapters import without_cache
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions_of
from peakcast.jobs.spec import ActivationCheckpointing, Optimizer, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.assumptions import assumption_on_caches
from peakcast.timelines.timeline import Phase

NETWORK = Architecture(
    name="small",
    model_type="llama",
    hidden_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    vocab_size=1024,
)
MIXED = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
KEYS = 4 * 512 * 4 * 64 * 2
"""Bytes of a layer's keys, or values, in bfloat16."""


def job(release, **changes):
    base = {"architecture": NETWORK, "sequence_length": 512, "micro_batch_size": 4, "framework": "huggingface"}
    return TrainingJob(**{**base, "versions": FrozenMapping({"transformers": release, "torch": "2.13.0"}), **changes})


def autocast(release, **changes):
    return job(release, precision=MIXED, framework_options=FrozenMapping({"autocast": True}), **changes)


def peak(asked, phase):
    return ledger(asked, step="steady").phase_peaks()[phase] / MIB


@pytest.mark.parametrize(
    ("release", "attention", "loss", "wide_loss"),
    [
        ("4.45.2", "sdpa", 204.92, 305.07),
        ("4.45.2", "eager", 348.73, None),
        ("4.45.2", "flash_attention_2", 192.92, None),
        ("4.48.3", "sdpa", 214.92, 315.07),
        ("4.48.3", "eager", 352.73, None),
        ("4.48.3", "flash_attention_2", 196.92, None),
        ("4.51.3", "sdpa", 206.97, 307.12),
        ("4.57.3", "sdpa", 188.97, 298.12),
        ("4.57.3", "eager", 344.78, None),
    ],
)
def test_losses_beside_the_cache_are_as_traced(release, attention, loss, wide_loss):
    """MiB of the traced loss of each release over torch 2.13, in bfloat16 and under autocast."""
    assert peak(job(release, attention=attention), Phase.LOSS) == pytest.approx(loss, rel=3e-4)
    if wide_loss:
        assert peak(autocast(release), Phase.LOSS) == pytest.approx(wide_loss, rel=3e-4)


def held(asked, name="past_key_values"):
    timeline = ledger(asked, step="steady")
    return sum(size for one, size in zip(timeline.names, timeline.num_bytes.tolist(), strict=True) if one == name)


def test_a_cache_holds_what_attention_does_not_save_itself():
    """Keys and values that were repeated for every query head; without that attention saves the cached ones."""
    alone = replace(NETWORK, num_key_value_heads=8)
    assert held(job("4.45.2")) == 3 * 2 * KEYS
    assert held(job("4.45.2", architecture=alone)) == 0
    assert held(job("4.57.3")) == held(job("5.17.0")) == 0


def test_concatenated_caches_of_autocast_are_wide():
    """The empty cache has the dtype of rotated keys, which is float32 under autocast, and so values become float32."""
    assert held(autocast("4.57.3")) == 3 * 2 * 2 * KEYS


def test_tuples_of_keys_and_values_are_widened_and_objects_are_not():
    """Keys are float32 after their rotation; values are made so."""
    assert held(autocast("4.45.2"), "past_key_values.to_float32") == 3 * 2 * KEYS
    assert held(autocast("4.48.3"), "past_key_values.to_float32") == 0


@pytest.mark.parametrize(
    "off",
    [
        job("4.51.3", activation_checkpointing=ActivationCheckpointing(mode="full", use_reentrant=True)),
        job("5.17.0"),
        job("4.44.2"),
        job("4.51.3", architecture=replace(NETWORK, model_type="gemma2")),
    ],
)
def test_training_without_a_cache(off):
    assert held(off) == 0


@pytest.mark.parametrize(
    ("model_type", "release", "has", "tuples"),
    [
        ("llama", "4.41.2", True, True),
        ("llama", "4.44.2", False, True),
        ("llama", "4.47.1", True, True),
        ("llama", "4.48.3", True, False),
        ("qwen2_moe", "4.53.3", True, True),
        ("qwen2_moe", "4.54.1", True, False),
        ("gpt2", "4.44.2", True, True),
        ("gpt2", "4.55.4", True, True),
        ("gpt_neox", "4.49.0", True, False),
        ("gemma3_text", "4.57.3", False, False),
        ("nemotron", "4.46.3", False, True),
        ("llama", "5.0.0", False, False),
    ],
)
def test_what_forward_returned_in_training(model_type, release, has, tuples):
    """As small networks on the CPU returned it, in each of these releases."""
    versions, facts = FrozenMapping({"transformers": release}), FrozenMapping({"model_type": model_type})
    found = conventions_of("huggingface", versions, facts, FrozenMapping({}))
    assert (found["outputs_have_cache"], found["returns_cache_as_tuples"] and has) == (has, tuples and has)


@pytest.mark.parametrize(
    ("model_type", "release", "num_masks"),
    [("gpt2", "5.1.0", 3), ("gpt2", "5.2.0", 0), ("gpt_neox", "4.48.3", 3), ("gpt_neox", "4.49.0", 0)],
)
def test_causal_masks_in_layers(model_type, release, num_masks):
    """A bool for each pair of positions in each of three layers."""
    network = replace(NETWORK, model_type=model_type, num_key_value_heads=8, max_position_embeddings=1024)
    assert held(job(release, architecture=network), "attention.bias") == num_masks * MIB


def test_one_key_head_that_is_not_repeated_has_no_kernel():
    """Falcon gives sdpa 71 query heads and one of keys, so torch computes scores: a traced peak of 4.45.2."""
    network = replace(catalog.architecture("falcon-7b"), num_hidden_layers=2, vocab_size=1024)
    setting = {"architecture": network, "sequence_length": 1024, "micro_batch_size": 2, "optimizer": Optimizer(name="sgd")}
    for release in ("4.45.2", "4.51.3"):
        assert peak(job(release, **setting), Phase.BACKWARD) == pytest.approx(3878.72, rel=1e-4)


def test_gpt2_under_autocast_takes_log_softmax_of_narrow_logits():
    """nll_loss alone is on autocast's fp32 list here, and accelerate widens logits, keys and values after it: MiB of the
    traced loss of transformers 4.45.2."""
    network = replace(catalog.architecture("gpt2"), num_hidden_layers=2, vocab_size=8192)
    asked = autocast("4.45.2", architecture=network, sequence_length=256)
    assert peak(asked, Phase.LOSS) == pytest.approx(526.48, rel=1e-4)


def test_layers_that_return_no_attention_weights():
    """GPT-Neo with reentrant checkpoints under autocast, as traced with transformers 4.51.3; with the weights that newer
    releases return it is 1.4 % more."""
    network = replace(catalog.architecture("gpt-neo-1.3b"), num_hidden_layers=2, vocab_size=4096)
    asked = job(
        "4.51.3",
        architecture=network,
        micro_batch_size=2,
        framework_options=FrozenMapping({"autocast": True}),
        activation_checkpointing=ActivationCheckpointing(mode="full", use_reentrant=True),
    )
    assert peak(asked, Phase.BACKWARD) == pytest.approx(1133.38, rel=1e-4)


def test_phi3_rotated_whole_heads_before_4_49():
    """The traced forward of eager attention with transformers 4.48.3; with parts that are concatenated, 24 MiB less."""
    network = replace(catalog.architecture("phi-3-mini"), num_hidden_layers=2, vocab_size=1024)
    assert peak(job("4.48.3", architecture=network, attention="eager"), Phase.FORWARD) == pytest.approx(2454.37, rel=1e-4)


def test_a_cache_that_is_assumed_is_said_and_can_be_switched_off():
    asked = autocast("4.45.2")
    off = asked.replace(framework_options=FrozenMapping({"autocast": True, "outputs_have_cache": False}))
    assert "use_cache" in assumption_on_caches(asked)
    assert [assumption_on_caches(one) for one in (off, autocast("5.17.0"))] == ["", ""]
    assert held(off) == 0
    assert without_cache(asked) == off
    assert without_cache(autocast("5.17.0")) == autocast("5.17.0")
