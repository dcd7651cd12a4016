"""Data-parallel layouts: bytes of a two-layer network (conftest.py) counted by hand; properties that hold for every one."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, Offload, Optimizer, Parallelism, Precision
from peakcast.models.allocator.replay import replay
from peakcast.models.baseline.host import host_bytes
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.ddp import bucket_sizes
from peakcast.models.ledger.layouts.fsdp1 import FSDP1, FSDP1Settings
from peakcast.models.ledger.layouts.fsdp2 import FSDP2, FSDP2Settings
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.scope.assumptions import assumption_on_fsdps_offload
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category, Phase

LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
ENDS = 2 * 1024 * 256 + 256
P = 2 * LAYER + ENDS
BF16, FP32 = 2, 4
MIXED = Precision(parameters="float32", compute="bfloat16", gradients="float32", optimizer_states="float32")
BUFFERS = Category.COMMUNICATION_BUFFERS
SHARDED = ("ddp", "fsdp1", "fsdp1_trainer", "fsdp2", "fsdp2_trainer", "hsdp")
LAYOUTS = (*SHARDED, "zero1", "zero2", "zero3")


def parts(width, ranks):
    """Bytes of one part of every tensor; those of the five norms are rounded up to 512."""
    return (P - 5 * 256) * width // ranks + 5 * 512


def most(timeline, category, phase):
    """The most bytes of a category at one instant of a phase."""
    return max(timeline.composition(i).get(category, 0) for i in (timeline.phases == phase).nonzero()[0].tolist())


def at_the_optimizer(timeline):
    return timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)


def test_ddp_keeps_a_second_set_of_gradients_in_buckets(job):
    inside = at_the_optimizer(ledger(job("ddp")))
    assert (inside[Category.PARAMETERS], inside[Category.GRADIENTS], inside[BUFFERS]) == (P * BF16, P * BF16, P * BF16)
    views = FrozenMapping({"ddp_gradient_as_bucket_view": True})
    inside = at_the_optimizer(ledger(job("ddp", framework_options=views)))
    assert (inside.get(Category.GRADIENTS, 0), inside[BUFFERS]) == (0, P * BF16)


def test_a_bucket_is_closed_when_it_has_reached_its_size_and_the_first_is_small():
    assert bucket_sizes([MIB // 2] * 4 + [30 * MIB, 1], 25 * MIB) == [MIB, 31 * MIB, 1]
    assert bucket_sizes([], 25 * MIB) == []


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp1_trainer", "fsdp2", "fsdp2_trainer"])
def test_fully_sharded_a_rank_keeps_one_part_of_each_state(job, layout):
    inside = at_the_optimizer(ledger(job(layout)))
    if layout.startswith("fsdp2"):
        assert inside[Category.PARAMETERS] == parts(BF16, 4)
    # a flat part is rounded up to 512 bytes as a whole: one for each of at most four units
    assert inside[Category.PARAMETERS] == pytest.approx(P * BF16 // 4, abs=4 * 512)
    assert inside[Category.GRADIENTS] == pytest.approx(P * BF16 // 4, abs=4 * 512)
    assert inside[Category.OPTIMIZER_STATES] == pytest.approx(2 * P * BF16 // 4, abs=2 * 512 * 40)  # and step counters


def test_fsdp2_holds_the_previous_gather_while_the_next_is_copied_out(job):
    timeline = ledger(job("fsdp2"))
    # the root's weights, the gathers of both layers, and the second layer's weights
    assert most(timeline, BUFFERS, Phase.FORWARD) == (ENDS + 3 * LAYER) * BF16
    # in backward a layer's weights, the all-gather of the one before it, the reduce-scatter's input of the one after it
    assert most(timeline, BUFFERS, Phase.BACKWARD) == (ENDS + 3 * LAYER) * BF16


def test_fsdp2_under_mixed_precision_gathers_narrow_and_reduces_wide(job):
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


def test_fsdp2_reduces_narrow_weights_as_wide_as_the_job_asks(job):
    """`MixedPrecisionPolicy(bfloat16, float32)` over weights in bfloat16."""
    for options, width in (({}, BF16), ({"fsdp_reduce_dtype": "float32"}, FP32)):
        timeline = ledger(job("fsdp2", framework_options=FrozenMapping(options)))
        last = max(i for i, label in enumerate(timeline.labels) if label == "reduce_scatter.copy_in")
        assert timeline.composition(last)[BUFFERS] == ENDS * width


def test_without_synchronisation_full_gradients_wait_in_the_dtype_of_the_reduction(job):
    options = FrozenMapping({"accumulates_without_sync": True})
    timeline = ledger(job("fsdp2", precision=MIXED, gradient_accumulation_steps=2, framework_options=options))
    second = [i for i, label in enumerate(timeline.labels) if label == "embed_tokens"][-2]  # of forward, then backward
    assert timeline.composition(second)[Category.GRADIENTS] == P * FP32
    reducing = ledger(job("fsdp2", precision=MIXED, gradient_accumulation_steps=2))
    second = [i for i, label in enumerate(reducing.labels) if label == "embed_tokens"][-2]
    assert reducing.composition(second)[Category.GRADIENTS] == pytest.approx(P * FP32 // 4, abs=3 * 512)


def test_fsdp1_gathers_into_the_flat_parameter_itself(job):
    assert most(ledger(job("fsdp1_trainer")), BUFFERS, Phase.FORWARD) == (ENDS + LAYER) * BF16
    # torch's own default fetches the next layer in backward
    plain, trainer = (most(ledger(job(name)), BUFFERS, Phase.BACKWARD) for name in ("fsdp1", "fsdp1_trainer"))
    assert plain - trainer == LAYER * BF16


def test_fsdp1s_first_forward_makes_what_units_are_gathered_into_wide_and_narrow(job):
    first, later = (ledger(job("fsdp1", precision=MIXED), step=step) for step in ("first", "steady"))
    begins = [instant for instant, label in enumerate(first.labels) if label == "init_flat_param_attributes"]
    one, layer = (first.composition(instant)[BUFFERS] for instant in (begins[2], max(begins)))
    assert (one, layer, len(begins)) == (ENDS * FP32, LAYER * FP32, 3 * 3)  # the root's, a layer's
    assert "init_flat_param_attributes" not in later.labels


def test_fsdp1_flattens_a_units_gradients_before_it_reduces_them(job):
    timeline = ledger(job("fsdp1_trainer"))
    flat = timeline.labels.index("cat")
    assert timeline.composition(flat)[Category.GRADIENTS] == 2 * LAYER * BF16 + (1024 * 256 + 256) * BF16  # and the head's


def test_parts_are_padded_by_rows_in_fsdp2_and_at_the_end_in_fsdp1():
    tensors = [
        StoredTensor("w", "layers.0", (10, 7), 2, 2, trains=True),
        StoredTensor("b", "layers.0", (10,), 2, 2, trains=True),
    ]
    unit = Unit("layers.0", ("layers.0",), tuple(tensors))
    by_rows = FSDP2(tensors, [unit], FSDP2Settings(shards=4))
    assert [t.shape for t in by_rows.optimized()] == [(3, 7), (3,)]
    at_the_end = FSDP1(tensors, [unit], FSDP1Settings(shards=3))
    assert [t.shape for t in at_the_end.optimized()] == [(27,)]  # 80 elements in 3 parts
    # with the original tensors each begins at 16 bytes; rank 0 has the first 28 of 82 elements, all of them of w
    originals = FSDP1(tensors, [unit], FSDP1Settings(shards=3, keeps_originals=True))
    assert [(t.name, t.shape) for t in originals.optimized()] == [("w", (28,))]


def test_hsdp_shards_within_a_node_only(job):
    inside = at_the_optimizer(ledger(job("hsdp", ranks=32)))
    assert inside[Category.PARAMETERS] == parts(BF16, 8)


def test_offloaded_by_fsdp2_only_gathered_weights_are_on_the_gpu(job):
    offloaded = job("fsdp2", offload=Offload(parameters=True, optimizer=True))
    assert out_of_scope(offloaded) == ""
    timeline = ledger(offloaded)
    inside = at_the_optimizer(timeline)
    assert not {Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATES} & set(inside)
    assert most(timeline, BUFFERS, Phase.FORWARD) == (ENDS + 3 * LAYER) * BF16


def test_fsdp_has_the_optimizer_where_it_has_the_weights(job):
    both, weights = (job("fsdp2", offload=Offload(parameters=True, optimizer=told)) for told in (True, False))
    assert out_of_scope(weights) == assumption_on_fsdps_offload(both) == ""
    assert "offload.optimizer=true is assumed" in assumption_on_fsdps_offload(weights)
    assert ledger(weights).totals.tolist() == ledger(both).totals.tolist()
    assert host_bytes(weights, ledger) == host_bytes(both, ledger) > 0


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


@pytest.mark.parametrize("layout", SHARDED)
def test_one_rank_changes_nothing(job, layout):
    alone = job(layout, ranks=1)
    plain = alone.replace(parallelism=Parallelism())
    assert ledger(alone).totals.tolist() == ledger(plain).totals.tolist()


@given(
    layout=st.sampled_from(LAYOUTS),
    ranks=st.integers(2, 40),
    more=st.integers(1, 4),
    hidden=st.sampled_from([64, 192, 320]),
    layers=st.integers(1, 3),
)
@settings(max_examples=40)
def test_more_ranks_never_raise_what_stands_on_one(job, layout, ranks, more, hidden, layers):
    architecture = replace(job().architecture, hidden_size=hidden, head_dim=hidden // 4, num_hidden_layers=layers)

    def standing(size):
        options = FrozenMapping({"reduce_bucket_size": 1000} if layout.startswith("zero") else {})
        inside = at_the_optimizer(ledger(job(layout, ranks=size, architecture=architecture, framework_options=options)))
        kinds = (Category.PARAMETERS, Category.MAIN_PARAMETERS, Category.OPTIMIZER_STATES)
        return sum(inside.get(kind, 0) for kind in kinds)

    # flat partitions are padded to a multiple of the ranks: a few elements more in each of at most a dozen tensors
    assert standing(ranks * more) <= standing(ranks) + 12 * 512
    assert min(ledger(job(layout, ranks=ranks, architecture=architecture)).num_bytes) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_has_a_life_and_a_second_micro_batch_leaves_nothing_behind(job, layout):
    one, two = (ledger(job(layout, gradient_accumulation_steps=steps)) for steps in (1, 2))
    for timeline in (one, two):
        assert (timeline.born <= timeline.dies).all()
        assert (timeline.num_bytes > 0).all()
    assert int(one.totals[-1]) == int(two.totals[-1])


def test_scope_names_what_is_left_out(job):
    assert out_of_scope(job("ddp")) == out_of_scope(job("fsdp1")) == out_of_scope(job("hsdp", ranks=16)) == ""
    assert [out_of_scope(job(f"zero{stage}")) for stage in (1, 2, 3)] == [""] * 3
    assert out_of_scope(job("zero2", offload=Offload(optimizer=True))) == ""
    assert "without offloaded activations" in out_of_scope(job("zero2", offload=Offload(activations=True)))
    assert "computed in the dtype of the weights only" in out_of_scope(job("zero3", precision=MIXED))
    overlaps, scattered = FrozenMapping({"overlap_comm": True}), FrozenMapping({"contiguous_gradients": False})
    assert out_of_scope(job("zero1", framework_options=overlaps)) == ""
    assert out_of_scope(job("zero2", framework_options=overlaps)) == ""
    tied = replace(job().architecture, tie_word_embeddings=True)
    asked = job("zero1", framework_options=overlaps, architecture=tied)
    assert "without a shared table" in out_of_scope(asked.replace(gradient_accumulation_steps=2))
    on_host = job("zero1", framework_options=overlaps, offload=Offload(optimizer=True))
    assert out_of_scope(on_host) == ""
    assert out_of_scope(on_host.replace(gradient_accumulation_steps=2)) == ""
    assert out_of_scope(on_host.replace(parallelism=job("zero2").parallelism, gradient_accumulation_steps=2)) == ""
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
    assert out_of_scope(job("fsdp1", offload=Offload(parameters=True, optimizer=True))) == ""
    assert "together with the weights" in out_of_scope(job("fsdp1", offload=Offload(optimizer=True)))
    assert "FSDP on several GPUs" in out_of_scope(job("fsdp1", ranks=1, offload=Offload(parameters=True)))


@pytest.mark.parametrize(
    ("layout", "refused"), [("ddp", ""), ("fsdp1", "muon"), ("fsdp2", "muon adafactor"), ("hsdp", "muon adafactor")]
)
def test_optimizers_of_matrices_need_them_whole(job, layout, refused):
    for name in ("muon", "adafactor", "sgd"):
        assert (name in out_of_scope(job(layout, ranks=16, optimizer=Optimizer(name=name)))) == (name in refused)


@pytest.mark.parametrize(
    ("layout", "apart"),
    [
        ("fsdp1", {"flat_param.narrow_part": 1, "flat_param.gathered": 2, "flat_param.grad": 2, "gradient": 3}),
        ("fsdp2", {"all_gather.cast": 1, "all_gather.output": 1, "gradient": 2, "gathered": 0, "reduce_scatter.input": 0}),
        ("hsdp", {"all_gather.cast": 1, "all_gather.output": 1, "gradient": 2}),
    ],
)
def test_communication_streams_have_pools_of_their_own(job, layout, apart):
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


def kept_in_backward(job, version, reentrant=True):
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


def test_a_hook_on_a_frozen_unit_keeps_what_was_checkpointed_around_it(job):
    """Of two layers both inputs, and the gradient of the second's: the first's goes to the embedding."""
    assert kept_in_backward(job, "4.48.1") == (2, 1)
    assert kept_in_backward(job, "4.48.1", reentrant=False) == kept_in_backward(job, "5.17.0") == (0, 0)


@pytest.mark.parametrize("layout", ["fsdp1_trainer", "fsdp2_trainer"])
def test_constants_of_quantised_weights_are_whole_on_every_rank(job, layout):
    steps = ledger(job(layout, finetuning=Finetuning(method="qlora", rank=8, quantization="nf4")))
    held = [size for name, size in zip(steps.names, steps.num_bytes, strict=True) if name.endswith("q_proj.weight.absmax")]
    assert held == [256 * 256 // 64 * FP32] * 2


def test_the_last_gradient_of_a_unit_stays_until_it_is_reduced(job):
    """`foreach_reduce`'s loop variable: of the root, the whole lm_head beside what it is reduced to."""
    for ranks in (2, 8):
        steps = ledger(job("fsdp2", ranks=ranks, precision=MIXED))
        lives = zip(steps.names, steps.modules, steps.num_bytes.tolist(), steps.born, steps.dies, strict=True)
        (last,) = [
            (size, born, dies) for name, unit, size, born, dies in lives if (name, unit) == ("gradient.last", "root")
        ]
        assert last[0] == 1024 * 256 * BF16
        assert "reduce_scatter" in steps.labels[last[1] : last[2]]
