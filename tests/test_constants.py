"""Files of measured constants: they come back as written, a damaged one is a sentence, and predictions rest on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peakcast import api
from peakcast.answers.prediction import QUANTITIES, Prediction
from peakcast.catalog import gpu
from peakcast.catalog.constants import Constants, constants_path, load_constants, own_constants, save_constants
from peakcast.commands import cli
from peakcast.core.errors import RecordError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import MIB
from peakcast.models.baseline.device_memory import one_communicator_bytes
from peakcast.models.baseline.measured_constants import outside
from peakcast.web.asking import PageState, answered

JOB = {"architecture": "llama-3.2-1b", "sequence_length": 512}
USES = {
    "elementwise": 10, "cublas": 20, "cublaslt": 5, "cublas in backward": 1, "embedding backward": 2, "cross entropy": 3,
    "attention: flash": 4, "adamw: foreach": 6, "adamw: fused": 9, "nccl": 50, "cudnn": 700,
}  # fmt: skip
OF_JOB = 10 + 20 + 5 + 1 + 2 + 3 + 4 + 6
"""What of these a step of `JOB` has, in MiB."""


def constants(**changes: Any) -> Constants:
    found = Constants(
        gpu="H100-80GB",
        context_bytes=520 * MIB,
        first_uses_bytes=FrozenMapping({name: size * MIB for name, size in USES.items()}),
        versions=FrozenMapping({"torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.65"}),
        observed="2026-01-31",
    )
    return replace(found, **changes)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAKCAST_CONSTANTS", str(tmp_path / "constants"))


def device_bytes(answer: Prediction) -> int:
    return answer.peak_device_bytes.point - answer.peak_reserved_bytes.point


# -- the file -------------------------------------------------------------------------------------------------------------


def test_they_come_back_as_written() -> None:
    written = constants(communicator_bytes=FrozenMapping({"2": 300 * MIB, "8": 990 * MIB}))
    path = save_constants(written)
    assert load_constants(path) == own_constants("H100-80GB") == written
    assert load_constants(path).to_bytes() == path.read_bytes()
    assert own_constants("L40S") is None


def test_they_are_among_the_users_own_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PEAKCAST_CONSTANTS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert constants_path("L40S") == tmp_path / "peakcast" / "constants" / "L40S.json"


WHOLE = constants(communicator_bytes=FrozenMapping({"2": 1})).to_mapping()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b'{"schema_version": 2}', b"1" * 5000,
        *(json.dumps({**WHOLE, **change}).encode() for change in (
            {"gpu": 3}, {"gpu": ""}, {"gpu": "L40S"}, {"context_bytes": 1e300}, {"context_bytes": -1},
            {"context_bytes": 2**60}, {"context_bytes": None}, {"context_bytes": True}, {"first_uses_bytes": [1]},
            {"first_uses_bytes": {"cublas": "1"}}, {"communicator_bytes": {"eight": 1}}, {"communicator_bytes": {"1": 1}},
            {"communicator_bytes": {"9" * 400: 1}}, {"versions": {"torch": 2}}, {"observed": 7}, {"another": 1},
        )),
        json.dumps({key: value for key, value in WHOLE.items() if key != "context_bytes"}).encode(),
    ],
)  # fmt: skip
def test_a_damaged_file_is_a_sentence(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = constants_path("H100-80GB")
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(RecordError, match="is not what `peakcast collect constants` writes"):
        own_constants("H100-80GB")
    assert cli._run(["predict", "--model", "llama-3.2-1b", "--gpu", "H100-80GB"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"peakcast: {path} is not what")
    assert said.rstrip().endswith("run it again, or delete the file.")


def test_a_place_that_cannot_be_written_is_a_sentence() -> None:
    constants_path("H100-80GB").parent.write_text("a file")
    with pytest.raises(RecordError, match="a file is where its folder should be"):
        save_constants(constants())


# -- predictions ----------------------------------------------------------------------------------------------------------


def test_device_memory_is_reserved_memory_and_what_was_read() -> None:
    before = api.predict(JOB, "H100-80GB")
    save_constants(constants())
    after = api.predict(JOB, "H100-80GB")
    assert device_bytes(after) == (520 + OF_JOB) * MIB != device_bytes(before)
    assert after.peak_device_bytes.baseline - after.peak_reserved_bytes.baseline == (520 + OF_JOB) * MIB
    for quantity in QUANTITIES:
        if quantity != "peak_device_bytes":
            assert getattr(after, quantity).point == getattr(before, quantity).point
    elsewhere = api.predict(JOB, "A100-80GB")
    assert not any("collect constants" in said for said in elsewhere.assumptions)


def test_the_point_moves_by_exactly_what_readings_differ_by() -> None:
    save_constants(constants())
    less = api.predict(JOB, "H100-80GB")
    save_constants(constants(context_bytes=777 * MIB))
    more = api.predict(JOB, "H100-80GB")
    assert more.peak_device_bytes.point - less.peak_device_bytes.point == 257 * MIB


@pytest.mark.parametrize(
    ("ranks", "read", "expected"),
    [
        (8, {"2": 300, "8": 900}, 900),
        (4, {"4": 500, "8": 900}, 500),
        (2, {"2": 300, "8": 900}, 300),
    ],
)
def test_communicators_are_those_that_were_read(ranks: int, read: dict[str, int], expected: int) -> None:
    save_constants(constants(communicator_bytes=FrozenMapping({name: size * MIB for name, size in read.items()})))
    job = {**JOB, "parallelism": {"data_parallel_size": ranks, "sharding": "fsdp2"}}
    answer = api.predict(job, "H100-80GB")
    assert device_bytes(answer) == (520 + OF_JOB + 50 + expected) * MIB


def test_a_larger_communicator_than_was_read_is_scaled_as_the_estimates_are() -> None:
    device = replace(gpu("H100-80GB"), constants=constants(communicator_bytes=FrozenMapping({"2": 300 * MIB})))
    job = api.read({**JOB, "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"}}).job
    pair, eight = (one_communicator_bytes(device, ranks, job.versions) for ranks in (2, 8))
    found = outside(job, device)
    assert found is not None
    assert found.communicator_bytes == 50 * MIB + 300 * MIB * eight // pair


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"}}, "NCCL's communicators"),
        ({"compile": True}, "triton, inductor"),
        ({"optimizer": {"name": "adamw_8bit"}}, "bitsandbytes: adamw_8bit"),
    ],
)
def test_what_was_not_read_is_named_and_nothing_becomes_less_for_it(change: dict[str, Any], missing: str) -> None:
    before = api.predict({**JOB, **change}, "H100-80GB")
    save_constants(constants(context_bytes=1))
    small = api.predict({**JOB, **change}, "H100-80GB")
    assert small.peak_device_bytes.point == before.peak_device_bytes.point
    (said,) = [said for said in small.assumptions if "collect constants" in said]
    assert said.startswith("device memory is no less than reserved memory and what")
    assert said.endswith(f"Not read there: {missing}.")
    save_constants(constants(context_bytes=20_000 * MIB))
    assert device_bytes(api.predict({**JOB, **change}, "H100-80GB")) >= 20_000 * MIB


@pytest.mark.parametrize(("versions", "used"), [({}, True), ({"torch": "2.11"}, True), ({"torch": "2.4.1+cu121"}, False)])
def test_readings_of_another_cuda_are_not_used_and_that_is_said(versions: dict[str, str], used: bool) -> None:
    before = api.predict({**JOB, "versions": versions}, "H100-80GB")
    save_constants(constants())
    after = api.predict({**JOB, "versions": versions}, "H100-80GB")
    assert (device_bytes(after) == (520 + OF_JOB) * MIB) is used
    if not used:
        assert after.peak_device_bytes == before.peak_device_bytes
        assert any("that was under CUDA 13, and this job's versions mean CUDA 12." in said for said in after.assumptions)


def test_every_door_uses_them_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    question = {"gpu": "H100-80GB", "job": JOB}
    (estimated,) = api.predict_batch([question])  # an answer that is remembered, until something was read
    assert not any("collect constants" in said for said in estimated["assumptions"])
    path = save_constants(constants())
    said = (
        "device memory is reserved memory and what `peakcast collect constants` read on H100-80GB here "
        f"(2026-01-31, {path}): CUDA context 0.51 GiB, kernels and handles 0.05 GiB."
    )
    point = api.predict(JOB, "H100-80GB").peak_device_bytes.point
    (batch,) = api.predict_batch([question])
    assert batch["peak_device_bytes"]["point"] == point
    page = answered(PageState(text=json.dumps(JOB), gpu="H100-80GB")).prediction
    assert page.peak_device_bytes.point == point
    flags = ["--model", "llama-3.2-1b", "--sequence-length", "512", "--gpu", "H100-80GB", "--json"]
    cli._run(["predict", *flags])
    printed = json.loads(capsys.readouterr().out)
    assert printed["peak_device_bytes"]["point"] == point
    explained = api.explain(JOB, "H100-80GB")
    for assumptions in (batch["assumptions"], printed["assumptions"], explained.assumptions, page.assumptions):
        assert said in assumptions


def test_the_served_model_and_the_search_use_them() -> None:
    from peakcast.models.calibration.calibration import calibrations
    from peakcast.models.prediction.serving import answer_row

    save_constants(constants())
    point = api.predict(JOB, "H100-80GB").peak_device_bytes.point
    row = {"architecture": "llama-3.2-1b", "sequence_length": 512}
    assert answer_row(row, calibrations()["H100-80GB"])["peak_device_bytes.point"] == point
    found = api.search(JOB, "H100-80GB", num_gpus=1, top=3, processes=2)
    assert {plan.peak_device_bytes.point for plan in found.plans} == {  # type: ignore[union-attr]
        api.predict(plan.job, "H100-80GB").peak_device_bytes.point for plan in found.plans  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("read", [False, True])
def test_no_search_misses_a_plan_that_surely_fits(read: bool) -> None:
    from peakcast.models.prediction.predict import could_surely_fit, predict

    device = replace(gpu("RTX4090"), constants=constants(gpu="RTX4090") if read else None)
    job = api.read({**JOB, "activation_checkpointing": {"mode": "full"}}).job
    sure: Callable[[Any], bool] = lambda job: predict(job, device).fits == "yes"  # noqa: E731
    jobs = [job.replace(micro_batch_size=size) for size in (1, 2, 4, 8, 16)]
    for each in filter(sure, jobs):
        assert could_surely_fit(each, device, predict(each, device).peak_allocated_bytes.baseline)


def test_fits_of_calibrations_do_not_see_them() -> None:
    from peakcast.models.calibration.samples import _catalog_device

    save_constants(constants())
    assert _catalog_device("H100-80GB").constants is None
