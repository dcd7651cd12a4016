"""The mask of ones that the Trainer's collators send: what it changes in a step, and what answers for its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.networks.undescribed import for_tracing
from peakcast.timelines.timeline import Phase

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from peakcast.collectors.tracing.ones import are_ones  # noqa: E402
from peakcast.collectors.tracing.trace import fake_mode  # noqa: E402

BATCH, LENGTH = 3, 192
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512}
SMALL |= {"intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 16}
BASE: dict[str, Any] = {"micro_batch_size": BATCH, "sequence_length": LENGTH, "activation_checkpointing": {"mode": "full"}}


def cwm(window: int, **more: Any) -> Any:
    """A small network of a family that only recipes know, whose layers 1 to 3 of 4 have a window."""
    with for_tracing():
        return job_from_mapping({"architecture": {"model_type": "cwm", **SMALL, "sliding_window": window}, **BASE, **more})


@pytest.mark.slow
def test_a_window_that_slides_has_a_mask_for_each_sequence(traced) -> None:
    """transformers 5.17 masking_utils.py `sdpa_mask`: `padding_mask_function` reads a row of the batch, so that what is
    else one [s, s] mask, expanded, is [b, s, s]. A plain loop sends none."""

    def kept(framework: str) -> int:
        """Bytes of masks that checkpoints keep from the forward to the backward."""
        step = traced(cwm(64, framework=framework))["steady"]
        backward = np.flatnonzero(step.phases == Phase.BACKWARD)[0]
        over = (step.born < backward) & (step.dies > backward)
        sizes = step.num_bytes[over & np.isin(step.num_bytes, (LENGTH**2, BATCH * LENGTH**2))]
        return int(sizes.sum())

    assert kept("torch") == LENGTH**2
    assert kept("huggingface") == BATCH * LENGTH**2


@pytest.mark.slow
def test_a_window_longer_than_the_sequence_has_none(traced) -> None:
    labels = traced(cwm(LENGTH + 1, framework="huggingface"))["steady"].labels
    assert not any(label.startswith("_scaled_dot_product_efficient_attention") for label in labels)


def test_a_mask_of_ones_answers_that_all_of_it_is_true() -> None:
    with fake_mode():
        mask = torch.ones_like(torch.randint(9, (2, 5)))
        assert mask.to(torch.bool).all()
        assert torch.all(mask[:, 1:] == 1)
        assert not torch.all(torch.randint(9, (2, 5)) == 1)  # of which nothing is known


def test_a_mask_that_is_written_is_no_longer_of_ones() -> None:
    with fake_mode():
        mask = torch.ones(2, 5)
        assert are_ones(mask)
        mask[:, 0] = 0
        assert not are_ones(mask)
    with FakeTensorMode():
        assert not are_ones(torch.ones(2))
