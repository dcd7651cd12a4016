"""Preference training: what a reference adds, which jobs are covered, and that other jobs mean what they did."""

from dataclasses import replace

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import BF16, FP32
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.conventions import adapter_dtype
from peakcast.jobs.spec import Loss, Parallelism, TrainingJob, job_to_mapping
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.blocks.preference_heads import _cast
from peakcast.models.ledger.parameters.inventory import num_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category, Phase

DPO, PRECOMPUTED = {"kind": "dpo"}, {"kind": "dpo", "reference": "precomputed"}
LORA = {"method": "lora", "rank": 8}
ENTROPY = 3 * 128 / (16 * 128)
"""The share of 16 · 128 tokens' logits that three tensors of 128 tokens have."""


def job(**changes) -> TrainingJob:
    network = {"name": "llama-3.2-1b", "num_hidden_layers": 2}
    base = {"architecture": network, "sequence_length": 128, "micro_batch_size": 2}
    return expand({"base": base, "include": [changes]})[0]


def standing(of, category):
    """Bytes of `category` between steps."""
    timeline = ledger(of)
    last = len(timeline.phases) - 1
    there = (timeline.born <= last) & (timeline.dies > last) & (timeline.categories == int(category))
    return int(timeline.num_bytes[there].sum())


def test_a_reference_is_a_second_network_between_steps():
    plain, dpo = job(), job(loss=DPO)
    weights = num_parameters(plain.architecture) * BF16
    assert standing(dpo, Category.REFERENCE_PARAMETERS) == standing(dpo, Category.PARAMETERS) == weights
    for other in (plain, job(loss=PRECOMPUTED), job(loss=DPO, finetuning=LORA), job(loss={"kind": "reward"})):
        assert standing(other, Category.REFERENCE_PARAMETERS) == 0


def test_a_reference_shows_in_every_phase_as_its_weights():
    """Its own forward hides below backward: the head's gradients are larger."""
    kept, made = ledger(job(loss=DPO)), ledger(job(loss=PRECOMPUTED))
    weights = standing(job(loss=DPO), Category.REFERENCE_PARAMETERS)
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP):
        assert kept.peak(phase).num_bytes - made.peak(phase).num_bytes == weights


def test_no_whole_logits_are_made_but_where_they_are_asked_for():
    logits = 2 * 128 * 128_256 * BF16
    assert ledger(job(loss=PRECOMPUTED)).peak(Phase.LOSS).num_bytes < ledger(job()).peak(Phase.LOSS).num_bytes - logits
    old = job(loss=PRECOMPUTED, versions={"trl": "0.24.0"})
    assert ledger(old).peak(Phase.LOSS).num_bytes > ledger(job(loss=PRECOMPUTED)).peak(Phase.LOSS).num_bytes + logits
    assert "whole logits" in out_of_scope(old)
    assert out_of_scope(old.replace(framework_options=FrozenMapping({"autocast": True}))) == ""


@pytest.mark.parametrize(("autocast", "logits"), [(True, 3 * FP32), (False, 2 * BF16)])
def test_how_often_whole_logits_are_there_in_backward(autocast, logits):
    """In fp32 the logits, which are saved; the gradient of each sequence; and all of them stacked. Then the first gives way
    to the zeros into which the gradient of the chosen tokens' logits is written. In 16 bits each sequence's log-softmax is
    freed as its gradient is made (traces of trl 1.5.1 and 1.6.0 agree within 0.1 % in backward). The head is frozen."""
    options = {"preference_logits": "whole", "autocast": autocast}
    one = job(loss={"kind": "dpo", "reference": "precomputed"}, finetuning=LORA, framework_options=options)
    one = one.replace(architecture=replace(one.architecture, tie_word_embeddings=False))
    larger = one.replace(architecture=replace(one.architecture, vocab_size=one.architecture.vocab_size + 1024))
    head_and_table = 2 * one.architecture.hidden_size * 1024 * BF16
    grown = ledger(larger).peak(Phase.BACKWARD).num_bytes - ledger(one).peak(Phase.BACKWARD).num_bytes
    assert grown == 2 * 128 * 1024 * logits + head_and_table


@pytest.mark.parametrize(
    ("scores", "times"), [("log_softmax", 3), ("shifted_log_softmax", 5), ("shifted_log_softmax_and_nll", 5.5)]
)
def test_a_reference_meets_what_the_policys_log_probabilities_keep(scores, times):
    """The policy's log-softmax, and the reference's logits and their log-softmax. Where logits are shifted there is a copy
    without each sequence's last token too, and the policy's logits are held by a variable; trl 0.9.6 to 0.11 also have the
    log-softmax of the chosen half, for a loss that DPO does not use. Six dry runs of trl 0.11.4 and six of LLaMA-Factory's
    trainer agree within 0.3 %."""
    one = job(loss=DPO, finetuning=LORA, framework_options={"preference_logits": scores, "autocast": True})
    one = one.replace(architecture=replace(one.architecture, tie_word_embeddings=False))
    larger = one.replace(architecture=replace(one.architecture, vocab_size=one.architecture.vocab_size + 1024))
    head_and_table = 2 * one.architecture.hidden_size * 1024 * BF16
    grown = ledger(larger).peak(Phase.LOSS).num_bytes - ledger(one).peak(Phase.LOSS).num_bytes
    assert grown == times * 2 * 128 * 1024 * FP32 + head_and_table


@pytest.mark.parametrize(
    ("trl", "autocast", "reference", "times"),
    [
        ("1.5.1", True, "model", 4.5),
        ("1.5.1", False, "model", 5.5),
        ("1.5.1", True, "precomputed", 2.5),
        ("1.6.0", True, "model", 3 + ENTROPY),
        ("1.6.0", True, "precomputed", 2 + ENTROPY),
        ("0.28.0", True, "model", 2.5),
    ],
)
def test_what_a_trainers_loss_refers_to_is_there_at_once(trl, autocast, reference, times):
    """In units of all logits: the outputs of policy and reference, of which trl 0.29 to 1.5 also make copies without each
    sequence's last token; then the copy that indexing one half by its mask makes, or, from 1.6 on, the one that reshaping a
    view makes for the entropy. In 16 bits the graph saves a log-softmax beside the copy. A published run (pull request 5926
    of trl: Qwen2.5-0.5B, A100, 8 sequences of 512 tokens) went from 17.86 to 15.17 GiB with 1.6; the answers are 18.43 and
    15.19 if every token is a completion's, and 17.86 for the first if half of them are. Traces of both releases agree
    within 0.4 %."""
    loss = {"kind": "dpo"} | ({"reference": reference} if reference != "model" else {})
    one = job(loss=loss, versions={"trl": trl}, micro_batch_size=16, framework_options={"autocast": autocast})
    one = one.replace(architecture=replace(one.architecture, tie_word_embeddings=False))
    larger = one.replace(architecture=replace(one.architecture, vocab_size=one.architecture.vocab_size + 1024))
    held = 4 if reference == "model" else 3  # weights, optimizer states, and the reference's weights
    head_and_table = 2 * one.architecture.hidden_size * 1024 * BF16 * held
    grown = ledger(larger).peak(Phase.LOSS).num_bytes - ledger(one).peak(Phase.LOSS).num_bytes
    unit = 16 * 128 * 1024 * (FP32 if autocast else BF16)
    assert (grown - head_and_table) / unit == pytest.approx(times, abs=0.05)


def test_a_classifier_has_no_lm_head():
    plain, reward = job(), job(loss={"kind": "reward"})
    untied = replace(plain.architecture, tie_word_embeddings=False)
    width, rows = plain.architecture.hidden_size, plain.architecture.vocab_size
    assert standing(reward, Category.PARAMETERS) == (num_parameters(untied) - width * rows + width) * BF16


@pytest.mark.parametrize(
    ("rows", "vocabulary", "forward", "backward"),
    [
        (100, 32_000, 32_100, 32_100),  # one tile: all tokens and the whole head
        (100, 65_536, 32_868, 65_636),  # the head's second chunk is there before backward lets go of the first
        (8192, 1000, 8192, 9192),  # two chunks of tokens meet, in backward beside the head's
    ],
)
def test_rows_that_autocast_narrows_at_a_time(rows, vocabulary, forward, backward):
    assert (_cast(rows, vocabulary), _cast(rows, vocabulary, keeps_weight=True)) == (forward, backward)


@pytest.mark.parametrize(("completion", "scored"), [(None, 127), (32, 32), (500, 127)])
def test_grpo_scores_completions_and_not_their_prompts(completion, scored):
    one = job(loss={"kind": "grpo", "completion_length": completion})
    step = ledger(one)
    made = dict(zip(step.names, step.num_bytes.tolist(), strict=True))
    assert made["lm_head.scored"] == 2 * scored * one.architecture.hidden_size * BF16


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_batch_size": 3}, "even micro_batch_size"),
        ({"parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"}}, "without a reference network only"),
        ({"parallelism": {"data_parallel_size": 8, "sharding": "hsdp"}}, "under DDP, FSDP1, FSDP2 and ZeRO only"),
        ({"framework": "torch"}, "for TRL's trainers only"),
        ({"loss": {"kind": "grpo"}, "finetuning": {**LORA, "method": "qlora", "quantization": "nf4"}}, "with no trace"),
        (
            {"finetuning": {**LORA, "method": "qlora", "quantization": "nf4"}, "parallelism": {"data_parallel_size": 2}},
            "over quantised weights",
        ),
        ({"architecture": {"name": "mixtral-8x7b", "num_hidden_layers": 2}}, "not modelled with experts"),
    ],
)
def test_what_was_not_traced_is_out_of_scope_and_still_answered(changes, says):
    one = job(**{"loss": DPO, **changes})
    assert says in out_of_scope(one)
    assert ledger(one).peak().num_bytes > 0


def test_a_classifier_cannot_be_made_in_parts():
    layouts = {stage: {"data_parallel_size": 2, "zero_stage": stage} for stage in (2, 3)}
    said = {stage: out_of_scope(job(loss={"kind": "reward"}, parallelism=layout)) for stage, layout in layouts.items()}
    assert said[2] == ""
    assert "cannot make a classifier's weights in parts" in said[3]


def gathered_to_the_end_of_backward(of):
    timeline = ledger(of, step="first")
    ends = [instant for instant, phase in enumerate(timeline.phases) if phase == Phase.BACKWARD][-1]
    names = zip(timeline.names, timeline.modules, timeline.dies, timeline.num_bytes, strict=True)
    return {module for name, module, dies, size in names if name == "gathered" and dies == ends + 1 and size > 2**20}


def test_zero_3_lets_go_of_nothing_in_backward_once_adapters_were_switched_off():
    """The forward without adapters comes after the policy's, and its modules forget that backward is to tell them."""
    shares = {"data_parallel_size": 4, "zero_stage": 3}
    network = {"name": "llama-3.2-1b", "num_hidden_layers": 2, "tie_word_embeddings": False}
    losses = (DPO, PRECOMPUTED)
    left = [
        gathered_to_the_end_of_backward(job(loss=loss, finetuning=LORA, parallelism=shares, architecture=network))
        for loss in losses
    ]
    assert left == [{"layers.0", "layers.1", "head"}, {"head"}]


def test_trls_adapters_under_zero_3_are_of_the_networks_dtype():
    shares = {"data_parallel_size": 4, "zero_stage": 3}
    dtypes = [adapter_dtype(job(loss=loss, finetuning=LORA, parallelism=shares)) for loss in ({}, DPO)]
    assert dtypes == ["float32", "bfloat16"]


def test_sharding_a_reference_keeps_a_part_of_it_and_gathers_it():
    whole, parts = job(loss=DPO), job(loss=DPO, parallelism={"data_parallel_size": 4, "sharding": "fsdp2"})
    weights = standing(whole, Category.REFERENCE_PARAMETERS)
    assert standing(parts, Category.REFERENCE_PARAMETERS) == pytest.approx(weights / 4, rel=1e-3)
    assert standing(parts.replace(parallelism=Parallelism(data_parallel_size=4)), Category.REFERENCE_PARAMETERS) == weights


def test_fsdp2_gathers_the_whole_reference_beside_what_was_sent():
    one = job(loss=DPO, parallelism={"data_parallel_size": 4, "sharding": "fsdp2"})
    weights = standing(job(loss=DPO), Category.REFERENCE_PARAMETERS)
    timeline = ledger(one)
    owners = zip(timeline.modules, timeline.categories, strict=True)
    of_copy = [module == "reference" and kind == Category.COMMUNICATION_BUFFERS for module, kind in owners]
    assert timeline.num_bytes[of_copy].sum() == pytest.approx(2 * weights, rel=1e-3)


def test_zero_3_fetches_the_reference_as_it_runs_and_zero_2_keeps_it_whole():
    weights = standing(job(loss=DPO), Category.REFERENCE_PARAMETERS)
    layouts = {stage: {"data_parallel_size": 4, "zero_stage": stage} for stage in (2, 3)}
    kind = Category.REFERENCE_PARAMETERS
    held = {stage: standing(job(loss=DPO, parallelism=layout), kind) for stage, layout in layouts.items()}
    assert held == {2: pytest.approx(weights, rel=1e-3), 3: pytest.approx(weights / 4, rel=1e-3)}


def test_old_jobs_say_and_hash_what_they_did_and_new_ones_come_back():
    assert job_to_mapping(job())["loss"] == {"fused_linear_cross_entropy": False}
    for one in (job(loss=DPO), job(loss=PRECOMPUTED), job(loss={"kind": "reward"})):
        assert job_from_mapping(job_to_mapping(one)) == one
        assert one.config_hash != job().config_hash


def test_a_reference_that_cannot_be_is_refused():
    with pytest.raises(SpecError, match=r"loss\.reference='model' needs a loss with a reference"):
        Loss(reference="model")
    with pytest.raises(SpecError, match="needs an adapter to switch off"):
        job(loss={"kind": "dpo", "reference": "adapter_off"})


def test_whole_logits_under_zero3_are_made_by_the_head_as_the_cross_entropys_are():
    zero3 = {"framework": "deepspeed", "parallelism": {"data_parallel_size": 4, "zero_stage": 3}}
    plain = job(**zero3)
    whole = job(**zero3, loss=PRECOMPUTED, framework_options={"preference_logits": "whole"})
    assert ledger(whole).peak().num_bytes == ledger(plain).peak().num_bytes


def test_fsdp1_gathers_no_adapter_for_a_reference_that_runs_without_them():
    """With `use_orig_params` each adapter's weight is a unit of its own, gathered while its module runs."""
    shares = {"data_parallel_size": 2, "sharding": "fsdp1"}
    timeline = ledger(job(loss=DPO, finetuning=LORA, parallelism=shares, framework_options={"fsdp1_use_orig_params": True}))
    begun = {Phase(timeline.phases[at]) for at, of in zip(timeline.born, timeline.modules, strict=True) if "lora" in of}
    assert Phase.FORWARD in begun
    assert Phase.LOSS not in begun


def test_the_copy_of_a_reward_models_head_is_counted_whether_or_not_it_is_named():
    reward = job(loss={"kind": "reward"}, finetuning=LORA)
    named = job(loss={"kind": "reward"}, finetuning={**LORA, "modules_to_save": ["score"]})
    assert out_of_scope(named) == out_of_scope(reward) == ""
    assert ledger(named).peak() == ledger(reward).peak()
