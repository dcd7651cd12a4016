"""The per-layer table adds up to the ledger, and its rows are counts that can be made by hand."""

from __future__ import annotations

from math import prod

import pytest

from peakcast.answers.explanation import LAYER_COLUMNS, ModuleRow
from peakcast.doors.questions import translation_of
from peakcast.explaining.layer_table import module_rows
from peakcast.explaining.rank_parameters import parameter_rows
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.parameters.inventory import num_parameters
from peakcast.timelines.timeline import Category, Timeline

RANKS = [("full", 0), ("long_lora", 0), ("checkpointed", 0), ("megatron", 0), ("megatron", 7)]


def table(job: TrainingJob, rank: int = 0) -> tuple[Timeline, dict[str, ModuleRow]]:
    timeline = ledger(job, rank=rank)
    return timeline, {row.module: row for row in module_rows(timeline, job, parameter_rows(job, rank))}


def test_every_category_is_in_exactly_one_column() -> None:
    assert sorted(category for categories in LAYER_COLUMNS.values() for category in categories) == list(Category)


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_the_last_column_adds_up_to_the_peak(jobs: dict[str, TrainingJob], name: str, rank: int) -> None:
    timeline, rows = table(jobs[name], rank)
    assert sum(row.at_peak for row in rows.values()) == timeline.peak().num_bytes


@pytest.mark.parametrize(("name", "rank"), RANKS)
def test_a_column_adds_up_to_the_most_that_its_categories_take(jobs: dict[str, TrainingJob], name: str, rank: int) -> None:
    timeline, rows = table(jobs[name], rank)
    most = dict.fromkeys(LAYER_COLUMNS, 0)
    for instant in range(len(timeline.phases)):
        parts = timeline.composition(instant)
        for column, categories in LAYER_COLUMNS.items():
            most[column] = max(most[column], sum(parts.get(category, 0) for category in categories))
    assert {column: sum(getattr(row, column) for row in rows.values()) for column in LAYER_COLUMNS} == most


def test_one_layer_of_llama_by_hand(jobs: dict[str, TrainingJob]) -> None:
    _, rows = table(jobs["full"])
    elements = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert rows["layers.7"].num_parameters == elements
    assert rows["layers.7"].weights == 2 * elements
    assert rows["layers.7"].gradients == 2 * elements
    assert rows["layers.7"].optimizer == 2 * 2 * elements


def test_a_column_of_parameters_is_the_whole_model(jobs: dict[str, TrainingJob]) -> None:
    _, rows = table(jobs["full"])
    assert sum(row.num_parameters for row in rows.values()) == num_parameters(jobs["full"].architecture)


def test_adapters_of_a_layer_by_hand(jobs: dict[str, TrainingJob]) -> None:
    shapes = {row.name: row.shape for row in parameter_rows(jobs["long_lora"], 0) if row.module == "layers.0"}
    assert shapes["self_attn.q_proj.lora_A"] == (16, 4096)
    assert shapes["self_attn.v_proj.lora_B"] == (1024, 16)
    _, rows = table(jobs["long_lora"])
    adapters = sum(prod(shape) for name, shape in shapes.items() if ".lora_" in name)
    assert rows["layers.0"].gradients == adapters * 4


def test_tensor_parallelism_halves_what_megatron_splits_and_keeps_norms_whole(jobs: dict[str, TrainingJob]) -> None:
    rows = {(row.module, row.name): row for row in parameter_rows(jobs["megatron"], 0)}
    qkv = rows["layers.0", "self_attention.linear_qkv.weight"]
    assert (qkv.shape, qkv.rank_shape) == ((6144, 4096), (3072, 4096))
    projection = rows["layers.0", "self_attention.linear_proj.weight"]
    assert (projection.shape, projection.rank_shape) == ((4096, 4096), (4096, 2048))
    norm = rows["layers.0", "mlp.linear_fc1.layer_norm.weight"]
    assert norm.shape == norm.rank_shape == (4096,)


def test_pipeline_stages_share_the_layers_out(jobs: dict[str, TrainingJob]) -> None:
    first, last = (
        {row.module for row in parameter_rows(jobs["megatron"], rank) if row.module.startswith("layers.")}
        for rank in (0, 7)
    )
    assert first == {f"layers.{i}" for i in range(16)}
    assert last == {f"layers.{i}" for i in range(16, 32)}


def test_a_contiguous_buffer_is_shared_out_by_elements_and_its_padding_kept_apart(jobs: dict[str, TrainingJob]) -> None:
    timeline, rows = table(jobs["megatron"])
    layer = rows["layers.3"]
    assert layer.gradients == 4 * layer.num_parameters
    padding = rows["model"].gradients if "model" in rows else 0
    (buffer,) = [int(timeline.num_bytes[i]) for i, name in enumerate(timeline.names) if name == "gradient_buffer"]
    assert buffer == 4 * sum(row.num_parameters for row in rows.values()) + padding
    assert 0 <= padding < 2**20


def test_fully_sharded_parameters_are_counted_in_parts() -> None:
    layout = {"data_parallel_size": 8, "sharding": "fsdp2"}
    sharded = translation_of({"architecture": "llama-3.2-1b", "parallelism": layout}).job
    assert {row.shards for row in parameter_rows(sharded, 0)} == {8}
