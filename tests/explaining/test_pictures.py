"""The stacked timeline: nothing is lost between the ledger and the picture, in a file and in a terminal."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.errors import SpecError
from peakcast.explaining.picture import draw, write_picture
from peakcast.explaining.stack import BANDS, LEAST_SHARE, sampled, spans, stacked
from peakcast.explaining.text_picture import HEIGHT, WIDTH, text_picture
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

NAMES = ["full", "long_lora", "checkpointed", "megatron"]


def test_every_category_is_in_exactly_one_band() -> None:
    assert sorted(category for band in BANDS for category in band.categories) == list(Category)
    assert len({band.character for band in BANDS}) == len({band.colour for band in BANDS}) == len(BANDS)


@pytest.mark.parametrize("name", NAMES)
def test_bands_add_up_to_the_total_at_every_instant(jobs: dict[str, TrainingJob], name: str) -> None:
    timeline = ledger(jobs[name])
    assert np.array_equal(stacked(timeline).sum(axis=0), timeline.totals)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [40, 70, 1200, 20_000])
def test_sampling_keeps_the_peak_the_order_and_every_phase(jobs: dict[str, TrainingJob], name: str, count: int) -> None:
    timeline = ledger(jobs[name])
    instants = sampled(timeline, count)
    assert len(instants) == count
    assert (np.diff(instants) >= 0).all()
    assert timeline.totals[instants].max() == timeline.peak().num_bytes
    assert set(timeline.phases[instants]) == set(timeline.phases)


def test_a_phase_of_few_operations_is_drawn_wide_enough_to_be_seen(jobs: dict[str, TrainingJob]) -> None:
    timeline = ledger(jobs["full"])
    phases = timeline.phases[sampled(timeline, 1000)]
    for phase in (Phase.LOSS, Phase.GRADIENT_CLIPPING, Phase.OPTIMIZER_STEP):
        assert (phases == phase).sum() >= 1000 * LEAST_SHARE - 1


@settings(max_examples=40)
@given(phases=st.lists(st.sampled_from(list(Phase)), min_size=1, max_size=60), count=st.integers(60, 200))
def test_any_step_can_be_sampled(phases: list[Phase], count: int) -> None:
    timeline = Timeline.from_entries([Entry("w", Category.PARAMETERS, 512, 0, len(phases))], phases)
    instants = sampled(timeline, count)
    assert len(instants) == count
    assert (np.diff(instants) >= 0).all()
    assert len(spans(timeline)) == 1 + sum(a != b for a, b in pairwise(phases))


@pytest.mark.parametrize("name", NAMES)
def test_the_terminal_picture_fits_a_terminal_and_shows_the_parts_in_proportion(
    jobs: dict[str, TrainingJob], name: str
) -> None:
    timeline = ledger(jobs[name])
    lines = text_picture(timeline).splitlines()
    assert max(map(len, lines)) <= WIDTH
    weights = timeline.composition(timeline.peak().instant)
    part = (weights[Category.PARAMETERS] + weights.get(Category.MAIN_PARAMETERS, 0)) / timeline.peak().num_bytes
    rows = sum(line[9:10] == "█" for line in lines[:HEIGHT])
    assert abs(rows - part * HEIGHT) <= 1
    assert any("peak" in line for line in lines[HEIGHT:])


def test_a_picture_of_two_tensors_by_hand() -> None:
    entries = [
        Entry("w", Category.PARAMETERS, 2**30, 0, 2),
        Entry("a", Category.ACTIVATIONS, 2**30, 1, 2),
    ]
    timeline = Timeline.from_entries(entries, [Phase.FORWARD, Phase.BACKWARD])
    lines = text_picture(timeline, width=20, height=4).splitlines()
    assert [line[9:] for line in lines[:4]] == ["     ░░░░░", "     ░░░░░", "██████████", "██████████"]
    assert lines[5][9:] == "FFFFFBBBBB"


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_picture_file_is_labelled_and_the_same_again(tmp_path: Path, jobs: dict[str, TrainingJob], ending: str) -> None:
    timeline = ledger(jobs["full"])
    path = tmp_path / f"step{ending}"
    write_picture(timeline, path, "llama on a GPU", 85 * 10**9)
    first = path.read_bytes()
    write_picture(timeline, path, "llama on a GPU", 85 * 10**9)
    assert path.read_bytes() == first
    if ending == ".svg":
        text = first.decode()
        for word in ("llama on a GPU", "peak 74.79 GiB", "optimizer states", "forward pass", "GiB", "the GPU's 79.2 GiB"):
            assert word in text
    else:
        assert first.startswith(b"\x89PNG")


def test_another_kind_of_file_is_refused(tmp_path: Path, jobs: dict[str, TrainingJob]) -> None:
    with pytest.raises(SpecError, match=r"must end in \.png or \.svg"):
        write_picture(ledger(jobs["full"]), tmp_path / "x.jpg", "")


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("name", NAMES)
def test_the_names_of_phases_do_not_run_into_one_another(
    jobs: dict[str, TrainingJob], name: str, micro_batches: int
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    timeline = ledger(jobs[name].replace(gradient_accumulation_steps=micro_batches))
    figure = draw(timeline, "a step")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    names = [text.get_window_extent(renderer) for text in figure.axes[0].texts if text.get_fontsize() == 8]
    assert len(names) == len({phase for phase, *_ in spans(timeline)})
    assert not any(a.overlaps(b) for a, b in pairwise(sorted(names, key=lambda box: box.x0)))
