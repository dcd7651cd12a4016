"""CUDA graphs of Megatron-LM's steps: what they read and keep, by hand and on a published run, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.catalog import gpu
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.store import datasets_folder, read_csv
from peakcast.models.baseline.baseline import baseline
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.scope import scope_findings
from peakcast.timelines.timeline import Category, Timeline

LAYERS, HIDDEN, SEQUENCE, BATCH, MICRO_BATCHES = 4, 256, 512, 2, 8
SMALL: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 4, "seq_length": SEQUENCE,
    "max_position_embeddings": SEQUENCE, "micro_batch_size": BATCH, "global_batch_size": BATCH * MICRO_BATCHES,
    "vocab_size": 512, "bf16": True, "attention_dropout": 0, "hidden_dropout": 0,
}  # fmt: skip
STREAM, MASK = SEQUENCE * BATCH * HIDDEN * 2, BATCH * SEQUENCE * SEQUENCE
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
WHOLE_STEP = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}


def job(num_gpus: int = 1, **arguments: Any) -> TrainingJob:
    return from_megatron({**SMALL, **arguments}, num_gpus, versions={"megatron_core": "0.17.1"}).job


def named(timeline: Timeline, name: str) -> int:
    return sum(int(size) for size, one in zip(timeline.num_bytes, timeline.names, strict=True) if one == name)


def test_graphs_read_a_state_and_a_mask_for_each_layer_in_flight():
    alone = megatron_ledger(job(**GRAPHS), step="replayed")
    assert named(alone, "graph_inputs") == LAYERS * STREAM
    assert named(alone, "graph_attention_masks") == LAYERS * MASK
    two_stages = job(2, pipeline_model_parallel_size=2, **GRAPHS)  # the first runs two micro-batches ahead, the last one
    inputs = [named(megatron_ledger(two_stages, rank=rank, step="replayed"), "graph_inputs") for rank in (0, 1)]
    assert inputs == [LAYERS // 2 * 2 * STREAM, LAYERS // 2 * STREAM]


def test_only_graphs_with_attention_read_masks():
    replayed = megatron_ledger(job(**GRAPHS, cuda_graph_scope="mlp"), step="replayed")
    assert named(replayed, "graph_inputs") == LAYERS * STREAM
    assert named(replayed, "graph_attention_masks") == 0


@pytest.mark.parametrize("scope", ["", "attn", "mlp", "[attn mlp]"])
def test_what_graphed_parts_make_is_in_their_pool_or_in_a_replayed_step_but_not_in_both(scope):
    one = job(**GRAPHS, cuda_graph_scope=scope)
    steady, captured, replayed = (megatron_ledger(one, step=kind) for kind in ("steady", "captured", "replayed"))
    of_layers = [
        {(name, module, int(born)) for name, module, born in zip(step.names, step.modules, step.born, strict=True)
         if module.startswith("layers.") and born > 0}
        for step in (captured, replayed, steady)
    ]  # fmt: skip
    assert not of_layers[0] & of_layers[1]
    assert of_layers[0] | of_layers[1] == of_layers[2]
    assert bool(of_layers[1]) == (scope in ("attn", "mlp"))  # the other half of each layer has no graph


@pytest.mark.parametrize(
    ("mixture", "made"),
    [
        ({"moe_grouped_gemm": True}, "experts.linear_fc1"),
        ({"moe_token_dispatcher_type": "allgather"}, "expert.linear_fc1"),  # one expert after the other
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"], "moe_grouped_gemm": True}, "moe"),
    ],
)
def test_experts_are_in_the_graphs_of_their_own_part_however_they_run(mixture, made):
    routed = {"num_experts": 8, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "disable_bias_linear": True}
    for scope, graphed in (("attn", False), ("moe", True)):
        one = job(**GRAPHS, cuda_graph_scope=scope, **{**routed, **mixture})
        pool, outside = (set(megatron_ledger(one, step=kind).names) for kind in ("captured", "replayed"))
        assert (made in pool, made in outside) == (graphed, not graphed)


def test_what_fsdp_gathers_for_a_layer_is_outside_of_graphs():
    sharded = job(2, **GRAPHS, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params")
    steady, replayed = (megatron_ledger(sharded, step=kind) for kind in ("steady", "replayed"))
    assert named(replayed, "whole_gradients") == named(steady, "whole_gradients") > 0


def test_recording_needs_an_output_for_each_layer_in_flight_beside_the_next_ones_input():
    """A stage without a head: its steps without graphs have one tensor of the stream's size between two layers."""
    four = job(2, pipeline_model_parallel_size=2, num_layers=16, **GRAPHS)
    steady, captured = (megatron_ledger(four, rank=0, step=kind).peak().num_bytes for kind in ("steady", "captured"))
    in_flight = 2 * 8
    assert captured - steady == pytest.approx(in_flight * (STREAM + MASK), rel=0.1)


def test_graphs_of_layers_by_megatron_core_are_recorded_before_there_are_optimizer_states():
    """After the first step's backward; what comes from outside has one tensor that all graphs share in turn."""
    local = job(cuda_graph_impl="local")
    steady, captured, first = (megatron_ledger(local, step=kind) for kind in ("steady", "captured", "first"))
    assert named(steady, "graph_inputs") == named(steady, "graph_output_gradient") == STREAM
    assert named(steady, "graph_attention_masks") == MASK
    assert not [module for module, born in zip(steady.modules, steady.born, strict=True)
                if module.startswith("layers.") and born > 0]  # fmt: skip
    assert steady.peak().num_bytes < megatron_ledger(job(), step="steady").peak().num_bytes
    states = captured.categories == int(Category.OPTIMIZER_STATES)
    assert not captured.num_bytes[states].sum()
    layer = 12 * HIDDEN**2 + 13 * HIDDEN  # two norms, and four projections with biases
    assert named(captured, "graph_gradient_copies") == 4 * layer
    assert first.peak().num_bytes == megatron_ledger(job(), step="first").peak().num_bytes


def test_a_graph_of_a_whole_step_has_every_micro_batch_on_the_gpu():
    with_graph, without = (megatron_ledger(job(**asked), step="steady").peak().num_bytes for asked in (WHOLE_STEP, {}))
    ids, floats = 8 * BATCH * SEQUENCE, 4 * BATCH * SEQUENCE
    assert with_graph - without == (MICRO_BATCHES - 1) * (3 * ids + floats + MASK)


def test_a_pool_is_reserved_beside_what_the_rest_of_a_step_needs():
    """A head and loss as large as the layers: without graphs each reuses what the other has freed, with graphs none can."""
    large_head = {"vocab_size": 32000, "recompute_granularity": None}
    device = gpu("H100-80GB")
    plain, graphed = (baseline(job(**large_head, **asked), device, 0) for asked in ({}, GRAPHS))
    assert graphed.peak_allocated_bytes == plain.peak_allocated_bytes, "the steps before graphs are recorded have all"
    assert graphed.peak_reserved_bytes >= plain.peak_reserved_bytes
    assert graphed.steady_state_bytes > plain.steady_state_bytes


def test_a_published_run_with_graphs():
    """gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph_1node on GB200: 14 layers, the last of which predicts a further
    token. Between steps it had 44.6 MB that a step without graphs has not: 14 states (7.3) and 14 masks (29.4); then
    gradients of what graphs of routed layers return (2.1) and of a dense layer's parameters (2.1), which are not counted,
    and an error of 2.9 that its steps without graphs have too."""
    table = read_csv(datasets_folder() / "published" / "megatron_ci.csv")
    row = next(row for row in table if "scoped_cudagraph_1node" in row.case)
    asked = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn mlp moe_preprocess moe_router"}
    graphed = row.job.replace(framework_options=FrozenMapping({**row.job.framework_options, **asked}))
    found = baseline(graphed, gpu(row.gpu), row.rank)
    assert found.peak_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.003)
    between = megatron_ledger(graphed, device=gpu(row.gpu), rank=row.rank, step="replayed").totals[-1]
    assert 0 < row.steady_allocated_bytes - int(between) < 8e6


def test_older_flags_name_the_same_graphs():
    older = job(external_cuda_graph=True).framework_options
    assert older == job(**GRAPHS).framework_options
    assert job(enable_cuda_graph=True, cuda_graph_scope="full").framework_options["cuda_graph_impl"] == "local"


def test_what_is_said_of_graphs():
    def said(**arguments: Any) -> list[tuple[str, str, str]]:
        found = scope_findings(job(**arguments))
        return [(one.code, one.parameter.removeprefix("framework_options."), one.direction) for one in found]

    assert said() == []
    assert said(**GRAPHS) == [("nearly_modelled", "cuda_graph_impl", "either")]
    assert said(enable_cuda_graph=True) == [("nearly_modelled", "cuda_graph_impl", "either")]
    assert said(**GRAPHS, cuda_graph_warmup_steps=1) == [("not_modelled", "cuda_graph_warmup_steps", "less")]
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert said(**GRAPHS, **again) == [("run_would_fail", "cuda_graph_scope", "either")]
    assert said(**WHOLE_STEP, **again) == [("nearly_modelled", "cuda_graph_impl", "either")]
    with pytest.raises(SpecError, match="'attention' is not"):
        job(**GRAPHS, cuda_graph_scope="attention")
