"""Recording every family: what is refused before it begins, and what goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peakcast import api
from peakcast.collectors.measure import recording
from peakcast.core.errors import CollectorError, RecordError, SpecError
from peakcast.doors import shipping
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes import shipped
from peakcast.models.recipes.recipe import near
from tests.models.recipes.test_kinds import CONFIG, Wide

VERSIONS = {"transformers": "5.17.0", "torch": "2.13.0+cpu", "numpy": "2.0"}


class Recorder:
    """Stands for the process that records: a library of one family, which fails from the job `fails_from` on."""

    asked = 0
    fails_from = 10**9

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def families(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        return {"unheard_of": dict(CONFIG), "llama": {"model_type": "llama"}}, VERSIONS

    @contextmanager
    def of(self, job: TrainingJob) -> Iterator[Any]:
        type(self).asked += 1
        if self.asked > self.fails_from:
            raise CollectorError("it was interrupted")
        yield Library(lambda *sample: sample)


class Library:
    def __init__(self, walk: Any) -> None:
        self.walk, self.defaults, self.read = walk, dict[str, Any](), frozenset[str]()


@pytest.fixture(autouse=True)
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "WalkRecorder", Recorder)
    monkeypatch.setattr(Recorder, "asked", 0)
    monkeypatch.setattr(shipping, "Walk", SimpleNamespace(read=lambda sample: Wide(8)(*sample)))


def test_what_was_recorded_is_not_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "fails_from", 3)
    first = api.record_all(tmp_path)
    assert first.kinds == {"unheard_of": 3}
    assert first.refused == {"unheard_of": "it was interrupted"}
    monkeypatch.setattr(Recorder, "fails_from", 10**9)
    monkeypatch.setattr(Recorder, "asked", 0)
    second = api.record_all(tmp_path)
    jobs = len(shipping.REGIMES) * len(shipping.BATCHES)
    assert second.kinds == {"unheard_of": jobs}
    assert Recorder.asked == jobs - 3
    (path,) = (tmp_path / "transformers-5.17.0").iterdir()
    assert {tuple(recipe.versions.items()) for _, recipe in shipped.all_of(path)} == {
        (("torch", "2.13.0"), ("transformers", "5.17.0"))
    }


def test_a_regime_that_is_refused_loses_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of networks that cannot recompute activations: the regimes without checkpoints are recorded all the same."""

    def of(self: Any, job: TrainingJob) -> Any:
        if job.activation_checkpointing.mode != "none":
            raise CollectorError("it does not support gradient checkpointing")
        return nullcontext(Library(lambda *sample: sample))

    monkeypatch.setattr(Recorder, "of", of)
    found = api.record_all(tmp_path)
    assert found.kinds == {"unheard_of": len(shipping.BATCHES) * len(shipping.REGIMES) // 2}
    assert found.refused == {"unheard_of": "it does not support gradient checkpointing"}


def test_regimes_are_every_mixture_of_what_people_choose() -> None:
    """Also bf16=True of a Trainer without checkpoints, of float32 weights or of narrow ones under autocast."""
    assert len({str(one) for one in shipping.REGIMES}) == len(shipping.REGIMES) == 24
    assert shipping.AUTOCAST in shipping.REGIMES
    assert shipping.AUTOCAST_OF_NARROW in shipping.REGIMES


def test_a_window_is_recorded_on_both_sides() -> None:
    """From a window's length on there is a mask, and the recipe of it begins at that length: 4,096 is a common one."""
    network = {"model_type": "cwm", "sliding_window": 4096, "max_window_layers": 24, "window": None}
    assert shipping.windows_of(network) == [4096]
    jobs = list(shipping._jobs(network | {"num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": 64}, {}))
    lengths = [job.sequence_length for job in jobs if job.micro_batch_size == 1]
    assert lengths[0] == shipping.LENGTH
    assert near(lengths[1])[0] == 4096
    assert shipping.windows_of({"sliding_window": 128}) == []  # all lengths that are walked fill it
    assert shipping.windows_of({"sliding_window": 4096, "max_position_embeddings": 4096}) == []  # no sequence fills it


@pytest.mark.parametrize(
    ("layers", "kinds", "expected"),
    [
        (48, [], 24),
        (12, [], 12),
        (22, [], 22),
        (30, ["s"] * 5 + ["f"], 24),
        (61, ["s", "f"], 23),
        (16, ["c", "c", "f", "c"], 16),
    ],
)
def test_whole_periods_of_layers_are_left_out(layers: int, kinds: list[str], expected: int) -> None:
    assert shipping.recorded_layers(layers, (kinds * layers)[:layers]) == expected


def test_layers_of_no_period_are_all_recorded() -> None:
    irregular = ["f" if layer in (2, 5, 8, 10, 12, 14) else "c" for layer in range(30)]
    assert shipping.recorded_layers(30, irregular) == 30


def test_a_family_that_is_not_recorded_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="families='llama' must be a family that transformers has and the ledger has not"):
        api.record_all(tmp_path, families=["llama"])


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be made: a file is where its folder should be"):
        api.record_all(tmp_path / "file")
