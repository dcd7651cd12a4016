"""The job of an answer has the loss and the kernels of the script: the ledger counts what the script needs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from peakcast import catalog
from peakcast.models.baseline.ledger import ledger

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 32_000, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    return "llama"


@pytest.mark.needs("trl", "bitsandbytes", "peft")
@pytest.mark.parametrize(
    ("trainer", "more", "loss"),
    [
        ("SFT", (), {}),
        pytest.param("DPO", (), {"kind": "dpo", "reference": "model"}, marks=pytest.mark.whole),
        ("DPO", ("--nf4",), {"kind": "dpo", "reference": "adapter_off"}),
        pytest.param("DPO", ("--nf4", "--checkpoint"), {"kind": "dpo"}, marks=pytest.mark.whole),
        pytest.param("KTO", ("--nf4",), {"kind": "kto"}, marks=pytest.mark.whole),
        pytest.param("Reward", ("--nf4", "--checkpoint"), {"kind": "reward"}, marks=pytest.mark.whole),
    ],
)
def test_the_job_of_a_trl_trainer_needs_what_its_script_needs(run_script, checkpoint, trainer, more, loss):
    """A row that stands in is all answer but for a word, which both count."""
    found = run_script("preference.py", trainer, checkpoint, *more, length=256)
    assert {name: getattr(found.job.loss, name) for name in loss} == loss
    assert found.job.framework_options.get("loss_kernel") == ("tiles" if trainer == "SFT" else None)
    expected = ledger(found.job, device=catalog.gpu("H100-80GB"), rank=0, step="steady").peak()
    assert expected.num_bytes == pytest.approx(found.timelines["steady"].peak().num_bytes, rel=2e-3)
    codes = {finding.code for finding in found.answer.findings}
    assert "job_differs" not in codes
    assert not any("compared with no trace" in finding.sentence for finding in found.answer.findings)


@pytest.mark.needs("trl", "liger_kernel")
def test_kernels_of_liger_are_those_that_run(run_script, checkpoint):
    """TRL's SFTTrainer has a head of its own and keeps Liger's away, whose layers stay."""
    found = run_script("preference.py", "SFT", checkpoint, "--liger", length=256)
    assert not found.job.loss.fused_linear_cross_entropy
    options = found.job.framework_options
    kernels = ("loss_kernel", "norm_kernel", "rotary_kernel", "gated_activation_kernel")
    assert [options.get(name) for name in kernels] == ["tiles", "fused", "fused", "fused"]
    expected = ledger(found.job, device=catalog.gpu("H100-80GB"), rank=0, step="steady").peak()
    assert expected.num_bytes == pytest.approx(found.timelines["steady"].peak().num_bytes, rel=2e-3)


def test_only_words_of_completions_have_logits_in_grpo():
    from transformers import LlamaConfig, LlamaForCausalLM

    from peakcast.collectors.dryrun.losses import loss_of

    sizes = {name: LLAMA[name] // 8 for name in ("hidden_size", "intermediate_size", "vocab_size")}
    trainer = type("GRPOTrainer", (), {"max_completion_length": 16, "beta": 0.0, "ref_model": None})()
    steps = SimpleNamespace(trainer=trainer, tokens=(8, 24), ran=set())
    loss, _ = loss_of(steps, LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)))
    assert loss == {"kind": "grpo", "reference": "none", "completion_length": 16}
