"""Grids: what a short YAML file expands to."""

import pytest

from peakcast.collectors.measure.grid import expand, load_grid
from peakcast.core.errors import CatalogError, CollectorError, SpecError


def test_axes_make_a_product_with_each_architecture_seen_before_any_is_seen_twice():
    jobs = expand({"axes": {"architecture": ["gpt2", "pythia-160m"], "activation_checkpointing.mode": ["none", "full"]}})
    assert [(j.architecture.name, j.activation_checkpointing.mode) for j in jobs] == [
        ("gpt2", "none"),
        ("pythia-160m", "none"),
        ("gpt2", "full"),
        ("pythia-160m", "full"),
    ]


def test_a_depth_cut_architecture_keeps_everything_but_its_depth():
    (job,) = expand({"include": [{"architecture": {"name": "llama-3.1-8b", "num_hidden_layers": 4}}]})
    assert (job.architecture.num_hidden_layers, job.architecture.hidden_size) == (4, 4096)
    assert job.architecture.name == "llama-3.1-8b[num_hidden_layers=4]"


def test_base_include_and_exclude():
    grid = {
        "base": {"sequence_length": 256},
        "axes": {"architecture": ["gpt2", "pythia-160m"]},
        "include": [{"architecture": "gpt2", "micro_batch_size": 4}, {"architecture": "gpt2"}],
        "exclude": [{"architecture": "pythia-160m"}],
    }
    jobs = expand(grid)
    assert [(j.architecture.name, j.micro_batch_size, j.sequence_length) for j in jobs] == [
        ("gpt2", 1, 256),  # the included repeat of it is one cell with it
        ("gpt2", 4, 256),
    ]


def test_a_base_alone_is_a_cell():
    alone = {"base": {"architecture": "pythia-160m"}}
    jobs = expand({"base": {"sequence_length": 256}, "parts": [{"include": [{"architecture": "gpt2"}]}, alone]})
    assert [(j.architecture.name, j.sequence_length) for j in jobs] == [("gpt2", 256), ("pythia-160m", 256)]


@pytest.mark.parametrize(
    ("grid", "error", "message"),
    [
        ({"axis": {}}, CollectorError, r"grid\.axis is not a known key; did you mean 'axes'"),
        ({"axes": {"architecture": "gpt2"}}, CollectorError, "must map each key to a list"),
        ({"include": [{"architecture": "gtp2"}]}, CatalogError, "did you mean 'gpt2'"),
        (
            {"include": [{"architecture": "gpt2", "micro_batch_size": 0}]},
            SpecError,
            "micro_batch_size=0 must be at least 1",
        ),
        ({"include": [{"architecture": "gpt2", "optimizer.nam": "sgd"}]}, SpecError, r"optimizer\.nam is not a known key"),
    ],
)
def test_a_bad_grid_is_refused_with_a_sentence(grid, error, message):
    with pytest.raises(error, match=message):
        expand(grid)


def test_an_unknown_shipped_grid_names_those_there_are():
    with pytest.raises(CollectorError, match="did you mean 'quick'"):
        load_grid("quik")


def test_the_standard_grid_has_sixty_architectures_and_each_can_be_built():
    from peakcast.networks.reverse import hf_config_of

    jobs = load_grid("standard")
    architectures = {job.architecture for job in jobs}
    assert len({(a.model_type, a.hidden_size, a.num_hidden_layers) for a in architectures}) >= 60
    for architecture in architectures:
        assert hf_config_of(architecture)["model_type"] == architecture.model_type


def test_parts_are_grids_of_their_own_on_the_common_base():
    jobs = expand(
        {
            "base": {"sequence_length": 64},
            "parts": [
                {"axes": {"architecture": ["gpt2", "opt-125m"]}},
                {"base": {"sequence_length": 32}, "include": [{"architecture": "gpt2"}]},
            ],
        }
    )
    assert [(job.architecture.name, job.sequence_length) for job in jobs] == [("gpt2", 64), ("opt-125m", 64), ("gpt2", 32)]
    with pytest.raises(CollectorError, match=r"grid\.parts must hold grids, not 3"):
        expand({"parts": [3]})
