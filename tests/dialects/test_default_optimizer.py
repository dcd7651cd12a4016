"""The Trainer's optimizer where none is given: fused since transformers 4.54, if torch is 2.8 or newer."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

GIVEN = {"model_name_or_path": "meta-llama/Llama-3.2-1B", "per_device_train_batch_size": 1, "bf16": True}


@pytest.mark.parametrize(
    ("versions", "implementation"),
    [
        ({}, "fused"),
        ({"transformers": "4.57.3"}, "fused"),
        ({"transformers": "4.54.1", "torch": "2.8.0"}, "fused"),
        ({"transformers": "4.53.3"}, "foreach"),
        ({"transformers": "4.57.3", "torch": "2.7.1"}, "foreach"),
        ({"torch": "2.6.0"}, "foreach"),
    ],
)
def test_the_default_is_of_the_releases(versions, implementation):
    """`default_optim` in training_args.py of transformers 4.53.3, 4.54.1, 4.57.3 and 5.17."""
    read = translation_of(GIVEN, ReadOptions(versions=AskedVersions(given=FrozenMapping(versions))))
    assert read.job.optimizer.implementation == implementation
    assert any(sentence.startswith("optim is not given") for sentence in read.assumptions)

