"""Scripts whose weights bitsandbytes packs: what they need is what the trace of the same job needs."""

from __future__ import annotations

import json

import pytest

from peakcast.dialects.job_file import job_from_mapping
from peakcast.models.analytical.quantization import quantized_linear_bytes
from peakcast.timeline import Category

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 1000, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH = 256
MATRICES = [(512, 512)] * 4 + [(1024, 512)] * 2 + [(512, 1024)]
"""Of a layer."""


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    return "llama"


def parameters_of(found):
    return found.timelines["steady"].composition(0)[Category.PARAMETERS]


def weights(tuning):
    """Bytes of the base: packed matrices, and in bfloat16 the table, the head and the norms; and of adapters of rank 4."""
    packed = sum(size for shape in MATRICES for _, size in quantized_linear_bytes(shape, tuning))
    adapters = 4 * sum(4 * (rows + columns) for rows, columns in MATRICES)
    return 2 * (packed + adapters) + 2 * (2 * 1000 * 512 + 5 * 512)


def test_packed_weights_are_those_of_the_job_and_adapters_train_on_them(run_script, traced, checkpoint):
    found = run_script("qlora.py", checkpoint, "4", str(LENGTH))
    tuning = found.job.finetuning
    assert (tuning.method, tuning.quantization, tuning.rank) == ("qlora", "nf4", 4)
    job = job_from_mapping(
        {"architecture": LLAMA, "sequence_length": LENGTH, "finetuning": {**mapping_of(tuning), "adapter_dtype": "float32"}}
    )
    for step, timeline in traced(job).items():
        assert found.timelines[step].peak().num_bytes == pytest.approx(timeline.peak().num_bytes, rel=0.01)


def mapping_of(tuning):
    return {"method": "qlora", "rank": 4, "targets": list(tuning.targets), "quantization": "nf4"}


def test_weights_of_eight_bits_have_a_byte_an_element(run_script, checkpoint):
    found = run_script("qlora.py", checkpoint, "8", str(LENGTH))
    assert found.job.finetuning.quantization == "int8"
    assert any("too large for 8 bits" in warning for warning in found.answer.warnings)


def test_paged_states_are_not_of_the_allocator(run_script, checkpoint):
    found = run_script("qlora.py", checkpoint, "4", str(LENGTH), "--prepare", "--paged")
    assert found.job.optimizer.name == "paged_adamw_32bit"
