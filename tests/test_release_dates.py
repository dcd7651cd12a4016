"""What a commit, a month or a patch release stands for, and a stack that brings its own network."""

from __future__ import annotations

import pytest

from peakcast.core.versions import (
    not_compared,
    of_their_time,
    remarks,
)
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.conventions import conventions


@pytest.mark.parametrize(
    ("versions", "taken"),
    [
        ({"torchtitan": "3b39d7ab0", "torch": "2.8.0.dev202503"}, {"torchtitan": "0.0.2"}),
        ({"torchtitan": "c31ff8b05", "torch": "2.9.0.dev20250612"}, {"torchtitan": "0.1.0"}),
        ({"torchtitan": "f738a03bf", "torch": "2.9.0.dev2025"}, {"torchtitan": "0.1.1"}),  # July: three months before 2.9
        ({"torchtitan": "f6ebe8402", "torch": "2.12.0.dev202603"}, {"torchtitan": "0.2.2"}),
        ({"torchtitan": "27aa49077"}, {}),
        ({"torchtitan": "0.2.0", "torch": "2.5"}, {}),
        ({"litgpt": "0.4.11", "lightning_thunder": "2024-09"}, {"torch": "2.5.0"}),
        ({"lightning_thunder": "2024-09", "torch": "2.4"}, {}),
        ({"torchtitan": "27aa49077", "torch": "nightly"}, {}),
    ],
)
def test_a_commit_or_a_month_stands_for_the_releases_of_its_time(versions: dict[str, str], taken: dict[str, str]) -> None:
    assert of_their_time(versions) == taken


def test_what_a_commit_is_taken_for_is_said() -> None:
    (found,) = not_compared({"torchtitan": "3b39d7ab0", "torch": "2.8.0.dev202503"})
    assert "0.0.2 is assumed, from the time of torch 2.8.0.dev202503" in found.sentence
    assert remarks({"lightning_thunder": "2024-09"}) == [
        "torch 2.5.0 is assumed, from the time of the other versions (catalog/dates.toml)."
    ]


def test_a_job_of_litgpt_has_litgpts_network() -> None:
    """One matrix for queries, keys and values, of whose parts adapters name each."""
    asked = {"architecture": "llama-3.2-1b", "framework": "torch", "versions": {"litgpt": "0.4.11"}}
    assert job_from_mapping(asked).architecture.fused_qkv
    assert not job_from_mapping({**asked, "finetuning": {"method": "lora", "rank": 4}}).architecture.fused_qkv
    assert not job_from_mapping({**asked, "versions": {}}).architecture.fused_qkv


@pytest.mark.parametrize(("torch", "cudnn"), [("2.5.0", True), ("2.5.0a0+e000cf0ad9", True), ("2.5.0.dev20240814", True),
                                              ("2.5", False), ("2.5.1", False), ("2.4.1", False)])  # fmt: skip
def test_a_patch_release_is_meant_where_it_is_said(torch: str, cudnn: bool) -> None:
    """torch 2.5.0 alone takes cuDNN's attention first; who says "2.5" has 2.5.1, most likely."""
    asked = {"architecture": "llama-3.2-1b", "framework": "torch", "versions": {"torch": torch}}
    assert conventions(job_from_mapping(asked))["cudnn_attention"] is cudnn
