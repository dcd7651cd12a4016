"""Data-parallel layouts: bytes of a two-layer network counted by hand, and properties that hold for every layout."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.architecture import Architecture
from peakcast.fields import FrozenMapping
from peakcast.models.allocator import replay
from peakcast.models.analytical.hf_blocks import block_context
from peakcast.models.analytical.layouts.base import StoredTensor, Unit
from peakcast.models.analytical.layouts.ddp import bucket_sizes
from peakcast.models.analytical.layouts.fsdp1 import FSDP1
from peakcast.models.analytical.layouts.fsdp2 import FSDP2
from peakcast.models.analytical.layouts.zero import Buckets
from peakcast.models.analytical.layouts.zero3_fetching import Coordinator
from peakcast.models.analytical.layouts.zero3_order import Order
from peakcast.models.analytical.layouts.zero3_turns import Turn
from peakcast.models.analytical.layouts.zero12 import Arrival, Zero12
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.scope import out_of_scope
from peakcast.models.analytical.step import Step
from peakcast.models.analytical.stored_parameters import stored_parameters
from peakcast.models.host import host_bytes
from peakcast.spec import ActivationCheckpointing, Finetuning, Offload, Optimizer, Parallelism, Precision, TrainingJob
from peakcast.timeline import Category, Phase
from peakcast.units import MIB, power_of_two

TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1024,
)
LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
ENDS = 2 * 1024 * 256 + 256
P = 2 * LAYER + ENDS
BF16, FP32 = 2, 4
MIXED = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
BUFFERS = Category.COMMUNICATION_BUFFERS
LAYOUTS = {
    "ddp": ("torch", {}),
    "fsdp1": ("torch", {"sharding": "fsdp1"}),
    "fsdp1_trainer": ("huggingface", {"sharding": "fsdp1"}),
    "fsdp2": ("torch", {"sharding": "fsdp2"}),
    "fsdp2_trainer": ("huggingface", {"sharding": "fsdp2"}),
    "hsdp": ("torch", {"sharding": "hsdp"}),
    "zero1": ("deepspeed", {"zero_stage": 1}),
    "zero2": ("deepspeed", {"zero_stage": 2}),
    "zero3": ("deepspeed", {"zero_stage": 3}),
}


def job(layout="fsdp2", ranks=4, **changes):
    framework, sharding = LAYOUTS[layout]
    base = {
        "architecture": TINY,
        "sequence_length": 128,
        "framework": framework,
        "optimizer": Optimizer(implementation="fused"),
        "parallelism": Parallelism(data_parallel_size=ranks, **sharding),
    }
    return TrainingJob(**{**base, **changes})


def parts(width, ranks):
    """Bytes of one part of every tensor; those of the five norms are rounded up to 512."""
    return (P - 5 * 256) * width // ranks + 5 * 512


def most(timeline, category, phase):
    """The most bytes of a category at one instant of a phase."""
    return max(timeline.composition(i).get(category, 0) for i in (timeline.phases == phase).nonzero()[0].tolist())


def at_the_optimizer(timeline):
    return timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)


def test_ddp_keeps_a_second_set_of_gradients_in_buckets():
    inside = at_the_optimizer(ledger(job("ddp")))
    assert (inside[Category.PARAMETERS], inside[Category.GRADIENTS], inside[BUFFERS]) == (P * BF16, P * BF16, P * BF16)
    views = FrozenMapping({"ddp_gradient_as_bucket_view": True})
    inside = at_the_optimizer(ledger(job("ddp", framework_options=views)))
    assert (inside.get(Category.GRADIENTS, 0), inside[BUFFERS]) == (0, P * BF16)


def test_a_bucket_is_closed_when_it_has_reached_its_size_and_the_first_is_small():
    assert bucket_sizes([MIB // 2] * 4 + [30 * MIB, 1], 25 * MIB) == [MIB, 31 * MIB, 1]
    assert bucket_sizes([], 25 * MIB) == []


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1_trainer", "fsdp2", "fsdp2_trainer"])
def test_fully_sharded_a_rank_keeps_one_part_of_each_state(layout):
    inside = at_the_optimizer(ledger(job(layout)))
    if layout.startswith("fsdp2"):
        assert inside[Category.PARAMETERS] == parts(BF16, 4)
    # a flat part is rounded up to 512 bytes as a whole: one for each of at most four units
    assert inside[Category.PARAMETERS] == pytest.approx(P * BF16 // 4, abs=4 * 512)
    assert inside[Category.GRADIENTS] == pytest.approx(P * BF16 // 4, abs=4 * 512)
    assert inside[Category.OPTIMIZER_STATES] == pytest.approx(2 * P * BF16 // 4, abs=2 * 512 * 40)  # and step counters


def test_fsdp2_holds_the_previous_gather_while_the_next_is_copied_out():
    timeline = ledger(job("fsdp2"))
    # the root's weights, the gathers of both layers, and the second layer's weights
    assert most(timeline, BUFFERS, Phase.FORWARD) == (ENDS + 3 * LAYER) * BF16
    # in backward a layer's weights, the all-gather of the one before it, the reduce-scatter's input of the one after it
    assert most(timeline, BUFFERS, Phase.BACKWARD) == (ENDS + 3 * LAYER) * BF16


def test_fsdp2_under_mixed_precision_gathers_narrow_and_reduces_wide():
    timeline = ledger(job("fsdp2", precision=MIXED))
    inside = at_the_optimizer(timeline)
    assert inside[Category.PARAMETERS] == parts(FP32, 4)
    assert inside[Category.GRADIENTS] == pytest.approx(P * FP32 // 4, abs=3 * 512)
    assert most(timeline, BUFFERS, Phase.FORWARD) == (ENDS + 3 * LAYER) * BF16
    # the root is reduced last: its fp32 input beside its bf16 gradients
    labels = timeline.labels
    last = max(i for i, label in enumerate(labels) if label == "reduce_scatter.copy_in")
    assert timeline.composition(last)[BUFFERS] == ENDS * FP32
    assert timeline.composition(last)[Category.GRADIENTS] == pytest.approx(2 * LAYER * FP32 // 4 + ENDS * BF16, abs=2 * 512)


def test_without_synchronisation_full_gradients_wait_in_the_dtype_of_the_reduction():
    options = FrozenMapping({"accumulates_without_sync": True})
    timeline = ledger(job("fsdp2", precision=MIXED, gradient_accumulation_steps=2, framework_options=options))
    second = [i for i, label in enumerate(timeline.labels) if label == "embed_tokens"][-2]  # of forward, then backward
    assert timeline.composition(second)[Category.GRADIENTS] == P * FP32
    reducing = ledger(job("fsdp2", precision=MIXED, gradient_accumulation_steps=2))
    second = [i for i, label in enumerate(reducing.labels) if label == "embed_tokens"][-2]
    assert reducing.composition(second)[Category.GRADIENTS] == pytest.approx(P * FP32 // 4, abs=3 * 512)


def test_fsdp1_gathers_into_the_flat_parameter_itself():
    assert most(ledger(job("fsdp1_trainer")), BUFFERS, Phase.FORWARD) == (ENDS + LAYER) * BF16
    # torch's own default fetches the next layer in backward
    plain, trainer = (most(ledger(job(name)), BUFFERS, Phase.BACKWARD) for name in ("fsdp1", "fsdp1_trainer"))
    assert plain - trainer == LAYER * BF16


def test_fsdp1_flattens_a_units_gradients_before_it_reduces_them():
    timeline = ledger(job("fsdp1_trainer"))
    flat = timeline.labels.index("cat")
    assert timeline.composition(flat)[Category.GRADIENTS] == 2 * LAYER * BF16 + (1024 * 256 + 256) * BF16  # and the head's


def test_zero3_fetches_one_matrix_at_a_time_until_it_knows_the_order_of_modules():
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
    turns = [Turn(i + 1, i + 2, (weights[j],), starts=i == 0) for i, j in enumerate((0, 1, 2, 2, 1, 0))]
    step = Step()
    sizes = Buckets(reduce=100, num_reduce=1, prefetch=100, persistence=0, reuse=300, live=1000, sub_group=1000)
    coordinator = Coordinator(step, ranks=2, sizes=sizes, packs=True)
    coordinator.learn(turns)
    coordinator.play(turns)
    coordinator.end(7)
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
        sizes = Buckets(reduce=bucket, num_reduce=1, prefetch=0, persistence=0, reuse=0, live=0, sub_group=1)
        layout = Zero12([tensor], stage=2, ranks=4, element_bytes=2, buckets=sizes)
        layout._waiting.append(Arrival(tensor, 0))
        copied.append(layout._copied())
    assert copied == [0, 48, 48, 72, 96]


def test_zero3_knows_an_order_from_its_second_time_until_another_module_comes():
    order, seen = Order(), []
    for names in ("ab", "ab", "abc", "ab"):
        order.begin()
        for name in names:
            wrong = order.meet(Turn(0, 1, name=name))
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
        turns = [Turn(1, 2, (tensor,), computes_again=True), Turn(2, 3, (first,)), Turn(3, 4, (tensor,))]
        step = Step()
        sizes = Buckets(reduce=1, num_reduce=1, prefetch=0, persistence=0, reuse=0, live=0, sub_group=1)
        coordinator = Coordinator(step, ranks=2, sizes=sizes, packs=packs)
        coordinator.play(turns)
        coordinator.end(4)
        for _ in range(5):
            step.moment("", Phase.BACKWARD)
        held = (step.timeline().totals // 512).tolist()
        assert [held[1], held[2] - 1, held[3]] == expected  # 1: `first`, gathered while it is used


def test_zero3_adapters_are_fp32_and_frozen_weights_keep_their_inputs_with_its_linears():
    lora = Finetuning(method="lora", rank=4)
    stage2, stage3 = (stored_parameters(job(name, finetuning=lora)) for name in ("zero2", "zero3"))
    assert {t.element_bytes for t in stage2 if t.trains} == {BF16}
    assert {t.element_bytes for t in stage3 if t.trains} == {FP32}
    kept = [block_context(job(name, finetuning=lora), None).linears_keep_input for name in ("zero2", "zero3")]
    assert kept == [False, True]


def test_zero3_shares_quantised_weights_but_not_their_constants():
    tuning = Finetuning(method="qlora", rank=4, quantization="nf4")
    sizes = FrozenMapping({"stage3_param_persistence_threshold": 0})
    adapted = [job("zero3", ranks=ranks, finetuning=tuning, framework_options=sizes) for ranks in (4, 8)]
    assert {t.element_bytes for t in stored_parameters(adapted[0]) if t.trains} == {BF16}
    constants = sum(t.numel for t in stored_parameters(adapted[0]) if not t.sharded)
    held = [at_the_optimizer(ledger(one))[Category.PARAMETERS] for one in adapted]
    assert 0 < constants < 2 * held[1] - held[0] <= constants + 200 * 512  # rounded


def test_parts_are_padded_by_rows_in_fsdp2_and_at_the_end_in_fsdp1():
    tensors = [
        StoredTensor("w", "layers.0", (10, 7), 2, 2, trains=True),
        StoredTensor("b", "layers.0", (10,), 2, 2, trains=True),
    ]
    unit = Unit("layers.0", ("layers.0",), tuple(tensors))
    assert [t.shape for t in FSDP2(tensors, [unit], shards=4).optimized()] == [(3, 7), (3,)]
    assert [t.shape for t in FSDP1(tensors, [unit], shards=3).optimized()] == [(27,)]  # 80 elements in 3 parts
    # with the original tensors each begins at 16 bytes; rank 0 has the first 28 of 82 elements, all of them of w
    assert [(t.name, t.shape) for t in FSDP1(tensors, [unit], shards=3, original=True).optimized()] == [("w", (28,))]


def test_hsdp_shards_within_a_node_only():
    inside = at_the_optimizer(ledger(job("hsdp", ranks=32)))
    assert inside[Category.PARAMETERS] == parts(BF16, 8)


def test_offloaded_by_fsdp2_only_gathered_weights_are_on_the_gpu():
    offloaded = job("fsdp2", offload=Offload(parameters=True, optimizer=True))
    assert out_of_scope(offloaded) == ""
    timeline = ledger(offloaded)
    inside = at_the_optimizer(timeline)
    assert not {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES} & set(inside)
    assert most(timeline, BUFFERS, Phase.FORWARD) == (ENDS + 3 * LAYER) * BF16


@pytest.mark.parametrize(("layout", "weights"), [("zero1", P * BF16), ("zero2", P * BF16), ("zero3", P * BF16 // 4)])
def test_zero_partitions_main_copies_and_states_in_fp32(layout, weights):
    options = FrozenMapping({"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000})
    timeline = ledger(job(layout, framework_options=options))
    inside = at_the_optimizer(timeline)
    assert inside[Category.PARAMETERS] == pytest.approx(weights, abs=1024)
    assert inside[Category.MAIN_PARAMETERS] == pytest.approx(P * FP32 // 4, abs=1024)
    assert inside[Category.OPTIMIZER_STATES] == pytest.approx(2 * P * FP32 // 4, abs=2048)


def test_zero_1_keeps_full_gradients_and_zero_2_a_bucket():
    options = FrozenMapping({"reduce_bucket_size": 1000})
    one, two = (ledger(job(name, framework_options=options)) for name in ("zero1", "zero2"))
    assert most(one, Category.GRADIENTS, Phase.BACKWARD) == pytest.approx(P * BF16 + P * BF16 // 4, abs=1024)
    # the last rank's partition begins within the last layer's up_proj, of which it has room for all, and in the norm before
    # the final one; beside it the lm_head's gradient, which is too large for the bucket
    mine = (256 * 512 + 256 * 512 + 1024 * 256 + 2 * 256) * BF16
    largest = 1024 * 256 * BF16
    assert most(two, Category.GRADIENTS, Phase.BACKWARD) == pytest.approx(mine + largest, abs=1024)


def test_tensors_of_a_step_live_from_allocate_to_free():
    step = Step()
    first = step.allocate("a", BUFFERS, [512])
    step.moment("one", Phase.FORWARD)
    step.allocate("b", BUFFERS, [1024])
    step.moment("two", Phase.FORWARD)
    step.free(first)
    step.moment("three", Phase.FORWARD)
    assert first == []
    assert step.timeline().totals.tolist() == [512, 1536, 1024]


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("zero")])
def test_one_rank_changes_nothing(layout):
    alone = job(layout, ranks=1)
    plain = alone.replace(parallelism=Parallelism())
    assert ledger(alone).totals.tolist() == ledger(plain).totals.tolist()


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_without_contiguous_gradients_there_is_no_bucket_and_each_group_goes_as_it_is_flattened(stage):
    steady = ledger(job(stage, ranks=2, framework_options=FrozenMapping({"contiguous_gradients": False})))
    assert not {"ipg_bucket", "grads_in_partition"} & set(steady.names)
    if stage != "zero3":  # of the last group, the five norms, nothing is left of the matrices' gradients
        widened = [instant for instant, label in enumerate(steady.labels) if label == "to_float32"]
        gradients = [name == "gradient" for name in steady.names]
        left = [int(steady.num_bytes[steady.alive_at(instant) & gradients].sum()) for instant in widened]
        assert left[1] < 5 * 512 < left[0]


def test_with_overlap_zero_1_reduces_in_backward_but_keeps_what_is_larger_than_a_bucket():
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


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_on_one_rank_deepspeed_keeps_main_copies_and_a_bucket_but_gathers_nothing(stage):
    alone = job(stage, ranks=1, framework_options=FrozenMapping({"reduce_bucket_size": 1000}))
    steady = ledger(alone)
    assert most(steady, Category.MAIN_PARAMETERS, Phase.FORWARD) == FP32 * P
    assert {"ipg_bucket"} <= set(steady.names)
    assert "gathered" not in steady.names


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    ranks=st.integers(2, 40),
    more=st.integers(1, 4),
    hidden=st.sampled_from([64, 192, 320]),
    layers=st.integers(1, 3),
)
@settings(max_examples=40)
def test_more_ranks_never_raise_what_stands_on_one(layout, ranks, more, hidden, layers):
    architecture = replace(TINY, hidden_size=hidden, head_dim=hidden // 4, num_hidden_layers=layers)

    def standing(size):
        options = FrozenMapping({"reduce_bucket_size": 1000} if layout.startswith("zero") else {})
        inside = at_the_optimizer(ledger(job(layout, ranks=size, architecture=architecture, framework_options=options)))
        kinds = (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.OPTIMIZER_STATES)
        return sum(inside.get(kind, 0) for kind in kinds)

    # flat partitions are padded to a multiple of the ranks: a few elements more in each of at most a dozen tensors
    assert standing(ranks * more) <= standing(ranks) + 12 * 512
    assert min(ledger(job(layout, ranks=ranks, architecture=architecture)).num_bytes) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_has_a_life_and_a_second_micro_batch_leaves_nothing_behind(layout):
    one, two = (ledger(job(layout, gradient_accumulation_steps=steps)) for steps in (1, 2))
    for timeline in (one, two):
        assert (timeline.born <= timeline.dies).all()
        assert (timeline.num_bytes > 0).all()
    assert int(one.totals[-1]) == int(two.totals[-1])


def test_scope_names_what_is_left_out():
    assert out_of_scope(job("ddp")) == out_of_scope(job("fsdp1")) == out_of_scope(job("hsdp", ranks=16)) == ""
    assert [out_of_scope(job(f"zero{stage}")) for stage in (1, 2, 3)] == [""] * 3
    assert out_of_scope(job("zero2", offload=Offload(optimizer=True))) == ""
    assert "without offloaded activations" in out_of_scope(job("zero2", offload=Offload(activations=True)))
    assert "computed in the dtype of the weights only" in out_of_scope(job("zero3", precision=MIXED))
    overlaps, scattered = FrozenMapping({"overlap_comm": True}), FrozenMapping({"contiguous_gradients": False})
    assert out_of_scope(job("zero1", framework_options=overlaps)) == ""
    assert out_of_scope(job("zero2", framework_options=overlaps)) == ""
    asked = job("zero1", framework_options=overlaps, architecture=replace(TINY, tie_word_embeddings=True))
    assert "with overlap_comm only" in out_of_scope(asked.replace(gradient_accumulation_steps=2))
    assert "with overlap_comm only" in out_of_scope(asked.replace(offload=Offload(optimizer=True)))
    assert [out_of_scope(job(f"zero{stage}", framework_options=scattered)) for stage in (1, 2, 3)] == [""] * 3
    offloaded = job("zero3", framework_options=scattered, offload=Offload(optimizer=True))
    assert "with contiguous_gradients=true only" in out_of_scope(offloaded)
    assert out_of_scope(job("zero2", ranks=1)) == ""
    for method, said in (("nf4", ""), ("int8", "with nf4 or whole weights only")):
        tuning = Finetuning(method="qlora", rank=8, quantization=method)
        assert all(said in out_of_scope(job(f"zero{stage}", finetuning=tuning)) for stage in (2, 3))
    half = Precision(parameters="float16", compute="float16", gradients="float16", optimizer_states="float32")
    assert out_of_scope(job("zero3", precision=half)) == ""
    assert out_of_scope(job("fsdp1", finetuning=Finetuning(method="lora", rank=8))) == ""
    assert "offload" in out_of_scope(job("fsdp1", offload=Offload(parameters=True, optimizer=True)))


@pytest.mark.parametrize(
    ("layout", "apart"),
    [
        ("fsdp1", {"flat_param.narrow_part": 1, "flat_param.gathered": 2, "gradient": 3}),
        ("fsdp2", {"all_gather.cast": 1, "all_gather.output": 1, "gradient": 2, "gathered": 0, "reduce_scatter.input": 0}),
        ("hsdp", {"all_gather.cast": 1, "all_gather.output": 1, "gradient": 2}),
    ],
)
def test_communication_streams_have_pools_of_their_own(layout, apart):
    """What a stream allocates (torch `_runtime_utils._init_streams`, `FSDPCommContext`), and every other tensor on the one
    that computes; the allocator then reserves at least what each stream has at its own peak."""
    timeline = ledger(job(layout, precision=MIXED), rank=0, step="steady")
    streams = [0] * len(timeline.names) if timeline.streams is None else timeline.streams.tolist()
    seen = {}
    for name, stream, category in zip(timeline.names, streams, timeline.categories.tolist(), strict=True):
        if category != Category.OPTIMIZER_TEMPORARIES:
            seen.setdefault(name, set()).add(stream)
    assert {name: max(seen[name]) for name in apart} == apart
    assert {name for name, used in seen.items() if used != {0}} <= set(apart) | {
        "flat_param.grad.padded",
        "flat_param.grad.cast",
    }
    least = 0
    for stream in set(streams):
        mine = np.array(streams) == stream
        change = np.zeros(len(timeline.phases) + 1, dtype=np.int64)
        end = len(timeline.phases)
        np.add.at(change, np.clip(timeline.born[mine], 0, end), timeline.num_bytes[mine])
        np.subtract.at(change, np.clip(timeline.dies[mine], 0, end), timeline.num_bytes[mine])
        least += int(np.cumsum(change)[:-1].max())
    assert least > timeline.peak().num_bytes
    assert replay(timeline).peak_reserved_bytes >= least


def kept_in_backward(version, reentrant=True):
    """Inputs of checkpointed layers, and gradients of them, that are still there when backward ends."""
    steps = ledger(
        job(
            "fsdp1_trainer",
            finetuning=Finetuning(method="lora", rank=8),
            activation_checkpointing=ActivationCheckpointing(mode="full", use_reentrant=reentrant),
            versions=FrozenMapping({"transformers": version}),
        )
    )
    end = steps.labels.index("backward ends")
    alive = [name for name, born, dies in zip(steps.names, steps.born, steps.dies, strict=True) if born <= end < dies]
    return alive.count("checkpoint"), alive.count("checkpoint.grad")


def test_a_hook_on_a_frozen_unit_keeps_what_was_checkpointed_around_it():
    """Of two layers both inputs, and the gradient of the second's: the first's goes to the embedding."""
    assert kept_in_backward("4.48.1") == (2, 1)
    assert kept_in_backward("4.48.1", reentrant=False) == kept_in_backward("5.17.0") == (0, 0)


@pytest.mark.parametrize("layout", ["fsdp1_trainer", "fsdp2_trainer"])
def test_constants_of_quantised_weights_are_whole_on_every_rank(layout):
    steps = ledger(job(layout, finetuning=Finetuning(method="qlora", rank=8, quantization="nf4")))
    held = [size for name, size in zip(steps.names, steps.num_bytes, strict=True) if name.endswith("q_proj.weight.absmax")]
    assert held == [256 * 256 // 64 * FP32] * 2


def test_the_last_gradient_of_a_unit_stays_until_it_is_reduced():
    """`foreach_reduce`'s loop variable: of the root, the whole lm_head beside what it is reduced to."""
    for ranks in (2, 8):
        steps = ledger(job("fsdp2", ranks=ranks, precision=MIXED))
        lives = zip(steps.names, steps.modules, steps.num_bytes.tolist(), steps.born, steps.dies, strict=True)
        (last,) = [
            (size, born, dies) for name, unit, size, born, dies in lives if (name, unit) == ("gradient.last", "root")
        ]
        assert last[0] == 1024 * 256 * BF16
        assert "reduce_scatter" in steps.labels[last[1] : last[2]]


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (4, 2)])
def test_zero_2_offloads_its_partition_pinned_to_powers_of_two_and_adams_states_pageable(ranks, steps):
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


def test_zero_3_offloads_parameters_to_a_flat_buffer_whose_pieces_stay_pinned_too():
    sizes = FrozenMapping({"stage3_param_persistence_threshold": 256})
    asked = job("zero3", ranks=4, offload=Offload(parameters=True, optimizer=True), framework_options=sizes)
    matrices, vectors = (P - 5 * 256) // 4, 5 * 256 // 4
    main = 3 * FP32 * (matrices + vectors)
    pinned = [FP32 * matrices, FP32 * vectors, BF16 * matrices, BF16 * vectors, BF16 * (matrices + vectors)]
    pieces = [BF16 * 1024 * 256 // 4] * 2 + 2 * ([BF16 * 256 * 256 // 4] * 4 + [BF16 * 256 * 512 // 4] * 3)
    assert host_bytes(asked, ledger) == main + sum(power_of_two(size) for size in pinned + pieces)
    inside = at_the_optimizer(ledger(asked))
    assert not {Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.MAIN_PARAMETERS} & set(inside)
