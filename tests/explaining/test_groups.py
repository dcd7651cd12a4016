"""Rank lists: the examples that Megatron-LM's own documentation works through, and what must hold for any layout."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.doors.questions import translation_of
from peakcast.explaining.groups import EMBEDDING, GRADIENT, communication_groups, group_along


def groups(
    rank: int = 0, model: str = "llama-3.1-8b", options: dict[str, Any] | None = None, **sizes: int
) -> dict[str, Any]:
    layout = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
    job = {"architecture": model, "framework": "megatron", "parallelism": layout, "framework_options": options or {}}
    return {group.axis: group for group in communication_groups(translation_of(job).job, rank)}


def test_megatron_cores_docstring_of_masked_groups() -> None:
    """`generate_masked_orthogonal_rank_groups`: parallel_size = [tp, dp, pp] = [2, 3, 4], mask = [False, True, False]."""
    found = group_along("dp", {"tp": 2, "dp": 3, "pp": 4}, ("dp",), 0).groups
    assert found[0] == (0, 2, 4)
    assert found[1] == (1, 3, 5)
    assert found[7] == (19, 21, 23)


def test_megatron_cores_docstring_of_another_order() -> None:
    """The same docstring: order tp-pp-dp, sizes 2-2-2, data-parallel groups."""
    assert group_along("dp", {"tp": 2, "pp": 2, "dp": 2}, ("dp",), 0).groups == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_sixteen_gpus_of_megatron_cores_initialisation() -> None:
    """`initialize_model_parallel`: 16 GPUs, tensor 2, pipeline 4."""
    found = groups(tensor=2, pipeline=4, data=2)
    assert found["data parallel"].groups == ((0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15))
    assert found["tensor parallel"].groups == tuple((i, i + 1) for i in range(0, 16, 2))
    assert found["pipeline parallel"].groups == ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))


def test_context_parallel_ranks_lie_between_tensor_and_data() -> None:
    found = groups(rank=5, tensor=2, context=2, data=2)
    assert found["context parallel"].members == (5, 7)
    assert found["data parallel"].members == (1, 5)
    assert found[GRADIENT].members == (1, 3, 5, 7)


def test_experts_have_a_layout_of_their_own() -> None:
    found = groups(rank=3, model="mixtral-8x7b", tensor=2, data=4, expert=4)
    assert found["expert parallel"].groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert "expert data parallel" not in found


def test_the_ends_of_a_pipeline_share_a_tied_embedding() -> None:
    found = groups(rank=6, model="llama-3.2-1b", tensor=2, pipeline=4)
    assert found[EMBEDDING].members == (0, 6)
    assert EMBEDDING not in groups(rank=2, model="llama-3.2-1b", tensor=2, pipeline=4)


def test_the_flag_that_moves_pipeline_stages_inside() -> None:
    found = groups(tensor=2, pipeline=2, data=2, options={"use_tp_pp_dp_mapping": True})
    assert found["pipeline parallel"].members == (0, 2)
    assert found["data parallel"].members == (0, 4)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 4), min_size=4, max_size=4), axes=st.sets(st.sampled_from("abcd"), min_size=1))
def test_groups_split_the_ranks_without_overlap(sizes: list[int], axes: set[str]) -> None:
    layout = dict(zip("abcd", sizes, strict=True))
    world = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    found = [group_along("", layout, tuple(axes), rank) for rank in range(world)]
    groups = found[0].groups
    assert sorted(rank for group in groups for rank in group) == list(range(world))
    assert {len(group) for group in groups} == {prod(layout[axis] for axis in axes)}
    assert [next(group for group in groups if rank in group) for rank in range(world)] == [f.members for f in found]
