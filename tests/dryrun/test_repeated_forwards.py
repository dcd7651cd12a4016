"""Forwards of an evaluation that are like those before do not run, and return what they would have returned."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from peakcast.collectors.dryrun.repeated_forwards import FEW, RepeatedForwards


@dataclasses.dataclass
class Cache:
    """What a loop of generation passes from token to token."""

    keys: tuple[torch.Tensor, ...]


class Decoder(torch.nn.Module):
    """Counts its forwards; its cache grows by the tokens that it is given."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 8)
        self.lengths = []

    def forward(self, tokens, cache=None):
        self.lengths.append(tokens.shape[1])
        keys = self.embedding(tokens)
        return {"logits": keys @ self.embedding.weight.T}, Cache(
            (keys if cache is None else torch.cat([cache.keys[0], keys], 1),)
        )


@pytest.fixture
def decoder():
    network = Decoder().eval()
    notes = []
    RepeatedForwards(network, lambda: not torch.is_grad_enabled(), lambda: notes.append(1))
    network.notes = notes
    with torch.no_grad():
        yield network


def tokens(rows, length):
    return torch.zeros(rows, length, dtype=torch.long)


def test_equal_batches_run_a_few_times(decoder):
    shapes = {decoder(tokens(4, 32))[0]["logits"].shape for _ in range(200)}
    assert shapes == {(4, 32, 100)}
    assert decoder.lengths == [32] * FEW
    assert len(decoder.notes) == 200 - FEW


def test_a_cache_grows_without_most_forwards(decoder):
    cache = None
    for number in range(1, 301):
        logits, cache = decoder(tokens(2, 1), cache)
        assert logits["logits"].shape == (2, 1, 100)
        assert cache.keys[0].shape == (2, number, 8)
    assert len(decoder.lengths) < 60


def test_the_longest_runs_within_an_eighth(decoder):
    for length in range(1, 401):
        assert decoder(tokens(1, length))[0]["logits"].shape == (1, length, 100)
    assert max(decoder.lengths) * 1.125 >= 400
    assert len(decoder.lengths) < 80


def test_what_was_always_so_is_no_rule_for_other_inputs(decoder):
    """After batches of one shape, those of another run until what follows from what is known."""
    for _ in range(20):
        decoder(tokens(8, 64))
    for length in (7, 8, 9, 10):
        assert decoder(tokens(3, length))[0]["logits"].shape == (3, length, 100)


def test_training_runs_the_own_forward(decoder):
    for _ in range(20):
        decoder(tokens(4, 32))
    with torch.enable_grad():
        assert decoder(tokens(4, 32))[0]["logits"].requires_grad
    assert "forward" not in vars(decoder)


def test_inputs_that_a_forward_changes_are_always_run(decoder):
    class Held:
        keys = (torch.zeros(4, 0, 8),)

    for _ in range(30):
        decoder(tokens(4, 1), Held())
    assert len(decoder.lengths) == 30


def test_a_wrapper_that_hands_on_what_is_set_keeps_its_network_s_forward():
    """As Lightning's Fabric does: what took the wrapper's place was set in the network as well, and called itself."""

    class Wrapper(torch.nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def __setattr__(self, name, value):
            if name == "forward":
                setattr(self.network, name, value)
            super().__setattr__(name, value)

        def forward(self, given):
            return self.network(given)

    wrapper = Wrapper(torch.nn.Linear(8, 4))
    RepeatedForwards(wrapper, lambda: True, lambda: None)
    assert wrapper(torch.ones(2, 8)).shape == (2, 4)
