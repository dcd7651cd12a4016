from __future__ import annotations

import json
from dataclasses import replace

import pytest

from peakcast import api, catalog
from peakcast.answers.prediction import QUANTITIES, Interval, Limit
from peakcast.answers.remarks import verdict_reason
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import (
    CAUSES,
    FAILS,
    GUESSED,
    KINDS,
    LESS,
    MORE,
    NEARLY_LESS,
    NEARLY_MORE,
    UNKNOWN,
    Finding,
    found,
)
from peakcast.core.units import GIB, MIB, format_gib
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.jobs.images import Images
from peakcast.jobs.spec import ActivationCheckpointing, Batch, Finetuning, Loss, Offload, Parallelism, TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.calibration import UNCALIBRATED
from peakcast.models.calibration.domain import RANGED, Domain
from peakcast.models.calibration.fit import fit
from peakcast.models.prediction.predict import predict
from peakcast.models.prediction.verdict import Judgement, judge


@pytest.fixture(autouse=True)
def ledger_covers_everything(monkeypatch):
    monkeypatch.setattr("peakcast.models.prediction.predict.known_of", lambda job: ())


@pytest.fixture(scope="module")
def calibration(fakes):
    rows = fakes.rows(num_architectures=24, noise=0.002, hidden=lambda random, unit: 0.02)
    return fit(rows, "H100-80GB", created="2026-11-21", **fakes.stand_ins)


def test_the_point_is_baseline_plus_residual_inside_its_bars(fakes, calibration):
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    allocated = answer.peak_allocated_bytes
    assert allocated.point / allocated.baseline == pytest.approx(1.0202, abs=0.002)
    assert allocated.lower < allocated.point < allocated.upper
    assert allocated.upper / allocated.point - 1 < 0.008
    intervals = [getattr(answer, name).to_mapping() for name in QUANTITIES]
    assert all(isinstance(value, int) for interval in intervals for key, value in interval.items() if key != "rests_on")
    assert allocated.rests_on == "measurements"
    json.dumps(answer.to_mapping(), allow_nan=False)


def test_quantities_contain_each_other(fakes, calibration):
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    assert answer.peak_allocated_bytes.point <= answer.peak_reserved_bytes.point <= answer.peak_device_bytes.point


def test_without_measurements_the_bars_are_wide_and_say_so(fakes):
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, UNCALIBRATED, ledger=fakes.ledger)
    bar = answer.peak_allocated_bytes
    assert (answer.calibration, answer.inside_calibrated_domain) == ("none", False)
    assert bar.point == bar.baseline
    assert bar.upper / bar.point - 1 > 0.04
    assert {getattr(answer, name).rests_on for name in QUANTITIES} == {"judgement"}


def test_another_layout_or_gpu_type_widens_the_bars_with_a_reason(fakes, calibration):
    def width(answer):
        return answer.peak_allocated_bytes.upper / answer.peak_allocated_bytes.point - 1

    device = fakes.devices["H100-80GB"]
    inside = predict(fakes.job(), device, 0, calibration, ledger=fakes.ledger)
    tensor_parallel = fakes.job(parallelism=Parallelism(tensor_parallel_size=2))
    layout = predict(tensor_parallel, device, 0, calibration, ledger=fakes.ledger)
    relative = predict(fakes.job(), fakes.devices["H200"], 0, calibration, ledger=fakes.ledger)
    assert width(layout) > 2 * width(inside)
    assert any("layout=tp" in warning for warning in layout.warnings)
    assert width(relative) > 1.4 * width(inside)
    assert any("not on H200" in warning for warning in relative.warnings)
    assert not layout.inside_calibrated_domain
    assert [finding.code for finding in relative.findings if finding.severity] == ["gpu_not_measured"]


@pytest.mark.parametrize(("architecture", "method"), [("llama-3.1-8b", "full"), ("qwen2.5-7b", "lora")])
def test_a_large_vocabulary_is_no_reason_to_be_outside(architecture, method):
    """Rows of A100 have up to 50,304 words; what more of them take is counted exactly."""
    finetuning = {"method": method, **({"rank": 16} if method == "lora" else {})}
    answer = api.predict({"architecture": architecture, "finetuning": finetuning}, "A100-80GB")
    assert answer.inside_calibrated_domain
    assert answer.peak_allocated_bytes.rests_on == "measurements"


def test_rows_of_another_quantity_are_rows_of_the_gpu_type_and_of_the_release():
    """Of L40S reserved memory was published, with transformers 4.52 to 5.15; of L40 nothing."""
    finetuning = {"method": "lora", "rank": 32}
    job = {"architecture": "llama-3.2-3b", "finetuning": finetuning, "versions": {"transformers": "4.57"}}
    answer = api.predict(job, "L40S")
    assert answer.inside_calibrated_domain
    assert answer.peak_allocated_bytes.rests_on == "relatives"
    assert answer.peak_reserved_bytes.rests_on == "measurements"
    assert not api.predict(job, "L40").inside_calibrated_domain


def test_an_unmodelled_job_is_answered_with_wide_bars(fakes, calibration, monkeypatch):
    monkeypatch.setattr(
        "peakcast.models.prediction.predict.known_of", lambda job: (found("mixtures are not modelled.", "moe"),)
    )
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    assert answer.peak_allocated_bytes.upper / answer.peak_allocated_bytes.point - 1 > 0.12
    assert answer.warnings[0] == "mixtures are not modelled."
    assert answer.to_mapping()["findings"][0] == {
        "code": "not_modelled",
        "parameter": "moe",
        "direction": "either",
        "sentence": "mixtures are not modelled.",
    }


def test_a_network_that_is_only_guessed_is_within_a_factor_of_two_and_never_surely_fits(fakes, calibration, monkeypatch):
    guess = found("nothing knows this network", "architecture", effect=GUESSED)
    monkeypatch.setattr("peakcast.models.prediction.predict.known_of", lambda job: (guess,))
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    bar = answer.peak_allocated_bytes
    assert bar.upper == pytest.approx(2 * bar.point, abs=2)
    assert bar.lower == pytest.approx(bar.point / 2, abs=2)
    assert (bar.rests_on, answer.is_covered, answer.inside_calibrated_domain) == ("judgement", False, False)
    assert (answer.peak_device_bytes.upper_95 < answer.limit.num_bytes, answer.fits) == (True, "uncertain")
    assert verdict_reason(answer).endswith(" GiB if it needs as much as a Llama of its sizes, which is a guess")


def test_what_reading_the_question_found_widens_the_bars(fakes, calibration):
    def answered(*findings):
        return predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger, findings=findings)

    def width(answer):
        return answer.peak_allocated_bytes.upper / answer.peak_allocated_bytes.point - 1

    plain, unknown = answered(), answered(Finding("setting_unknown", "mystery", "either", "mystery is not known."))
    unsupported = answered(Finding("setting_not_modelled", "fp8", "more", "fp8 is not modelled."))
    assert width(plain) < width(unknown) < width(unsupported)


def test_a_residual_never_takes_the_point_below_what_must_exist(fakes):
    rows = fakes.rows(num_architectures=24, noise=0.002, hidden=lambda random, unit: -1.2)
    low = fit(rows, "H100-80GB", created="2026-11-21", **fakes.stand_ins)
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, low, ledger=fakes.ledger)
    assert answer.peak_allocated_bytes.point == 4 * 512 * 2**20


def test_fits(fakes):
    def bars(allocated, reserved, device, spread=0.1):
        def bar(gib):
            low, high = gib * (1 - spread), gib * (1 + spread)
            parts = {"baseline": gib, "point": gib, "lower": low, "upper": high, "upper_95": high}
            return Interval(**{name: int(value * GIB) for name, value in parts.items()})

        return dict(zip(QUANTITIES, (bar(allocated), bar(reserved), bar(device), bar(0)), strict=True))

    gpu = [Limit("peak_device_bytes", 80 * GIB)]
    for size, fits in ((50, "yes"), (70, "uncertain"), (100, "no")):
        assert judge(bars(size, size + 5, size + 7), gpu) == Judgement(fits, gpu[0])
    cached = judge(bars(70, 110, 112), gpu)
    assert (cached.fits, cached.finding.code) == ("uncertain", "cache_beyond_capacity")

    def beside(size, effect):
        return judge(bars(size, size + 5, size + 7), gpu, [found("it is not modelled.", "it", effect=effect)]).fits

    assert [beside(50, effect) for effect in (MORE, LESS, UNKNOWN)] == ["uncertain", "yes", "yes"]
    assert [beside(100, effect) for effect in (MORE, LESS, UNKNOWN)] == ["no", "uncertain", "no"]
    assert [beside(50, effect) for effect in (NEARLY_MORE, FAILS)] == ["yes", "uncertain"]
    assert beside(100, NEARLY_LESS) == "no"


def test_the_worst_limit_decides():
    def bar(gib):
        size = int(gib * GIB)
        return Interval(baseline=size, point=size, lower=size, upper=size, upper_95=size)

    needed = dict(zip(QUANTITIES, map(bar, (50, 60, 62, 100)), strict=True))
    gpu, allocator = Limit("peak_device_bytes", 80 * GIB), Limit("peak_reserved_bytes", 40 * GIB)
    host, other = Limit("peak_host_bytes", 200 * GIB), Limit("peak_host_bytes", 90 * GIB)
    assert judge(needed, [gpu, host]).fits == "yes"
    assert judge(needed, [gpu, allocator, host]) == Judgement("no", allocator)
    assert judge(needed, [gpu, other]) == Judgement("no", other)
    unknown = judge(needed, [gpu, replace(other, known=False)])
    assert (unknown.fits, unknown.finding.code) == ("uncertain", "host_memory_not_given")
    assert judge(needed, [gpu, replace(host, known=False)]).fits == "yes"


def test_the_allocator_may_be_allowed_only_a_part_of_the_gpu():
    job, gpu = TrainingJob(architecture=catalog.architecture("gpt2"), micro_batch_size=8), catalog.gpu("A100-80GB")

    def allowed(part):
        return predict(job.replace(allocator=Allocator(per_process_memory_fraction=part)), gpu)

    assert (allowed(0.01).fits, allowed(0.9).fits) == ("no", "yes")
    assert allowed(0.01).limit == Limit("peak_reserved_bytes", int(0.01 * gpu.cuda_memory_bytes))


def test_host_memory_is_weighed_where_it_is_given_and_doubted_where_it_is_much():
    offloads = Parallelism(data_parallel_size=8, zero_stage=3)
    small, large = (
        TrainingJob(
            architecture=catalog.architecture(name),
            parallelism=offloads,
            offload=Offload(parameters=True, optimizer=True),
            activation_checkpointing=ActivationCheckpointing(mode="full"),
        )
        for name in ("llama-3.1-8b", "llama-3.1-405b")
    )
    gpu = catalog.gpu("H200")
    doubted = predict(large, gpu)
    assert doubted.fits == "uncertain"
    assert (doubted.limit.quantity, doubted.limit.known) == ("peak_host_bytes", False)
    assert "host_memory_not_given" in [finding.code for finding in doubted.findings]
    assert predict(large, replace(gpu, host_memory_bytes=1024 * GIB)).fits == "no"
    assert predict(small, gpu).fits == "yes"
    needed = predict(small, gpu).peak_host_bytes
    assert predict(small, replace(gpu, host_memory_bytes=8 * needed.upper_95 + 8)).fits == "yes"
    assert predict(small, replace(gpu, host_memory_bytes=8 * needed.lower - 8)).fits == "no"
    assert predict(small, replace(gpu, host_memory_bytes=8 * needed.lower - 8, gpus_per_node=1)).fits == "yes"


def test_what_others_hold_is_not_there_for_the_job():
    job, gpu = TrainingJob(architecture=catalog.architecture("gpt2"), micro_batch_size=8), catalog.gpu("A100-80GB")
    alone = predict(job, gpu)
    shared = predict(job.replace(other_memory_fraction=0.75), gpu)
    assert alone.fits == "yes"
    assert shared.capacity_bytes == gpu.cuda_memory_bytes - int(0.75 * gpu.cuda_memory_bytes)
    assert shared.peak_device_bytes == alone.peak_device_bytes
    full = predict(job.replace(other_memory_fraction=0.99), gpu)
    assert full.fits == "no"
    with pytest.raises(SpecError, match=r"other_memory_fraction=1\.0 must be at least 0 and below 1"):
        job.replace(other_memory_fraction=1.0)


def test_the_domain_knows_ranges_versions_and_kinds(fakes, calibration):
    domain = calibration.quantities["peak_allocated_bytes"].domain
    assert Domain.from_mapping(json.loads(json.dumps(domain.to_mapping()))) == domain
    row = {name: (low + high) / 2 for name, (low, high) in domain.ranges.items()}
    assert domain.outside(fakes.job(), row) == []
    far = domain.outside(fakes.job(), {**row, "log2_tokens": 40.0})
    assert [(reason.code, reason.parameter) for reason in far] == [("size_not_measured", "tokens")]
    assert "tokens" in far[0].sentence
    sees = fakes.architecture(model_type="llava", configuration='{"vision_config":{}}')
    for unseen, said in (
        ({"compile": True}, "compile=true"),
        ({"loss": Loss(kind="dpo")}, "loss=dpo"),
        ({"batch": Batch(form="masked", shortest_sequence=8)}, "lengths=changing"),
        ({"images": Images(per_sequence=1, height=448), "architecture": sees}, "inputs=images"),
    ):
        assert any(said in reason.sentence for reason in domain.outside(fakes.job(**unseen), row))


def test_a_kind_is_measured_only_where_one_row_has_all_of_it(fakes):
    """Adapters of dense layers and fully trained experts say nothing of adapters beside experts; nor do adapters of one
    framework of those of another."""
    from types import SimpleNamespace

    sizes = dict.fromkeys(RANGED, 0.0)
    experts = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1408)
    lora, routed = Finetuning(method="lora", rank=8), fakes.architecture(moe=experts)
    rows = [
        SimpleNamespace(row=SimpleNamespace(job=job, gpu="H100-80GB"), architecture="", features=sizes)
        for job in (fakes.job(finetuning=lora), fakes.job(architecture=routed), fakes.job(framework="torch"))
    ]
    domain = Domain.of(rows)
    assert all(domain.outside(one.row.job, sizes) == [] for one in rows)
    (both,) = domain.outside(fakes.job(architecture=routed, finetuning=lora), sizes)
    assert (both.code, both.parameter, both.severity) == ("kind_not_measured", "finetuning", 2)
    assert "huggingface, train, experts, adapters" in both.sentence
    (elsewhere,) = domain.outside(fakes.job(framework="torch", finetuning=lora), sizes)
    assert "torch, train, dense, adapters" in elsewhere.sentence


def test_bars_of_the_quantities_agree_with_what_contains_what():
    from peakcast.answers.prediction import Interval
    from peakcast.models.prediction.combining import nested

    def bar(lower, point, upper):
        return Interval(baseline=point, point=point, lower=lower, upper=upper, upper_95=upper)

    loose = {
        "peak_allocated_bytes": bar(90, 100, 140),
        "peak_reserved_bytes": bar(60, 110, 200),
        "peak_device_bytes": bar(80, 120, 130),
        "peak_host_bytes": bar(0, 0, 0),
    }
    tight = nested(loose)
    assert [tight[name].lower for name in loose] == [90, 90, 90, 0]
    assert [tight[name].upper for name in loose] == [130, 130, 130, 0]
    assert [tight[name].point for name in loose] == [100, 110, 120, 0]


def test_the_host_memory_of_a_node_is_that_of_its_ranks(fakes, calibration):
    job = fakes.job(offload=Offload(optimizer=True), parallelism=Parallelism(data_parallel_size=4, zero_stage=2))
    answer = predict(job, fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    each = answer.peak_host_bytes.baseline
    assert each > 0
    assert f"a node of 4 such ranks needs {format_gib(4 * each)} of host memory for it." in answer.assumptions
    alone = predict(job.replace(parallelism=Parallelism()), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    assert not any("node" in sentence for sentence in alone.assumptions)


def test_what_the_replay_is_known_to_miss_is_said_and_changes_no_bar_of_tensors(fakes, calibration):
    """A cause of error in what the allocator keeps, not in what is counted: the verdict stays."""
    from peakcast.models.baseline.reserved_findings import reserved_findings

    def codes(**changes):
        return [(finding.code, finding.parameter, finding.direction) for finding in reserved_findings(fakes.job(**changes))]

    experts = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1408)
    assert codes() == []
    assert codes(architecture=fakes.architecture(moe=experts)) == [("reserved_beyond_replay", "moe", "more")]
    generates = {"task": "inference", "framework": "huggingface"}
    releases = ({"transformers": "4.34.1"}, {"transformers": "4.35.2"}, {})
    said = [codes(**generates, versions=FrozenMapping(release)) for release in releases]
    assert said == [[("reserved_beyond_replay", "task", "more")], [], []]
    titan = {"framework": "torch", "versions": FrozenMapping({"torchtitan": "0.2.0"})}
    routed = fakes.architecture(moe=experts, model_type="deepseek_v3")
    assert codes(**titan, architecture=routed) == [("reserved_beyond_replay", "moe", "more")]
    assert codes(**titan) == []
    changing = Batch(shortest_sequence=91)
    quantised = Finetuning(method="qlora", rank=8, quantization="nf4")
    sharded = Parallelism(data_parallel_size=2, sharding="fsdp1")
    said = codes(finetuning=quantised, parallelism=sharded), codes(finetuning=quantised)
    assert said == ([("reserved_beyond_replay", "finetuning.quantization", "more")], [])
    zero, engine = {"framework": "deepspeed", "offload": Offload(optimizer=True)}, "reserved_beyond_replay"
    one = Parallelism(data_parallel_size=2, zero_stage=2)
    assert codes(**zero, parallelism=one) == [(engine, "offload.optimizer", "more")]
    assert codes(**zero | {"framework": "megatron"}, parallelism=replace(one, zero_stage=1)) == []  # not DeepSpeed's engine
    assert codes(framework="deepspeed", parallelism=one) == []
    assert codes(batch=changing) == [("reserved_beyond_replay", "batch.shortest_sequence", "more")]
    assert not KINDS["reserved_beyond_replay"].uncounted
    assert {*CAUSES} <= {*KINDS}


def test_an_estimate_is_named_where_it_may_be_a_tenth_of_the_answer_and_nothing_was_measured(fakes, calibration):
    """The most that equal runs on two machines differed by, beside what is predicted: 9 times as much hides it."""
    from peakcast.models.baseline.measured_constants import Outside
    from peakcast.models.prediction.outside_findings import ELSEWHERE_BYTES, outside_estimated

    one, several = ELSEWHERE_BYTES
    alone = replace(baseline(fakes.job(), fakes.devices["H100-80GB"], ledger=fakes.ledger), communicator_bytes=0)
    ranks = replace(alone, communicator_bytes=1)
    small = outside_estimated(alone, 9 * one - MIB)
    assert (small.code, small.direction, small.uncounted, small.severity) == ("outside_estimated", "more", False, 0)
    assert "collect constants" in small.sentence
    assert outside_estimated(alone, 9 * one + MIB) is None
    assert "NCCL" in outside_estimated(ranks, 9 * one + MIB).sentence
    assert outside_estimated(ranks, 9 * several + MIB) is None
    read = Outside(context_bytes=1, kernels_bytes=1, communicator_bytes=0, missing=())
    assert outside_estimated(replace(alone, outside=read), 9 * one - MIB) is None
    answer = predict(fakes.job(), fakes.devices["H100-80GB"], 0, calibration, ledger=fakes.ledger)
    assert small.sentence in answer.warnings
