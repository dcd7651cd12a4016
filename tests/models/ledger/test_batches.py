"""Padded and padding-free batches: what they cost beside full rows, and what a job may say of them."""

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Batch, TrainingJob, job_to_mapping
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

ARCHITECTURE = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=1408,
    vocab_size=32000,
)
FLASH = {"attention": "flash_attention_2"}


def job(form="rows", num_tokens=None, **changes):
    changes = {"micro_batch_size": 4, "sequence_length": 256, **changes}
    return TrainingJob(architecture=ARCHITECTURE, batch=Batch(form=form, num_tokens=num_tokens), **changes)


def peak(asked, phase=Phase.LOSS):
    return ledger(asked).peak(phase).num_bytes


def held(asked, name):
    """Bytes of everything called `name` in a step."""
    timeline = ledger(asked)
    return sum(int(size) for each, size in zip(timeline.names, timeline.num_bytes, strict=True) if each == name)


def test_flash_attention_of_one_joined_row_costs_what_its_rows_would():
    """Positions instead of a mask of ones, as many numbers; rotary tables are as long as the row, not as a sequence; a
    single row of labels is shifted without a copy."""
    tables, shifted_labels = 2 * (4 - 1) * 256 * 64 * 2, 4 * 256 * 8
    assert peak(job("padding_free", **FLASH)) - peak(job(**FLASH)) == tables - shifted_labels


def test_only_tokens_that_are_no_padding_cost_where_there_is_none():
    def more(num_tokens):
        return peak(job("padding_free", num_tokens, **FLASH)) - peak(job("padding_free", 256, **FLASH))

    assert more(768) == 2 * more(512) > 0


def test_a_padded_batch_has_a_mask_of_every_row():
    assert held(job("masked"), "attention_mask") == held(job(), "attention_mask") + 4 * 256**2


def test_every_layer_makes_its_own_additive_mask_of_it():
    assert held(job("masked"), "self_attn.additive_mask") == 4 * (4 * 256**2 * 2)  # layers, rows, bfloat16
    assert held(job(), "self_attn.additive_mask") == 0


def test_flash_attention_gathers_what_is_no_padding():
    gathered = [held(job("masked", tokens, **FLASH), "self_attn.unpad_q") for tokens in (512, 1024)]
    assert gathered == [4 * 512 * 512 * 2, 4 * 1024 * 512 * 2]


def test_more_tokens_than_fit_are_refused():
    with pytest.raises(SpecError, match="num_tokens=1025 exceeds micro_batch_size × sequence_length=1024"):
        job("padding_free", 1025)
    with pytest.raises(SpecError, match=r"set batch\.form"):
        job("rows", 10)


def test_a_framework_that_has_no_such_batch_says_so():
    assert "batch.form" in out_of_scope(job("masked", framework="megatron"))
    assert not out_of_scope(job("masked"))


def test_lengths_that_change_are_answered_for_the_longest():
    changing = Batch(form="masked", shortest_sequence=16)
    asked = job("masked").replace(batch=changing)
    assert ledger(asked).peak() == ledger(job("masked")).peak()
    assert not out_of_scope(asked)
    for changes in ({"compile": True}, {"framework": "megatron"}, {"task": "inference"}):
        assert "shortest_sequence=16" in out_of_scope(job().replace(batch=Batch(shortest_sequence=16), **changes))


def test_blocks_cached_for_shorter_sequences_are_reserved_beside_those_of_longer_ones():
    device = catalog.gpu("A100-80GB")
    same, changing = (
        baseline(job("padding_free", sequence_length=2048).replace(batch=batch), device)
        for batch in (Batch(form="padding_free"), Batch(form="padding_free", shortest_sequence=64))
    )
    assert changing.peak_allocated_bytes == same.peak_allocated_bytes
    assert changing.peak_reserved_bytes > same.peak_reserved_bytes


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"shortest_sequence": 257}, "shortest_sequence=257 exceeds sequence_length=256"),
        ({"shortest_sequence": 9, "form": "masked", "num_tokens": 300}, "num_tokens=300 fixes it; leave one out"),
        ({"seed": 3}, "batch.seed=3 draws the lengths"),
    ],
)
def test_lengths_that_say_two_things_are_refused(batch, says):
    with pytest.raises(SpecError, match=says):
        job().replace(batch=Batch(**batch))


def test_jobs_that_say_nothing_of_lengths_are_stored_as_before():
    assert job_to_mapping(job("masked", 300))["batch"] == {"form": "masked", "num_tokens": 300}
    assert "batch" not in job_to_mapping(job())
