"""The Megatron-LM ledger: per-layer sums counted by hand, layouts, and published runs replayed.

The published figures are NVIDIA/Megatron-LM functional-test golden values (commit d98e8a6), last rank, exact bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peakcast.catalog import gpu
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.head import head
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import attention_core, layer_context
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category, Timeline

B, S, H, A = 4, 1024, 512, 8
SBH, AS2B = S * B * H, A * S * S * B
MIB = 2**20

BASE: dict[str, Any] = {
    "num-layers": 12,
    "hidden-size": H,
    "num-attention-heads": A,
    "micro-batch-size": B,
    "global-batch-size": 32,
    "seq-length": S,
    "max-position-embeddings": S,
    "vocab-size": 50257,
    "bf16": True,
    "attention-softmax-in-fp32": True,
    "no-gradient-accumulation-fusion": True,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "attention-backend": "unfused",
}
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def make(num_gpus: int = 8, env: dict[str, str] | None = None, **flags: Any) -> TrainingJob:
    """A job from BASE and `flags` (underscores for dashes; None removes one)."""
    arguments = {**BASE, **{name.replace("_", "-"): value for name, value in flags.items()}}
    kept = {name: value for name, value in arguments.items() if value is not None}
    return from_megatron(kept, num_gpus, env if env is not None else DETERMINISTIC).job


def kept_bytes(job: TrainingJob) -> int:
    """Bytes that one layer keeps for backward, its input included, without kernels' own."""
    template = decoder_layer(layer_context(job, None))
    kept = ~template.born_backward & template.dies_backward
    return int(template.num_bytes[kept].sum())


def last(job: TrainingJob, step: str = "steady", device: str | None = None) -> Timeline:
    chosen = gpu(device) if device else None
    return megatron_ledger(job, rank=job.parallelism.world_size - 1, step=step, device=chosen)


def category_bytes(timeline: Timeline, category: Category) -> int:
    """Bytes of a category at the end of the step."""
    return timeline.composition(len(timeline.phases) - 1).get(category, 0)


# -- one layer ------------------------------------------------------------------------------------------------------------

STATISTICS = 2 * 2 * 4 * S * B  # mean and deviation of two LayerNorms, fp32


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
def test_layer_is_korthikanti_table_2(implementation):
    """34·sbh + 5·a·s²·b: GELU, dropout, biases, unfused attention with the fused softmax."""
    job = make(transformer_impl=implementation)
    assert kept_bytes(job) == 34 * SBH + 5 * AS2B + STATISTICS


@pytest.mark.parametrize(("tensor", "sequence_parallel"), [(2, False), (4, False), (2, True), (4, True)])
def test_tensor_and_sequence_parallel_layers(tensor, sequence_parallel):
    """sbh·(10 + 24/t) + 5·a·s²·b/t; with sequence parallelism all of it ÷ t."""
    job = make(tensor_model_parallel_size=tensor, sequence_parallel=sequence_parallel)
    whole = 10 * SBH // tensor + STATISTICS // tensor if sequence_parallel else 10 * SBH + STATISTICS
    assert kept_bytes(job) == whole + 24 * SBH // tensor + 5 * AS2B // tensor


def test_flash_and_fused_attention():
    """No score is kept: fp32 log-sum-exp instead. flash-attn also keeps its output in its own layout, 2·sbh more."""
    statistics = STATISTICS + 4 * S * B * A + 512
    assert kept_bytes(make(attention_backend="fused")) == 34 * SBH + statistics
    assert kept_bytes(make(attention_backend="flash")) == 36 * SBH + statistics


@pytest.mark.parametrize(("groups", "copies"), [(8, False), (4, True), (2, True), (1, False)])
def test_queries_of_several_groups_are_copied_when_they_are_reshaped(groups, copies):
    """Of one group on a rank they are a view of the projection, as they are where every head has keys of its own."""
    job = make(group_query_attention=True, num_query_groups=groups)
    labels = decoder_layer(layer_context(job, None)).forward_labels
    assert ("query_reshape" in labels) == copies


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_of_heads_keep_what_they_copied_from_transformer_engine_1_13_on(normalization):
    """Before, it is the projection's whole output, of which queries, keys and values are a third each."""
    normed = make(num_gpus=1, qk_layernorm=True, normalization=normalization, attention_backend="flash")
    old, new = (
        kept_bytes(normed.replace(versions=FrozenMapping({"transformer_engine": release}))) for release in ("1.12", "1.13")
    )
    assert old - new == 3 * (2 * SBH) - 2 * (2 * SBH)


def test_fp32_softmax_keeps_seven_bytes_per_score():
    job = make(transformer_impl="local", no_masked_softmax_fusion=True)
    assert kept_bytes(job) == 34 * SBH + 7 * AS2B + STATISTICS


def test_selective_recomputation_drops_the_scores():
    job = make(recompute_granularity="selective")
    assert kept_bytes(job) == 34 * SBH + STATISTICS


def test_swiglu_and_no_dropout():
    """The fused SwiGLU keeps its two-fold input and its product: 4·f + 2·f bytes per token; no masks."""
    job = make(swiglu=True, hidden_dropout=0, attention_dropout=0, attention_backend="fused")
    ffn = job.architecture.intermediate_size
    assert kept_bytes(job) == 16 * SBH + 6 * S * B * ffn + STATISTICS + 4 * S * B * A + 512


def test_rmsnorm_keeps_one_statistic():
    assert kept_bytes(make(normalization="RMSNorm")) == 34 * SBH + 5 * AS2B + STATISTICS // 2


# -- layouts --------------------------------------------------------------------------------------------------------------


def test_context_parallelism_of_one_and_one_virtual_stage_change_nothing():
    plain, spelled = make(num_gpus=1), make(num_gpus=1, context_parallel_size=1, num_virtual_stages_per_pipeline_rank=1)
    a, b = last(plain), last(spelled)
    assert a.peak() == b.peak()
    assert np.array_equal(a.num_bytes, b.num_bytes)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_names_a_pair_and_an_output_for_every_turn_to_its_end(ranks):
    job = make(num_gpus=ranks, context_parallel_size=ranks, attention_backend="fused")
    context = layer_context(job, None, ranks - 1)  # of the last rank no output is half of one
    template, one = decoder_layer(context), SBH // ranks * 2  # keys, values and outputs are as large, in bf16
    backward = template.born_backward
    in_passing = [name == "fused_attention.temporary" for name in template.names]
    pairs, outputs = [2 * one] * (ranks - 1), [one] * ranks  # one pair is kept
    assert template.num_bytes[in_passing & ~backward].tolist() == [*pairs, *outputs]
    assert template.num_bytes[in_passing & backward].tolist() == [4 * one, 4 * one, one]
    assert template.streams[in_passing & ~backward].sum() == ranks // 2  # every second turn's output


def test_exchanged_heads_lie_on_a_stream_of_their_own():
    """What comes is put into order on the second stream: query, key, value, kept; the result; their three gradients; and
    the result's gradient. What is sent, the kernel's result and its gradients are of the stream that computes."""
    job = make(num_gpus=2, context_parallel_size=2, attention_backend="fused", cp_comm_type="a2a")
    template, one = decoder_layer(layer_context(job, None)), SBH // 2 * 2
    aside = template.streams == 1
    kept = ~template.born_backward & template.dies_backward
    assert template.num_bytes[aside & kept].tolist() == [one] * 4  # with the result, which the projection keeps
    assert template.num_bytes[aside & template.born_backward].tolist() == [one] * 4
    assert template.num_bytes[aside].sum() == 8 * one


def test_more_tensor_parallelism_never_raises_parameters():
    sizes = [
        category_bytes(last(make(num_gpus=t, tensor_model_parallel_size=t)), Category.PARAMETERS) for t in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_distributed_optimizer_shards_states_and_nothing_else():
    whole, sharded = last(make()), last(make(use_distributed_optimizer=True))
    for category in (Category.OPTIMIZER_STATES, Category.MAIN_PARAMETERS):
        ratio = category_bytes(whole, category) / category_bytes(sharded, category)
        assert ratio == pytest.approx(8, rel=0.01)
    for category in (Category.PARAMETERS, Category.GRADIENTS):
        assert category_bytes(sharded, category) == pytest.approx(category_bytes(whole, category), rel=1e-3)


def test_bf16_is_18_bytes_per_parameter():
    """2 + 4 gradient + 4 main + 8 Adam, of V·h + s·h + 12·(12h² + 13h) + 2h parameters."""
    parameters = 50304 * H + S * H + 12 * (12 * H * H + 13 * H) + 2 * H
    timeline = last(make(num_gpus=1))
    model = (Category.PARAMETERS, Category.GRADIENTS, Category.MAIN_PARAMETERS, Category.OPTIMIZER_STATES)
    assert sum(category_bytes(timeline, category) for category in model) == 18 * parameters


def test_fp16_gradients_get_an_fp32_copy_in_the_optimizer_step():
    job = make(num_gpus=1, bf16=None, fp16=True)
    parameters = 50304 * H + S * H + 12 * (12 * H * H + 13 * H) + 2 * H
    assert category_bytes(last(job), Category.GRADIENTS) == (2 + 4) * parameters


def test_earlier_stages_hold_more_micro_batches():
    job = make(num_gpus=4, pipeline_model_parallel_size=4, attention_backend="fused")
    middle = [megatron_ledger(job, rank=rank).peak().num_bytes for rank in (1, 2)]
    layer = kept_bytes(job)
    assert middle[0] - middle[1] == pytest.approx(3 * layer, rel=0.05)


def test_first_step_has_no_states_until_its_optimizer_step():
    job = make()
    first, steady = last(job, "first"), last(job)
    states = category_bytes(steady, Category.OPTIMIZER_STATES)
    assert steady.peak().num_bytes - first.peak().num_bytes == states
    assert first.totals[-1] == steady.totals[-1]


def test_full_recomputation_keeps_the_inputs_only():
    job = make(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    saved = last(make()).peak().num_bytes - last(job).peak().num_bytes
    mask = B * S * S  # the checkpoints keep it during the loss, as the plain forward does
    assert saved == pytest.approx(12 * (kept_bytes(make()) - 2 * SBH), abs=mask)


def test_a_large_job_has_few_entries():
    """An 80-layer job in four dimensions: what is simulated is what can be in flight, not every micro-batch."""
    job = make(
        num_gpus=1024, num_layers=80, tensor_model_parallel_size=8, pipeline_model_parallel_size=8,
        context_parallel_size=2, sequence_parallel=True, use_distributed_optimizer=True, global_batch_size=4096,
        num_attention_heads=64, hidden_size=8192, attention_backend="fused",
    )  # fmt: skip
    assert len(megatron_ledger(job).num_bytes) < 60_000


# -- choices --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "deterministic", "backend"),
    [
        ("T4", "0", "unfused"),
        ("V100-16GB", "1", "unfused"),
        ("A100-80GB", "0", "flash"),
        ("A100-80GB", "1", "flash"),
        ("H100-80GB", "0", "fused"),
        ("H100-80GB", "1", "fused"),
        ("GB200", "0", "flash"),
        ("GB200", "1", "fused"),
    ],
)
def test_automatic_attention(name, deterministic, backend):
    job = make(attention_backend=None, env={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": deterministic})
    assert attention_core(job, gpu(name)) == backend


def test_transformer_engines_loss_keeps_an_fp32_gradient_from_2_18_on():
    """4 bytes a logit that are kept beside the narrow logits; before, the gradient takes the logits' place."""
    fused = make(num_gpus=1, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    kept = []
    for release in ("2.17", "2.18"):
        template = head(layer_context(fused.replace(versions=FrozenMapping({"transformer_engine": release})), None))
        sizes = zip(template.names, template.num_bytes.tolist(), strict=True)
        kept.append([size for name, size in sizes if name == "vocab_parallel_cross_entropy.saved"])
    assert kept == [[], [B * S * 50304 * 4]]


def test_weights_gathered_in_fp8_are_a_byte_each_and_their_own_rows():
    """Projections' 12h² weights a layer lie in a buffer of bytes, which is their layout by rows; on Hopper a copy by
    columns stays beside it. Without fp8-param-gather they take two bytes, and both copies."""
    flags = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "use_distributed_optimizer": True}
    weights = 12 * 12 * H * H
    plain, gathered = (last(make(**flags, **more), device="H100-80GB") for more in ({}, {"fp8_param_gather": True}))
    saved = category_bytes(plain, Category.PARAMETERS) - category_bytes(gathered, Category.PARAMETERS)
    assert saved == pytest.approx(weights, abs=2 * 512)
    copies = [
        sum(int(size) for name, size in zip(t.names, t.num_bytes, strict=True) if name.endswith(".weight.fp8"))
        for t in (plain, gathered)
    ]
    assert copies == [2 * weights, weights]


@pytest.mark.parametrize(("versions", "streams"), [({}, 3), ({"transformer_engine": "2.8"}, 2)])
def test_overlapped_tensor_parallelism_has_workspaces_of_its_own(versions: dict[str, str], streams: int):
    job = make(tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=True)
    timeline = last(job.replace(versions=FrozenMapping(versions)), device="H100-80GB")
    sizes = zip(timeline.names, timeline.num_bytes.tolist(), strict=True)
    assert [size for name, size in sizes if name == "userbuffers_workspace"] == [streams * (32 * MIB + 1024)]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_scope():
    assert out_of_scope(make()) == ""
    assert out_of_scope(make(num_experts=8)) == ""
    assert out_of_scope(make(multi_latent_attention=True)) == ""
    assert out_of_scope(make(fp8_format="hybrid")) == ""
    assert out_of_scope(make(fp8_format="hybrid", **FULL)) == ""
    assert out_of_scope(make(fp8_format="hybrid", num_experts=8)) == ""
    for flags in (
        {"num_experts": 8, **FULL},
        {"transformer_impl": "local"},
        {"mtp_num_layers": 1},
        {"recompute_granularity": "selective", "attention_backend": "unfused"},
    ):
        assert "float8" in out_of_scope(make(fp8_format="hybrid", **flags))
    assert "precision_aware" in out_of_scope(make(use_precision_aware_optimizer=True))


# -- published runs -------------------------------------------------------------------------------------------------------

BIG: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 6144, "num_attention_heads": 48, "seq_length": 4096, "max_position_embeddings": 4096,
    "vocab_size": 256000, "group_query_attention": True, "num_query_groups": 8, "squared_relu": True,
    "disable_bias_linear": True, "attention_dropout": 0.0, "hidden_dropout": 0.0, "position_embedding_type": "rope",
    "rotary_percent": 0.5, "no_rope_fusion": True, "sequence_parallel": True, "tensor_model_parallel_size": 8,
    "untie_embeddings_and_output_weights": True, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
    "overlap_param_gather": True, "global_batch_size": 384, "no_gradient_accumulation_fusion": None,
    "attention_softmax_in_fp32": None, "attention_backend": None,
}  # fmt: skip
FP16_LOCAL = {"bf16": None, "fp16": True, "transformer_impl": "local", "apply_query_key_layer_scaling": True}
NO_MASK = {"no_create_attention_mask_in_dataloader": True, "attention_backend": None}

AUTO = {"attention_backend": None}
SHARDED = {**AUTO, "use_distributed_optimizer": True}
INTERLEAVED = {**AUTO, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 1}
PUBLISHED: list[tuple[str, dict[str, Any], int, tuple[int, int, int], float]] = [
    # GPU, flags, number of GPUs, (after the step, peak of step 1, peak), relative tolerance
    ("A100-80GB", SHARDED, 8, (552128512, 2615097856, 2711714304), 5e-4),
    ("GB200", SHARDED, 8, (581489664, 2644459008, 2743026176), 1e-3),
    ("H100-80GB", SHARDED, 8, (581489664, 2594127360, 2691792384), 5e-4),
    ("A100-80GB", {**SHARDED, **FP16_LOCAL}, 8, (518880768, 4511150592, 4607767040), 5e-4),
    ("GB200", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, **NO_MASK}, 8,
     (511860224, 1251365376, 1430390272), 2e-4),
    ("GB200", INTERLEAVED, 8, (759682560, 2395798528, 2677510144), 4e-3),
    ("H100-80GB", INTERLEAVED, 8, (759682560, 2358049792, 2639761408), 4e-3),
    ("A100-80GB", {"pipeline_model_parallel_size": 2, "position_embedding_type": "rope"}, 8,
     (886001664, 3212633088, 3570001920), 4e-3),
    ("H100-80GB", BIG, 256, (13269043200, 27658764288, 28160194560), 2e-3),
]  # fmt: skip


@pytest.mark.parametrize(("name", "flags", "gpus", "published", "tolerance"), PUBLISHED)
def test_published_runs(name, flags, gpus, published, tolerance):
    job = make(gpus, {} if flags is BIG else None, **flags)
    first, steady = last(job, "first", name), last(job, "steady", name)
    ledger = int(steady.totals[-1]), first.peak().num_bytes, max(first.peak().num_bytes, steady.peak().num_bytes)
    assert ledger == pytest.approx(published, rel=tolerance)


def test_fp8_copies_of_weights_and_saved_inputs_counted_by_hand():
    """Per layer 12·h² matrix elements: two layouts of a byte on Hopper, one on Blackwell. Saved: a byte in the place of two
    for the norms' outputs (2·s·b·h) and the second projection's input (4·s·b·h), and with delayed scaling one more for the
    attention's projection, whose input attention keeps as well."""
    wide = make(attention_backend="fused", no_gradient_accumulation_fusion=None)
    narrow = make(fp8_format="hybrid", attention_backend="fused", no_gradient_accumulation_fusion=None)
    layers, hidden = wide.architecture.num_hidden_layers, wide.architecture.hidden_size
    for name, layouts in (("H100-80GB", 2), ("GB200", 1)):
        copies = copies_of(megatron_ledger(narrow, device=gpu(name)), ".fp8")
        assert copies == layouts * 12 * hidden**2 * layers
    rows = wide.micro_batch_size * wide.sequence_length
    saved = [saved_by_a_layer(job) for job in (wide, narrow)]
    assert saved[0] - saved[1] == rows * hidden * (2 + 4 - 1)


def copies_of(timeline, ending):
    return sum(int(size) for name, size in zip(timeline.names, timeline.num_bytes, strict=True) if name.endswith(ending))


def saved_by_a_layer(job):
    timeline = megatron_ledger(job)
    begins = timeline.labels.index("vocab_parallel_cross_entropy")
    alive = timeline.alive_at(begins)
    return sum(
        int(timeline.num_bytes[i])
        for i in range(len(timeline.names))
        if alive[i] and timeline.modules[i] == "layers.1" and timeline.born[i] > 0 and timeline.born[i] < begins
    )
