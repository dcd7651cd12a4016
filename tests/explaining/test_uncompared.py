"""Changes of a network that recipes answer: those without a recipe are named, not left out in silence."""

from peakcast import api
from peakcast.explaining.uncompared import uncompared

CONFIG = {"model_type": "apertus", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32} | {
    "num_key_value_heads": 8,
    "intermediate_size": 21_504,
    "vocab_size": 131_072,
}
"""A family whose recipes come with peakcast, none of them with Liger's loss."""


def _job(**given):
    return api.read({"architecture": CONFIG, "micro_batch_size": 1, "sequence_length": 2048, **given}).job


def test_what_no_recipe_of_is_recorded_is_named():
    assert "fused-loss" in {candidate.name for candidate in uncompared(_job())}


def test_what_the_ledger_counts_has_a_number():
    job = {"architecture": "llama-3.1-8b", "micro_batch_size": 1, "sequence_length": 2048}
    assert uncompared(api.read(job).job) == ()


def test_what_a_job_has_already_is_not_named():
    fused = {"loss": {"fused_linear_cross_entropy": True}}
    assert "fused-loss" not in {candidate.name for candidate in uncompared(_job(**fused))}


def test_answers_of_runs_that_do_not_fit_say_so():
    job = {"architecture": CONFIG, "micro_batch_size": 8, "sequence_length": 4096}
    [said] = api.predict(job, "RTX4090").remarks
    assert said.startswith("Not compared, since each is recorded only when it is asked for: ")
    assert "(--set loss.fused_linear_cross_entropy=true)" in said
