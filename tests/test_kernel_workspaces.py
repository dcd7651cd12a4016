"""What kernels take for themselves, held to every such allocation in the published histories."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from peakcast import catalog
from peakcast.catalog.kernel_workspaces import Workspace, column_sum, cublaslt_kept, reduction, sort_bytes
from peakcast.histories.files import read_histories
from peakcast.histories.history import Action, History

FOLDER = Path(__file__).resolve().parents[1] / "datasets" / "published" / "histories"
REDUCES = "raw:at::native::gpu_reduce_kernel"
H100, TURING, ADA = (132, 2048), (72, 1024), (170, 1536)
"""Multiprocessors and threads of each. The second is a guess: it explains the cap of 144 parts in one history whose GPU is
not named. Of the third nothing is capped in these histories, so that any GPU of this size does."""


@cache
def reductions(name: str) -> Counter[tuple[str, int, int, int]]:
    """(operator, bytes of its output, of the buffer, of the semaphores) of a history, each with how often it is there."""
    (path,) = FOLDER.glob(f"{name}.jsonl.gz")
    (history,) = read_histories(path)
    made = [event for event in history.events if event.action is Action.ALLOC]
    found: Counter[tuple[str, int, int, int]] = Counter()
    for before, buffer, semaphores in zip(made, made[1:], made[2:], strict=False):
        names = [history.categories[event.category] for event in (before, buffer, semaphores)]
        if REDUCES in names[1] and REDUCES not in names[0]:
            assert names[1] == names[2]
            found[names[1].split("<")[0].split()[0], before.num_bytes, buffer.num_bytes, semaphores.num_bytes] += 1
    return found


def of_columns(outputs: int, reduced: int, gpu: tuple[int, int], accumulator: int = 4) -> tuple[int, int]:
    found = reduction(outputs, reduced, *gpu, reduced_is_contiguous=False, accumulator_bytes=accumulator)
    return found.buffer_bytes, found.semaphore_bytes


def of_rows(reduced: int, gpu: tuple[int, int], accumulator: int) -> tuple[int, int]:
    found = reduction(1, reduced, *gpu, reduced_is_contiguous=True, accumulator_bytes=accumulator)
    return found.buffer_bytes, found.semaphore_bytes


@pytest.mark.parametrize(("context", "tokens"), [(128, 512), (256, 1024), (512, 2048)])
def test_reductions_of_a_decoder_on_h100(context, tokens):
    """Gradients of a norm's rows (2,560 elements each, for every token) and logits (10,000), neither contiguous in what is
    reduced; `max` keeps a value and an index."""
    for path in FOLDER.glob(f"kkaitlyn111-memory-ctx{context}-fullstep-*.jsonl.gz"):
        assert reductions(path.name.removesuffix(".jsonl.gz")) == {
            ("sum_dim_IntList", 4 * tokens, *of_columns(tokens, 2560, H100)): 66 - 1,
            ("sum_dim_IntList", 4 * tokens, *of_columns(tokens, 10_000, H100)): 1,
            ("max_dim", 8 * tokens, *of_columns(tokens, 10_000, H100, accumulator=16)): 1,
        }


@pytest.mark.parametrize(
    ("name", "columns", "rows", "count"),
    [
        ("linyunlinyun-xl-ctx512-full-step-bf16-4e0e", 2560, 2048, 65),
        ("linyunlinyun-xl-ctx512-full-step-none-f23d", 2560, 2048, 65),
        ("linyunlinyun-xl-ctx128-full-step-none-c5fe", 2560, 512, 0),
        ("niuhuangxiaozi-forward-and-backward-snap-100-9ab7", 512, 1000, 0),
        ("niuhuangxiaozi-forward-and-backward-snap-150-16ed", 512, 1500, 27),
        ("niuhuangxiaozi-forward-and-backward-snap-200-cee6", 512, 2000, 27),
        ("niuhuangxiaozi-forward-and-backward-snap-200-mixed-precision-4ed7", 512, 2000, 27),
        ("wedsonlin-medium-128-training-snap-0db7", 1024, 512, 0),
        ("wedsonlin-medium-256-training-snap-8a42", 1024, 1024, 49),
        ("wedsonlin-medium-512-training-snap-61dc", 1024, 2048, 49),
        ("wedsonlin-medium-1024-training-snap-83e7", 1024, 4096, 49),
    ],
)
def test_gradients_of_norm_weights(name, columns, rows, count):
    """Sums over tokens; a step with fewer than 1,021 of them takes no buffer."""
    found, expected = reductions(name), of_columns(columns, rows, ADA)
    assert sum(found.values()) == count
    if count:
        assert set(found) == {("sum_dim_IntList", 4 * columns, *expected)}
    else:
        assert expected == (0, 0)


def test_whole_tensors_are_reduced_in_parts_too():
    """Of a history whose GPU is not named: `any` of flags and a mean, of sizes that its tensors tell."""
    expected = {("any", 1, *of_rows(reduced, TURING, 1)) for reduced in (131_072, 262_144, 524_288, 1_048_576, 1_966_080)}
    expected |= {("any", 1, *of_rows(32_768, TURING, 1))} if of_rows(32_768, TURING, 1)[0] else set()
    expected |= {("mean_dim", 4, *of_rows(1_966_080, TURING, 4))}
    assert set(reductions("jaspersolt-snapshot-6720")) == expected
    sum_of_half_a_million = ("sum_dim_IntList", 4, *of_rows(524_288, TURING, 4))
    assert reductions("silmont2000-mem-snapshot-b61b") == {sum_of_half_a_million: 1}


def test_no_reduction_of_any_history_is_left_out():
    checked = 0
    for path in FOLDER.glob("*.jsonl.gz"):
        (history,) = read_histories(path)
        if any(REDUCES in text for text in history.categories):
            checked += 1
            assert re.match("kkaitlyn|linyun|niuhuang|wedsonlin|jaspersolt|silmont2000-mem-", path.name)
    assert checked == 15


# -- by hand ------------------------------------------------------------------------------------------------------------


def summed(num_columns, num_rows, gpu="H100-80GB"):
    device = catalog.gpu(gpu)
    return column_sum(num_columns, num_rows, device.num_sms, device.max_threads_per_sm)


def test_the_norm_of_a_7b_decoder_takes_134_megabytes():
    assert summed(4096, 4096) == Workspace(4 * 4096 * 128 * 64, 4 * 32)


def test_a_buffer_is_taken_from_1021_rows_on():
    assert not summed(4096, 1020)
    assert summed(4096, 1021).buffer_bytes == 4 * 4096 * 128 * 16


def test_a_small_gpu_takes_fewer_parts():
    assert summed(4096, 8192, "RTX3090").buffer_bytes < summed(4096, 8192).buffer_bytes


# -- other kernels ------------------------------------------------------------------------------------------------------


def raw_sizes(function: str) -> list[tuple[History, int, int]]:
    found = []
    for path in sorted(FOLDER.glob("*.jsonl.gz")):
        (history,) = read_histories(path)
        if any(function in text for text in history.categories):
            made = [event for event in history.events if event.action is Action.ALLOC]
            at = [number for number, event in enumerate(made) if f"raw:{function}" in history.categories[event.category]]
            found += [(history, made[number].num_bytes, made[number - 1].num_bytes) for number in at]
    return found


def test_sorts_of_indices():
    """Before the sort its keys are allocated, 8 bytes for each index."""
    found = Counter((size, keys // 8) for _, size, keys in raw_sizes("at::cuda::cub::detail::radix_sort_pairs_impl"))
    assert sum(found.values()) == 30
    for size, indices in found:
        assert size == sort_bytes(indices, 10_000), (size, indices)


def test_cublaslt():
    found = raw_sizes("at::cuda::blas::gemm_and_bias")
    assert {size for _, size, _ in found} == {2**20}
    assert all(cublaslt_kept(tuple(map(int, history.torch.split(".")))) is False for history, _, _ in found)
    assert [cublaslt_kept(release) for release in ((2, 4), (2, 6), (2, 9), (2, 13))] == [False, None, True, True]
