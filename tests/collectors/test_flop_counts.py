"""How many operations kernels are counted as."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from peakcast.collectors.tracing.flop_counts import Operations, of_matrices  # noqa: E402


def of(*shapes):
    return of_matrices(torch.empty(shape, device="meta") for shape in shapes)


def test_a_kernel_of_three_matrices_multiplies_their_three_sizes():
    assert of((4096, 768), (3072, 768), (4096, 3072)) == 2 * 4096 * 768 * 3072
    assert of((4096, 768), (3072, 768), (4096, 3072), (4096, 3072)) == 2 * 4096 * 768 * 3072  # another result
    assert of((4096, 768), (768, 768), (4096, 768)) == 2 * 4096 * 768**2
    assert of((3, 3072, 768), (3, 768, 768)) == 2 * 3 * 3072 * 768**2  # a matrix with its own transpose
    assert of((5, 768, 768), (5, 768, 768)) == 2 * 5 * 768**3


def test_a_kernel_without_a_second_matrix_counts_nothing():
    assert of((4096, 768), (4096, 768)) == 0
    assert of((4096,), (4096,)) == 0


def test_operations_are_counted_up_to_an_instant():
    operations = Operations()
    operations.launched(10, 3)
    operations.launched(0, 4)
    operations.launched(5, 7)
    assert [operations.before(instant) for instant in (3, 4, 7, 8)] == [0, 10, 10, 15]
