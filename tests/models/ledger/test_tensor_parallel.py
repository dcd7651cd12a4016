"""Tensor parallelism of Hugging Face and plain torch: bytes of a two-layer network counted by hand."""

import itertools
from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Batch, Finetuning, Parallelism, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.optimizers.choice import optimizer_rule
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category, Phase

BF16, FP32 = 2, 4
WIDTH, INNER, VOCABULARY, ROWS = 512, 1408, 32000, 128
NORMS = (2 * 4 + 1) * WIDTH
TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=WIDTH,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    intermediate_size=INNER,
    vocab_size=VOCABULARY,
)


def job(ranks=2, framework="torch", **changes):
    layout = {"tensor_parallel_size": ranks, **changes.pop("layout", {})}
    return TrainingJob(
        architecture=replace(
            TINY,
            tie_word_embeddings=changes.pop("tied", False),
            model_type=changes.pop("family", "llama"),
            normalization=changes.pop("normalization", "rmsnorm"),
        ),
        framework=framework,
        sequence_length=ROWS,
        parallelism=Parallelism(**layout),
        **changes,
    )


def parameters(timeline):
    return sum(timeline.num_bytes[timeline.categories == Category.PARAMETERS].tolist())


def matrices(ranks):
    return 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) // ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_transformers_splits_projections_and_the_head_but_not_an_untied_table(ranks):
    table = VOCABULARY * WIDTH
    expected = (matrices(ranks) + NORMS + table + table // ranks) * BF16
    assert parameters(ledger(job(ranks, "huggingface"))) == expected


@pytest.mark.parametrize("framework", ["torch", "huggingface"])
def test_a_table_that_the_head_shares_is_split_once(framework):
    expected = (matrices(4) + NORMS + VOCABULARY * WIDTH // 4) * BF16
    assert parameters(ledger(job(4, framework, tied=True))) == expected


def test_torch_makes_the_whole_tables_gradient_on_every_rank():
    steady = ledger(job(4))
    table = [
        size
        for name, size in zip(steady.names, steady.num_bytes.tolist(), strict=True)
        if name == "embed_tokens.weight.grad"
    ]
    assert table == [VOCABULARY * WIDTH * BF16]


def test_of_an_adapter_the_matrix_is_split_that_meets_the_split_side():
    """lora_B where the outputs are split, lora_A where the inputs are; the base network is split as if it trained."""
    rank, ranks = 8, 4
    tuned = job(ranks, "huggingface", finetuning=Finetuning(method="lora", rank=rank, targets=("all-linear",)))
    assert out_of_scope(tuned) == ""
    by_columns = 3 * (WIDTH + WIDTH // ranks) + 2 * (WIDTH + INNER // ranks)
    by_rows = (WIDTH // ranks + WIDTH) + (INNER // ranks + WIDTH)
    adapters = 4 * rank * (by_columns + by_rows) * FP32
    assert parameters(ledger(tuned)) == parameters(ledger(job(ranks, "huggingface"))) + adapters


@pytest.mark.parametrize("sequence", [False, True])
def test_under_torchs_plan_adapters_are_split_the_same_and_a_row_splits_sum_waits_for_whoever_takes_it(sequence):
    """The same bytes as peft's; where ranks share the sequence, lora_B of a matrix that is split by its inputs sees a part,
    and clipping adds its gradients up into copies: two in each of four layers."""
    rank, ranks = 64, 4
    adapters = Finetuning(method="lora", rank=rank, targets=("all-linear",))
    tuned = job(ranks, finetuning=adapters, layout={"sequence_parallel": sequence})
    assert out_of_scope(tuned) == ""
    steady, table = ledger(tuned), VOCABULARY * WIDTH * (ranks - 1) // ranks
    assert parameters(steady) == parameters(ledger(job(ranks, "huggingface", finetuning=adapters))) - table * BF16
    clipped = steady.alive_at(steady.labels.index("clip_grad_norm_"))
    summed = [name.endswith(".grad.sum") for name in steady.names]
    assert int(steady.num_bytes[clipped & summed].sum()) == sequence * 4 * 2 * WIDTH * rank * FP32


@pytest.mark.parametrize(("family", "whole"), [("llama", 1), ("phi3", 2)])
def test_a_part_that_gathers_its_columns_keeps_its_queries_whole(family, whole):
    """Two ranks: half of the queries each, or all."""
    steady = ledger(job(2, "huggingface", family=family))
    alive = steady.alive_at(steady.peak(Phase.LOSS).instant)
    rotated = [name == "self_attn.rotary_q.add" for name in steady.names]
    assert int(steady.num_bytes[alive & rotated].sum()) == 4 * whole * ROWS * WIDTH // 2 * BF16


def test_with_a_split_loss_no_rank_holds_all_logits():
    split = ledger(job(4))
    whole = ledger(job(4, framework_options=FrozenMapping({"loss_parallel": False})))
    logits = ROWS * VOCABULARY * FP32
    assert max(split.num_bytes[split.categories == Category.LOGITS]) == logits // 4
    assert max(whole.num_bytes[whole.categories == Category.LOGITS]) == logits


def test_sequence_parallelism_divides_what_layers_keep_of_the_stream():
    def kept(layout):
        steady = ledger(job(4, layout=layout))
        alive = steady.alive_at(steady.peak(Phase.LOSS).instant)
        mine = [name == "input_layernorm.to_float32" for name in steady.names]
        return int(steady.num_bytes[alive & mine].sum())

    assert kept({}) == 4 * ROWS * WIDTH * FP32
    assert kept({"sequence_parallel": True}) == ROWS * WIDTH * FP32


@pytest.mark.parametrize("views", [False, True])
def test_under_ddp_all_gradients_meet_at_the_end_of_backward(views):
    """What makes DTensors of the parameters runs first in forward, so last in backward: when the table's gradient is there
    for all of its rows, so are the gradients of everything else, and the buckets for all of them."""
    options = FrozenMapping({"ddp_gradient_as_bucket_view": views})
    step = ledger(job(4, layout={"data_parallel_size": 2}, framework_options=options), step="first")
    (at,) = [instant for instant, label in enumerate(step.labels) if label == "embed_tokens"][1:]
    alive = step.alive_at(at)
    part = VOCABULARY * WIDTH // 4
    made = int(step.num_bytes[alive & (step.categories == Category.GRADIENTS)].sum())
    assert made == (matrices(4) + NORMS + part) * BF16
    buckets = int(step.num_bytes[alive & (step.categories == Category.COMMUNICATION_BUFFERS)].sum())
    assert buckets == (matrices(4) + NORMS + 2 * part) * BF16
    table = [name == "embed_tokens.temporary" for name in step.names]
    assert int(step.num_bytes[alive & table].sum()) == VOCABULARY * WIDTH * BF16


def test_the_trainer_steps_parameter_by_parameter_over_a_mixture_of_tensors():
    assert optimizer_rule(job(2, "huggingface")) == optimizer_rule(
        job(1, "huggingface", optimizer=replace(job().optimizer, implementation="loop"))
    )
    assert optimizer_rule(job(2)) == optimizer_rule(job(1))


def test_more_ranks_never_raise_a_phase():
    peaks = [ledger(job(ranks, layout={"sequence_parallel": ranks > 1})).phase_peaks() for ranks in (1, 2, 4, 8)]
    for fewer, more in itertools.pairwise(peaks):
        assert all(more[phase] <= fewer[phase] for phase in fewer)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"framework": "huggingface", "layout": {"data_parallel_size": 2, "sharding": "fsdp2"}}, "ReplicateParallel"),
        ({"framework": "huggingface", "layout": {"sequence_parallel": True}}, "sequence_parallel"),
        ({"layout": {"data_parallel_size": 2, "sharding": "fsdp1"}}, "sharding='fsdp1'"),
        ({"layout": {"data_parallel_size": 2}, "tied": True}, "shares its token table"),
        (
            {"finetuning": Finetuning(method="lora", rank=8), "layout": {"data_parallel_size": 2}},
            "DDP would make every frozen weight trainable",
        ),
        ({"family": "phi", "normalization": "layernorm"}, "'phi' under framework='torch'"),
        ({"normalization": "layernorm", "framework": "huggingface", "family": "bloom"}, "tensor parallelism of 'bloom'"),
        ({"framework": "huggingface", "family": "olmo2", "finetuning": Finetuning(method="lora", rank=8)}, "self_attn"),
        ({"framework": "deepspeed"}, "framework='deepspeed'"),
        ({"batch": Batch(form="masked")}, "batch.form='masked'"),
    ],
)
def test_what_is_not_modelled_is_named(changed, words):
    assert out_of_scope(job()) == ""
    assert words in out_of_scope(job(**changed))


MIXTURE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("family", "traced"), [("qwen3_moe", 153963520), ("mixtral", 167433000), ("olmoe", 226317800)]
)
def test_each_rank_computes_its_part_of_every_expert(family, traced):
    """`moe_tp_experts` of transformers 5.17: the rows between the two products are a rank's part of them. The peaks of
    traces."""
    narrow = dict.fromkeys(("parameters", "compute", "gradients", "optimizer_states"), "bfloat16")
    asked = job_from_mapping(
        {
            "architecture": {"model_type": family, **MIXTURE, **EXPERTS[family]},
            "framework": "huggingface",
            "micro_batch_size": 4,
            "sequence_length": 512,
            "precision": {**narrow, "main_parameters": None},
            "parallelism": {"tensor_parallel_size": 2},
        }
    )
    assert ledger(asked).peak().num_bytes == pytest.approx(traced, rel=0.001)
    assert "not modelled" not in out_of_scope(asked)
    looped = replace(asked, framework_options=FrozenMapping({"experts_implementation": "loop"}))
    assert "grouped products" in out_of_scope(looped)
