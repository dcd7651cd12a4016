"""What DeepSpeed's ZeRO leaves in the allocator's cache: released weights that wait for the computing stream, what looks
for infinite gradients, and what making the engine leaves behind."""

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import GIB, round_up
from peakcast.jobs.spec import ActivationCheckpointing, Offload, Parallelism, Precision, TrainingJob
from peakcast.models.allocator.replay import replay_run
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.building import building
from peakcast.models.baseline.ledger import ledger
from peakcast.models.calibration.calibration import UNCALIBRATED
from peakcast.models.ledger.layouts.run_ahead import OPERATIONS_AHEAD, Awaited
from peakcast.models.ledger.layouts.zero import GATHERING, REDUCING
from peakcast.models.prediction.predict import predict
from peakcast.timelines.timeline import Category, Phase

FP16 = Precision(
    parameters="float16", compute="float16", gradients="float16", optimizer_states="float32", main_parameters="float32"
)
LAYER = 4 * 256 * 256 + 3 * 256 * 512 + 2 * 256
P = 2 * LAYER + 2 * 1024 * 256 + 256
EIGHT_RANKS = TrainingJob(
    architecture=catalog.architecture("llama-3-8b"),
    framework="deepspeed",
    sequence_length=2048,
    micro_batch_size=4,
    activation_checkpointing=ActivationCheckpointing(mode="full"),
    parallelism=Parallelism(data_parallel_size=8, zero_stage=3),
)
"""Each of its layers has 416 MiB of weights."""


def holders(timeline, name):
    return [entry for entry, called in enumerate(timeline.names) if called == name]


@pytest.mark.parametrize(
    ("freed", "reusable"),
    [
        (5, 40),  # the reduction recorded at 10 is awaited when a third one after it is recorded
        (10, 40),
        (11, 50),
        (25, 60),  # nothing is recorded four times after it: it waits for the end
        (60, 60),
    ],
)
def test_a_block_waits_until_the_cpu_has_waited_for_an_event_recorded_since(freed, reusable):
    assert Awaited((10, 20, 30, 40, 50), 3, 60).reusable(freed) == reusable


def test_a_full_queue_of_launches_is_waited_for_too():
    assert Awaited((), 3, 10**6).reusable(7) == 7 + OPERATIONS_AHEAD


def test_in_a_forward_released_weights_wait_as_long_as_the_queue_lets_them_and_none_beyond_backward():
    timeline = ledger(EIGHT_RANKS)
    ends = int((timeline.phases == Phase.BACKWARD).nonzero()[0][-1]) + 1
    forward = int((timeline.phases == Phase.FORWARD).nonzero()[0][-1])
    weights = [entry for entry in holders(timeline, "gathered") if timeline.streams[entry] == GATHERING]
    released = [entry for entry in weights if timeline.dies[entry] < forward - OPERATIONS_AHEAD]
    assert released
    assert {int(timeline.reusable[entry] - timeline.dies[entry]) for entry in released} == {OPERATIONS_AHEAD}
    assert all(timeline.dies[entry] <= timeline.reusable[entry] <= ends for entry in weights)


def test_in_backward_they_wait_for_reductions_and_so_no_longer_than_for_four_buckets_of_gradients():
    timeline = ledger(EIGHT_RANKS)
    begins, ends = (int((timeline.phases == Phase.BACKWARD).nonzero()[0][at]) for at in (0, -1))
    weights = holders(timeline, "gathered")
    waiting = [
        sum(int(timeline.num_bytes[e]) for e in weights if timeline.dies[e] <= instant < timeline.reusable[e])
        for instant in range(begins + OPERATIONS_AHEAD, ends, 50)  # what forward has left has passed by then
    ]
    assert 0 < max(waiting) < 4 * 500_000_000 * 2


def test_on_the_computing_stream_a_released_weight_is_free_at_once():
    assert ledger(EIGHT_RANKS.replace(framework_options=FrozenMapping({"overlap_comm": False}))).reusable is None


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        # absolute values in fp16, and a truth value each
        ({"precision": FP16}, [round_up(P // 4 * 2, 512), round_up(P // 4, 512)]),
        ({}, []),  # bf16 needs no scaled loss
        ({"precision": FP16, "offload": Offload(optimizer=True)}, []),  # its gradients are on the host
    ],
)
def test_with_a_scaled_loss_every_step_looks_for_infinite_gradients_on_the_reducing_stream(job, changes, sizes):
    timeline = ledger(job("zero3", **changes))
    found = holders(timeline, "has_overflow")
    assert [int(timeline.num_bytes[entry]) for entry in found] == sizes
    assert all(timeline.streams[entry] == REDUCING for entry in found)


@pytest.mark.parametrize(
    ("release", "precision", "layout", "per_element"),
    [
        ("0.19.5", FP16, "zero2", 11),  # an fp32 copy, three times truth values, and fp32 again
        ("0.19.5", FP16, "zero1", 11),
        ("0.19.6", FP16, "zero2", 0),
        ("0.19.5", Precision(), "zero2", 0),
    ],
)
def test_before_0_19_6_fp16_takes_11_bytes_an_element_of_the_largest_gradient(job, release, precision, layout, per_element):
    versions = FrozenMapping({"deepspeed": release})
    timeline = ledger(job(layout, ranks=1, precision=precision, versions=versions))
    found = [int(timeline.num_bytes[entry]) for entry in holders(timeline, "has_overflow")]
    assert found == [1024 * 256 * per_element] * (per_element > 0)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_stands_when_the_engine_is_made_is_what_the_first_step_begins_with(job, layout, ranks):
    asked = job(layout, ranks=ranks)
    (built,) = building(asked)
    first = ledger(asked, step="first")
    end = len(built.phases)
    left = sorted(
        (name, int(size)) for name, size, dies in zip(built.names, built.num_bytes, built.dies, strict=True) if dies >= end
    )
    stands = [
        (name, int(size))
        for name, size, category, born in zip(first.names, first.num_bytes, first.categories, first.born, strict=True)
        if born == 0 and category in (Category.PARAMETERS, Category.MAIN_PARAMETERS) and name != "gathered"
    ]
    assert left == sorted(stands)


def test_the_engine_leaves_a_clone_and_gradients_that_no_step_uses_in_the_cache(job):
    asked, norms = job("zero3", ranks=1), 5 * 256
    (built,) = building(asked)
    kept = P * 2 + P * 4  # partitions as sent, and the main copy
    assert built.peak().num_bytes == pytest.approx(kept + (P - norms) * 4, abs=1024)  # of the larger of two groups
    steps = [ledger(asked, step=step) for step in ("first", "steady")]
    assert replay_run([built, *steps]).peak_reserved_bytes >= replay_run([built]).peak_reserved_bytes


def test_near_the_limit_waiting_blocks_are_given_back():
    """70B on 64 ranks reserves much more than it allocates. A smaller GPU makes it wait, and not fail."""
    asked = EIGHT_RANKS.replace(
        architecture=catalog.architecture("llama-3.1-70b"),
        micro_batch_size=1,
        parallelism=Parallelism(data_parallel_size=64, zero_stage=3),
    )
    roomy, small = catalog.gpu("B200"), catalog.gpu("A100-80GB")
    waiting = baseline(asked, roomy).waiting_bytes
    assert waiting > 20 * GIB
    assert "blocks_wait" in {finding.code for finding in predict(asked, roomy, None, UNCALIBRATED).found}
    answer = predict(asked, small, None, UNCALIBRATED)
    assert answer.peak_device_bytes.upper_95 <= answer.capacity_bytes
    assert answer.fits == "yes"
