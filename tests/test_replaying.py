"""`peakcast replay` and `api.replay`: a recording through the simulated allocator, and beside a prediction."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from peakcast import api
from peakcast.commands import cli
from peakcast.histories.files import read_histories
from peakcast.models.allocator.history_timeline import recorded_timeline
from peakcast.timelines.timeline import Category, Phase

FOLDER = Path(__file__).resolve().parents[1] / "datasets" / "published" / "histories"
STEP = FOLDER / "wedsonlin-medium-128-training-snap-0db7.jsonl.gz"
DECODER = {
    "architecture": {
        "model_type": "llama", "name": "medium", "hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096,
        "num_attention_heads": 16, "vocab_size": 10000, "tie_word_embeddings": False,
    },
    "micro_batch_size": 4,
    "sequence_length": 128,
    "attention": "eager",
    "precision": {"parameters": "float32", "compute": "float32", "gradients": "float32", "optimizer_states": "float32"},
}  # fmt: skip


def run(*arguments: object) -> int:
    return cli._run(["replay", *map(str, arguments)])


def test_a_history_that_agrees(capsys):
    assert run(STEP, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["allocations"] == found["same_place"] == 6526
    assert found["peak_reserved_bytes"] == found["recorded_peak_reserved_bytes"] == 6900 * 2**20
    assert found["agrees"] is True
    assert run(STEP) == 0
    assert "6,526 of 6,526 allocations land at the recorded address" in capsys.readouterr().out


def test_a_history_that_does_not_agree(tmp_path, capsys):
    lines = gzip.decompress((FOLDER / "jaspersolt-snapshot-6720.jsonl.gz").read_bytes()).splitlines(keepends=True)
    allocations = [number for number, line in enumerate(lines) if line.startswith(b'["a"')]
    event = json.loads(lines[allocations[100]])
    event[1] += 8
    lines[allocations[100]] = json.dumps(event).encode() + b"\n"
    path = tmp_path / "moved.jsonl"
    path.write_bytes(b"".join(lines))
    assert run(path) == 3
    assert "DISAGREES" in capsys.readouterr().out


NO_RECORDINGS = {
    "cut.jsonl.gz": lambda: STEP.read_bytes()[:2000],
    "cut at a line.jsonl": lambda: b"\n".join(gzip.decompress(STEP.read_bytes()).splitlines()[:500]),
    "cut.jsonl": lambda: gzip.decompress(STEP.read_bytes())[:-7],
    "bomb.jsonl.gz": lambda: gzip.compress(b"[" * 200_000_000, 1),
    "bomb.pickle.gz": lambda: gzip.compress(b"\x80\x04" + b"}" * 100_000_000, 1),
    "digits.jsonl": lambda: b"9" * 100_000,
    "deep.jsonl": lambda: b"[" * 100_000,
    "other.jsonl": lambda: b'{"format": "something else"}\n',
    "header.jsonl": lambda: b'{"format": "allocator history 1", "initial": 5}\n',
    "large.jsonl": lambda: (
        b'{"format": "allocator history 1", "initial": {"segments": [[0, 1e999, 0, "large"]], "blocks": []}}'
    ),
    "text.txt": lambda: b"hello",
    "empty": lambda: b"",
    "list.pickle": lambda: pickle.dumps([1]),
}
"""Contents by the names of their files; some take a second to make."""


@pytest.mark.parametrize("name", NO_RECORDINGS)
def test_what_is_no_recording_is_one_sentence(tmp_path, capsys, name):
    path = tmp_path / name
    path.write_bytes(NO_RECORDINGS[name]())
    assert run(path, "--json") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert name in said.err
    assert len(said.err) < 500


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert run(tmp_path / "nothing.pickle") == 2
    assert "cannot be read" in capsys.readouterr().err


def test_an_output_needs_something_to_compare_with(capsys):
    assert run(STEP, "--output", "x.png") == 2
    assert "give against" in capsys.readouterr().err


# -- several recordings ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(tmp_path):
    """A folder of two recordings and a page that is none."""
    for number, name in enumerate(("jaspersolt-snapshot-6720", "charan6924-snap-075d")):
        (tmp_path / f"rank{number}.jsonl.gz").write_bytes((FOLDER / f"{name}.jsonl.gz").read_bytes())
    (tmp_path / "README.md").write_text("two ranks")
    return tmp_path


@pytest.mark.parametrize("named", [lambda folder: [folder], lambda folder: sorted(folder.glob("rank*"))])
def test_several_recordings_are_one_object_each(ranks, capsys, named):
    assert run(*named(ranks), "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(one["file"]).name for one in found] == ["rank0.jsonl.gz", "rank1.jsonl.gz"]
    alone = [api.replay(ranks / f"rank{number}.jsonl.gz").to_mapping() for number in range(2)]
    assert found == alone


def test_a_damaged_one_among_several_does_not_end_the_others(ranks, capsys):
    (ranks / "rank0.pickle").write_text("hello")
    assert run(ranks, "--json") == 2
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one.get("agrees") for one in found] == [True, None, True]
    assert "damaged" in found[1]["error"]["message"]
    assert run(ranks) == 2
    assert "not replayed: " in capsys.readouterr().out


def test_a_folder_without_recordings_and_a_comparison_with_several_are_refused(ranks, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty") == 2
    assert "has no recording" in capsys.readouterr().err
    assert run(ranks, "--against", "llama-3.2-1b") == 2
    assert "name one file" in capsys.readouterr().err


# -- beside a prediction ------------------------------------------------------------------------------------------------


def test_a_recording_as_a_timeline():
    (history,) = read_histories(STEP)
    timeline = recorded_timeline(history)
    assert len(timeline.phases) == 1 + history.num_allocations
    assert set(timeline.phases.tolist()) == {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER_STEP}
    hidden = timeline.num_bytes[timeline.categories == Category.WORKSPACES]
    assert hidden.sum() > 0


def test_the_two_add_up(tmp_path):
    """A decoder of CS336's course beside the ledger of the nearest architecture that has a name."""
    found = api.replay(STEP, DECODER, "A100-80GB", output=tmp_path / "beside.svg")
    assert found.beside is not None
    assert found.beside.peak.recorded_bytes == max(moment.recorded_bytes for moment in found.beside.phases)
    assert found.beside.peak.recorded_bytes == found.gpus[0].peak_allocated_bytes
    for moment in found.beside.phases:
        parts = moment.unpredicted_bytes + moment.hidden_bytes + moment.slack_bytes
        assert moment.as_predicted_bytes + parts == moment.recorded_bytes
        assert moment.as_predicted_bytes + moment.missing_bytes == moment.predicted_bytes
        assert sum(row.difference_bytes for row in moment.sizes) == (
            moment.recorded_bytes - moment.slack_bytes - moment.predicted_bytes
        )
    assert found.beside.peak.as_predicted_bytes > 0.9 * found.beside.peak.recorded_bytes  # weights, gradients, states
    assert (tmp_path / "beside.svg").read_text().startswith("<?xml")
    text = json.dumps(found.to_mapping())
    assert "as_predicted_bytes" in text


def test_a_recording_beside_itself_has_no_difference():
    from peakcast.explaining.recording_comparison import compare_recording
    from peakcast.models.allocator.history_replay import allocated_bytes

    (history,) = read_histories(STEP)
    timeline = recorded_timeline(history)
    found = compare_recording(timeline, timeline, allocated_bytes(history), "itself")
    for moment in found.phases:
        assert moment.missing_bytes == 0
        assert moment.unpredicted_bytes == 0
        assert moment.hidden_bytes == 0
