"""The search tries everything that a job may be, and its answers are those of `predict`."""

import os
import signal
from dataclasses import replace

import pytest

from peakcast import api, catalog
from peakcast.catalog.speeds import UTILISATION, speed
from peakcast.core.errors import SpecError
from peakcast.core.workers import LostError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.explaining.collectives import CollectiveCall
from peakcast.explaining.groups import DATA
from peakcast.jobs.spec import Parallelism
from peakcast.models.baseline.device_memory import context_bytes
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import not_covered
from peakcast.models.prediction.predict import could_surely_fit
from peakcast.printing.plans import plan_words
from peakcast.searching import costs
from peakcast.searching.cheapest_first import (
    LEAST,
    SearchInput,
    SearchWorkers,
    fullest,
    held_throughout,
    least_of,
    no_less,
    series,
)
from peakcast.searching.inverse import fewest_gpus, largest
from peakcast.searching.search import planned, search
from peakcast.searching.search_settings import SearchSettings
from peakcast.searching.space import candidates, layouts

H100, A100 = catalog.gpu("H100-80GB"), catalog.gpu("A100-80GB")
MEGATRON = job_from_mapping({"architecture": "llama-3.2-1b", "framework": "megatron", "sequence_length": 4096})
ADAPTERS = job_from_mapping(
    {
        "architecture": "llama-3.2-1b",
        "sequence_length": 4096,
        "finetuning": {"method": "lora", "rank": 16},
        "activation_checkpointing": {"mode": "full"},
    }
)


def fullest_of_all(job, device):
    layout = job.parallelism
    per_stage = layout.world_size // layout.pipeline_parallel_size
    ranks = [stage * per_stage for stage in range(layout.pipeline_parallel_size)]
    return max(ledger(job, device=device, rank=rank).peak().num_bytes for rank in ranks)


def test_every_candidate_uses_all_gpus_and_makes_the_global_batch():
    found = list(candidates(MEGATRON, 8, 32))
    assert len(set(found)) == len(found) > 50
    for job in found:
        assert job.parallelism.world_size == 8
        assert job.micro_batch_size * job.gradient_accumulation_steps * job.parallelism.data_parallel_size == 32
        assert job.gradient_accumulation_steps >= job.parallelism.pipeline_parallel_size
    layouts = {job.parallelism for job in found}
    assert {layout.tensor_parallel_size for layout in layouts} == {1, 2, 4, 8}
    assert {layout.pipeline_parallel_size for layout in layouts} == {1, 2, 4, 8}
    assert {layout.sequence_parallel for layout in layouts} == {True, False}


def test_tensor_parallelism_stays_in_a_node_and_one_gpu_has_one_layout():
    assert {job.parallelism.tensor_parallel_size for job in candidates(MEGATRON, 8, 32, gpus_per_node=2)} == {1, 2}
    assert len({job.parallelism for job in candidates(ADAPTERS, 1, 4)}) == 1


@pytest.mark.parametrize("framework", ["deepspeed", "huggingface"])
def test_data_parallel_frameworks_vary_what_they_shard(framework):
    job = ADAPTERS.replace(framework=framework)
    layouts = {c.parallelism for c in candidates(job, 4, 8)}
    stages = {layout.zero_stage for layout in layouts}
    assert stages == ({0, 1, 2, 3} if framework == "deepspeed" else {0})
    offloads = {c.offload for c in candidates(job, 4, 8)}
    assert len(offloads) == 3


def test_pytorchs_own_layouts_are_those_that_the_ledger_covers():
    titan = {"architecture": "llama-3.2-3b", "framework": "torch", "versions": {"torchtitan": "0.2.0"}}
    job = job_from_mapping({**titan, "sequence_length": 4096}).replace(architecture=untied("llama-3.2-3b"))
    found = list(candidates(job, 16, 64))
    every = [c.parallelism for c in found]
    for size in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size", "data_parallel_size"):
        assert {1, 2, 4} <= {getattr(layout, size) for layout in every}
    assert {layout.sharding for layout in every} == {"none", "fsdp2", "hsdp"}
    assert any(layout.pipeline_parallel_size > 1 < layout.data_parallel_size for layout in every)
    assert not any(map(not_covered, found))
    falcon = job_from_mapping({"architecture": "falcon-7b", "framework": "torch", "sequence_length": 2048})
    assert {layout.data_parallel_size for layout in layouts(falcon, 16)} == {16}  # others are not modelled for it


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"architecture": "gpt2", "framework": "torch", "optimizer": {"name": "adafactor"}}, {"sharding": {"none"}}),
        ({"architecture": "deepseek-v2-lite", "framework": "megatron"}, {"context_parallel_size": {1}}),
        ({"architecture": "t5-base", "framework": "megatron", "sequence_length": 512}, {"pipeline_parallel_size": {1}}),
        # mixed precision under ZeRO is unknown, which its own question accepts
        ({"architecture": "gpt2", "framework": "deepspeed", "precision": {"parameters": "float32"}}, {"zero_stage": {0}}),
        (
            {
                "architecture": "gpt2",
                "framework": "deepspeed",
                "precision": {"parameters": "float32"},
                "parallelism": {"zero_stage": 3, "data_parallel_size": 2},
            },
            {"zero_stage": {0, 1, 2, 3}},
        ),
        # no layout of several ranks is covered: all that there are, with the findings of their predictions
        (
            {"architecture": "gpt2", "framework": "deepspeed", "finetuning": {"method": "loha", "rank": 8}},
            {"zero_stage": {0, 1, 2, 3}},
        ),
    ],
)
def test_no_plan_is_unknown_or_fails_but_for_what_is_asked(asked, sizes):
    job = job_from_mapping({"sequence_length": 1024, **asked})
    found = list(candidates(job, 8, 16))
    assert found
    for size, values in sizes.items():
        assert {getattr(candidate.parallelism, size) for candidate in found} == values
    if asked.get("finetuning") is None:
        assert all(not_covered(candidate) <= not_covered(job) for candidate in found)


def shallow(job):
    """The job of a network a quarter as deep, each of whose candidates takes a quarter of the time."""
    network = job.architecture
    return job.replace(architecture=replace(network, num_hidden_layers=network.num_hidden_layers // 4))


def untied(name):
    """The network with an output layer of its own, which pipeline stages need."""
    return replace(catalog.architecture(name), tie_word_embeddings=False)


def test_shallower_networks_bound_deep_ones_from_below():
    """The peak is convex in the number of layers, in every layout of PyTorch's own."""
    job = job_from_mapping({"architecture": "llama-3.2-3b", "framework": "torch", "sequence_length": 2048})
    job = job.replace(architecture=replace(untied("llama-3.2-3b"), vocab_size=32000))
    for candidate in list(candidates(job, 8, 16))[::11]:
        peak = fullest_of_all(candidate, H100)
        layout, bound = candidate.parallelism, no_less(candidate, H100)
        assert bound <= peak
        # under DDP over split matrices a deep network is fullest when all gradients meet, a shallow one at its loss
        otherwise = layout.tensor_parallel_size > 1 < layout.num_replicas and layout.sharding == "none"
        assert bound > (0.8 if otherwise else 0.9) * peak or 28 // layout.pipeline_parallel_size <= 6


@pytest.mark.parametrize("architecture", ["llama-3.2-1b", pytest.param("mixtral-8x7b", marks=pytest.mark.whole)])
def test_what_lets_a_candidate_be_passed_over_is_below_its_peak(architecture):
    """What stands on its ranks, the same shards with sequence parallelism and no interleaving, a smaller micro-batch. Half
    the network's layers have the same layouts, but for the deepest pipelines."""
    layout = {"pipeline_parallel_size": 2, "virtual_pipeline_stages": 2, "pipeline_schedule": "interleaved_1f1b"}
    job = job_from_mapping(
        {"architecture": architecture, "framework": "megatron", "sequence_length": 4096, "parallelism": layout}
    )
    network = job.architecture
    job = job.replace(architecture=replace(network, num_hidden_layers=network.num_hidden_layers // 2))
    every = list(candidates(job, 8, 32))
    assert {c.parallelism.virtual_pipeline_stages for c in every} >= {1, 2}
    found = series(every)
    assert sorted(index for members in found for index in members) == list(range(len(every)))
    for members in found[::7]:
        peaks = [fullest_of_all(every[index], H100) for index in members]
        assert peaks == sorted(peaks)
        assert held_throughout(every, members) <= peaks[0]
        assert fullest_of_all(least_of(every[members[0]]), H100) <= LEAST * peaks[0]


@pytest.mark.parametrize(
    ("name", "num_gpus", "batch", "top", "gpu"),
    [
        pytest.param("megatron", 4, 16, 5, "A100-80GB", marks=pytest.mark.whole),
        ("megatron", 4, 16, 5, "RTX4090"),  # where few fit
        ("deepspeed", 4, 8, 40, "A100-80GB"),  # fewer plans than are asked for
        pytest.param("torch", 4, 4, 4, "RTX4090", marks=pytest.mark.whole),
    ],
)
def test_a_search_finds_what_predicting_every_candidate_does(name, num_gpus, batch, top, gpu):
    job = MEGATRON.replace(framework=name)
    job = shallow(job) if name == "deepspeed" else job  # candidates are as many, whatever the depth
    device = catalog.gpu(gpu)
    # more tensors than that are no plan, however wide the bars
    room = device.cuda_memory_bytes - context_bytes(device, job.versions)
    every = [(peak, c) for c in candidates(job, num_gpus, batch) if (peak := fullest_of_all(c, device)) <= room]
    known = [(peak, c, costs.cost(c, device, costs.sending(alike(c), device))) for peak, c in every]
    ordered = sorted(known, key=lambda item: (*costs.order(item[1], item[2]), item[0]))
    plans = [planned(c, device, cost) for _, c, cost in ordered]
    sure = [plan for plan in plans if plan.fits == "yes"][:top]
    others = [plan for plan in plans if plan.fits == "uncertain"][: top - len(sure)]
    found = search(job, device, num_gpus, batch, SearchSettings(top=top))
    assert len(found.plans) == len(sure + others) > 0
    assert sorted(map(str, found.plans)) == sorted(map(str, sure + others))
    assert all(could_surely_fit(p.job, device, fullest_of_all(p.job, device)) for p in sure)


def test_several_processes_find_what_one_does():
    job = shallow(MEGATRON.replace(framework="torch"))
    assert search(job, H100, 4, 4, SearchSettings(processes=2)) == search(job, H100, 4, 4)


def alike(job):
    """The candidate of the first micro-batch size that sends as much: ties are exact."""
    if job.parallelism.zero_stage == 3 or job.parallelism.sharding != "none":
        return job
    together = job.micro_batch_size * job.gradient_accumulation_steps
    return job.replace(micro_batch_size=together, gradient_accumulation_steps=1)


def test_a_stage_without_room_is_enough_to_pass_over_a_candidate():
    for job in list(candidates(MEGATRON, 4, 16))[::5]:
        exact, room = fullest_of_all(job, H100), 20 * 2**30
        peak = fullest(job, H100, room)
        assert peak == exact or min(peak, exact) > room


def test_plans_that_surely_fit_come_first_then_the_cheapest():
    found = search(MEGATRON, H100, 8, 64, SearchSettings(top=12))
    order = [(plan.fits != "yes", *costs.order(plan.job, plan.cost)) for plan in found.plans]
    assert order == sorted(order)
    assert found.plans[0].fits == "yes"
    answer = api.predict(found.plans[0].job, "H100-80GB")
    assert (answer.fits, answer.peak_device_bytes) == ("yes", found.plans[0].peak_device_bytes)
    # nothing that takes less and surely fits was left out
    best = found.plans[0]
    for job in candidates(MEGATRON, 8, 64):
        if costs.cost(job, H100).total < best.cost.total - 0.001:
            assert planned(job, H100).fits != "yes"


def test_recomputed_operations_are_those_of_the_papers_formula():
    selective = job_from_mapping(
        {
            "architecture": "gpt2",
            "framework": "megatron",
            "sequence_length": 1024,
            "activation_checkpointing": {"mode": "selective"},
        }
    )
    h, s = 768, 1024
    assert costs.recompute(selective) == pytest.approx(4 * s * s * h / (3 * (24 * s * h * h + 4 * s * s * h)))
    assert costs.recompute(ADAPTERS) == pytest.approx(1 / 3)


def test_a_pipelines_bubble_is_that_of_the_papers_formula():
    stages = job_from_mapping(
        {
            "architecture": "llama-3.1-8b",
            "framework": "megatron",
            "gradient_accumulation_steps": 8,
            "parallelism": {"pipeline_parallel_size": 4},
        }
    )
    assert costs.bubble(stages) == pytest.approx(3 / 8)
    interleaved = replace(stages.parallelism, virtual_pipeline_stages=2, pipeline_schedule="interleaved_1f1b")
    assert costs.bubble(stages.replace(parallelism=interleaved)) == pytest.approx(3 / 16)
    assert costs.bubble(MEGATRON) == 0


def test_all_stages_wait_for_the_one_with_the_output_layer():
    """llama-3.1-70b: the output layer has 1.05e9 weights, a layer 0.856e9, and attention of 8,192 tokens as many operations
    as 2·8192·8192·3 / 6 weights more."""
    job = job_from_mapping({"architecture": "llama-3.1-70b", "framework": "megatron", "sequence_length": 8192})
    head, layer = 128256 * 8192, 855_654_400 + 8192 * 8192
    for stages in (2, 16):
        layout = Parallelism(pipeline_parallel_size=stages)
        last = 80 / stages * layer + head
        expected = last / ((80 * layer + head) / stages)
        assert costs.slowest_stage(job.replace(parallelism=layout)) == pytest.approx(expected, rel=1e-3)
    assert costs.slowest_stage(job) == 1


def test_a_ring_over_nodes_has_the_network_of_all_its_ranks_there():
    """Of 64 ranks with the same weights 8 in a node share its 8 links of 50 GB/s; with tensor parallelism each has one."""
    fast = speed("H100-80GB")
    for tensor, bytes_per_second in ((1, 400e9), (8, 50e9)):
        layout, ranks = Parallelism(data_parallel_size=64 // tensor, tensor_parallel_size=tensor), 64 // tensor
        call = CollectiveCall(
            axis=DATA, function="all-gather", what="", where="", group_size=ranks, message_bytes=1, count=1, source=""
        )  # fmt: skip
        assert costs._bytes_per_second(call, layout, 8, fast) == bytes_per_second


def test_a_step_takes_six_operations_for_each_weight_and_token():
    job = job_from_mapping({"architecture": "gpt2", "sequence_length": 1024, "gradient_accumulation_steps": 2})
    weights, attention = 124_439_808, 3 * 2 * 1024 * 768 * 12
    seconds = 2048 * (6 * weights + attention) / (989e12 * UTILISATION)
    assert costs.step_seconds(job, H100) == pytest.approx(seconds)


def test_of_a_mixture_only_the_experts_that_a_token_meets_compute():
    mixtral = catalog.architecture("mixtral-8x7b")
    assert costs.active_parameters(mixtral) == pytest.approx(12.9e9, rel=0.01)  # Jiang et al. 2024, arXiv:2401.04088


@pytest.mark.parametrize(
    ("name", "num_gpus", "batch", "usual"),
    [
        ("llama-3.1-8b", 8, 128, "cp2 dp4"),
        # docs/search.md asks this too, and its third plan has the layout
        pytest.param("llama-3.1-70b", 64, 128, "tp4 pp4 vp5 cp2 dp2 sp", marks=pytest.mark.whole),
    ],
)
def test_the_first_plans_have_the_layouts_that_are_usual_for_llama_on_h100(name, num_gpus, batch, usual):
    job = job_from_mapping({"architecture": name, "framework": "megatron", "sequence_length": 8192})
    plans = search(job, H100, num_gpus, batch, SearchSettings(top=3)).plans
    assert any(plan_words(plan.job).startswith(usual) for plan in plans)
    assert all(costs.bubble(plan.job) < 0.05 and plan.fits == "yes" for plan in plans)


def test_layers_beside_ends_make_stages_of_a_depth_that_divides_nothing():
    job = job_from_mapping({"architecture": "llama-3.1-405b", "framework": "megatron", "sequence_length": 8192})
    found = {c.pipeline_parallel_size: c.pipeline_layers for c in layouts(job, 512)}
    assert found[16] == (7, *[8] * 14, 7)
    assert found[2] == ()


@pytest.mark.parametrize("name", ["micro_batch_size", "sequence_length"])
def test_the_largest_that_fits_fits_and_the_next_does_not_surely(name):
    found = largest(ADAPTERS, A100, name)
    assert planned(ADAPTERS.replace(**{name: found.value}), A100).fits == "yes"
    assert planned(ADAPTERS.replace(**{name: found.beyond}), A100).fits == found.beyond_fits != "yes"
    assert found.beyond - found.value == (1 if name == "micro_batch_size" else 256)


def test_fewer_gpus_than_the_fewest_do_not_surely_fit():
    job = job_from_mapping({"architecture": "llama-3.1-8b", "framework": "megatron", "sequence_length": 8192})
    found = fewest_gpus(job, H100, 16)
    assert found.value > 1
    fewer = search(job, H100, found.value // 2, 16, SearchSettings(top=1))
    assert not fewer.plans or fewer.plans[0].fits != "yes"


def test_the_biggest_model_fits_and_nothing_bigger_was_found_to():
    found = api.search(ADAPTERS, "RTX4090", find="model")
    assert api.predict(found.plan.job, "RTX4090").fits == "yes"
    assert found.beyond_fits != "yes"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"find": "layouts"}, "find='layouts' is not known"),
        ({"num_gpus": 3, "global_batch_size": 4}, "no layout on num_gpus=3 makes global_batch_size=4"),
        ({"top": 0}, "top=0 must be from 1 to"),
    ],
)
def test_bad_questions_are_a_sentence(options, words):
    with pytest.raises(SpecError, match=words):
        api.search(ADAPTERS, "A100-80GB", **options)


def test_what_fits_nowhere_is_said():
    job = job_from_mapping({"architecture": "llama-3.1-405b", "framework": "megatron", "sequence_length": 8192})
    assert search(job, H100, 8, 8).plans == ()
    assert api.search(job, "H100-80GB", find="micro_batch_size").value is None


def ended(question, item):
    os.kill(os.getpid(), signal.SIGKILL)


def test_processes_that_no_machine_has_are_refused_and_killed_ones_are_said():
    with pytest.raises(SpecError, match="processes=100,000 must be from 1 to"):
        api.search("gpt2", "H100-80GB", num_gpus=8, processes=100_000)
    question = SearchInput((), catalog.gpu("H100-80GB"), 0)
    with SearchWorkers(question, 2) as workers, pytest.raises(LostError, match="of the search was killed"):
        workers.map(ended, [1, 2])
