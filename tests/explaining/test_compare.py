"""Two jobs side by side: the differences are those of their ledgers."""

from __future__ import annotations

from peakcast.explaining.compare import changed_fields, compare
from peakcast.jobs.spec import ActivationCheckpointing, TrainingJob
from peakcast.models.baseline.ledger import ledger


def test_checkpointing_by_field_category_and_tensor(jobs: dict[str, TrainingJob]) -> None:
    before = jobs["long_lora"]
    after = before.replace(activation_checkpointing=ActivationCheckpointing(mode="full"))
    first, second = ledger(before), ledger(after)
    found = compare((before, first), (after, second))
    assert found.fields == {"activation_checkpointing.mode": ("none", "full")}
    assert found.peak_bytes == (first.peak().num_bytes, second.peak().num_bytes)
    assert sum(change.difference for change in found.categories) == found.peak_bytes[1] - found.peak_bytes[0]
    by_name = {change.name: change for change in found.tensors}
    hidden = 16_384 * 4096 * 2
    assert (by_name["checkpoint"].before, by_name["checkpoint"].after) == (0, 32 * hidden)
    assert by_name["mlp.gate_proj"].after == 0
    sizes = [abs(change.difference) for change in found.tensors]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 not in sizes


def test_equal_jobs_differ_in_nothing(jobs: dict[str, TrainingJob]) -> None:
    timeline = ledger(jobs["full"])
    found = compare((jobs["full"], timeline), (jobs["full"], timeline))
    assert found.fields == {}
    assert found.tensors == ()
    assert {change.difference for change in (*found.categories, *found.phases)} == {0}


def test_another_architecture_is_one_field(jobs: dict[str, TrainingJob]) -> None:
    fields = changed_fields(jobs["full"], jobs["checkpointed"])
    assert fields["architecture"] == ("llama-3.1-8b", "llama-2-7b")
    assert not [path for path in fields if path.startswith("architecture.")]
    assert fields["micro_batch_size"] == (1, 8)
