"""Recipes that dry runs keep: they answer as a dry run of other batches, lengths and layouts would, or are refused."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace

import pytest

import peakcast
from peakcast import api
from peakcast.core.errors import RecordError, SpecError
from peakcast.doors.recipe_files import read_recipe_file

pytestmark = pytest.mark.usefixtures("recorded_elsewhere")
LAYERS = ("plain_loop.py", "--layers", "2", "--hidden", "256")


def at(batch, length):
    return (*LAYERS, "--batch", str(batch), "--length", str(length))


@pytest.fixture(scope="module")
def kept(run_script, tmp_path_factory):
    """The path of what a dry run of two sequences of 256 tokens keeps; it answers as the steps that were seen."""
    path = tmp_path_factory.mktemp("kept") / "llama.json.gz"
    found = run_script(*at(2, 256), save_recipe=path)
    assert not found.not_kept
    assert all(abs(error) < 1e-3 for error in found.kept.phases.values())
    assert {"backward", "optimizer step"} <= set(found.kept.phases)
    return path


@pytest.mark.parametrize(("batch", "length"), [(4, 320), (1, 512)])
def test_a_kept_recipe_answers_as_a_dry_run_of_that_batch(kept, run_script, batch, length):
    job = read_recipe_file(kept).job.replace(micro_batch_size=batch, sequence_length=length)
    ours = peakcast.predict(job, "H100-80GB", rank=0, recipe=kept)
    theirs = run_script(*at(batch, length)).answer
    assert ours.peak_allocated_bytes.baseline == pytest.approx(theirs.peak_allocated_bytes.baseline, rel=1e-3)
    assert ours.peak_phase == theirs.peak_phase
    assert any("llama.json.gz, saved by a dry run" in said for said in ours.assumptions)


def test_the_command_line_varies_it_with_the_flags_of_a_job(kept):
    command = [sys.executable, "-P", "-m", "peakcast", "predict", "--recipe", str(kept), "--gpu", "H100-80GB", "--json"]
    flags = ["--micro-batch-size", "4", "--num-gpus", "8", "--sharding", "fsdp2"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    job = read_recipe_file(kept).job
    whole = peakcast.predict(job.replace(micro_batch_size=4), "H100-80GB", recipe=kept)
    sharded = json.loads(done.stdout)
    states = whole.composition["optimizer_states"]
    assert sharded["composition_bytes"]["optimizer_states"] == pytest.approx(states / 8, rel=0.01)


def test_a_search_asks_it_about_all_candidates_that_it_covers_and_counts_the_others(kept):
    found = peakcast.search(None, "H100-80GB", recipe=kept, num_gpus=4, global_batch_size=16)
    assert {plan.job.activation_checkpointing.mode for plan in found.plans} == {"none"}
    assert {plan.job.parallelism.sharding for plan in found.plans} == {"none", "fsdp2"}
    assert found.left_out["the recipe is of another activation_checkpointing.mode"] == found.num_candidates
    assert "the recipe is of another offload.activations" in found.left_out
    assert "of layouts, recipes are placed under DDP, FSDP, HSDP and ZeRO" in found.left_out
    for plan in found.plans:
        alone = peakcast.predict(plan.job, "H100-80GB", recipe=kept)
        assert plan.peak_device_bytes == alone.peak_device_bytes
    assert peakcast.search(None, "H100-80GB", recipe=kept, num_gpus=4, global_batch_size=16, processes=2) == found


@pytest.mark.parametrize(("name", "most"), [("micro_batch_size", 65_536), ("sequence_length", 65_536)])
def test_the_largest_batch_and_length_are_searched_as_far_as_it_goes(kept, name, most):
    found = peakcast.search(None, "H100-80GB", recipe=kept, find=name)
    assert found.plan.peak_device_bytes == peakcast.predict(found.plan.job, "H100-80GB", recipe=kept).peak_device_bytes
    assert found.limit == (most if found.value == most else None)
    assert found.beyond_fits == (None if found.limit else "uncertain")


def test_searches_that_it_answers_nothing_of_are_refused(kept):
    job = read_recipe_file(kept).job
    with pytest.raises(SpecError, match=r"covers none of .* the recipe is of other batches or lengths"):
        peakcast.search(job.replace(sequence_length=100_000), "H100-80GB", recipe=kept)
    with pytest.raises(SpecError, match=r"find='model' asks about other networks"):
        peakcast.search(None, "H100-80GB", recipe=kept, find="model")
    full = job.replace(activation_checkpointing=replace(job.activation_checkpointing, mode="full"))
    with pytest.raises(SpecError, match=r"of another activation_checkpointing.mode"):
        peakcast.search(full, "H100-80GB", recipe=kept, find="sequence_length")


def test_an_explanation_is_of_it_and_of_what_is_changed(kept):
    found = peakcast.explain(None, "H100-80GB", 0, recipe=kept)
    assert found.source == "recipe"
    predicted = peakcast.predict(None, "H100-80GB", 0, recipe=kept)
    assert found.timeline.peak().num_bytes == pytest.approx(predicted.peak_allocated_bytes.baseline, rel=1e-3)
    done = peakcast_command(
        "explain", "--recipe", str(kept), "--gpu", "H100-80GB", "--against", "micro_batch_size=4", "--json"
    )
    assert json.loads(done)["comparison"]["peak_bytes"][1] > found.timeline.peak().num_bytes


@pytest.mark.whole
def test_what_record_writes_is_asked_in_the_same_way(kept, tmp_path):
    path, job = tmp_path / "recorded.json.gz", read_recipe_file(kept).job
    api.record(job, output=path)
    ours, theirs = (peakcast.predict(None, "H100-80GB", recipe=one) for one in (path, kept))
    assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes
    assert any("recorded.json.gz, which peakcast record has written" in said for said in ours.assumptions)


def peakcast_command(*words):
    return subprocess.run(
        [sys.executable, "-P", "-m", "peakcast", *words], capture_output=True, text=True, check=True
    ).stdout


def test_what_it_does_not_hold_for_is_refused(kept):
    job = read_recipe_file(kept).job
    with pytest.raises(SpecError, match=r"does not hold for micro_batch_size=2 and sequence_length=100000\. It holds for"):
        peakcast.predict(job.replace(sequence_length=100_000), "H100-80GB", recipe=kept)
    with pytest.raises(SpecError, match=r"is of another precision\.compute"):
        peakcast.predict(job.replace(precision=replace(job.precision, compute="float32")), "H100-80GB", recipe=kept)


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "other.json.gz"
    path.write_bytes(gzip.compress(b'{"schema_version": 2, "recipes": []}'))
    for wrong in (path, tmp_path / "nothing.json.gz"):
        with pytest.raises(RecordError, match=r"is no recipe of a dry run .* make one with: peakcast dryrun --save-recipe"):
            peakcast.predict(None, "H100-80GB", recipe=wrong)
