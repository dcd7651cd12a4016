"""Adapter methods beyond LoRA: parameters as published, states by hand, what is out of scope, settings that are refused."""

import json
import re

import pytest

import peakcast
from peakcast.collectors.published.peft_method_comparison import read_peft_method_comparison
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.jobs.spec import Parallelism
from peakcast.measurements.store import datasets_folder
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import adapted_matrices, network_tensors
from peakcast.models.ledger.parameters.adapter_methods import METHODS, factors
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category

TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    source = datasets_folder() / "published" / "sources" / "peft_method_comparison.jsonl"
    return read_peft_method_comparison(source)


def job(method, **finetuning):
    return job_from_mapping({"architecture": TINY, "sequence_length": 32, "finetuning": {"method": method, **finetuning}})


def num_trained_parameters(adapted):
    network, tuning = adapted.architecture, adapted.finetuning
    on_matrices = [METHODS[tuning.method].on_matrix(matrix) for matrix in adapted_matrices(network, tuning)]
    return sum(one.numel for made in (network_tensors(network, tuning), *on_matrices) for one in made if one.trains)


def test_every_published_count_of_trained_parameters_is_exact(rows):
    compared = {}
    for row in rows:
        counted = [sentence for sentence in row.assumptions if sentence.startswith("The source counts")]
        if counted and not row.out_of_scope and not out_of_scope(row.job):
            published = int(re.sub(r"\D", "", counted[0]))
            compared[row.job.finetuning] = published, num_trained_parameters(row.job)
    assert {adapter.method for adapter in compared} > {
        "loha",
        "lokr",
        "vera",
        "oft",
        "fourierft",
        "lily",
        "randlora",
        "shira",
    }
    assert all(published == ours for published, ours in compared.values()), compared


def test_reserved_memory_of_every_method_in_scope(rows):
    """One L40S, Llama-3.2-3B: 18 methods within 2 % and LoRA within 0.3, nothing fitted."""
    errors = {}
    for row in rows:
        if row.out_of_scope or out_of_scope(row.job):
            continue
        found = baseline(row.job, peakcast.catalog.gpu("L40S"), 0).peak_reserved_bytes
        errors.setdefault(row.job.finetuning.method, []).append(found / row.peak_reserved_bytes - 1)
    assert len(errors) >= 18
    assert all(abs(error) < 0.003 for error in errors["lora"])
    assert {method: error for method, own in errors.items() for error in own if abs(error) >= 0.02} == {}


@pytest.mark.parametrize(
    ("method", "settings", "per_layer"),
    [
        ("loha", {"rank": 4}, 2 * 4 * ((64 + 64) + (32 + 64))),
        ("lokr", {"rank": 4}, 8 * 8 + 8 * 8 + 4 * 8 + 8 * 8),
        ("ia3", {}, 32 + 32 + 128),
        ("vera", {"rank": 16}, 64 + 16 + 32 + 16),
        ("miss", {"rank": 8}, 8 * 64 + 8 * 32),
    ],
)
def test_states_and_gradients_follow_from_the_parameters(method, settings, per_layer):
    """fp32 adapters and AdamW: four bytes of weight, four of gradient and eight of states each."""
    adapted = job(method, **settings)
    trained = 2 * per_layer
    assert num_trained_parameters(adapted) == trained
    timeline = ledger(adapted)
    peak = timeline.composition(len(timeline.phases) - 1)
    assert 8 * trained <= peak[Category.OPTIMIZER_STATES] < 8 * trained + 512 * 4 * 2 * 2 * 8
    made = [int(n) for n, c in zip(timeline.num_bytes, timeline.categories, strict=True) if c == Category.GRADIENTS]
    assert 4 * trained <= sum(made) < 4 * trained + 512 * len(made)


def test_two_factors_of_a_number():
    assert [factors(128, -1), factors(127, -1), factors(128, 4), factors(3072, -1)] == [
        (8, 16),
        (1, 127),
        (4, 32),
        (48, 64),
    ]


def test_prompts_lengthen_every_sequence():
    plain, prompted = job("lora", rank=8), job("prompt_tuning", settings={"num_virtual_tokens": 32})
    logits = {
        name: max(int(n) for n, c in zip(t.num_bytes, t.categories, strict=True) if c == Category.LOGITS)
        for name, t in (("plain", ledger(plain)), ("prompted", ledger(prompted)))
    }
    assert logits["prompted"] == 2 * logits["plain"]
    assert "up to 3 % more" in out_of_scope(prompted)


def test_what_is_not_counted_is_named():
    assert out_of_scope(job("loha", rank=4)) == ""
    assert "no whole run has confirmed" in out_of_scope(job("ia3"))
    two = job("loha", rank=4).replace(parallelism=Parallelism(data_parallel_size=2, sharding="fsdp2"))
    assert "one GPU only" in out_of_scope(two)
    old = job_from_mapping(
        {"architecture": TINY, "versions": {"peft": "0.15.2"}, "finetuning": {"method": "oft", "rank": 4}}
    )
    assert "implemented otherwise in the peft release" in out_of_scope(old)


@pytest.mark.parametrize(
    ("finetuning", "message"),
    [
        ({"method": "lokr", "rank": 4, "settings": {"decompose_facto": 4}}, "did you mean 'decompose_factor'"),
        ({"method": "lokr", "rank": 4, "settings": {"decompose_factor": "4"}}, "must be a whole number, such as -1"),
        ({"method": "loha"}, "finetuning.rank is missing"),
        ({"method": "prompt_tuning"}, "finetuning.settings.num_virtual_tokens is missing"),
        ({"method": "lorra", "rank": 4}, "did you mean 'lora'"),
    ],
)
def test_settings_that_cannot_be_are_refused(finetuning, message):
    with pytest.raises(SpecError, match=re.escape(message)):
        job_from_mapping({"architecture": TINY, "finetuning": finetuning})


def test_peft_configurations_become_their_methods():
    read = lambda **peft: from_huggingface(TINY, peft=peft).job.finetuning  # noqa: E731
    lokr = read(peft_type="LOKR", r=4, decompose_factor=4, target_modules=["q_proj"], alpha=8)
    assert (lokr.method, lokr.rank, lokr.settings, lokr.targets) == ("lokr", 4, {"decompose_factor": 4}, ("q_proj",))
    assert read(peft_type="LORA", r=4, use_dora=True).method == "dora"
    assert (read(peft_type="IA3").rank, read(peft_type="ADALORA", init_r=6).rank) == (None, 6)
    assert read(peft_type="TRAINABLE_TOKENS", token_indices=[1, 2, 5]).settings == {"num_tokens": 3}
    unknown = from_huggingface(TINY, peft={"peft_type": "XLORA"})
    assert any("peft_type=XLORA is not modelled" in sentence for sentence in unknown.unsupported)
    assert json.dumps(dict(lokr.settings)) == '{"decompose_factor": 4}'
