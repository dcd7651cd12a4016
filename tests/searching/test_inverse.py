"""The inverse questions keep to what a job can be, and a search hears everything that it is told."""

import pytest

from peakcast import api, catalog
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.printing.plans import search_text
from peakcast.searching.inverse import MOST, largest

ADAPTERS = {"architecture": "llama-3.2-1b", "finetuning": {"method": "lora", "rank": 16}}
SCRIPT = "\n".join(
    (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16",
        "--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 16 --bf16",
        "--vocab-size 50257 --mystery-flag",
    )
).replace("\n", " ")


@pytest.mark.parametrize("micro_batch_size", [1, 64])
def test_no_sequence_is_longer_than_a_table_of_positions(micro_batch_size):
    job = job_from_mapping({"architecture": "gpt2", "micro_batch_size": micro_batch_size})
    found = largest(job, catalog.gpu("L4"), "sequence_length")
    assert found.value <= catalog.architecture("gpt2").max_position_embeddings
    assert (found.beyond is None) == (found.value == 1024)
    assert found.value % 2 == 0


def test_a_sequence_beyond_the_positions_is_answered_with_a_warning():
    job = {"architecture": "gpt2", "sequence_length": 1025}
    assert any("use at most 1024" in sentence for sentence in api.predict(job, "L4").warnings)
    assert not any("positions" in sentence for sentence in api.predict({**job, "sequence_length": 1024}, "L4").warnings)


def test_the_largest_is_never_more_than_what_is_asked():
    job = job_from_mapping({**ADAPTERS, "batch": {"form": "padding_free", "num_tokens": 2000}})
    found = largest(job, catalog.gpu("B300"), "micro_batch_size")
    assert (found.value, found.beyond) == (MOST["micro_batch_size"], None)


@pytest.mark.parametrize("batch", [{"form": "masked", "num_tokens": 3000}, {"form": "masked", "shortest_sequence": 3000}])
def test_sequences_are_asked_from_the_shortest_that_the_batch_allows(batch):
    job = job_from_mapping({**ADAPTERS, "sequence_length": 4096, "batch": batch})
    found = largest(job, catalog.gpu("A100-80GB"), "sequence_length")
    assert found.value >= 3000
    crowded = job.replace(other_memory_fraction=0.5)
    assert largest(crowded, catalog.gpu("T4"), "sequence_length").value is None


def test_what_a_search_cannot_read_widens_its_bars_and_is_said():
    known = SCRIPT.replace(" --mystery-flag", "")
    plain, puzzled = (api.search(text, "A100-40GB", top=1) for text in (known, SCRIPT))
    assert not plain.warnings
    assert "mystery-flag is not known" in puzzled.warnings[0]
    bar = puzzled.plans[0].peak_device_bytes
    answer = api.predict(puzzled.plans[0].job, "A100-40GB").peak_device_bytes
    assert (bar.point, bar.upper_95 > answer.upper_95) == (answer.point, True)


def test_lengths_beyond_the_networks_positions_are_said():
    found = api.search(ADAPTERS | {"architecture": "qwen2.5-0.5b"}, "H200", find="sequence_length", num_gpus=1)
    assert search_text(found).endswith(" qwen2.5-0.5b is made for 32,768 positions (max_position_embeddings).")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find": "micro_batch_size", "num_gpus": 8}, "keeps the job's own layout, of 1 GPU, and not num_gpus=8; give"),
        ({"find": "model", "global_batch_size": 8}, "own batch, and not global_batch_size=8; leave it out"),
        ({"find": "num_gpus", "num_gpus": 8}, "looks for the number of GPUs itself; leave num_gpus=8 out"),
        ({"num_gpus": 10**9}, "num_gpus=1000000000 must be from 1 to 1,048,576"),
    ],
)
def test_options_that_a_question_does_not_hear_are_refused(options, words):
    with pytest.raises(SpecError, match=words):
        api.search(ADAPTERS, "A100-80GB", **options)


def test_a_generation_is_split_by_tensor_parallelism_over_the_fewest_gpus():
    job = {"architecture": "llama-3.1-70b", "task": "inference", "micro_batch_size": 8}
    found = api.search(job, "H100-80GB", find="num_gpus")
    assert (found.value, found.plan.job.parallelism.tensor_parallel_size) == (2, 2)
    assert (found.beyond, found.beyond_fits) == (1, "no")
    assert api.predict(found.plan.job, "H100-80GB").fits == "yes"
    assert "--tensor-parallel-size 2" in search_text(found)
    assert api.search({**job, "architecture": "llama-3.1-405b"}, "L4", find="num_gpus").value is None


@pytest.mark.parametrize(
    ("gpus", "asked", "way_out"),
    [
        ("H100-80GB", {}, "find num_gpus"),
        (["H100-80GB", "L4"], {"find": "num_gpus"}, "one --gpu"),
        ("H100-80GB", {"find": "num_gpus", "global_batch_size": 8}, "leave it out"),
    ],
)
def test_what_is_not_searched_of_a_generation_is_refused_with_a_way_out(gpus, asked, way_out):
    with pytest.raises(SpecError, match=way_out):
        api.search({"architecture": "llama-3.1-8b", "task": "inference"}, gpus, **asked)
