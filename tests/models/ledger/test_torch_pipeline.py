"""Pipeline stages of plain torch: what a rank holds and keeps in flight, counted by hand."""

from dataclasses import replace

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import BF16
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import ActivationCheckpointing, Parallelism, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.layouts.pipeline import turns_of_rank
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category, Phase

WIDTH, INNER, VOCABULARY, ROWS, LAYERS = 256, 512, 4096, 128, 8
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
STREAM = ROWS * WIDTH * BF16
TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=INNER,
    vocab_size=VOCABULARY,
)


def job(micro_batches=8, **layout):
    return TrainingJob(
        architecture=TINY,
        framework="torch",
        sequence_length=ROWS,
        gradient_accumulation_steps=micro_batches,
        parallelism=Parallelism(**{"pipeline_parallel_size": 4, **layout}),
    )


def held(timeline, category):
    return int(timeline.num_bytes[(timeline.categories == category) & (timeline.born == 0)].sum())


def test_a_rank_stores_its_own_layers_and_the_ends_that_it_has():
    stages = [held(ledger(job(), rank=rank), Category.PARAMETERS) for rank in range(4)]
    table, layers = VOCABULARY * WIDTH, 2 * LAYER
    assert stages == [BF16 * n for n in (table + layers, layers, layers, layers + table + WIDTH)]


def test_uneven_stages_are_as_long_as_they_are_said_to_be():
    uneven = job(pipeline_layers=(1, 2, 2, 3))
    assert held(ledger(uneven, rank=3), Category.PARAMETERS) == BF16 * (3 * LAYER + VOCABULARY * WIDTH + WIDTH)


@pytest.mark.parametrize("micro_batches", [4, 8, 32])
def test_what_is_received_has_a_buffer_for_every_micro_batch(micro_batches):
    """Activations, where a stage comes before; gradients, where one comes after."""
    for rank, kinds in enumerate((1, 2, 2, 1)):
        steady = ledger(job(micro_batches), rank=rank)
        received = [name.startswith("received") for name in steady.names]
        last = len(steady.phases) - 1
        assert int(steady.num_bytes[steady.alive_at(last) & received].sum()) == kinds * micro_batches * STREAM


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8]), ("zero_bubble", [4, 4, 4, 4]), ("zero_bubble_v", [8, 8, 8, 8])],
)
def test_micro_batches_in_flight_by_schedule(most_in_flight, schedule, expected):
    several = 2 if schedule == "zero_bubble_v" else 1
    layout = job(pipeline_schedule=schedule, virtual_pipeline_stages=several).parallelism
    assert [most_in_flight(turns_of_rank(layout, rank, 8)) for rank in range(4)] == expected


def test_more_micro_batches_than_are_in_flight_cost_their_buffers_alone():
    def peak(micro_batches):
        full = job(micro_batches).replace(activation_checkpointing=ActivationCheckpointing(mode="full"))
        return ledger(full, rank=1).peak().num_bytes

    ids = 2 * ROWS * 8
    assert peak(64) - peak(32) == 32 * (2 * STREAM + ids)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (job(pipeline_schedule="interleaved_1f1b"), "virtual_pipeline_stages=1"),
        (job(3), "Schedule1F1B refuses"),
        (job(7, pipeline_schedule="dualpipe_v", virtual_pipeline_stages=2), "fewer than the stages"),
        (
            job(pipeline_schedule="zero_bubble").replace(
                activation_checkpointing=ActivationCheckpointing(mode="selective")
            ),
            "weight's backward",
        ),
        (job(data_parallel_size=2, pipeline_schedule="zero_bubble"), "no hooks of DDP"),
        (job(data_parallel_size=2, sharding="fsdp1"), "sharding='fsdp1'"),
        (job(9, pipeline_schedule="interleaved_1f1b", virtual_pipeline_stages=2), "not a multiple"),
        (job().replace(architecture=replace(TINY, tie_word_embeddings=True)), "token table"),
        (job().replace(framework="huggingface"), "framework='megatron' and 'torch'"),
        (job(data_parallel_size=2, sharding="fsdp2"), "fsdp2_units=ends"),
    ],
)
def test_what_is_not_modelled_is_named(changed, words):
    assert out_of_scope(job()) == ""
    assert words in out_of_scope(changed)


@pytest.mark.parametrize("views", [False, True])
def test_under_ddp_a_stage_has_buckets_for_its_gradients_which_move_there_in_the_last_backward(views):
    stages = job(data_parallel_size=2).replace(framework_options=FrozenMapping({"ddp_gradient_as_bucket_view": views}))
    assert out_of_scope(stages) == ""
    for rank, alone in ((0, 0), (2, 1), (6, 3)):
        trained = held(ledger(job(), rank=alone), Category.PARAMETERS)
        timeline = ledger(stages, rank=rank)
        buckets = [name.startswith("bucket.") for name in timeline.names]
        assert int(timeline.num_bytes[buckets].sum()) == trained
        clips = timeline.alive_at(timeline.peak(Phase.GRADIENT_CLIPPING).instant)
        gradients = timeline.num_bytes[clips & (timeline.categories == Category.GRADIENTS)].sum()
        assert int(gradients) == (0 if views else trained)


def test_of_several_sharded_stages_three_at_most_are_gathered():
    """Of four stages per rank, one layer each: while one computes, two more are there or on their way."""
    layout = {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_pipeline_stages": 4}
    stages = job(4, **layout, data_parallel_size=2, sharding="fsdp2")
    stages = stages.replace(versions=FrozenMapping({"torchtitan": "main"}))
    assert out_of_scope(stages) == ""
    timeline = ledger(stages, rank=2)
    chosen = [index for index, name in enumerate(timeline.names) if name in ("gathered", "all_gather.output")]
    layers = [timeline.modules[index] for index in chosen]
    assert {layer for layer in layers if layer.startswith("layers.")} == {f"layers.{index}" for index in (1, 3, 5, 7)}
    most = max(
        len({name for index, name in zip(chosen, layers, strict=True) if timeline.born[index] <= now < timeline.dies[index]}
            - {"tail", "root"})
        for now in range(len(timeline.phases))
    )  # fmt: skip
    assert most == 3


def test_zero_bubble_sends_for_all_units_of_a_stage_before_it_copies_any_out():
    """In the order of the modules, the table before the layers; the other schedules gather a unit when it is used."""
    stages = job(8, data_parallel_size=2, sharding="fsdp2", pipeline_schedule="zero_bubble")
    timeline = ledger(stages.replace(versions=FrozenMapping({"torchtitan": "main"})))
    units = ["embedding", "layers.0", "layers.1"]
    sent, gathered = (
        {timeline.modules[i]: int(timeline.born[i]) for i, one in enumerate(timeline.names) if one == name}
        for name in ("all_gather.output", "gathered")
    )
    assert sorted(sent, key=sent.__getitem__) == sorted(gathered, key=gathered.__getitem__) == units
    assert max(sent.values()) < min(gathered.values())


@pytest.mark.parametrize("layers", [(-1, 3, 3, 3), (4, 0, 2, 2), (8, 0, 0, 0)])
def test_a_stage_between_others_has_layers(layers):
    with pytest.raises(SpecError, match="leaves a stage of pipeline_parallel_size=4 without layers"):
        job(pipeline_layers=layers)


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_v_has_two_stages_on_each_rank(schedule, stages):
    with pytest.raises(SpecError, match=f"virtual_pipeline_stages={stages} must be 2"):
        job(pipeline_schedule=schedule, virtual_pipeline_stages=stages)


def test_the_first_stage_may_hold_the_embedding_alone():
    assert held(ledger(job(pipeline_layers=(0, 2, 3, 3)), rank=0), Category.PARAMETERS) == BF16 * VOCABULARY * WIDTH
