"""Blocks that FSDP1 has let go of and the GPU still uses, counted by hand: the CPU is as far ahead as it can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning
from peakcast.models.allocator.replay import replay
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.layouts.run_ahead import RunAhead
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category, Phase, Timeline

LAYERS = 5
LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
"""Elements of a layer of the network in `conftest.py`, in bf16."""
REENTRANT = ActivationCheckpointing(mode="full", use_reentrant=True)


def deep(job: Any, layout: str = "fsdp1_trainer", **changes: Any) -> Timeline:
    architecture = job().architecture
    return ledger(job(layout, architecture=replace(architecture, num_hidden_layers=LAYERS), **changes), step="steady")


def blocks(timeline: Timeline, phase: Phase, name: str, least_bytes: int = 0) -> tuple[int, int]:
    """Of the tensors of a name, how many stand together at most, and how many blocks they keep from others."""
    assert timeline.reusable is not None
    named = np.array([each == name for each in timeline.names])
    chosen = named & (timeline.num_bytes >= least_bytes)
    instants = [instant for instant, its in enumerate(timeline.phases) if its == phase]
    begun = [chosen & (timeline.born <= instant) for instant in instants]
    stand, keep = (
        max(int((some & (instant < ends)).sum()) for some, instant in zip(begun, instants, strict=True))
        for ends in (timeline.dies, timeline.reusable)
    )
    return stand, keep


def layers_gathered(timeline: Timeline, phase: Phase) -> tuple[int, int]:
    """The root is smaller."""
    return blocks(timeline, phase, "flat_param.gathered", LAYER * 2)


def test_the_cpu_waits_for_the_event_before_the_last_one():
    step, ahead = Step(), RunAhead(limits=True)
    for _ in range(4):
        ahead.wait(step)
        block = step.allocate("gathered", Category.COMMUNICATION_BUFFERS, [1024])
        step.moment("computes", Phase.FORWARD)
        ahead.let_go(step, block)
        ahead.record()
    ahead.catch_up(step)
    step.moment("loss", Phase.LOSS)
    timeline = step.timeline()
    assert timeline.reusable is not None
    assert timeline.dies.tolist() == [1, 2, 3, 4]
    assert timeline.reusable.tolist() == [2, 3, 4, 4]


def test_a_forward_alternates_between_two_blocks(job):
    """Before it gathers a layer the CPU waits for the one before the last, so the last one's block is not free yet."""
    assert layers_gathered(deep(job), Phase.FORWARD) == (1, 2)


def test_without_the_limiter_every_layer_of_a_forward_gets_a_block(job):
    free = deep(job, framework_options=FrozenMapping({"fsdp1_limit_all_gathers": False}))
    assert layers_gathered(free, Phase.FORWARD) == (1, LAYERS)
    assert free.totals.tolist() == deep(job).totals.tolist()


def test_in_backward_gradients_wait_and_what_was_gathered_does_not(job):
    """A trained layer is resharded on the stream on which it was gathered: only forward's last block is in the way. The
    gradients of the layer above wait for its event, joined ones for that of the layer below, which is waited for two layers
    later."""
    timeline = deep(job)
    assert layers_gathered(timeline, Phase.BACKWARD) == (1, 2)
    assert blocks(timeline, Phase.BACKWARD, "mlp.down_proj.weight.grad") == (1, 2)
    assert blocks(timeline, Phase.BACKWARD, "flat_param.grad", LAYER * 2) == (1, 3)


@pytest.mark.parametrize(
    ("version", "checkpointing", "expected"),
    [
        # the layer below is gathered before this one goes, in the block of the one above: since then adapters, units of
            # their own, have been waited for
            ("5.17.0", ActivationCheckpointing(), (2, 2)),
        ("4.48.1", REENTRANT, (1, 2)),  # gathered to compute again, let go, gathered again
    ],
)
def test_frozen_layers_wait_in_backward_too(job, version, checkpointing, expected):
    timeline = deep(
        job,
        finetuning=Finetuning(method="lora", rank=8),
        activation_checkpointing=checkpointing,
        versions=FrozenMapping({"transformers": version}),
    )
    assert layers_gathered(timeline, Phase.BACKWARD) == expected


@pytest.mark.parametrize("checkpointing", [ActivationCheckpointing(), ActivationCheckpointing(mode="full"), REENTRANT])
def test_an_adapter_is_gathered_for_its_own_product_only(job, checkpointing):
    adapters = Finetuning(method="lora", rank=64, targets=("q_proj", "v_proj"))
    timeline = deep(job, finetuning=adapters, activation_checkpointing=checkpointing)
    gathered = {
        (module, tuple(timeline.labels[born:dies]))
        for name, module, born, dies in zip(timeline.names, timeline.modules, timeline.born, timeline.dies, strict=True)
        if name == "flat_param.gathered" and ".lora_" in module
    }
    adapted = [f"self_attn.{name}.{part}" for name in ("q_proj", "v_proj") for part in ("lora_A", "lora_B")]
    assert gathered == {(f"layers.{layer}.{name}", (name,)) for layer in range(LAYERS) for name in adapted}


def test_nothing_waits_when_a_step_ends(job):
    for accumulated in (1, 2):
        timeline = deep(job, gradient_accumulation_steps=accumulated)
        assert timeline.reusable is not None
        waits = timeline.reusable > timeline.dies
        assert waits.any()
        *_, end = (instant for instant, phase in enumerate(timeline.phases) if phase == Phase.BACKWARD)
        assert timeline.reusable[waits].max() <= end + 1
        assert timeline.reusable.min() >= 0
        assert (timeline.reusable >= timeline.dies).all()


def test_the_cache_grows_by_what_waits_and_nothing_is_allocated_for_it(job):
    wide = replace(job().architecture, num_hidden_layers=LAYERS, hidden_size=1024, intermediate_size=4096)
    timeline = ledger(job("fsdp1_trainer", architecture=wide), step="steady")
    waiting, plain = replay(timeline), replay(replace(timeline, reusable=None))
    layer = (4 * 1024 * 256 + 3 * 1024 * 4096 + 2 * 1024) * 2
    assert waiting.peak_requested_bytes == plain.peak_requested_bytes
    assert waiting.peak_reserved_bytes - plain.peak_reserved_bytes >= layer

