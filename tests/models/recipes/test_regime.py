"""Which jobs share a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.recorded.covering import no_recipe
from peakcast.models.recipes.regime import point_of, regime

BART = {"model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 512}


def job(**changes: object) -> TrainingJob:
    return job_from_mapping({"architecture": BART, **changes})


def test_a_recipe_is_of_any_length_of_targets() -> None:
    assert regime(job(sequence_length=512, decoder_sequence_length=96)) == regime(job(sequence_length=700))
    assert point_of(job(sequence_length=512, decoder_sequence_length=96)) == (1, 512, 96)
    assert point_of(job(sequence_length=512, micro_batch_size=3)) == (3, 512)


def test_a_known_decoder_has_no_targets() -> None:
    with pytest.raises(SpecError, match="is none; give sequence_length alone"):
        job_from_mapping({"architecture": "gpt2", "decoder_sequence_length": 96})


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"form": "padding_free", "num_tokens": 300}, "batch.num_tokens=300"),
        ({"shortest_sequence": 64}, "lengths that change"),
    ],
)
def test_rows_that_are_not_full_share_the_regime_of_full_ones_and_have_no_recipe(
    batch: dict[str, Any], reason: str
) -> None:
    asked = job(micro_batch_size=4, sequence_length=128, batch=batch)
    assert regime(asked) == regime(job(batch={key: value for key, value in batch.items() if key == "form"}))
    assert reason in no_recipe(asked)
