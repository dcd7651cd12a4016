"""Batches whose lengths change from step to step, run whole on this machine's CPU with CUDA's readings from a stand-in."""

import itertools

import pytest

from peakcast.collectors.measure import worker
from peakcast.collectors.measure.grid import expand
from peakcast.core.errors import CollectorError
from peakcast.jobs.lengths import CHANGING_STEPS, longest_step, steps
from peakcast.jobs.spec import job_to_mapping

TINY = {
    "model_type": "llama", "name": "tiny", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def job(form, **changes):
    cell = {"architecture": TINY, "sequence_length": 32, "micro_batch_size": 3, "precision": {"parameters": "float32"}}
    batch = {"form": form, "shortest_sequence": 4, "seed": 1}
    return expand({"include": [cell | {"batch": batch} | changes]})[0]


@pytest.mark.parametrize("form", ["rows", "masked", "padding_free"])
def test_each_micro_batch_has_its_own_lengths_and_the_row_says_which(stand_in, monkeypatch, form):
    transformers = pytest.importorskip("transformers")
    calls = []
    forward = transformers.LlamaModel.forward

    def seen(self, input_ids=None, attention_mask=None, position_ids=None, **rest):
        calls.append((tuple(input_ids.shape), attention_mask, position_ids))
        return forward(self, input_ids, attention_mask, position_ids, **rest)

    monkeypatch.setattr(transformers.LlamaModel, "forward", seen)
    asked = job(form, gradient_accumulation_steps=2)
    ((row, _),) = worker.run({"job": job_to_mapping(asked), "gpu": None})
    assert (row.outcome, row.spoiled, row.job.batch) == ("ok", (), asked.batch)
    said = row.environment["readings"]["lengths"]
    assert [len(step) for step in said] == [2] * CHANGING_STEPS
    assert said[longest_step(asked)] == [[32, 96], [32, 96]]
    assert len({tuple(part) for step in said for part in step}) > CHANGING_STEPS
    for (longest, tokens), (shape, mask, positions) in zip(itertools.chain.from_iterable(said), calls, strict=True):
        assert shape == ((1, tokens) if form == "padding_free" else (3, longest))
        if form == "masked":  # of a full one the last token is left out: a mask of ones would be none
            assert int(mask.sum()) == min(tokens, 3 * longest - 1)
        if form == "padding_free":
            assert (int((positions == 0).sum()), int(positions.max())) == (3, longest - 1)


def test_phases_of_the_row_are_the_worst_of_all_steps_but_the_first(stand_in, monkeypatch):
    """Readings of the stand-in rise by call; one in the middle is made the highest."""
    from peakcast.collectors.machine import probes

    peaks = stand_in.peaks

    def once_high():
        found = peaks()
        return dict.fromkeys(found, 10_000) if stand_in.reading == 17 else found  # of the third step: 5 edges each, and one

    monkeypatch.setattr(probes, "allocator_peaks", once_high)
    ((row, _),) = worker.run({"job": job_to_mapping(job("rows")), "gpu": None})
    assert max(row.phase_peaks.values()) == row.peak_allocated_bytes == 10_000


def test_ranks_draw_lengths_of_their_own_and_a_seed_gives_the_same_again():
    def lengths(seed, rank):
        asked = job("masked", batch={"form": "masked", "shortest_sequence": 4, "seed": seed})
        return [part.num_tokens for (part,) in itertools.islice(steps(asked, rank), CHANGING_STEPS)]

    assert lengths(1, 0) == lengths(1, 0)
    assert lengths(1, 0) != lengths(1, 1)
    assert lengths(1, 0) != lengths(2, 0)
    for seed in range(20):  # one step has full rows, and never the first
        drawn = lengths(seed, 0)
        assert drawn.index(96) > 0
        assert min(drawn) >= 3 * 4


OF_ONE_LENGTH = [{"compile": True}, {"parallelism": {"tensor_parallel_size": 2}}, {"framework": "megatron"}]


@pytest.mark.parametrize("changes", OF_ONE_LENGTH)
def test_stacks_that_need_one_length_refuse_others(changes):
    pytest.importorskip("torch")
    from peakcast.collectors.stacks import build

    with pytest.raises(CollectorError, match=r"batch.shortest_sequence=4 has no collector under"):
        build(job("rows", **changes), "cpu", longest=True)
