"""The campaign spends its time well: in any part of it each grid has its share, and nothing is done twice or lost."""

import pytest

from peakcast.collectors import campaign
from peakcast.collectors.measure.grid import expand, load_grid
from peakcast.collectors.measure.runner import ranks_to_run
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.measurements import store

GOOD = "return row(question)"


@pytest.fixture(scope="module")
def ordered():
    return campaign.jobs_in_order()


@pytest.mark.parametrize("part", [0.1, 0.3, 0.5, 0.8])
def test_whenever_time_is_up_every_grid_has_had_its_share(ordered, part):
    num_cells = len(ordered) - campaign.NUM_REPEATS
    begun = set(ordered[: round(part * num_cells)])
    for grid in campaign.GRIDS:
        jobs = load_grid(grid)
        assert abs(sum(job in begun for job in jobs) - part * len(jobs)) <= 1.5, grid


def test_half_an_hour_holds_what_it_should(ordered):
    """Breadth of shapes, rows in all, and kinds of cells, so that a grid that is cut shows."""
    anchors, breadth = load_grid(campaign.ANCHORS), load_grid("campaign-breadth")
    assert len({job.architecture for job in breadth}) >= 60
    assert sum(len(ranks_to_run(job, CollectSettings(ranks="one"))) for job in [*anchors, *ordered]) >= 300
    assert {job.architecture.kind for job in breadth} >= {"decoder", "encoder", "encoder_decoder"}
    layouts = load_grid("campaign-layouts")
    assert {job.framework for job in layouts} == {"huggingface", "torch", "deepspeed", "megatron"}
    assert {job.parallelism.sharding for job in layouts} == {"none", "fsdp1", "fsdp2", "hsdp"}
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "zero_stage"):
        assert len({getattr(job.parallelism, size) for job in layouts}) > 1, size
    assert {job.finetuning.method for job in layouts} == {"full", "lora"}
    variants = load_grid("campaign-variants")
    assert {job.batch.form for job in variants} == {"rows", "masked", "padding_free"}
    assert {job.offload for job in variants if job.framework == "deepspeed"} == {
        job.offload for job in load_grid("stacks") if job.framework == "deepspeed" and job.offload.optimizer
    }
    assert any(job.compile for job in variants)
    assert any(job.task == "inference" for job in variants)
    repeated = [job for job in set(ordered) if ordered.count(job) == 2]
    assert len(repeated) == campaign.NUM_REPEATS


@pytest.fixture
def small(monkeypatch):
    """A campaign of six short cells, two of them again."""
    grids = {
        "campaign-anchors": expand({"axes": {"architecture": ["gpt2"]}, "base": {"sequence_length": 64}}),
        "one": expand({"axes": {"architecture": ["pythia-70m", "pythia-160m", "opt-125m"]}}),
        "two": expand({"axes": {"architecture": ["olmo-1b", "phi-2"]}}),
    }
    monkeypatch.setattr(campaign, "load_grid", grids.__getitem__)
    monkeypatch.setattr(campaign, "jobs_in_order", lambda order=campaign.jobs_in_order: order(("one", "two"), 2))
    return grids


def cases(folder):
    rows, bad = store.read_shard(folder / campaign.TRACES)
    assert bad == []
    return [(row.job.architecture.name, row.case) for row in rows if row.outcome == "ok"]


def test_it_goes_on_where_it_stopped_and_repeats_at_last(small, tmp_path, cell):
    work = cell(GOOD)
    first, rest = campaign.run(tmp_path, trace=True, processes=1, work=work)
    assert (first.finished, rest.finished) == (1, 7)
    names = cases(tmp_path)
    assert names[0] == ("gpt2", "")
    assert sorted(names[1:6]) == [(name, "") for name in ("olmo-1b", "opt-125m", "phi-2", "pythia-160m", "pythia-70m")]
    assert sorted(names[6:]) == [("pythia-160m", "repeat 2"), ("pythia-70m", "repeat 2")]
    again = campaign.run(tmp_path, trace=True, work=work)
    assert [(each.skipped, each.finished) for each in again] == [(1, 0), (7, 0)]
    assert len(cases(tmp_path)) == 8


def test_without_time_nothing_is_begun_and_what_failed_comes_last(small, tmp_path, cell):
    assert [each.left for each in campaign.run(tmp_path, 1e-9, trace=True, work=cell(GOOD))] in ([], [1])
    failing = """
    if question["job"]["architecture"]["name"] == "pythia-70m":
        raise CollectorError("this cannot be.")
    return row(question)
    """
    campaign.run(tmp_path, trace=True, processes=1, work=cell(failing))
    last = campaign.failed_last(campaign.jobs_in_order(), tmp_path / campaign.TRACES)
    assert [job.architecture.name for job in last[-2:]] == ["pythia-70m", "pythia-70m"]
    campaign.run(tmp_path, trace=True, processes=1, work=cell(GOOD))
    assert sorted(cases(tmp_path))[-2:] == [("pythia-70m", ""), ("pythia-70m", "repeat 2")]


def test_a_program_that_fails_is_said_and_one_that_left_its_file_is_not_run_again(tmp_path, capsys):
    file = tmp_path / "readings.json"
    campaign._once(file, "no.such.module")
    said = capsys.readouterr().out
    assert said.startswith("readings.json: ")
    assert "No module named" in said
    file.touch()
    campaign._once(file, "no.such.module")
    assert capsys.readouterr().out == ""
