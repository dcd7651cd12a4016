"""Which plan or GPU type to take: the cheapest first, host memory weighed, and no time where no speed is known."""

from dataclasses import replace

import pytest

from peakcast import api, catalog
from peakcast.catalog.speeds import speed
from peakcast.core.errors import SpecError
from peakcast.core.units import GIB
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.doors.questions import on_node
from peakcast.printing.plans import plan_words, search_text
from peakcast.searching.search import search
from peakcast.searching.search_settings import SearchSettings

H100, A100 = catalog.gpu("H100-80GB"), catalog.gpu("A100-80GB")
ADAPTERS = job_from_mapping(
    {
        "architecture": "llama-3.2-1b",
        "sequence_length": 4096,
        "finetuning": {"method": "lora", "rank": 16},
        "activation_checkpointing": {"mode": "full"},
    }
)


# -- GPU types ----------------------------------------------------------------------------------------------------------


def test_the_cheapest_gpu_type_that_surely_fits_comes_first():
    prices = {"H100-80GB": 2.0, "A100-80GB": 1.0, "RTX4090": 0.1}
    job = job_from_mapping({"architecture": "llama-3.1-8b", "sequence_length": 512})
    found = api.search(job, None, num_gpus=1, price=prices)
    by_type = {offer.gpu: offer for offer in found.offers}
    assert list(by_type)[-1] == "RTX4090"
    assert by_type["RTX4090"].fits == "no"
    first, second = found.offers[:2]
    assert first.fits == second.fits == "yes"
    assert first.price_per_million_tokens < second.price_per_million_tokens
    h100 = by_type["H100-80GB"]
    assert h100.price_per_hour == 2.0
    assert h100.price_per_million_tokens == pytest.approx(2.0 / (h100.tokens_per_second * 3600) * 1e6)


def test_without_prices_the_fewest_gpus_come_first():
    found = api.search("llama-3.1-8b", "H100-80GB, B200")
    assert [offer.gpu for offer in found.offers] == ["B200", "H100-80GB"]
    assert [offer.num_gpus for offer in found.offers] == sorted(offer.num_gpus for offer in found.offers)
    for offer in found.offers:
        assert api.predict(offer.plan.job, offer.gpu).fits == offer.fits == "yes"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"price": {"H100-80GB": 0}}, "price of H100-80GB=0 must be a number above 0"),
        ({"price": {"H100-80GB": "cheap"}}, "price of H100-80GB='cheap' must be a number"),
        ({"find": "micro_batch_size"}, "find='micro_batch_size' asks about one GPU type"),
    ],
)
def test_questions_about_types_that_make_no_sense_are_a_sentence(options, words):
    with pytest.raises(SpecError, match=words):
        api.search(ADAPTERS, "A100-80GB,H100-80GB", **options)


def test_the_recommendation_is_the_cheapest_offer_that_surely_fits():
    found = api.search(ADAPTERS, "H100-80GB, A100-80GB", num_gpus=1, price={"H100-80GB": 9.0, "A100-80GB": 1.0})
    assert found.recommended.gpu == "A100-80GB"
    text = search_text(found)
    assert text.startswith("Recommended, the cheapest with which it surely fits: 1 × A100-80GB, one GPU, ")
    assert found.to_mapping()["recommended"] == found.offers[0].to_mapping()


@pytest.mark.parametrize("gpu", catalog.gpu_names())
def test_every_gpu_type_has_the_speed_of_a_data_sheet(gpu):
    found = speed(gpu)
    assert found.bf16_tflops * 1e12 > 1000 * found.link_gb_per_s
    assert found.network_gb_per_s <= found.link_gb_per_s
    assert (found == speed("H100-80GB")) == (gpu in ("H100-80GB", "H200", "GH200-96GB"))


def test_no_time_is_estimated_for_a_gpu_type_of_unknown_speed():
    unknown = replace(A100, name="Z1")
    found = search(ADAPTERS, unknown, 1, 4, SearchSettings(top=1))
    assert not found.estimates_time
    assert "as on an H100: no speed of Z1 is known" in search_text(found)
    offers = api.search(ADAPTERS, [unknown, H100], num_gpus=1, price={"H100-80GB": 2.0})
    assert [offer.gpu for offer in offers.offers] == ["H100-80GB", "Z1"]
    assert offers.offers[1].tokens_per_second is None
    assert "not known" in search_text(offers)


# -- host memory --------------------------------------------------------------------------------------------------------

OFFLOADS = job_from_mapping({"architecture": "qwen2.5-7b", "framework": "deepspeed", "sequence_length": 1024})


def test_plans_that_need_more_host_memory_than_the_node_has_are_left_out():
    """Adam's fp32 states and weights of 7.6e9 parameters are 85 GiB, which 2 GPUs of 24 GB cannot hold."""
    rtx4090 = catalog.gpu("RTX4090")
    found = search(OFFLOADS, on_node(rtx4090, 64, 8), 2, 4, SearchSettings(top=1))
    assert found.plans == ()
    assert found.num_beyond_host > 0
    assert f"{found.num_beyond_host} of them are left out: they need more host memory" in search_text(found)
    roomy = search(OFFLOADS, on_node(rtx4090, 2048, 8), 2, 4, SearchSettings(top=1))
    assert (len(roomy.plans), roomy.num_beyond_host) == (1, 0)
    assert all(85 * GIB < plan.node_host_bytes == 2 * plan.peak_host_bytes.point for plan in roomy.plans)
    assert "host/node" in search_text(roomy)


def test_the_recommended_plan_is_the_fastest_that_surely_fits():
    found = search(OFFLOADS, H100, 8, 32, SearchSettings(top=3))
    assert found.recommended == found.plans[0]
    assert found.recommended.fits == "yes"
    assert f"Recommended, the fastest that surely fits: {plan_words(found.plans[0].job)}, " in search_text(found)
    assert "host/node" not in search_text(found)  # nothing is offloaded
