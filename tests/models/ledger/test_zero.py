"""DeepSpeed's ZeRO: bytes of a two-layer network (conftest.py) counted by hand, and who fetches and keeps what when."""


from dataclasses import replace

import numpy as np
import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import power_of_two
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, Offload, Optimizer, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.host import host_bytes
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero import Buckets
from peakcast.models.ledger.layouts.zero3_fetching import Coordinator
from peakcast.models.ledger.layouts.zero3_hooks import Module, ModuleTurn, PassDirection
from peakcast.models.ledger.layouts.zero3_instants import Instants
from peakcast.models.ledger.layouts.zero3_order import Order
from peakcast.models.ledger.layouts.zero3_weights import Zero3Engine
from peakcast.models.ledger.layouts.zero12_bucket import Zero12Bucket
from peakcast.models.ledger.layouts.zero12_division import Division
from peakcast.models.ledger.parameters.inventory import num_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category, Phase

LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
ENDS = 2 * 1024 * 256 + 256
P = 2 * LAYER + ENDS
BF16, FP32 = 2, 4
MIXED = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
BUFFERS = Category.COMMUNICATION_BUFFERS

def most(timeline, category, phase):
    """The most bytes of a category at one instant of a phase."""
    return max(timeline.composition(i).get(category, 0) for i in (timeline.phases == phase).nonzero()[0].tolist())


def at_the_optimizer(timeline):
    return timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)


def test_zero3_fetches_one_matrix_at_a_time_until_it_knows_the_order_of_modules(job):
    sizes = FrozenMapping({"stage3_param_persistence_threshold": 256})
    first, steady = (ledger(job("zero3", framework_options=sizes), step=step) for step in ("first", "steady"))
    gathered = [entry for entry, name in enumerate(first.names) if name == "gathered"]
    forward = int((first.phases == Phase.FORWARD).nonzero()[0][-1])
    together = [sum(first.num_bytes[e] for e in gathered if first.born[e] <= i < first.dies[e]) for i in range(forward)]
    assert max(together) == 1024 * 256 * BF16  # the token table, the largest matrix
    # later every matrix is fetched ahead and stays, since backward comes back to it within 10**9 elements
    assert most(steady, BUFFERS, Phase.LOSS) == (P - 5 * 256) * BF16 + 500_000_000 * BF16
    # a second micro-batch knows the order already
    again = ledger(job("zero3", framework_options=sizes, gradient_accumulation_steps=2), step="first")
    assert most(again, BUFFERS, Phase.LOSS) >= (P - 5 * 256) * BF16 + 500_000_000 * BF16


def test_zero3_forgets_what_is_used_again_too_far_away():
    weights = [StoredTensor(f"{name}.weight", "layers.0", (100,), 2, 2, trains=True) for name in "abc"]
    modules = [Module("", (weight,)) for weight in weights]
    turns = [ModuleTurn(modules[j], i + 1, i + 2, starts=i == 0) for i, j in enumerate((0, 1, 2, 2, 1, 0))]
    step = Step()
    sizes = Buckets(reduce=100, num_reduce=1, prefetch=100, persistence=0, reuse=300, live=1000, sub_group=1000)
    coordinator = Coordinator(step, Zero3Engine(ranks=2, sizes=sizes, packs=True))
    coordinator.learn(turns)
    coordinator.play(turns, Instants())
    coordinator.weights.release_rest(7, small_too=False)
    for _ in range(8):
        step.moment("", Phase.FORWARD)
    # one ahead of each turn. `a` comes back after 400 elements and goes, `b` after 200 and stays; at the first `c` what
    # comes next and is not there is `a`
    assert (step.timeline().totals // 512).tolist() == [0, 2, 2, 3, 3, 2, 1, 0]


def test_zero2_copies_parts_of_different_ranks_together_until_they_make_a_bucket():
    """A tensor of 96 elements on four ranks: 24 each; a part alone is sent from where it is."""
    tensor = StoredTensor("w.weight", "layers.0", (96,), 2, 2, trains=True)
    copied = []
    for bucket in (20, 24, 47, 60, 96):
        waiting = Zero12Bucket(bucket, Division([([tensor], 24)], ranks=4, rank=0, round_robin=False))
        waiting.add(tensor, born=0)
        copied.append(waiting.copied_elements())
    assert copied == [0, 48, 48, 72, 96]


@pytest.mark.parametrize("transformers", ["4.50.0", "5.17.0"])  # experts one after the other; all at once
@pytest.mark.parametrize("name", ["granite-3.0-1b-a400m", "mixtral-8x7b", "mamba-130m"])
def test_zero2_sends_the_gradient_of_every_tensor_through_its_bucket(job, monkeypatch, name, transformers):
    sent = []
    add = Zero12Bucket.add
    monkeypatch.setattr(Zero12Bucket, "add", lambda bucket, tensor, born: (sent.append(tensor), add(bucket, tensor, born)))
    whole = catalog.architecture(name)
    architecture = replace(whole, num_hidden_layers=1, layer_types=whole.layer_types[:1])
    ledger(job("zero2", architecture=architecture, versions=FrozenMapping({"transformers": transformers})))
    assert len(set(sent)) == len(sent)
    assert sum(tensor.numel for tensor in sent) == num_parameters(architecture)


@pytest.mark.parametrize("method", ["lora", "dora", "ia3"])
def test_zero2_sends_the_gradient_of_every_adapter_through_its_bucket(job, monkeypatch, method):
    sent = []
    add = Zero12Bucket.add
    monkeypatch.setattr(Zero12Bucket, "add", lambda bucket, tensor, born: (sent.append(tensor), add(bucket, tensor, born)))
    whole = catalog.architecture("llama-3.2-1b")
    rank = {} if method == "ia3" else {"rank": 8}
    tuned = job("zero2", architecture=replace(whole, num_hidden_layers=2), finetuning=Finetuning(method=method, **rank))
    ledger(tuned)
    trained = [tensor for tensor in stored_parameters(tuned) if tensor.trains]
    assert {tensor.name for tensor in sent} == {tensor.name for tensor in trained}
    assert len(sent) == len(trained)


def test_zero3_frees_experts_that_run_one_after_the_other_and_keeps_stacked_ones_until_backward():
    # without reuse, a release frees what DeepSpeed's Linear reads; torch's grouped product has saved a view of all experts
    def gathered(transformers):
        found = replace(catalog.architecture("qwen3-30b-a3b"), num_hidden_layers=4, vocab_size=1024)
        few = replace(found, moe=replace(found.moe, num_experts=8))
        keeps_none = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}
        job = TrainingJob(
            architecture=few,
            framework="deepspeed",
            sequence_length=128,
            parallelism=Parallelism(data_parallel_size=8, zero_stage=3),
            versions=FrozenMapping({"transformers": transformers}),
            framework_options=FrozenMapping({**keeps_none, "reduce_bucket_size": 1000}),
        )
        size = few.moe.num_experts * 3 * few.hidden_size * few.moe.moe_intermediate_size
        return most(ledger(job), BUFFERS, Phase.LOSS), size

    (loop, experts), (stacked, _) = gathered("4.57.6"), gathered("5.17.0")
    assert stacked - loop == 4 * experts * BF16  # of each layer


def test_zero3_knows_an_order_from_its_second_time_until_another_module_comes():
    order, seen = Order(), []
    for names in ("ab", "ab", "abc", "ab"):
        order.begin()
        for name in names:
            wrong = order.deviates_at(ModuleTurn(Module(name), 0, 1))
            seen.append("wrong" if wrong else "known" if order.known is not None else "new")
            order.at += 1
    assert seen == ["new"] * 2 + ["known"] * 2 + ["known"] * 2 + ["wrong"] + ["new"] * 2


def test_zero3_keeps_what_a_checkpoint_has_packed_and_gathers_it_again():
    """Released after its recomputation, a weight's memory stays until its backward, for which it is gathered once more; a
    frozen one waits for the first module of the backward."""
    trained, frozen = (
        StoredTensor("w.weight", "layers.0", (1024,), 2, 2, trains=trains) for trains in (True, False)
    )
    for tensor, packs, expected in ((trained, True, [4, 4, 8]), (trained, False, [4, 0, 4]), (frozen, True, [4, 4, 4])):
        first = StoredTensor("v.weight", "layers.0", (1,), 2, 2, trains=True)
        module, other = Module("w", (tensor,)), Module("v", (first,))
        again = ModuleTurn(module, 1, 2, direction=PassDirection.RECOMPUTATION)
        turns = [again, ModuleTurn(other, 2, 3), ModuleTurn(module, 3, 4)]
        step = Step()
        sizes = Buckets(reduce=1, num_reduce=1, prefetch=0, persistence=0, reuse=0, live=0, sub_group=1)
        coordinator = Coordinator(step, Zero3Engine(ranks=2, sizes=sizes, packs=packs))
        coordinator.play(turns, Instants())
        coordinator.weights.release_rest(4, small_too=False)
        for _ in range(5):
            step.moment("", Phase.BACKWARD)
        held = (step.timeline().totals // 512).tolist()
        assert [held[1], held[2] - 1, held[3]] == expected  # 1: `first`, gathered while it is used


def test_zero3_before_deepspeed_0_19_3_releases_the_frozen_weights_that_a_reentrant_checkpoint_gathers(job):
    """ds_recompute_parameters is of 0.19.3: since then they stay until the whole network's backward has ended."""
    lora = Finetuning(method="lora", rank=4)
    names = ("param_persistence_threshold", "max_reuse_distance", "prefetch_bucket_size")
    sizes = FrozenMapping({f"stage3_{name}": 0 for name in names})
    full = ActivationCheckpointing(mode="full", use_reentrant=True)
    asked = job("zero3", finetuning=lora, activation_checkpointing=full, framework_options=sizes)
    older, newer = (
        ledger(asked.replace(versions=FrozenMapping({"deepspeed": version})), step="steady")
        for version in ("0.19.2", "0.19.3")
    )
    last = int((newer.phases == Phase.BACKWARD).nonzero()[0][-1])
    assert newer.composition(last)[BUFFERS] - older.composition(last)[BUFFERS] == 2 * LAYER * BF16


def test_zero3_adapters_are_fp32_and_frozen_weights_keep_their_inputs_with_its_linears(job):
    lora = Finetuning(method="lora", rank=4)
    stage2, stage3 = (stored_parameters(job(name, finetuning=lora)) for name in ("zero2", "zero3"))
    assert {t.element_bytes for t in stage2 if t.trains} == {BF16}
    assert {t.element_bytes for t in stage3 if t.trains} == {FP32}
    kept = [block_context(job(name, finetuning=lora), None).linears.keep_input for name in ("zero2", "zero3")]
    assert kept == [False, True]


def test_zero3_shares_quantised_weights_but_not_their_constants(job):
    tuning = Finetuning(method="qlora", rank=4, quantization="nf4")
    sizes = FrozenMapping({"stage3_param_persistence_threshold": 0})
    adapted = [job("zero3", ranks=ranks, finetuning=tuning, framework_options=sizes) for ranks in (4, 8)]
    assert {t.element_bytes for t in stored_parameters(adapted[0]) if t.trains} == {BF16}
    constants = sum(t.numel for t in stored_parameters(adapted[0]) if not t.sharded)
    held = [at_the_optimizer(ledger(one))[Category.PARAMETERS] for one in adapted]
    assert 0 < constants < 2 * held[1] - held[0] <= constants + 200 * 512  # rounded


@pytest.mark.parametrize(("layout", "weights"), [("zero1", P * BF16), ("zero2", P * BF16), ("zero3", P * BF16 // 4)])
def test_zero_partitions_main_copies_and_states_in_fp32(job, layout, weights):
    options = FrozenMapping({"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000})
    timeline = ledger(job(layout, framework_options=options))
    inside = at_the_optimizer(timeline)
    assert inside[Category.PARAMETERS] == pytest.approx(weights, abs=1024)
    assert inside[Category.MAIN_PARAMETERS] == pytest.approx(P * FP32 // 4, abs=1024)
    assert inside[Category.OPTIMIZER_STATES] == pytest.approx(2 * P * FP32 // 4, abs=2048)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("paged", [False, True])
def test_zero_gives_eight_bit_optimizers_its_partitions(job, layout, paged):
    """Two bytes an element, which are managed memory if paged, and of each 256 elements two scales."""
    asked = job(layout, optimizer=Optimizer(name="paged_adamw_8bit" if paged else "adamw_8bit"))
    assert out_of_scope(asked) == ""
    states = at_the_optimizer(ledger(asked))[Category.OPTIMIZER_STATES]
    assert states == pytest.approx((0 if paged else 2 * P // 4) + 2 * FP32 * P // 4 // 256, abs=16 * 1024)


def test_zero_1_keeps_full_gradients_and_zero_2_a_bucket(job):
    options = FrozenMapping({"reduce_bucket_size": 1000})
    one, two = (ledger(job(name, framework_options=options)) for name in ("zero1", "zero2"))
    assert most(one, Category.GRADIENTS, Phase.BACKWARD) == pytest.approx(P * BF16 + P * BF16 // 4, abs=1024)
    # the last rank's partition begins within the last layer's up_proj, of which it has room for all, and in the norm before
    # the final one; beside it the lm_head's gradient, which is too large for the bucket
    mine = (256 * 512 + 256 * 512 + 1024 * 256 + 2 * 256) * BF16
    largest = 1024 * 256 * BF16
    assert most(two, Category.GRADIENTS, Phase.BACKWARD) == pytest.approx(mine + largest, abs=1024)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (4, 2)])
def test_zero_2_offloads_its_partition_pinned_to_powers_of_two_and_adams_states_pageable(job, ranks, steps):
    offload = Offload(optimizer=True)
    asked = job("zero2", ranks=ranks, offload=offload, gradient_accumulation_steps=steps)
    matrices, vectors = P - 5 * 256, 5 * 256
    part = [group // ranks for group in (matrices, vectors)]
    pinned = [size * numel for numel in part for size in (FP32, FP32, BF16)] + [BF16 * 1024 * 256]  # the largest gradient
    pageable = sum(2 * FP32 * numel for numel in part)
    if steps > 1:  # gradients that are added up lie there whole, of what the last rank has at least a part of
        last = [1024 * 256, *[256 * 512] * 2]
        assert sum(last) >= part[0] > sum(last[:-1])  # from the lm_head backwards
        pinned += [BF16 * numel for numel in (*last, 256, 256)]  # the final norm and half of the layer's second
    assert host_bytes(asked, ledger) == sum(power_of_two(size) for size in pinned) + pageable
    plain = asked.replace(framework_options=FrozenMapping({"offload_pin_memory": False}))
    assert host_bytes(plain, ledger) == sum(pinned) + pageable
    assert out_of_scope(asked) == ""


def test_zero_3_offloads_parameters_to_a_flat_buffer_whose_pieces_stay_pinned_too(job):
    sizes = FrozenMapping({"stage3_param_persistence_threshold": 256})
    asked = job("zero3", ranks=4, offload=Offload(parameters=True, optimizer=True), framework_options=sizes)
    matrices, vectors = (P - 5 * 256) // 4, 5 * 256 // 4
    main = 3 * FP32 * (matrices + vectors)
    pinned = [FP32 * matrices, FP32 * vectors, BF16 * matrices, BF16 * vectors, BF16 * (matrices + vectors)]
    pieces = [BF16 * 1024 * 256 // 4] * 2 + 2 * ([BF16 * 256 * 256 // 4] * 4 + [BF16 * 256 * 512 // 4] * 3)
    assert host_bytes(asked, ledger) == main + sum(power_of_two(size) for size in pinned + pieces)
    inside = at_the_optimizer(ledger(asked))
    assert not {Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.MAIN_PARAMETERS} & set(inside)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_on_one_rank_deepspeed_keeps_main_copies_and_a_bucket_but_gathers_nothing(job, stage):
    alone = job(stage, ranks=1, framework_options=FrozenMapping({"reduce_bucket_size": 1000}))
    steady = ledger(alone)
    assert most(steady, Category.MAIN_PARAMETERS, Phase.FORWARD) == FP32 * P
    assert {"ipg_bucket"} <= set(steady.names)
    assert "gathered" not in steady.names


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_without_contiguous_gradients_there_is_no_bucket_and_each_group_goes_as_it_is_flattened(job, stage):
    steady = ledger(job(stage, ranks=2, framework_options=FrozenMapping({"contiguous_gradients": False})))
    assert not {"ipg_bucket", "grads_in_partition"} & set(steady.names)
    if stage != "zero3":  # of the last group, the five norms, nothing is left of the matrices' gradients
        widened = [instant for instant, label in enumerate(steady.labels) if label == "to_float32"]
        gradients = [name == "gradient" for name in steady.names]
        left = [int(steady.num_bytes[steady.alive_at(instant) & gradients].sum()) for instant in widened]
        assert left[1] < 5 * 512 < left[0]


def test_with_overlap_zero_1_reduces_in_backward_but_keeps_what_is_larger_than_a_bucket(job):
    """When the table's gradient comes, last, there is beside it all of the network's, or the lm_head's alone: another rank
    updates that, and it is larger than the bucket."""
    table = 1024 * 256
    for overlaps, kept in ((False, P), (True, 2 * table)):
        options = FrozenMapping({"reduce_bucket_size": 200_000, "overlap_comm": overlaps})
        steady = ledger(job("zero1", ranks=2, framework_options=options))
        (at,) = [instant for instant, label in enumerate(steady.labels) if label == "embed_tokens"][1:]
        made = steady.alive_at(at) & (steady.categories == Category.GRADIENTS)
        made &= np.array([name != "grads_in_partition" for name in steady.names])
        assert int(steady.num_bytes[made].sum()) == BF16 * kept


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_norms_of_gradients_for_an_optimizer_on_the_host_are_computed_in_float64_all_at_once(job, stage):
    """Only stage 3 takes 250,000,000 elements at a time."""
    wide = replace(job().architecture, vocab_size=1_200_000)
    timeline = ledger(job(stage, ranks=1, architecture=wide, sequence_length=16, offload=Offload(optimizer=True)))
    norms = [name == "norm.to_float64" for name in timeline.names]
    beside = 256 * 1_200_000 * BF16  # what is freed just before
    assert int(timeline.num_bytes[norms].max()) == pytest.approx(8 * 256 * 1_200_000, abs=2 * beside)
    assert int(timeline.num_bytes[norms].max()) > 8 * 250_000_000


def test_zero_2_keeps_large_gradients_of_a_micro_batch_that_is_not_the_last_for_an_optimizer_on_the_host(job):
    """With one rank all gradients are its own. The token table's comes last: the lm_head's, which is larger than the bucket
    too, is still there in the first micro-batch, and in the second has gone to the host."""
    table = 1024 * 256 * BF16
    for steps, kept in ((1, [1]), (2, [2, 1])):
        options = FrozenMapping({"reduce_bucket_size": 200_000})
        asked = job("zero2", ranks=1, framework_options=options, offload=Offload(optimizer=True))
        steady = ledger(asked.replace(gradient_accumulation_steps=steps))
        ends = [instant for instant, label in enumerate(steady.labels) if label == "reduce_gradients"]
        large = (steady.categories == Category.GRADIENTS) & (steady.num_bytes == table)
        assert [int((steady.alive_at(instant) & large).sum()) for instant in ends] == kept


@pytest.mark.parametrize(("stage", "overlaps", "streams"), [(3, True, {0, 1, 2}), (3, False, {0}), (2, True, {0, 2})])
def test_what_is_gathered_and_reduced_has_streams_of_its_own_where_communication_overlaps(job, stage, overlaps, streams):
    """So it is cached in pools of its own, of no use to what computes: `Stream() if overlap_comm else default_stream()`."""
    options = FrozenMapping({"overlap_comm": overlaps, "reduce_bucket_size": 100_000})
    timeline = ledger(job(f"zero{stage}", framework_options=options))
    assert set(timeline.streams.tolist()) == streams
    aside = {name for name, stream in zip(timeline.names, timeline.streams, strict=True) if stream}
    assert aside <= {"gathered", "all_gather", "all_gather.output", "reduce_scatter.input", "all_reduce.input"}


OLDER = [("0.18.2", True), ("0.18.3", False)]


@pytest.mark.parametrize(("release", "first"), OLDER)
@pytest.mark.parametrize("layout", ["zero1", "zero2"])
def test_before_0_18_3_the_bucket_is_there_when_backward_begins(job, layout, release, first):
    """`backward_prologue`, not `setup_buckets`. Published: gpjt/fine-tune-2024-04 at efe8e99f, Qwen1.5-0.5B on one GPU in
    stage 2 with its optimizer on the host: 6,023, 9,702, 13,381 and 20,740 MiB with 1, 2, 3 and 5 sequences, 953.7 of them
    the bucket beside the loss's gradients."""
    step = ledger(job(layout, versions=FrozenMapping({"deepspeed": release})))
    begins = int((step.phases == Phase.BACKWARD).nonzero()[0][0])
    bucket = [name == "ipg_bucket" for name in step.names]
    assert bool((step.alive_at(begins) & bucket).any()) is first
    assert bool((step.alive_at(begins - 1) & bucket).any()) is False


@pytest.mark.parametrize(("release", "per_element"), [("0.19.5", 11), ("0.19.6", 8)])
def test_before_0_19_6_infinite_elements_are_looked_for_in_whole_copies(job, release, per_element):
    """`has_inf_or_nan`: an fp32 copy, two tensors of bools and their union, and that in fp32, for an optimizer on the host.
    Published: gpjt/fine-tune-2024-04 at f0ef6130, Llama-3-8B on 8 GPUs: 24,497 MiB on the rank with the lm_head, of
    which 3 bytes for each of its 525,336,576 elements are 1,503."""
    wide = replace(job().architecture, vocab_size=1_200_000)
    versions = FrozenMapping({"deepspeed": release})
    asked = job("zero2", ranks=1, architecture=wide, sequence_length=16, offload=Offload(optimizer=True), versions=versions)
    step = ledger(asked)
    sizes = step.num_bytes[[name == "norm.to_float64" for name in step.names]]
    assert int(sizes.max()) == pytest.approx(per_element * 256 * 1_200_000, abs=4 * 256 * 1_200_000 * BF16 // 3)


@pytest.mark.parametrize(("release", "clones"), [("0.19.7", False), ("0.19.8", True)])
def test_a_gradient_larger_than_the_bucket_is_cloned_since_0_19_8(job, release, clones):
    options, versions = FrozenMapping({"reduce_bucket_size": 200_000}), FrozenMapping({"deepspeed": release})
    step = ledger(job("zero2", ranks=1, framework_options=options, offload=Offload(optimizer=True), versions=versions))
    assert ("gradient.clone" in step.names) is clones


@pytest.mark.parametrize(("release", "size"), [("0.16.9", P * FP32), ("0.17.0", 0)])
def test_before_0_17_the_host_returns_its_partition_in_float32(job, release, size):
    versions = FrozenMapping({"deepspeed": release})
    step = ledger(job("zero2", ranks=1, offload=Offload(optimizer=True), versions=versions))
    returned = step.num_bytes[[name == "partition.returned" for name in step.names]]
    assert int(returned.sum()) == size


def test_weights_stay_where_the_network_was_loaded_before_zero_init_could_make_it(job):
    """torch's own Linear saves `weight.t()`, a view, so that a release frees nothing from forward to backward; only the
    token table's goes. DeepSpeed 0.19.4 replaces it when it partitions a finished network too. Published:
    gpjt/fine-tune-2024-04 at 948adb92, Llama-3-8B on 8 GPUs, 49,086 MiB, of which 14 GB are such weights."""
    sizes = {"stage3_param_persistence_threshold": 256, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    made, loaded, newer = (
        ledger(
            job(
                "zero3",
                framework_options=FrozenMapping({**sizes, "partitions_as_made": as_made}),
                versions=FrozenMapping({"deepspeed": release}),
            )
        )
        for as_made, release in ((True, "0.18.4"), (False, "0.18.4"), (False, "0.19.4"))
    )
    matrices = (P - 5 * 256 - 1024 * 256) * BF16
    bucket = 500_000_000 * BF16
    assert most(loaded, BUFFERS, Phase.LOSS) == matrices + bucket
    assert most(made, BUFFERS, Phase.LOSS) == most(newer, BUFFERS, Phase.LOSS) < matrices + bucket
