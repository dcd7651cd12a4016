"""Values that a fake tensor has where they can be known."""

from __future__ import annotations

import pytest
import torch

from peakcast.collectors.tracing import known_values
from peakcast.collectors.tracing.known_values import KnownValuesMode, value_of


@pytest.mark.parametrize("dim", [-1, 1])
def test_a_router_gives_each_expert_as_many_tokens(dim: int) -> None:
    """Nobody knows the router's numbers; a library that counts tokens by expert gets even counts, as whole numbers."""
    with KnownValuesMode(allow_non_fake_inputs=True):
        scores = torch.empty(12, 6)
        _, chosen = scores.topk(2, dim=dim)
        counts = torch.zeros(12, 6, dtype=torch.int64).scatter(1, chosen, 1).sum(0)
    assert value_of(scores) is None
    assert value_of(counts).tolist() == [4] * 6


def test_the_largest_of_known_numbers_are_those() -> None:
    with KnownValuesMode(allow_non_fake_inputs=True):
        _, chosen = torch.arange(8.0).topk(3)
    assert value_of(chosen).tolist() == [7, 6, 5]


def test_a_parameter_that_is_given_other_memory_has_no_known_values() -> None:
    """As ZeRO-3 releases a weight; no operator shows it, and a norm's ones would be read with the shape of before."""
    with KnownValuesMode(allow_non_fake_inputs=True):
        weight = torch.arange(8.0)
        assert value_of(weight).tolist() == list(range(8))
        weight.data = torch.empty(0)
        again = weight.view_as(weight)
    assert value_of(weight) is None
    assert again.shape == (0,)


def test_what_is_too_large_to_keep_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_values, "MOST_ELEMENTS", 10)
    with KnownValuesMode(allow_non_fake_inputs=True):
        _, chosen = torch.empty(12, 6).topk(2)
    assert value_of(chosen) is None


def test_the_one_expert_of_each_token_is_each_as_often() -> None:
    """As Switch's and NLLB's routers choose it, by the largest number."""
    with KnownValuesMode(allow_non_fake_inputs=True):
        scores = torch.empty(12, 6)
        found = [scores.argmax(dim=-1), scores.max(dim=-1).indices]
        anywhere = scores.argmax()
    assert [value_of(one).tolist() for one in found] == [[0, 1, 2, 3, 4, 5] * 2] * 2
    assert value_of(anywhere) is None


def test_a_known_number_is_written_as_it_is() -> None:
    """Switch finds its experts by name."""
    known_values.install()
    with KnownValuesMode(allow_non_fake_inputs=True):
        number, unknown = torch.arange(4)[3], torch.empty(())
    assert f"expert_{number}" == "expert_3"
    assert "FakeTensor" in f"{unknown}"


def test_whole_numbers_are_counted_as_a_gpu_counts_them() -> None:
    """histc on the CPU takes fractions alone; mixtures count the tokens of each expert with it."""
    chosen = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    counts = known_values._really(torch.ops.aten.histc.default, (chosen, 4, 0, 3), {})
    assert (counts.tolist(), counts.dtype) == ([1, 0, 2, 1], torch.int32)
