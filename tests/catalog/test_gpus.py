"""The GPU catalog: every stanza is complete and plausible, and names are found however they are written."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.core.errors import CatalogError

REQUIRED_GPUS = (
    "A100-40GB A100-80GB H100-80GB H100-PCIe-80GB H100-NVL-94GB H200 B200 GB200 B300 L40S L4 A10 A10G T4 V100-16GB "
    "V100-32GB A6000 RTX6000-Ada RTX2080Ti RTX3060 RTX3080 RTX3090 RTX4080 RTX4090 RTX5080 RTX5090 A40 H20-96GB H800-80GB "
    "A800-80GB"
)
THREADS_PER_SM = {(7, 0): 2048, (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048}
THREADS_PER_SM |= {(10, 0): 2048, (10, 3): 2048, (12, 0): 1536}


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_cuda_sees_a_little_less_than_nvidia_smi_which_sees_no_more_than_is_sold(name: str) -> None:
    device = catalog.gpu(name)
    assert device.cuda_memory_bytes < device.nvml_memory_bytes <= device.memory_bytes
    # what the driver keeps for itself: 0.1 to 1.7 GiB, at most 3 % of the card
    assert device.nvml_memory_bytes - device.cuda_memory_bytes < 0.035 * device.nvml_memory_bytes


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_every_number_says_where_it_is_from(name: str) -> None:
    device = catalog.gpu(name)
    assert device.source
    assert device.cuda_memory_source.startswith(("measured report: ", "estimated: "))


@pytest.mark.parametrize("name", catalog.gpu_names())
def test_threads_per_multiprocessor_follow_from_the_compute_capability(name: str) -> None:
    device = catalog.gpu(name)
    assert device.max_threads_per_sm == THREADS_PER_SM[device.compute_capability]
    assert 28 <= device.num_sms <= 192  # of an RTX 3060, and of a whole GB202


@pytest.mark.parametrize("name", REQUIRED_GPUS.split())
def test_the_gpus_people_train_on_are_there(name: str) -> None:
    assert catalog.gpu(name).name == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("nvidia geforce rtx 4090", "RTX4090"),
        ("Tesla T4", "T4"),
        ("h100-80gb", "H100-80GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("NVIDIA GeForce RTX 3060", "RTX3060"),
        ("RTX 3060", "RTX3060"),
        ("rtx-4070-ti", "RTX4070Ti"),
    ],
)
def test_a_gpu_is_found_as_torch_names_it_and_in_any_case(written: str, name: str) -> None:
    assert catalog.gpu(written).name == name


def test_equal_names_give_the_same_value() -> None:
    assert catalog.gpu("H100-80GB") is catalog.gpu("NVIDIA H100 80GB HBM3")


def test_an_unknown_gpu_is_refused_with_near_misses() -> None:
    with pytest.raises(CatalogError, match=r"gpu='H1000-80GB' is not in the catalog; did you mean 'H100-80GB'") as caught:
        catalog.gpu("H1000-80GB")
    assert (caught.value.parameter, caught.value.value) == ("gpu", "H1000-80GB")


def test_what_is_not_text_is_refused() -> None:
    with pytest.raises(CatalogError, match="gpu=5 must be a name"):
        catalog.gpu(5)  # type: ignore[arg-type]


def test_no_alias_means_two_gpus() -> None:
    names: dict[str, str] = {}
    for name, row in catalog._gpus().items():
        for alias in (name, *row["aliases"]):
            assert names.setdefault(catalog._folded(alias), name) == name


def test_of_unequal_gpus_the_one_with_the_least_memory_decides():
    for several in ("RTX5090+RTX4090", "RTX4090, H100-80GB"):
        with pytest.raises(CatalogError, match="has to fit on the one with the least memory: ask with RTX4090"):
            catalog.gpu(several)
    with pytest.raises(CatalogError, match="is not in the catalog"):
        catalog.gpu("RTX4090+RTX9999")


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        ("4xA100-40GB+4xA100-80GB", "the least memory: ask with A100-40GB and num_gpus=8"),
        ("A100-80GB:4, A100-40GB:2", "ask with A100-40GB and num_gpus=6"),
        ("4 × A100-40GB and A100-80GB", r"ask with A100-40GB\."),  # how many of the other is not said
        ("8xH100-80GB", "says how many GPUs there are; ask with H100-80GB and num_gpus=8"),
    ],
)
def test_the_gpus_of_a_node_are_told_what_to_ask(name: str, ask: str) -> None:
    with pytest.raises(CatalogError, match=ask):
        catalog.gpu(name)


@pytest.mark.parametrize("name", [" " * 10**5, "x" * 10**5, "4x" * 10**5, "H100:" * 10**5])
def test_a_long_text_is_no_node(name: str) -> None:
    with pytest.raises(CatalogError, match="is not in the catalog"):
        catalog.gpu(name)
