"""A skipped layer hands on what it is given, and is gone otherwise."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from peakcast.collectors.stacks.parts.skipped_layers import (  # noqa: E402  # they need torch
    Results,
    numbered_kinds,
    observed,
    skipping,
    without_skipped,
)


class Layer(torch.nn.Module):
    """Returns a hidden state of its own, a bias that it was given, and weights of attention or nothing."""

    def __init__(self, number: int, window: int | None = None) -> None:
        super().__init__()
        self.layer_idx, self.window = number, window or 0
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, hidden, bias=None, weighs=False):
        return self.linear(hidden), bias, hidden.new_zeros(3) if weighs else None


class Network(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(number) for number in range(layers)])

    def forward(self, hidden):
        bias, told = torch.ones(4), []
        for layer in self.layers:
            hidden, bias, _ = layer(hidden + bias, bias=bias)
            told.append(layer.window)
        return hidden, told


def blocks(network):
    return {f"layers.{number}": layer for number, layer in enumerate(network.layers)}


def test_a_skipped_layer_runs_nothing_and_has_no_weights() -> None:
    network = Network(3)
    with observed(blocks(network)) as results:
        network(torch.ones(2, 4))
    with skipping({"layers.1": results["layers.1"]}):
        thinner = without_skipped(Network(3))
    for other, layer in ((0, 0), (2, 2)):
        thinner.layers[other].load_state_dict(network.layers[layer].state_dict())
    expected = network.layers[0].linear(torch.ones(2, 4) + 1) + 1  # the layer's argument, with the bias that it was handed
    found, told = thinner(torch.ones(2, 4))
    assert torch.equal(found, network.layers[2].linear(expected + 1))
    assert told == [0, 0, 0]  # plain attributes are still there
    assert sorted(name for name, _ in thinner.named_parameters()) == [
        f"layers.{layer}.linear.{name}" for layer in (0, 2) for name in ("bias", "weight")
    ]
    assert not list(thinner.layers[1].modules())[1:]


def test_results_are_arguments_as_they_were_or_of_the_same_shape() -> None:
    hidden, mask = torch.ones(2, 4), torch.ones(2, 4)
    results = Results.of(((mask, hidden), {"scale": 2}), (hidden, torch.zeros(2, 4), torch.zeros(9), 3))
    assert results.sources == (1, 0, None, None)
    other = torch.full((5, 4), 7.0)
    assert results.from_arguments(((None, other), {"scale": 2}))[0] is other


def test_layers_are_of_one_kind_whatever_their_number() -> None:
    assert numbered_kinds([Layer(0), Layer(1), Layer(2, window=64), Layer(3)]) == [0, 0, 1, 0]
    assert numbered_kinds([Layer(0), Layer(1).eval()]) == [0, 1]
