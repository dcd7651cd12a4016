"""`peakcast collect constants`: what is read, what a machine cannot tell, and a real GPU's own (run with -m gpu)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from peakcast import api
from peakcast.catalog.constants import load_constants
from peakcast.collectors.measure import constants
from peakcast.collectors.measure.communicators import communicators, sizes
from peakcast.collectors.measure.constants import COMMUNICATORS, FIRST_USES, read_constants
from peakcast.collectors.measure.growth import Growth
from peakcast.commands import cli
from peakcast.core.errors import CollectorError
from peakcast.core.units import MIB

ALONE = {
    "gpu_name": "NVIDIA H100 80GB HBM3", "cuda": "13.0", "driver": "580.65", "num_gpus": 1, "nvml": [],
    "versions": {"python": "3.11", "torch": "2.11.0+cu130"}, "context_bytes": 520 * MIB,
    "steps": [
        {"step": "cublas", "outside_bytes": 80 * MIB, "kept_bytes": 1, "temporary_bytes": 2},
        {"step": "cross entropy", "outside_bytes": -3, "kept_bytes": 0, "temporary_bytes": 0},
        {"step": "liger", "reason": "ModuleNotFoundError: No module named 'liger_kernel'"},
        {"step": "nccl", "outside_bytes": 30 * MIB, "kept_bytes": 0, "temporary_bytes": 0},
    ],
}  # fmt: skip
TOGETHER = {"nccl": 31 * MIB, "communicators": {"2": 300 * MIB, "4": 500 * MIB}}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAKCAST_CONSTANTS", str(tmp_path / "constants"))
    return tmp_path / "constants"


def machine(alone, together=None):
    """A machine whose two programs find this; an error is raised."""

    def probe(module, num_ranks, timeout_seconds):
        found = alone if module == FIRST_USES else together
        assert num_ranks == (1 if module == FIRST_USES else alone["num_gpus"])
        assert module in (FIRST_USES, COMMUNICATORS)
        if isinstance(found, Exception):
            raise found
        return found

    return probe


def test_one_gpu_tells_its_context_and_each_librarys_first_use(monkeypatch, folder, capsys):
    monkeypatch.setattr(constants, "run_probe", machine(ALONE))
    assert cli._run(["collect", "constants"]) == 0
    printed = capsys.readouterr().out
    found = load_constants(folder / "H100-80GB.json")
    assert found.gpu == "H100-80GB"
    assert found.context_bytes == 520 * MIB
    assert found.first_uses_bytes == {"cublas": 80 * MIB, "cross entropy": 0, "nccl": 30 * MIB}
    assert found.communicator_bytes == {}
    assert found.versions == {"torch": "2.11.0+cu130", "cuda": "13.0", "driver": "580.65"}
    assert "liger was not read: ModuleNotFoundError" in printed
    assert "NCCL's communicators were not read, since only one GPU is here; they are estimated." in printed
    assert f"Kept in {folder / 'H100-80GB.json'}" in " ".join(printed.split())


def test_several_gpus_tell_communicators_too():
    found = read_constants(None, 60, machine({**ALONE, "num_gpus": 4}, TOGETHER)).constants
    assert found.communicator_bytes == {"2": 300 * MIB, "4": 500 * MIB}
    assert found.first_uses_bytes["nccl"] == 31 * MIB


def test_ranks_that_fail_cost_the_communicators_only():
    read = read_constants(None, 60, machine({**ALONE, "num_gpus": 4}, CollectorError("torchrun is gone.")))
    assert (read.constants.context_bytes, read.constants.communicator_bytes) == (520 * MIB, {})
    assert "NCCL's communicators were not read: torchrun is gone." in read.remarks


def test_the_json_has_what_the_file_has(monkeypatch, folder, capsys):
    monkeypatch.setattr(constants, "run_probe", machine({**ALONE, "gpu_name": "something new"}))
    assert cli._run(["collect", "constants", "--gpu", "l40s", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    path = folder / "L40S.json"
    assert printed.pop("path") == str(path)
    assert printed.pop("remarks")
    assert printed == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({**ALONE, "context_bytes": None, "nvml": ["NVML cannot be read: no driver."]}, "NVML cannot be read: no driver."),
        ({**ALONE, "gpu_name": "something new"}, "name its type with --gpu"),
        (CollectorError("it ended with exit code 1: nothing."), "it ended with exit code 1: nothing."),
    ],
)
def test_what_a_machine_cannot_tell_is_one_sentence_and_leaves_no_file(monkeypatch, folder, capsys, found, words):
    monkeypatch.setattr(constants, "run_probe", machine(found))
    assert cli._run(["collect", "constants"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not folder.exists()


def test_without_a_gpu_it_says_what_is_missing(capsys):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert cli._run(["collect", "constants"]) == 2
    assert capsys.readouterr().err == (
        "peakcast: no CUDA GPU is available here; `peakcast collect constants` reads a real one, so run it on a machine "
        "with a GPU.\n"
    )


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('peakcast: the driver is gone')", "ended with exit code 1: the driver is gone"),
        ("print('=' * 60)\nimport sys; sys.stderr.write('lost it\\n' + '=' * 60); sys.exit(3)", "exit code 3: lost it"),
        ("import time; time.sleep(60)", "gave no answer within timeout_seconds=2"),
        ("pass", "left no reading"),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "torch is not installed here"),
    ],
)
def test_a_program_that_fails_is_a_sentence(tmp_path, monkeypatch, program, words):
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(CollectorError, match=words):
        constants.run_probe("program", 1, 2)


@pytest.mark.whole
def test_ranks_without_a_gpu_say_so_through_torchrun(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CollectorError, match="no CUDA GPU is available here; `peakcast collect constants`"):
        constants.run_probe(COMMUNICATORS, 2, 60)


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "W1 torchrun\npeakcast: rank 1: RuntimeError: NCCL is not built in\npeakcast: rank 0: it is gone\n====\n",
            "rank 1: RuntimeError: NCCL is not built in",
        ),
        ("traceback : Signal 9 (SIGKILL) received by PID 7\n====\n", "traceback : Signal 9 (SIGKILL) received by PID 7"),
        ("\n====\n", "it said nothing"),
    ],
)
def test_of_ranks_that_fail_the_first_ones_sentence_is_told(said, cause):
    assert constants._cause(said) == cause


@pytest.mark.parametrize(
    "arguments",
    [["--trace"], ["--shard", "x.jsonl"], ["--engine-set", "a=1"], ["--ranks", "one"], ["--budget-minutes", "1"]],
)
def test_options_of_grids_are_refused(capsys, arguments):
    assert cli._run(["collect", "constants", *arguments]) == 2
    assert f"{arguments[0]} is for the cells of a grid; leave it out to collect constants." in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="must be above 0 and finite"):
        api.collect_constants(timeout_seconds=seconds)


# -- the programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6)), (8, (2, 4, 8))])
def test_communicators_of_every_power_of_two_and_of_all(num_ranks, expected):
    assert sizes(num_ranks) == expected


def test_loading_nccl_is_told_apart_from_communicators():
    memory = {"used": 1000}
    asked = []

    def use(ranks):
        if not asked:
            memory["used"] += 70  # NCCL's kernels
        asked.append(ranks)
        memory["used"] += 10 * len(ranks) if 0 in ranks else 0

    found = communicators(4, Growth(lambda: memory["used"], lambda: 0, 1000), use)
    assert asked == [(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)]
    assert found == {"nccl": 80, "communicators": {"2": 20, "4": 40}}


def test_the_program_of_first_uses_gives_what_is_read(stand_in, monkeypatch, tmp_path):
    """On a GPU that is not there, whose driver counts 500 MiB more for a context and 60 more for cuBLAS. Another process
    holds some of it, and torch has another attention than ours."""
    torch = pytest.importorskip("torch")
    from peakcast.collectors.machine import probes
    from peakcast.collectors.machine.nvml import Nvml
    from peakcast.collectors.measure import first_uses

    class Read(Nvml):
        def used_bytes(self):
            return stand_in.used

        def used_by_processes_bytes(self):
            return 3_000 * MIB

    def opened():
        stand_in.reserved += 2 * MIB
        stand_in.used += 502 * MIB

    def cublas(device):
        stand_in.reserved += 8 * MIB
        stand_in.used += 68 * MIB

    def another_signature(device):
        raise TypeError("unexpected keyword argument 'enable_gqa'")

    real = first_uses.first_uses
    monkeypatch.setattr(first_uses, "Nvml", Read)
    monkeypatch.setattr(first_uses, "first_uses", lambda device, growth: real(device, growth, {"cublas": cublas}))
    monkeypatch.setattr(first_uses, "chosen_attention", another_signature)
    monkeypatch.setattr(probes, "open_context", opened)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("peakcast.collectors.machine.nvml.SETTLING_SECONDS", 0.0)
    stand_in.used = 33 * MIB

    def probe(module, num_ranks, timeout_seconds):
        assert first_uses.main([str(tmp_path / "found.json")]) == 0
        return json.loads((tmp_path / "found.json").read_text())

    read = read_constants(None, 60, probe)
    found = read.constants
    assert found.gpu == "H100-80GB"
    assert found.context_bytes == 500 * MIB
    assert found.first_uses_bytes == {"cublas": 60 * MIB}
    assert read.remarks[0] == first_uses.BUSY
    assert "the choice of attention kernels was not read: TypeError: unexpected keyword" in " ".join(read.remarks)


def test_without_nvml_no_step_is_run_in_vain(stand_in, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from peakcast.collectors.measure import first_uses

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(first_uses, "first_uses", lambda *_: pytest.fail("a step was run"))
    monkeypatch.setattr(first_uses, "chosen_attention", lambda device: [])

    def probe(module, num_ranks, timeout_seconds):
        assert first_uses.main([str(tmp_path / "found.json")]) == 0
        return json.loads((tmp_path / "found.json").read_text())

    with pytest.raises(CollectorError, match="NVML cannot be read: pynvml is not installed"):
        read_constants(None, 60, probe)


def test_a_kernel_that_fails_later_costs_its_own_step_only(stand_in, monkeypatch):
    """CUDA reports what went wrong in a kernel at the next wait for the GPU, not where it was launched."""
    torch = pytest.importorskip("torch")
    from peakcast.collectors.measure import first_uses

    broken = []

    def wait(*_):
        if broken:
            raise RuntimeError(f"CUDA error: {broken.pop()}")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)

    def cublas(device):
        stand_in.used += 60 * MIB

    steps = {"attention: cudnn": lambda device: broken.append("misaligned address"), "cublas": cublas}
    found = first_uses.first_uses("cuda", Growth(lambda: stand_in.used, lambda: 0, 0), steps)
    assert found[0] == {"step": "attention: cudnn", "reason": "RuntimeError: CUDA error: misaligned address"}
    assert (found[1]["step"], found[1]["outside_bytes"]) == ("cublas", 60 * MIB)


@pytest.mark.gpu
def test_on_a_real_gpu_predictions_rest_on_what_was_read(folder):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = subprocess.run(
        [sys.executable, "-m", "peakcast", "collect", "constants", "--json"],
        capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    read = json.loads(done.stdout)
    assert 100 * MIB < read["context_bytes"] < 2048 * MIB
    assert read["first_uses_bytes"]["cublas"] > 0
    assert len(read["communicator_bytes"]) == len(sizes(torch.cuda.device_count())) * (torch.cuda.device_count() > 1)
    answer = api.predict({"architecture": "llama-3.2-1b", "sequence_length": 512}, read["gpu"])
    outside = answer.peak_device_bytes.point - answer.peak_reserved_bytes.point
    assert read["context_bytes"] < outside < read["context_bytes"] + sum(read["first_uses_bytes"].values())
    assert any(read["path"] in said for said in answer.assumptions)
