"""Batches from strangers: what one line does to its process or asks of it costs that line, and the others are answered."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peakcast.core.errors import SpecError
from peakcast.doors.batching import MAX_LINE_CHARACTERS, predict_batch

GOOD = {"gpu": "H100-80GB", "job": {"architecture": "gpt2", "sequence_length": 128}}
ENDLESS = {"gpu": "H100-80GB", "job": {"architecture": "gpt2", "sequence_length": 131}}
DEADLY = {"gpu": "H100-80GB", "job": {"architecture": "gpt2", "sequence_length": 137}}


@pytest.fixture
def stricken(monkeypatch):
    """One line's prediction never ends, another's ends its process: no job that is let in is known to do either."""
    from peakcast.doors import batching

    predict = batching._predict

    def stricken(question):
        if question.job.sequence_length == 131:
            while True:
                time.sleep(0.1)  # not at work, which would take the time of other tests
        if question.job.sequence_length == 137:
            os.kill(os.getpid(), signal.SIGKILL)
        return predict(question)

    monkeypatch.setattr(batching, "_predict", stricken)
    batching._remembered.cache_clear()
    yield
    batching._remembered.cache_clear()


def lengths(*sizes):
    return [{**GOOD, "id": size, "job": {**GOOD["job"], "sequence_length": size}} for size in sizes]


def test_a_line_that_never_ends_costs_its_time_alone(stricken):
    before, after = predict_batch([{**ENDLESS, "id": "endless"}, {**GOOD, "id": "good"}], timeout_seconds=0.5)
    assert before["error"]["message"].startswith("no answer within 0.5 s")
    assert after["fits"] == "yes"


def test_of_shared_lines_those_are_answered_whose_process_was_not_killed(stricken):
    lines = [*lengths(*range(1, 40)), {**DEADLY, "id": "deadly"}, {**ENDLESS, "id": "endless"}, *lengths(*range(40, 80))]
    answers = list(predict_batch(lines, processes=2, timeout_seconds=6))
    assert [answer["id"] for answer in answers] == [line["id"] for line in lines]
    refused = {answer["id"]: answer["error"]["message"] for answer in answers if "error" in answer}
    assert set(refused) == {"deadly", "endless"}
    assert "was ended by SIGKILL" in refused["deadly"]
    assert "no answer within 6 s" in refused["endless"]


def test_more_processes_than_a_machine_has_and_times_that_are_none_are_refused():
    with pytest.raises(SpecError, match="processes=100,000 must be from 1 to"):
        predict_batch([GOOD], processes=100_000)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(SpecError, match="timeout_seconds"):
            predict_batch([GOOD], timeout_seconds=seconds)


OWN = {
    "name": "mine", "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256, "norm_placement": "pre",
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 5_000_000), ("num_nextn_predict_layers", 10**7), ("hidden_size", 10**9), ("vocab_size", 10**40),
     ("max_position_embeddings", 10**12),
     ("moe", {"num_experts": 10**6, "num_experts_per_tok": 1, "moe_intermediate_size": 8})],
)  # fmt: skip
def test_an_own_network_is_bounded_as_the_others_are(key, value):
    begun = time.monotonic()
    lines = [{"gpu": "H100-80GB", "job": {"architecture": network}} for network in ({**OWN, key: value}, OWN)]
    bad, good = predict_batch(lines)
    assert "must be at most" in bad["error"]["message"]
    assert good["fits"] == "yes"
    assert time.monotonic() - begun < 5


def test_lines_that_never_end_are_read_no_further_than_a_line_may_be():
    """A line of 100 MB, of which the process never has more than its bound."""
    line = json.dumps(GOOD).encode() + b"\n"
    code = (
        "import sys; from peakcast.commands.cli import _run; code = _run(['predict', '--batch', '-']);"
        "print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0], file=sys.stderr); sys.exit(code)"
    )
    asking = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = asking.communicate(line + b"[" * 100_000_000 + b"\n" + line, timeout=120)
    answers = [json.loads(text) for text in out.splitlines()]
    assert answers[0] == answers[2]
    assert f"at most {MAX_LINE_CHARACTERS:,} are read" in answers[1]["error"]["message"]
    assert int(err) * 1024 < 400 * 2**20  # VmHWM is in KiB; ru_maxrss would have the parent's in it


@pytest.mark.attacks
def test_a_batch_whose_processes_are_killed_at_100_random_moments_answers_the_rest(tmp_path, record_property):
    """Each kill costs one line at most; the others are answered, in order."""
    record_property("attacks", 100)
    record_property("kind", "processes of a batch killed at random moments")
    draw = random.Random(0)
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lengths(*range(64, 8064))))
    command = [sys.executable, "-P", "-m", "peakcast", "predict", "--batch", str(file), "--processes", "2"]
    with (tmp_path / "answers.jsonl").open("wb") as out:
        asking = subprocess.Popen(command, stdout=out)
    killed = 0
    while killed < 100 and asking.poll() is None:
        time.sleep(draw.uniform(0.05, 0.3))
        children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children").read_text().split()
        for child in draw.sample(children, min(1, len(children))):
            os.kill(int(child), signal.SIGKILL)
            killed += 1
    assert asking.wait(timeout=600) == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == list(range(64, 8064))
    lost = [answer for answer in answers if "error" in answer]
    assert all("was ended by SIGKILL" in answer["error"]["message"] for answer in lost)
    assert len(lost) <= killed == 100
