"""Optimizers that update in backward: one update after each operation that makes a gradient, counted by hand."""

import numpy as np
import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Loss, Optimizer, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.layouts.fsdp2 import REDUCE_SCATTER
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.ledger.tape.update_in_backward import (
    Gradients,
    ParameterKey,
    ParameterOptimizer,
    UpdateInBackward,
    updated_in_backward,
)
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

F, B, G, T, A = Phase.FORWARD, Phase.BACKWARD, Category.GRADIENTS, Category.TEMPORARIES, Category.ACTIVATIONS
PHASES = [F, B, B, B, Phase.OPTIMIZER_STEP]
ENDS = [3]
"""One forward, two operations of backward, its end, the optimizer's step."""


def updated(*entries, tied=None, through_view=()):
    timeline = Timeline.from_entries([Entry(*entry) for entry in entries], PHASES, ["", "second", "first", "ends", ""])
    gradients = [index for index, entry in enumerate(entries) if entry[1] == G]
    update = UpdateInBackward(4, tied or {})
    return updated_in_backward(timeline, gradients_of(timeline, gradients, through_view), ENDS, update)


def gradients_of(timeline, entries, through_view=()):
    names = [timeline.names[index].removesuffix(".grad") for index in entries]
    return Gradients.of(timeline, np.array(entries), names, np.array(through_view, dtype=np.int64))


def test_a_gradient_is_used_up_after_the_operation_that_makes_the_next_one():
    """What that operation made for itself, and what it kept, is gone by then; what the one after it makes is to come."""
    timeline = updated(
        ("first.weight.grad", G, 10, 2, 5),
        ("second.weight.grad", G, 100, 1, 5),
        ("first.temporary", T, 1000, 2, 3),
        ("first.kept", A, 2000, 0, 3),
    )
    assert timeline.labels == ["", "second", "first", "update", "update", "ends", ""]
    assert timeline.totals.tolist() == [2000, 2100, 3110, 10 + 4 * 100, 4 * 10, 0, 0]
    assert timeline.phases.tolist() == [F, B, B, B, B, B, Phase.OPTIMIZER_STEP]


def test_a_bias_comes_before_its_matrix():
    timeline = updated(("first.weight.grad", G, 100, 1, 5), ("first.bias.grad", G, 10, 1, 5))
    assert timeline.totals.tolist() == [0, 110, 100 + 4 * 10, 100, 4 * 100, 0, 0]


def test_of_a_weight_used_twice_the_sum_is_there_when_backward_ends():
    timeline = updated(
        ("lm_head.weight.grad", G, 100, 1, 5),
        ("first.weight.grad", G, 10, 1, 5),
        tied={ParameterKey("", "lm_head.weight"): ParameterKey("", "embed_tokens.weight")},
    )
    assert timeline.totals.tolist() == [0, 110, 110, 100 + 4 * 10, 4 * 100, 0, 0]


def test_what_a_block_hands_on_and_a_gradient_that_is_added_to_another_are_there_meanwhile():
    """Of a norm, whose input is no view, the sum is made before its weights' gradients are taken to them."""
    timeline = updated(
        ("first.weight.grad", G, 10, 2, 5),
        ("second.weight.grad", G, 10, 1, 5),
        ("gradient", T, 1000, 3, 4),
        ("first.gradient", T, 100, 2, 3),
        ("norm.gradient", T, 7, 2, 3),
        through_view=[3],
    )
    assert timeline.totals[3] == 1000 + 100 + 10 + 4 * 10


def test_with_an_optimizer_for_each_parameter_a_gradient_is_applied_as_it_comes():
    """The first step makes its states there: 512 bytes each, as are the temporaries, after rounding."""
    timeline = Timeline.from_entries(
        [Entry("first.weight.grad", G, 512, 2, 5), Entry("second.weight.grad", G, 1024, 1, 5)],
        PHASES,
        ["", "second", "first", "ends", ""],
    )
    states = tuple((f"first.weight.{name}", "", 512) for name in ("exp_avg", "exp_avg_sq"))
    alone = (
        ParameterOptimizer(ParameterKey("", "second.weight"), 0),
        ParameterOptimizer(ParameterKey("", "first.weight"), 300, states),
    )
    made = updated_in_backward(timeline, gradients_of(timeline, [0, 1]), ENDS, UpdateInBackward(alone=alone))
    assert made.labels == ["", "second", "update", "first", "update", "ends", ""]
    assert made.totals.tolist() == [0, 1024, 1024, 512, 512 + 512 + 1024, 1024, 1024]


def test_a_parameter_used_twice_is_updated_once_when_its_gradients_have_been_added():
    """The second gradient is added to the first and freed before the optimizer's step."""
    timeline = Timeline.from_entries(
        [Entry("table.grad", G, 512, 1, 5), Entry("table.grad", G, 512, 2, 5)], PHASES, ["", "second", "first", "ends", ""]
    )
    states = (("table.exp_avg", "", 512),)
    update = UpdateInBackward(alone=(ParameterOptimizer(ParameterKey("", "table"), 1024, states),))
    made = updated_in_backward(timeline, gradients_of(timeline, [0, 1]), ENDS, update)
    assert made.labels == ["", "second", "first", "update", "ends", ""]
    assert made.totals.tolist() == [0, 512, 512 + 512, 512 + 512 + 1024, 512, 512]


NETWORKS = ["gemma-2-2b", "gpt2", "qwen2.5-0.5b", "bloom-1b1", "t5-small", "olmoe-1b-7b", "mamba-130m"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_that_trains_is_updated_once_by_its_own_optimizer(name, compiled):
    """Whatever a block calls the operation that makes its gradient, the first step makes each parameter's states once."""
    job = TrainingJob(
        architecture=catalog.architecture(name),
        framework="torch",
        sequence_length=64,
        compile=compiled,
        framework_options=FrozenMapping({"optimizer_in_backward": True}),
    )
    made, kept = (states_of(ledger(job, step=step)) for step in ("first", "steady"))
    assert made == kept
    assert ledger(job).labels.count("update") == len(kept) // 2


def states_of(timeline: Timeline) -> list[tuple[str, str, int]]:
    rows = zip(timeline.modules, timeline.names, timeline.num_bytes.tolist(), timeline.categories.tolist(), strict=True)
    return sorted((module, name, size) for module, name, size, category in rows if category == Category.OPTIMIZER_STATES)


def test_what_an_optimizer_in_backward_cannot_do_is_named():
    alone = TrainingJob(
        architecture=catalog.architecture("gpt2"),
        framework="torch",
        framework_options=FrozenMapping({"optimizer_in_backward": True}),
    )
    assert not out_of_scope(alone)
    plain = alone.replace(framework_options=FrozenMapping())
    assert ledger(alone).phase_peaks()[Phase.GRADIENT_CLIPPING] < ledger(plain).phase_peaks()[Phase.GRADIENT_CLIPPING]
    assert "no gradient to add to" in out_of_scope(alone.replace(gradient_accumulation_steps=2))


@pytest.mark.parametrize("name", ["lomo", "adalomo"])
def test_a_table_of_its_own_and_biases_are_in_scope(name):
    for architecture in ("qwen2.5-7b", "opt-125m", "pythia-160m", "gpt2"):
        assert not out_of_scope(job(name, architecture))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallelism": Parallelism(data_parallel_size=2)}, "on one GPU only"),
        ({"compile": True, "architecture": catalog.architecture("llama-3.1-8b")}, "without torch.compile only"),
        ({"loss": Loss(kind="dpo"), "micro_batch_size": 2}, "loss.kind='dpo'"),
        ({"architecture": catalog.architecture("olmoe-1b-7b")}, "factors matrices only; use lomo"),
    ],
)
def test_what_no_trace_has_confirmed_is_named(changes, why):
    assert why in out_of_scope(job("adalomo", "gpt2").replace(**changes))


def test_accumulating_changes_nothing_since_no_gradient_is_there_to_add_to():
    once = job("lomo", "gpt2")
    assert ledger(once.replace(gradient_accumulation_steps=3)).phase_peaks() == ledger(once).phase_peaks()


def job(name, architecture):
    return TrainingJob(architecture=catalog.architecture(architecture), sequence_length=64, optimizer=Optimizer(name=name))


def test_under_fsdp2_a_reduction_updates_and_no_gradient_waits_for_the_optimizer():
    """fp32 weights on four ranks: the parts of all gradients, a quarter of all that trains, wait for the optimizer without
    it; with it the states of a first step are made in backward, on the stream that reduces."""
    sharded = TrainingJob(
        architecture=catalog.architecture("gpt2"),
        framework="torch",
        precision=Precision(parameters="float32", compute="bfloat16"),
        parallelism=Parallelism(data_parallel_size=4, sharding="fsdp2"),
    )
    in_backward = sharded.replace(framework_options=FrozenMapping({"optimizer_in_backward": True}))
    assert not out_of_scope(in_backward)
    plain, updating = ledger(sharded), ledger(in_backward)
    assert plain.totals[-1] == updating.totals[-1]  # weights and states, and nothing else between steps
    parameters = sum(plain.num_bytes[plain.categories == Category.PARAMETERS])
    assert gradients_at_clipping(plain) == pytest.approx(parameters, rel=1e-3)
    assert gradients_at_clipping(updating) == 0
    first = ledger(in_backward, step="first")
    made = np.flatnonzero((first.categories == Category.OPTIMIZER_STATES) & (first.born > 0))
    assert {int(first.streams[index]) for index in made} == {REDUCE_SCATTER}
    assert {first.phases[first.born[index]] for index in made} == {Phase.BACKWARD}


def gradients_at_clipping(timeline: Timeline) -> int:
    clip = timeline.labels.index("clip_grad_norm_")
    there = (timeline.born <= clip) & (timeline.dies > clip) & (timeline.categories == Category.GRADIENTS)
    return int(timeline.num_bytes[there].sum())
