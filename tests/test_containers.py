"""Containers: NVIDIA's PyTorch images as a table of versions, and which conventions they choose."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import containers, release, remarks, resolved, tag_of, torch_release
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.conventions import conventions, unmodelled_versions
from peakcast.models.baseline.baseline import baseline

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "intermediate_size": 128, "max_position_embeddings": 128}  # fmt: skip


def test_every_container_names_its_source_and_versions_that_are_releases() -> None:
    assert {"24.01", "25.09", "25.11", "26.02", "26.04", "26.06"} <= set(containers())  # what Megatron-LM's tests ran in
    assert list(containers()) == sorted(containers())
    for tag, image in containers().items():
        assert image["source"]
        assert release(image["torch"])
        assert tag_of(tag) == tag
        assert all(release(version) for name, version in image.items() if name != "source")
        assert set(image) <= {"torch", "transformer_engine", "cuda", "cublas", "cudnn", "nccl", "source"}


def test_newer_containers_have_no_older_software() -> None:
    for package in ("torch", "transformer_engine", "cuda", "cublas", "cudnn", "nccl"):
        seen = [release(image[package])[:2] for image in containers().values() if package in image]
        assert seen == sorted(seen)


@pytest.mark.parametrize("tag", ["26.04", "26.04-py3", "nvcr.io/nvidia/pytorch:26.04-py3"])
def test_a_container_stands_for_its_versions_and_explicit_ones_win(tag: str) -> None:
    versions = {"ngc_pytorch": tag, "transformer_engine": "2.8"}
    assert resolved(versions)["torch"] == "2.12.0a0+0291f960b6"
    assert resolved(versions)["transformer_engine"] == "2.8"
    assert torch_release(versions) == (2, 12, 0)
    assert "source" not in resolved(versions)
    (sentence,) = remarks(versions)
    assert "26.04 has torch 2.12.0a0" in sentence
    assert "transformer_engine" not in sentence


def test_a_container_chooses_conventions() -> None:
    moe = {"architecture": "mixtral-8x7b", "framework": "megatron"}
    placeholders = {
        tag: conventions(job_from_mapping({**moe, "versions": {"ngc_pytorch": tag}}))["cached_grouped_placeholders"]
        for tag in ("25.10", "25.12")  # Transformer Engine 2.8 and 2.10; the convention changes at 2.9
    }
    assert placeholders == {"25.10": False, "25.12": True}


def test_a_container_changes_the_workspaces_of_cublas_with_its_torch() -> None:
    """torch 2.12 takes the larger workspace on Blackwell too (models/ledger/tape/workspaces.py)."""
    job = job_from_mapping({"architecture": TINY, "sequence_length": 128})
    b200 = catalog.gpu("B200")
    older, newer = (
        baseline(job.replace(versions=FrozenMapping({"ngc_pytorch": tag})), b200, 0).composition["workspaces"]
        for tag in ("26.03", "26.04")
    )
    assert newer - older == 2 * (32 * 2**20 - 8_519_680)


def test_a_container_that_the_table_has_not_is_a_sentence_and_a_word_is_refused() -> None:
    job = job_from_mapping({"architecture": TINY, "versions": {"ngc_pytorch": "19.01"}})
    (finding,) = unmodelled_versions(job)
    assert "19.01" in finding.sentence
    assert "whose contents are known" in finding.sentence
    assert "torch" in finding.sentence
    with pytest.raises(SpecError, match=r"versions\.ngc_pytorch='banana' must be the tag"):
        job_from_mapping({"architecture": TINY, "versions": {"ngc_pytorch": "banana"}})
