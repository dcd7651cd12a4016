"""Recipes of networks and losses of a script's own: its steps are walked with batches of other sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import peakcast
from peakcast.collectors.dryrun.resizing import BatchShape
from peakcast.core.errors import SpecError
from peakcast.doors.recipe_files import read_recipe_file

pytestmark = pytest.mark.usefixtures("recorded_elsewhere")
SCRIPT = Path(__file__).parent / "scripts" / "own_gpt.py"


@pytest.fixture(scope="module")
def kept(run_script, tmp_path_factory):
    """The path of what a dry run of four sequences of 256 tokens keeps."""
    path = tmp_path_factory.mktemp("kept") / "own.json.gz"
    found = run_script("own_gpt.py", "4", "256", save_recipe=path)
    assert not found.not_kept
    assert all(abs(error) < 1e-3 for error in found.kept.phases.values())
    return path


@pytest.mark.whole
@pytest.mark.parametrize(("batch", "length"), [(4, 256), (7, 100), (1, 256), (32, 256)])
def test_the_recipe_of_a_network_of_ones_own_answers_as_a_dry_run_of_that_batch(kept, run_script, batch, length):
    job = read_recipe_file(kept).job.replace(micro_batch_size=batch, sequence_length=length)
    ours = peakcast.predict(job, "H100-80GB", rank=0, recipe=kept)
    theirs = run_script("own_gpt.py", str(batch), str(length)).answer
    assert ours.peak_phase == theirs.peak_phase
    # kernels' own workspaces are those of a catalog here and of the operators that ran there
    assert ours.peak_allocated_bytes.baseline == pytest.approx(theirs.peak_allocated_bytes.baseline, abs=2**21)


@pytest.mark.whole
def test_few_layers_stand_for_all_and_no_length_is_beyond_the_script_s_positions(kept):
    for recipe in read_recipe_file(kept).recipes:
        assert recipe.walk.num_layers < recipe.layers == 6
        assert recipe.lengths[1] == 256
    job = read_recipe_file(kept).job
    with pytest.raises(SpecError, match=r"does not hold for micro_batch_size=4 and sequence_length=512"):
        peakcast.predict(job.replace(sequence_length=512), "H100-80GB", recipe=kept)


@pytest.mark.whole
def test_several_ranks_are_placed_on_the_walk_of_one(kept, tmp_path):
    path = tmp_path / "ranks.json.gz"
    words = [sys.executable, "-P", "-m", "peakcast", "dryrun", "--gpu", "H100-80GB", "--save-recipe", str(path), "--"]
    launched = ["torchrun", "--nproc-per-node", "4", str(SCRIPT), "4", "256"]
    done = subprocess.run([*words, *launched], capture_output=True, text=True, check=True)
    assert "the recipe of DistributedDataParallel is in" in done.stderr or "the recipe of GPT is in" in done.stderr
    job = read_recipe_file(path).job
    assert job.parallelism.data_parallel_size == 4
    alone = peakcast.predict(None, "H100-80GB", recipe=kept)
    ours = peakcast.predict(job, "H100-80GB", recipe=path)
    assert ours.peak_allocated_bytes.baseline > alone.peak_allocated_bytes.baseline  # by DDP's buckets


@pytest.mark.whole
def test_it_is_searched(kept):
    found = peakcast.search(None, "T4", recipe=kept, find="micro_batch_size")
    assert found.value > 32
    sharded = peakcast.search(None, "T4", recipe=kept, num_gpus=4, global_batch_size=16)
    assert {plan.job.parallelism.sharding for plan in sharded.plans} == {"none"}  # FSDP2 gathers bfloat16, without autocast
    assert any("precision.parameters" in reason for reason in sharded.left_out)


@pytest.mark.whole
def test_evaluations_between_steps_are_left_out_and_a_sequence_has_layers_too(kept, run_script, tmp_path):
    path = tmp_path / "kept.json.gz"
    options = {"skip_evaluation": True, "save_recipe": path}
    assert not run_script("own_gpt.py", "4", "256", "--evaluate", "--sequence", **options).not_kept
    ours, theirs = read_recipe_file(path).recipes[0], read_recipe_file(kept).recipes[0]
    assert ours.walk.num_layers == theirs.walk.num_layers
    assert sorted(ours.sizes.at(9, 200)) == sorted(theirs.sizes.at(9, 200))


def test_gradients_that_outlive_forward_are_refused(tmp_path):
    def train():
        model = torch.nn.Embedding(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            loss = model(torch.randint(64, (4, 256)).cuda()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    found = peakcast.dryrun(train, "H100-80GB", save_recipe=tmp_path / "kept.json.gz")
    assert "gradients of the step before are still there in forward" in found.not_kept
    assert found.answer.fits == "yes"
    assert list(tmp_path.iterdir()) == []


def test_batches_that_the_script_s_own_numbers_shape_are_refused(tmp_path):
    def train():
        model = torch.nn.Embedding(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            tokens = torch.randint(64, (4, 256)).cuda()
            model(tokens.view(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "H100-80GB", save_recipe=tmp_path / "kept.json.gz")
    assert "it raised RuntimeError: shape '[4, 256]' is invalid" in found.not_kept


@pytest.mark.parametrize(
    ("shape", "floats", "resized"),
    [
        ((4, 256), False, (3, 128)),
        ((4, 257), False, (3, 129)),
        ((4, 1, 256, 256), False, (3, 1, 128, 128)),
        ((1024,), False, (384,)),
        ((1025,), False, (385,)),
        ((4,), False, (3,)),
        ((4, 256, 256), True, (3, 128, 256)),
        ((4, 256), True, None),
        ((256, 4), False, None),
        ((64, 256), False, None),
    ],
)
def test_what_is_of_a_batch_is_told_by_its_shape(shape, floats, resized):
    assert BatchShape(4, 256).resized(shape, BatchShape(3, 128), floats=floats) == resized


def test_of_one_sequence_a_row_alone_is_no_batch():
    assert BatchShape(1, 256).resized((256,), BatchShape(1, 128), floats=False) is None
