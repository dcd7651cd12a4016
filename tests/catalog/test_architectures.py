"""The architecture catalog: our inventory counts what the makers published, for every file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from peakcast import catalog
from peakcast.core.errors import CatalogError
from peakcast.models.ledger.parameters.inventory import num_parameters

NAMES = catalog.architecture_names()


def _is_described(name: str) -> bool:
    """Whether the ledger has rules for the network; recipes answer the others (test_built_networks.py)."""
    return catalog.architecture(name).kind not in ("multimodal", "undescribed")


def _off(computed: dict[str, int]) -> dict[str, int]:
    """Name -> how far `computed` is from what is published, beyond its tolerance."""
    off = {name: count - catalog.published_num_parameters(name) for name, count in computed.items()}
    return {name: by for name, by in off.items() if abs(by) > catalog.published_num_parameters_tolerance(name)}


def test_the_inventory_counts_what_is_published() -> None:
    assert _off({name: num_parameters(catalog.architecture(name)) for name in NAMES if _is_described(name)}) == {}


def test_a_rounded_count_says_how_rounded_it_is() -> None:
    for name in NAMES:
        published, tolerance = catalog.published_num_parameters(name), catalog.published_num_parameters_tolerance(name)
        assert 0 <= tolerance <= 0.01 * published, name
        assert tolerance or published % 10**6, f"{name}: a round number needs a tolerance"
        assert catalog._file(name)["num_parameters_source"], name


def test_the_name_of_the_file_is_the_name_of_the_architecture() -> None:
    assert [catalog.architecture(name).name for name in NAMES] == list(NAMES)


def test_the_catalog_spans_the_sizes_people_train() -> None:
    counts = sorted(map(catalog.published_num_parameters, catalog.architecture_names()))
    assert len(counts) >= 70
    assert counts[0] < 10**8
    assert counts[-1] >= 671 * 10**9


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("LLAMA-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("NousResearch/Llama-2-70b-hf", "llama-2-70b"),
        ("TheBloke/Llama-2-70B-GPTQ", "llama-2-70b"),
        ("hugging-quants/Meta-Llama-3.1-405B-BNB-NF4-BF16", "llama-3.1-405b"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "mistral-7b"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "mixtral-8x7b"),
        ("bigcode/gpt_bigcode-santacoder", "santacoder"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("unsloth/Qwen3-8B-bnb-4bit", "qwen3-8b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b"),
        ("unsloth/Qwen2.5-VL-7B-Instruct-bnb-4bit", "qwen2.5-vl-7b"),
        ("google/gemma-3-4b-it", "gemma-3-4b-it"),
        ("openai/whisper-large-v3", "whisper-large-v3"),
        ("FacebookAI/roberta-base", "roberta-base"),
        ("BAAI/bge-base-en-v1.5", "bert-base"),
        ("allenai/OLMo-2-1124-7B-SFT", "olmo-2-7b"),
        ("princeton-nlp/Llama-3-Base-8B-SFT-DPO", "llama-3-8b"),
        ("mlabonne/Meta-Llama-3.1-8B-Instruct-abliterated", "llama-3.1-8b"),
        ("google/gemma-3-4b-pt", "gemma-3-4b-it"),
        ("unsloth/gemma-3-4b-pt-unsloth-bnb-4bit", "gemma-3-4b-it"),
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b-instruct"),
        ("Qwen/Qwen3-Embedding-0.6B", "qwen3-embedding-0.6b"),
        ("open-thoughts/OpenThinker3-7B", "qwen2.5-7b"),
    ],
)
def test_hub_ids_and_customary_spellings_are_found(written: str, name: str) -> None:
    assert catalog.architecture(written).name == name


def test_every_alias_leads_to_a_file() -> None:
    assert set(catalog._architecture_aliases().values()) <= set(catalog.architecture_names())


def test_an_unknown_architecture_is_refused_with_near_misses_and_the_way_out() -> None:
    with pytest.raises(CatalogError, match=r"'lama-3-8b' is not in the catalog; did you mean 'llama-3-8b'.*config.json"):
        catalog.architecture("lama-3-8b")


@pytest.mark.parametrize("name", ["../gpus", "a/../../gpus", "", ".", "llama\n"])
def test_a_name_is_never_a_path(name: str) -> None:
    with pytest.raises(CatalogError):
        catalog.architecture(name)


def test_one_lookup_parses_one_file() -> None:
    program = (
        "from peakcast import catalog\n"
        "catalog.architecture('llama-3.1-8b'); catalog.architecture('LLAMA-3.1-8B')\n"
        "import sys; print(catalog._file.cache_info().currsize, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["1", "False"]


def test_weights_are_loaded_in_the_dtype_in_which_they_are_published():
    """As transformers loads them: none of these has a dtype in its config.json, so that of the weights counts."""
    for name in ("google-bert/bert-base-cased", "gpt2-xl", "t5-small"):
        assert catalog.checkpoint_dtype(name) == "float32"
    assert catalog.checkpoint_dtype("meta-llama/Llama-3.1-8B") == "bfloat16"
