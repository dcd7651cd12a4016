"""Functions that train, and the limits of a dry run."""

from __future__ import annotations

import os
import shutil
import socket
import time
from pathlib import Path

import pytest

import peakcast
from peakcast.core.errors import ScriptError, SpecError

pytest_plugins = ["pytester"]


def training(width=512, steps=5):
    import torch

    def train():
        model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(64, width, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def test_a_function_that_trains_is_answered_as_a_script():
    found = peakcast.dryrun(training(), "A100-80GB")
    weights = 2 * (512 * 512 + 512) * 4
    assert found.answer.composition["parameters"] == pytest.approx(weights, rel=1e-2)
    assert found.answer.fits == "yes"
    assert found.to_mapping()["dryrun"]["steps"] == 3


@pytest.mark.parametrize(("shape", "batch"), [((4, 96, 512), (4, 96)), ((6, 3, 512, 512), (6, 1))])
def test_rows_without_tokens_are_vectors_or_images(shape, batch):
    """Masks that a network makes, as those of ReLU, are no tokens."""

    def train():
        import torch

        layer = torch.nn.TransformerEncoderLayer(512, 8, 1024, batch_first=True)
        if len(shape) == 4:
            pool = torch.nn.AdaptiveAvgPool2d(8)
            first = torch.nn.Conv2d(3, 8, 3)
            layer = torch.nn.Sequential(first, pool, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(512, 512))
        model = layer.cuda()
        model(torch.randn(shape, device="cuda"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(shape, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    job = peakcast.dryrun(train, "A100-80GB").job
    assert (job.micro_batch_size, job.sequence_length) == batch
    assert job.architecture.head_dim == 64


def test_a_process_that_has_trained_can_be_asked():
    """Its threads, which no copy of it would have, have worked already: autograd's and those of parallel kernels."""
    import torch

    def train(device):
        model = torch.nn.Linear(256, 256).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            (torch.arange(2**21) * 3).sum()
            inputs = torch.randn(6400, 256, device=device)
            torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train("cpu")
        assert [peakcast.dryrun(lambda: train("cuda"), "A100-80GB", timeout_seconds=60).steps for _ in range(2)] == [3, 3]
    finally:
        torch.set_num_threads(threads)


def test_what_a_function_closes_over_comes_along():
    """A network that is there already, its data and a function of this file, which no other process can import."""
    import torch

    model = torch.nn.Linear(512, 512)
    data = torch.arange(512.0)

    def train():
        assert data[3].item() == 3.0
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(data.cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        training()

    found = peakcast.dryrun(train, "A100-80GB")
    assert found.answer.composition["parameters"] == pytest.approx((512 * 512 + 512) * 4, rel=1e-2)
    assert model.weight.device.type == "cpu"


def test_what_cannot_come_along_is_said(tmp_path):
    with (tmp_path / "file").open("w") as file:

        def train():
            file.write("")

        with pytest.raises(SpecError, match=r"'train' cannot run in another process.*make that inside the function"):
            peakcast.dryrun(train, "A100-80GB")


@pytest.mark.parametrize(
    ("gpu", "name"), [("A100-40GB", "NVIDIA A100-SXM4-40GB"), ("RTX4090", "NVIDIA GeForce RTX 4090"), ("L4", "NVIDIA L4")]
)
def test_gpus_have_the_names_that_scripts_compare(gpu, name):
    from peakcast.collectors.dryrun.gpu import NAMES, name_of

    assert name_of(peakcast.catalog.gpu(gpu)) == name
    assert {peakcast.catalog.gpu(one).name for one in NAMES} == set(NAMES)


def test_queries_of_the_gpu_are_answered_as_the_chosen_one_would():
    import torch

    def asking():
        properties = torch.cuda.get_device_properties(0)
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "NVIDIA H100 80GB HBM3"
        assert torch.cuda.get_device_capability() == (9, 0)
        assert properties.total_memory == peakcast.catalog.gpu("H100-80GB").cuda_memory_bytes
        before = torch.cuda.memory_allocated()
        held = torch.empty(2**20, device="cuda")
        assert torch.cuda.memory_allocated() - before == held.numel() * 4
        training()()

    assert peakcast.dryrun(asking, "H100-80GB").steps == 3


@pytest.mark.parametrize(
    ("function", "sentence", "last"),
    [
        (lambda: None, "before any optimizer had stepped", []),
        (lambda: [][3], "failed before its third optimizer step", ["IndexError: list index out of range"]),
        (lambda: os.kill(os.getpid(), 9), "was ended by SIGKILL", []),
    ],
)
def test_what_cannot_be_followed_is_said(function, sentence, last):
    with pytest.raises(ScriptError, match=sentence) as caught:
        peakcast.dryrun(function, "A100-80GB")
    assert caught.value.last_lines[-1:] == last


def test_time_is_bounded():
    def endless():
        while True:
            time.sleep(60)

    started = time.monotonic()
    with pytest.raises(ScriptError, match="after 1 s"):
        peakcast.dryrun(endless, "A100-80GB", timeout_seconds=1)
    assert time.monotonic() - started < 20


def test_where_a_function_was_when_its_time_was_up_is_said():
    def waits():
        print("begins")
        while not os.path.exists("never"):
            time.sleep(1)

    assert peakcast.dryrun(training(), "A100-80GB").steps == 3  # the process that it is a copy of has started
    first = waits.__code__.co_firstlineno
    with pytest.raises(ScriptError, match=rf"test_functions\.py:({first + 2}|{first + 3}); give it more time") as caught:
        peakcast.dryrun(waits, "A100-80GB", timeout_seconds=4)
    assert caught.value.last_lines == ["begins"]


@pytest.mark.whole  # fifteen seconds, of which a script's process needs some to start; a function's does not
def test_where_a_script_was_when_its_time_was_up_is_said(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nprint('begins')\nwhile not os.path.exists('never'):\n    time.sleep(1)\n")
    with pytest.raises(ScriptError, match=r"waits\.py:[34]; give it more time") as caught:
        peakcast.dryrun(["python", str(script)], "A100-80GB", timeout_seconds=15)
    assert caught.value.last_lines == ["begins"]


def test_a_script_that_sleeps_is_not_waited_for():
    def patient():
        time.sleep(60)
        training()()

    started = time.monotonic()
    assert peakcast.dryrun(patient, "A100-80GB").steps == 3
    assert time.monotonic() - started < 50


def test_nvml_answers_with_the_chosen_gpu():
    def asking():
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert "A100" in pynvml.nvmlDeviceGetName(handle)
        before = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        training()()
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).used > before

    assert peakcast.dryrun(asking, "A100-80GB").steps == 3


def test_nothing_is_written_deleted_or_listened_on(tmp_path):
    kept = tmp_path / "kept" / "file.txt"
    kept.parent.mkdir()
    kept.write_text("as it was")

    def careless():
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "log.txt").write_text("written")
        with kept.open("a") as file:
            file.write(", and more")
        os.replace(kept, tmp_path / "logs" / "moved.txt")
        assert (tmp_path / "logs" / "log.txt").read_text() == "written"
        assert (tmp_path / "logs" / "moved.txt").read_text() == "as it was, and more"
        shutil.rmtree(kept.parent)
        assert not kept.exists()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))  # as scripts look for a free port
            assert free.getsockname()[1] > 1024
            with pytest.raises(PermissionError, match="opens no port"):
                free.listen()
        training()()

    assert peakcast.dryrun(careless, "A100-80GB").steps == 3
    assert kept.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_fixture_fails_a_change_that_needs_more(pytester):
    pytester.makeconftest('pytest_plugins = ["peakcast.pytest_plugin"]')
    pytester.makepyfile(
        test_memory=f"""
        import importlib.util, os

        spec = importlib.util.spec_from_file_location("functions", {str(Path(__file__))!r})
        functions = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(functions)

        def test_memory(peak_memory):
            peak_memory(functions.training(width=int(os.environ["WIDTH"])), "A100-80GB")
        """
    )
    for width, outcome in (("512", "passed"), ("1024", "failed")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WIDTH", width)
            result = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider")
        result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*peak_allocated_bytes grew from*--update-peaks*"])
