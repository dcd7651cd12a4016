"""What building a network leaves behind: FSDP1's units, one after the other."""

from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB
from peakcast.jobs.spec import Finetuning, Parallelism, TrainingJob
from peakcast.measurements.store import datasets_folder, read_csv
from peakcast.models.allocator.replay import replay_run
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.building import building
from peakcast.models.baseline.ledger import ledger
from peakcast.models.calibration.samples import prepare
from peakcast.models.ledger.layouts.broadcast import (
    BROADCAST_BUCKET_BYTES,
    LAUNCHES_OF_A_UNIT,
    Broadcasts,
    size_buckets,
)
from peakcast.models.ledger.layouts.fsdp_units import Unit
from peakcast.models.ledger.layouts.run_ahead import LAUNCHES_AHEAD
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category

SHARDED = TrainingJob(
    architecture=catalog.architecture("llama-3.2-1b"),
    sequence_length=512,
    parallelism=Parallelism(data_parallel_size=2, sharding="fsdp1"),
)


@pytest.mark.parametrize("changes", [{}, {"finetuning": Finetuning(method="qlora", rank=8, quantization="nf4")}])
def test_what_stands_when_it_is_built_is_what_the_first_step_begins_with(changes):
    job = SHARDED.replace(**changes)
    (built,) = building(job)
    first = ledger(job, step="first")
    stands = {
        (name, module, size)
        for name, module, size, category, born in zip(
            first.names, first.modules, first.num_bytes.tolist(), first.categories, first.born, strict=True
        )
        if born <= 0 and category == Category.PARAMETERS and size
    }
    end = len(built.phases)
    left = {
        (name, module, size)
        for name, module, size, dies in zip(
            built.names, built.modules, built.num_bytes.tolist(), built.dies, strict=True
        )
        if dies >= end
    }
    assert left <= stands
    assert sum(size for *_, size in left) > 0.9 * sum(size for *_, size in stands)


def test_a_unit_is_there_as_its_tensors_and_joined_while_its_part_is_copied():
    """The root's 128,256 x 2,048 table in bf16 is the largest unit: twice whole, and half of it, beside the parts of the
    layers; one tensor, so that nothing is copied to send it."""
    (built,) = building(SHARDED)
    network = SHARDED.architecture
    root = (network.vocab_size + 1) * network.hidden_size * 2
    layers = sum(
        size for name, module, size in zip(built.names, built.modules, built.num_bytes.tolist(), strict=True)
        if name == "flat_param" and module != "root"
    )  # fmt: skip
    assert built.peak().num_bytes == pytest.approx(layers + 2.5 * root, abs=4 * MIB)


def test_buckets_end_with_the_tensor_that_fills_them():
    assert size_buckets([100 * MIB] * 5) == [[100 * MIB] * 3, [100 * MIB] * 2]
    assert size_buckets([BROADCAST_BUCKET_BYTES, 1]) == [[BROADCAST_BUCKET_BYTES], [1]]
    assert size_buckets([1, 1]) == [[1, 1]]


def test_joining_a_unit_does_not_wait_until_its_weights_are_sent():
    """What is sent goes when the rank next copies weights from the host: until then nothing has waited for the GPU."""
    (built,) = building(SHARDED)
    lives = {
        name: [(module, born, dies) for name_, module, born, dies in zip(
            built.names, built.modules, built.born.tolist(), built.dies.tolist(), strict=True) if name_ == name]
        for name in ("broadcast", "flat_param.whole", "unsharded")
    }  # fmt: skip
    joined = {module: born for module, born, _ in lives["flat_param.whole"]}
    moved = sorted(born for _, born, _ in lives["unsharded"])
    for module, born, dies in lives["broadcast"]:
        following = [at for at in moved if at > born]
        assert born < joined[module] < dies
        assert not following or dies > following[0]


def test_a_replay_that_begins_with_it_never_reserves_less_than_it_did():
    (built,) = building(SHARDED)
    steps = [ledger(SHARDED, step=step) for step in ("first", "steady")]
    assert replay_run([built, *steps]).peak_reserved_bytes >= replay_run([built]).peak_reserved_bytes


def test_weights_that_are_not_sent_need_nobuckets():
    quiet = SHARDED.replace(framework_options=FrozenMapping({"fsdp1_sync_module_states": False}))
    assert "broadcast" in building(SHARDED)[0].names
    assert "broadcast" not in building(quiet)[0].names


def test_where_the_order_is_not_the_framework_s_nothing_is_said():
    alone = replace(SHARDED, parallelism=Parallelism())
    spread = replace(SHARDED, parallelism=Parallelism(data_parallel_size=2))
    assert building(alone) == building(spread) == []


def test_a_rank_without_weights_runs_ahead_until_the_queue_of_launches_is_full():
    """Units of ten tensors of 20 MiB, one bucket each: eleven launches and three. Usually a unit's buckets go with it;
    on a rank that runs ahead one goes when more than 1,024 launches came after its own last: 1,025 + 11 are 74 units."""

    def most(ahead, units):
        step, sent = Step(), Broadcasts(ahead=ahead)
        for index in range(units):
            sent.copied_from_host(step)
            sent.send(step, Unit(f"layers.{index}", (), ()), [20 * MIB] * 10)
        sent.finish(step)
        return step.timeline().peak().num_bytes // (200 * MIB)

    assert (LAUNCHES_AHEAD, LAUNCHES_OF_A_UNIT) == (1024, 3)
    assert (most(False, 200), most(True, 50), most(True, 200)) == (1, 50, 74)


def test_the_others_run_ahead_in_published_runs():
    """Mixtral-8x7B in 4 bits with fused adapters on two A100, tables of October and November 2024: the plug-in kept every
    rank's weights on its host before. The source gives nvidia-smi's mean of both GPUs, 10 GiB more in the second."""
    rows = [
        row
        for row in read_csv(datasets_folder() / "published" / "fms_history.csv")
        if row.case.endswith("Mixtral-8x7B-Instruct-v0.1/2 GPUs/batch 2/lora/accelerated-peft-bnb-foak")
        and row.observed in ("2024-10-14", "2024-11-14")
    ]
    october, november = sorted(prepare(rows).samples, key=lambda sample: sample.row.observed)
    errors = [sample.baseline.peak_device_bytes / sample.row.peak_device_bytes - 1 for sample in (october, november)]
    assert errors == pytest.approx([-0.048, -0.038], abs=0.005)
    alone = baseline(november.row.job, november.device, 0)
    assert november.baseline.peak_reserved_bytes - alone.peak_reserved_bytes > 9 * 1024 * MIB
    assert baseline(november.row.job, november.device).peak_reserved_bytes > 41000 * MIB
