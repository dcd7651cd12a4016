"""Scripts whose weights bitsandbytes packs: what they need is what the trace of the same job needs."""

from __future__ import annotations

import json

import pytest

from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.ledger.parameters.quantization import quantized_linear_bytes
from peakcast.timelines.timeline import Category

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 256
MATRICES = [(512, 512)] * 4 + [(1024, 512)] * 2 + [(512, 1024)]
"""Of a layer."""
RANK = 4
ADAPTERS = 2 * sum(RANK * (rows + columns) for rows, columns in MATRICES)
"""Parameters of the adapters of both layers."""
REST = 2 * (2 * 1000 * 512 + 5 * 512)
"""Bytes of the table, the head and the norms in bfloat16."""


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    return "llama"


def composition(found):
    return found.timelines["steady"].composition(0)


@pytest.mark.needs("bitsandbytes", "peft")
def test_packed_weights_are_those_of_the_job_and_adapters_train_on_them(run_script, traced, of_tensors, checkpoint):
    found = run_script("qlora.py", checkpoint, "4", str(LENGTH))
    tuning = found.job.finetuning
    assert (tuning.method, tuning.quantization, tuning.rank) == ("qlora", "nf4", RANK)
    assert sum(size for shape in MATRICES for _, size in quantized_linear_bytes(shape, tuning)) * 2 == pytest.approx(
        composition(found)[Category.PARAMETERS] + composition(found).get(Category.INPUTS, 0) - REST - 4 * ADAPTERS, rel=0.02
    )
    adapters = {"method": "qlora", "rank": RANK, "targets": ["all-linear"], "quantization": "nf4"}
    job = job_from_mapping({"architecture": LLAMA, "sequence_length": LENGTH, "finetuning": adapters})
    for step, timeline in traced(job).items():
        ours, theirs = of_tensors(found.timelines[step]).peak(), of_tensors(timeline).peak()
        assert ours.num_bytes == pytest.approx(theirs.num_bytes, rel=1e-3)
        assert ours.phase == theirs.phase


@pytest.mark.needs("bitsandbytes", "peft")
def test_dora_has_a_magnitude_for_each_row_of_packed_weights(run_script, checkpoint):
    """Its norms are those of the unpacked weights, which exist in the forward of a layer at a time."""
    plain, dora = (composition(run_script("qlora.py", checkpoint, "4", str(LENGTH), *more)) for more in ((), ("--dora",)))
    magnitudes = 2 * sum(rows for rows, _ in MATRICES)
    assert dora[Category.OPTIMIZER_STATES] - plain[Category.OPTIMIZER_STATES] == pytest.approx(8 * magnitudes, rel=0.01)
    held = [sum(found.get(kind, 0) for kind in (Category.PARAMETERS, Category.INPUTS)) for found in (plain, dora)]
    assert held[1] - held[0] == pytest.approx(4 * magnitudes, rel=0.01)


@pytest.mark.needs("bitsandbytes", "peft")
def test_weights_of_eight_bits_have_a_byte_an_element(run_script, checkpoint):
    found = run_script("qlora.py", checkpoint, "8", str(LENGTH))
    assert found.job.finetuning.quantization == "int8"
    weights = 2 * sum(rows * columns + 4 * rows for rows, columns in MATRICES)  # and a scale for each row
    held = composition(found)[Category.PARAMETERS] + composition(found).get(Category.INPUTS, 0)
    assert held == pytest.approx(weights + REST + 4 * ADAPTERS, rel=0.02)
    assert any("too large for 8 bits" in finding.sentence for finding in found.answer.findings)


@pytest.mark.needs("bitsandbytes", "peft")
def test_paged_states_are_not_of_the_allocator(run_script, checkpoint):
    found = run_script("qlora.py", checkpoint, "4", str(LENGTH), "--prepare", "--paged")
    assert found.job.optimizer.name == "paged_adamw_32bit"
    small = 2 * 4 * ADAPTERS  # below 100,000 elements states are not paged
    assert composition(found)[Category.OPTIMIZER_STATES] == pytest.approx(small, rel=0.02)


def test_a_weight_that_fsdp_has_gathered_has_the_state_of_its_layer():
    from types import SimpleNamespace

    from peakcast.collectors.stacks.parts.quantized_fakes import _state_from_layer

    gathered = SimpleNamespace(weight=SimpleNamespace(), quant_state="the layer's")
    _state_from_layer(gathered)
    assert gathered.weight.quant_state == "the layer's"
    loaded = SimpleNamespace(weight=SimpleNamespace(quant_state="its own"), quant_state="the layer's")
    _state_from_layer(loaded)
    assert loaded.weight.quant_state == "its own"


def test_rows_for_trainers_that_generate_are_prompts(monkeypatch):
    """Of TRL's GRPO; those that prefer have two answers, and others text."""
    import sys

    pytest.importorskip("datasets.arrow_dataset")  # `datasets` alone may be the repository's folder
    import datasets

    from peakcast.collectors.dryrun.synthetic_rows import Rows

    for name in [name for name in sys.modules if name.startswith("trl.trainer.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl.trainer.grpo_trainer", sys)
    assert Rows(4, 4, print).made(datasets).column_names == ["prompt"]


def test_other_methods_are_refused_in_a_sentence():
    from peakcast.collectors.dryrun.quantized import quantizer_of

    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig()
    with pytest.raises(NotImplementedError, match=r"only those of bitsandbytes .* not those of fp8"):
        quantizer_of("llama", config, {"quantization_config": transformers.FineGrainedFP8Config()})
    assert quantizer_of("llama", config, {"dtype": "bfloat16"}) is None
