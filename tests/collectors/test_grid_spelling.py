"""Nested and dotted keys of a grid mean the same everywhere, and no cell leaks into another."""

from peakcast.collectors.measure.grid import expand


def test_an_axis_inside_a_mapping_of_the_base_does_not_leak_into_other_cells():
    grid = {
        "base": {"architecture": "gpt2", "optimizer": {"name": "adam"}},
        "axes": {"optimizer.implementation": ["fused", "loop"]},
        "include": [{"sequence_length": 64}],
    }
    jobs = expand(grid)
    assert [(j.optimizer.name, j.optimizer.implementation) for j in jobs] == [
        ("adam", "fused"),
        ("adam", "loop"),
        ("adam", "foreach"),  # the default
    ]
    assert grid["base"]["optimizer"] == {"name": "adam"}


def test_an_exclusion_may_be_written_nested():
    axes = {"architecture": ["gpt2"], "optimizer.implementation": ["fused", "loop"]}
    (job,) = expand({"axes": axes, "exclude": [{"optimizer": {"implementation": "loop"}}]})
    assert job.optimizer.implementation == "fused"


def test_an_axis_of_mappings_gives_whole_settings():
    settings = [{"method": "full"}, {"method": "lora", "rank": 4}]
    jobs = expand({"axes": {"architecture": ["gpt2"], "finetuning": settings}})
    assert [(j.finetuning.method, j.finetuning.rank) for j in jobs] == [("full", None), ("lora", 4)]
