"""Which recipes are recorded for the cells of a grid, and in which order."""

from __future__ import annotations

import pytest

from peakcast import recording
from peakcast.collectors.grid import expand
from peakcast.spec import TrainingJob

UNKNOWN = {"model_type": "minimax_m2", "num_hidden_layers": 4, "hidden_size": 64, "num_local_experts": 4}


def test_cells_that_share_a_recipe_ask_for_it_in_their_order_and_known_families_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TrainingJob] = []
    monkeypatch.setattr(recording, "ensure_recipe", asked.append)
    points = [{"micro_batch_size": 2, "sequence_length": length} for length in (256, 301, 1024)]
    jobs = expand({"include": [{"architecture": one, **point} for one in (UNKNOWN, "gpt2") for point in points]})
    told: list[tuple[str, int, int]] = []
    recording.ensure_recipes(jobs, processes=3, progress=lambda *line: told.append(line))
    assert asked == [job for job in jobs if job.architecture.model_type == "minimax_m2"]
    assert told == [("recipe of minimax_m2", done, 3) for done in range(3)]


def test_where_nothing_wants_a_recipe_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "ensure_recipe", lambda job: pytest.fail(f"asked for {job.architecture.name}"))
    recording.ensure_recipes(expand({"include": [{"architecture": "gpt2"}]}), processes=1)
