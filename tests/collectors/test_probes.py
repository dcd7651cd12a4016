"""Readings that need no GPU to be right: kernel names in a graph, messages, settings."""

import pytest

from peakcast.collectors import probes

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
    ("current", "expandable", "setting"),
    [
        ("", True, "expandable_segments:True"),
        ("expandable_segments:True", False, "expandable_segments:False"),
        ("max_split_size_mb:64,expandable_segments:False", True, "max_split_size_mb:64,expandable_segments:True"),
    ],
)
def test_the_jobs_allocator_setting_wins_and_the_others_stay(current, expandable, setting):
    assert probes.allocator_setting(expandable, current) == setting


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
