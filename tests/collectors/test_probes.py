"""Readings that need no GPU to be right: kernel names in a graph, messages, settings."""

import os

import pytest

from peakcast.collectors.machine import probes
from peakcast.jobs.allocator_settings import Allocator, parse_allocator

torch = pytest.importorskip("torch")


def attention_loss(enabled):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(1, 2, 8, 16, requires_grad=True)
    with sdpa_kernel(enabled if isinstance(enabled, list) else getattr(SDPBackend, enabled)):
        out = torch.nn.functional.scaled_dot_product_attention(query * 1, query * 1, query * 1, is_causal=True)
    return out.square().mean()


@pytest.mark.parametrize(("enabled", "found"), [("FLASH_ATTENTION", "flash"), ("MATH", None)])
def test_the_attention_kernel_is_read_from_the_graph_that_forward_left(enabled, found):
    assert probes.attention_in_graph(attention_loss(enabled)) == found


def test_a_loss_without_a_graph_has_no_attention_kernel():
    assert probes.attention_in_graph(torch.zeros(())) is None


@pytest.mark.parametrize(
    ("said", "current", "settings"),
    [
        ({}, "", ""),
        ({"expandable_segments": True}, "", "expandable_segments:True"),
        ({}, "expandable_segments:True,max_split_size_mb:64", ""),
        ({"max_split_size_mb": 64}, "max_split_size_mb:128", "max_split_size_mb:64"),
        (
            {"roundup_power2_divisions": "[256:1,>:8]", "garbage_collection_threshold": 0.8},
            "pinned_use_cuda_host_register:True, roundup_power2_divisions:[64:2,256:4],backend:cudaMallocAsync",
            "pinned_use_cuda_host_register:True,roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8",
        ),
    ],
)
def test_the_allocator_is_set_as_the_job_says_and_nothing_else_that_moves_tensors_stays(said, current, settings):
    asked = Allocator(**said)
    assert probes.allocator_settings(asked, current) == settings
    assert parse_allocator(settings) == asked


def test_what_the_environment_says_of_placement_is_forgotten(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,pinned_num_register_threads:8")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    probes.forget_allocator_settings()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "pinned_num_register_threads:8"
    assert "PYTORCH_ALLOC_CONF" not in os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    probes.forget_allocator_settings()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB", 20 * 2**20),
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0", 512),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_requested_size_is_read_from_the_message(message, size):
    assert probes.requested_bytes(message) == size


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("The size of tensor a must match"), False),
    ],
)
def test_running_out_in_a_library_is_out_of_memory_and_other_errors_are_not(error, answer):
    assert probes.is_out_of_memory(error) is answer


@pytest.mark.parametrize(("overflows", "skipped"), [(False, False), (True, True)])
def test_a_step_that_the_loss_scaler_left_out_is_noticed(overflows, skipped):
    scaler = torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * (float("inf") if overflows else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert probes.has_skipped(scaler) is skipped
    assert torch.equal(weight, torch.ones(2)) is skipped
    assert not probes.has_skipped(None)
