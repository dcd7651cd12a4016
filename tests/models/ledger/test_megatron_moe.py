"""Megatron-LM mixtures of experts, multi-latent attention and multi-token prediction: a layer counted by hand, the trace of
megatron-core's own layer, published parameter totals, and layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.catalog import architecture as catalog_architecture
from peakcast.catalog import gpu
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.moe import mixture_of_experts
from peakcast.models.ledger.megatron.blocks.recompute import checkpointed
from peakcast.models.ledger.megatron.buffers import owned_parameters
from peakcast.models.ledger.megatron.contexts import layer_context
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import rank_share
from peakcast.models.ledger.scope.scope import out_of_scope, scope_findings
from peakcast.models.ledger.tape.tape import Tape
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category, Phase, Timeline

H, FFN, T = 256, 512, 256
"""Hidden size, expert width and tokens of the small layer."""

SMALL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": H, "num_attention_heads": 8, "ffn_hidden_size": FFN, "seq_length": 128,
    "max_position_embeddings": 128, "micro_batch_size": 2, "vocab_size": 1000, "bf16": True, "disable_bias_linear": True,
    "num_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2, "no_gradient_accumulation_fusion": True,
    "transformer_impl": "local",
}  # fmt: skip


def make(num_gpus: int, **flags: Any) -> TrainingJob:
    """The job of these flags (underscores for dashes)."""
    arguments = {name.replace("_", "-"): value for name, value in flags.items()}
    return from_megatron(arguments, num_gpus, {}).job


def small(tensor: int = 1, expert: int = 1, expert_tensor: int = 1, **flags: Any) -> TrainingJob:
    layout = {
        "tensor_model_parallel_size": tensor,
        "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor,
        "sequence_parallel": tensor > 1,
    }
    return make(max(tensor, expert * expert_tensor), **{**SMALL, **layout, **flags})


def routed(job: TrainingJob) -> tuple[Template, int]:
    """The routed feed-forward alone, its input held by somebody else, and the bytes of its output."""
    context, tape = layer_context(job, None), Tape()
    assert context.experts is not None
    x = tape.input(context.stream_bytes, owned=False)
    output = mixture_of_experts(tape, x, context, context.experts)
    return tape.finish(output), output.num_bytes


def kept(template: Template) -> int:
    return int(template.num_bytes[~template.born_backward & template.dies_backward].sum())


def peaks(template: Template) -> tuple[int, int]:
    """The most bytes in forward and in backward, weight gradients kept to the end."""
    first, last = template.num_forward, template.num_forward + template.num_backward
    born = np.where(template.born_backward, first, 0) + template.born
    dies = np.where(template.weight_gradient, last, np.where(template.dies_backward, first, 0) + template.dies)
    totals = [int(template.num_bytes[(born <= i) & (i < dies)].sum()) for i in range(last)]
    return max(totals[:first]), max(totals[first:])


def last(job: TrainingJob, step: str = "steady", device: str | None = None) -> Timeline:
    chosen = gpu(device) if device else None
    return megatron_ledger(job, rank=job.parallelism.world_size - 1, step=step, device=chosen)


def weights(timeline: Timeline) -> int:
    return int(timeline.num_bytes[timeline.categories == int(Category.PARAMETERS)].sum())


# -- one layer ------------------------------------------------------------------------------------------------------------


def test_a_small_layer_counted_by_hand():
    """Two of four experts per token, one rank, bf16, GELU: rows of experts, and what the router keeps of T tokens."""
    template, _ = routed(small())
    rows = 2 * T
    dispatched = 2 * rows * H  # the permuted tokens
    experts = 3 * 2 * rows * FFN  # first projection, GELU, and its product with the probability
    permutation = 8 * rows + 2 * T * 4 + T * 4 + 2 * rows  # indices; transposed probabilities, map; one per row
    router = 8 * rows + 4 * rows + 4 * T * 4  # chosen indices, their softmax, every expert's score for the auxiliary loss
    assert kept(template) == dispatched + experts + permutation + router + 2 * 512  # the loss and the counts of tokens


TRACED: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    # flags of `small`, (bytes kept with the output, most in forward, most in backward) of megatron-core 0.16.1's MoELayer,
    # local implementation, traced on CPU with balanced logits and collectives that repeat this rank's tensors
    ({}, (1986560, 2382336, 3103232)),
    ({"deterministic_mode": True}, (2250752, 2384384, 3105280)),
    ({"expert": 2}, (1986560, 2385408, 2905600)),
    ({"expert": 2, "expert_tensor": 2, "tensor": 2}, (1129472, 1593344, 1720832)),
    ({"expert": 4, "tensor": 2, "moe_router_dtype": "fp32"}, (994816, 1855488, 2765312)),
    ({"moe_token_dispatcher_type": "alltoall"}, (1989120, 2645504, 3105792)),
    ({"moe_token_dispatcher_type": "alltoall", "expert": 2}, (1990656, 2910208, 2909696)),
    (
        {"moe_token_dispatcher_type": "alltoall", "expert": 2, "tensor": 2, "expert_tensor": 2, "moe_router_dtype": "fp32"},
        (1131520, 2640384, 2246656),
    ),
    (
        {"moe_token_dispatcher_type": "alltoall", "expert": 2, "moe_router_score_function": "sigmoid",
         "moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-3,
         "moe_router_enable_expert_bias": True},
        (2007552, 3058688, 3974656),
    ),
    (
        {"moe_token_dispatcher_type": "alltoall", "expert": 2, "moe_expert_capacity_factor": 1.5,
         "moe_pad_expert_input_to_capacity": True},
        (2912256, 4356096, 4225024),
    ),
    (
        {"moe_token_dispatcher_type": "alltoall", "expert": 2, "moe_shared_expert_intermediate_size": 512},
        (2514944, 3565568, 3565056),
    ),
    (
        {"moe_token_dispatcher_type": "alltoall", "expert": 4, "num_experts": 16, "moe_router_topk": 4},
        (3867648, 5836800, 5048832),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "traced"), TRACED)
def test_layer_against_the_trace_of_megatron_core(flags, traced):
    template, output_bytes = routed(small(**flags))
    assert (kept(template) + output_bytes, *peaks(template)) == pytest.approx(traced, rel=5e-3)


@pytest.mark.parametrize(
    ("flags", "traced"),
    [
        ({}, (795136, 2774016)),
        ({"moe_token_dispatcher_type": "alltoall", "expert": 2, "moe_router_dtype": "fp32"}, (1719808, 3962880)),
        (
            {"moe_token_dispatcher_type": "alltoall", "expert": 4, "moe_shared_expert_intermediate_size": 512},
            (1714176, 3696128),
        ),
    ],
)
def test_recomputed_layer_against_the_trace_of_megatron_core(flags, traced):
    """As `TRACED`, under `recompute-modules moe`, each weight gradient freed as soon as it is made."""
    context, tape = layer_context(small(**flags), None), Tape()
    experts = context.experts
    assert experts is not None
    x = tape.input(context.stream_bytes, owned=False)
    output = checkpointed(tape, x, "moe", lambda part, held: mixture_of_experts(part, held, context, experts))
    template = tape.finish(output)
    assert kept(template) == 0  # the input is somebody else's
    assert peaks(template) == pytest.approx(traced, rel=1.2e-2)  # forward: indices of 8 kB


@pytest.mark.parametrize("module", ["moe", "moe_act", "shared_experts"])
def test_recomputing_a_module_keeps_less_and_holds_the_same_weights(module):
    engine = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True, "num_layers": 4,
              "moe_shared_expert_intermediate_size": 512}  # fmt: skip
    plain = small(**engine)
    again = small(**engine, recompute_granularity="selective", recompute_modules=module)
    assert out_of_scope(again) == ""
    assert last(again).peak().num_bytes < last(plain).peak().num_bytes
    assert weights(last(again)) == weights(last(plain))


@pytest.mark.parametrize(
    ("recompute", "leaves"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 4),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, 2),
        ({"recompute_granularity": "selective", "recompute_modules": "moe"}, 4),
        ({"recompute_granularity": "selective", "recompute_modules": "core_attn"}, 0),
    ],
)
def test_what_recomputed_experts_begin_with_stays_between_steps(recompute, leaves):
    """Of each group or mixture its input and the gradient of that, [T, H], which the next step lets go of."""
    job = small(num_layers=4, **recompute)
    first, steady = (megatron_ledger(job, step=step) for step in ("first", "steady"))
    for timeline, ends in ((first, [False]), (steady, [False, True])):
        born = timeline.born[[name == "recomputed.leaf" for name in timeline.names]]
        assert sorted({bool(instant == 0) for instant in born}) == (ends if leaves else [])
    alive = timeline.alive_at(len(timeline.phases) - 1) & np.array([name == "recomputed.leaf" for name in timeline.names])
    assert int(timeline.num_bytes[alive].sum()) == leaves * 2 * (2 * T * H)


def test_an_unfused_gate_adds_an_offset_since_megatron_core_0_15():
    """A second factor of its own, [rows, FFN], where before it was a part of the first projection."""
    gated = {"swiglu": True, "no_bias_swiglu_fusion": True}
    job = small(**gated)
    older = job.replace(versions=FrozenMapping({"megatron_core": "0.14.0"}))
    assert kept(routed(job)[0]) - kept(routed(older)[0]) == 2 * (2 * T) * FFN


def test_predicting_ahead_of_a_tied_table_the_last_stage_has_two():
    ahead = {"num_layers": 2, "pipeline_model_parallel_size": 2, "mtp_num_layers": 1}
    tied = make(2, **{**SMALL, **ahead})
    own = make(2, **{**SMALL, **ahead, "untie_embeddings_and_output_weights": True})
    assert weights(last(tied)) == weights(last(own))


def test_a_mixture_of_exchanges_is_named():
    """Of context parallelism: one kind in all layers; heads and then a ring is one."""
    two = {**SMALL, "context_parallel_size": 2}
    assert out_of_scope(make(2, **two, cp_comm_type="a2a")) == ""
    assert out_of_scope(make(2, **two, cp_comm_type="a2a+p2p")) == ""
    assert "cp-comm-type" in out_of_scope(make(2, **two, cp_comm_type="a2a p2p"))


def test_capacity_and_the_worst_case():
    """Rows of this rank's experts: balanced T·k; at most what the capacity lets through; everybody's tokens at worst."""

    def rows(**flags: Any) -> int:
        context = layer_context(small(expert=4, moe_token_dispatcher_type="alltoall", **flags), None)
        assert context.experts is not None
        return context.experts.received_rows(T)

    assert rows() == 2 * T
    assert rows(moe_expert_capacity_factor=0.5) == T
    assert rows(moe_expert_capacity_factor=2.0) == 2 * T
    assert rows(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True) == 4 * T
    worst = small(expert=4).replace(framework_options=FrozenMapping({"moe_routing": "worst_case"}))
    experts = layer_context(worst, None).experts
    assert experts is not None
    assert experts.received_rows(T) == 4 * T  # one local expert: each of the group's tokens once
    with pytest.raises(SpecError, match="moe_routing"):
        layer_context(worst.replace(framework_options=FrozenMapping({"moe_routing": "skewed"})), None)


def test_worst_case_routing_needs_more():
    job = small(expert=4, moe_token_dispatcher_type="alltoall")
    worst = job.replace(framework_options=FrozenMapping({**job.framework_options, "moe_routing": "worst_case"}))
    assert last(worst).peak().num_bytes > last(job).peak().num_bytes
    assert weights(last(worst)) == weights(last(job))


def test_recomputing_the_layer_keeps_its_input_only():
    """All layers but the one that runs backward give back what they keep."""
    whole = small(num_layers=8)
    again = small(num_layers=8, recompute_granularity="selective", recompute_modules="moe")
    saved = last(whole).peak().num_bytes - last(again).peak().num_bytes
    template, _ = routed(whole)
    assert 7 * kept(template) < saved <= 8 * kept(template)


# -- parameters -----------------------------------------------------------------------------------------------------------


def whole_model(name: str, **options: Any) -> TrainingJob:
    return TrainingJob(
        architecture=catalog_architecture(name),
        framework="megatron",
        micro_batch_size=1,
        sequence_length=4096,
        framework_options=FrozenMapping(options),
    )


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("mixtral-8x7b", {}, 46_702_792_704),
        # 671,026,419,200 with the 58 · 256 correction biases, which are buffers
        ("deepseek-v3", {"qk_layernorm": True}, 671_026_404_352),
    ],
)
def test_published_parameter_totals(name, options, published):
    job = whole_model(name, **options)
    job = job.replace(architecture=replace(job.architecture, num_nextn_predict_layers=0))
    (parameters,) = owned_parameters(rank_share(job, None, 0))
    assert sum(p.numel for p in parameters) == published


def test_a_prediction_layer_is_a_layer_two_norms_a_projection_and_the_shared_tables():
    """DeepSeek-V3's: 11.5 B, without the copies of embedding and head that its checkpoint holds twice."""
    job = whole_model("deepseek-v3", qk_layernorm=True)

    def parameters(depth: int) -> list[Parameter]:
        changed = job.replace(architecture=replace(job.architecture, num_nextn_predict_layers=depth))
        return owned_parameters(rank_share(changed, None, 0))[0]

    layer = sum(p.numel for p in parameters(0) if p.module == "layers.60")
    extra = sum(p.numel for p in parameters(1)) - sum(p.numel for p in parameters(0))
    assert extra == layer + 2 * 7168 * 7168 + 3 * 7168
    assert 11.4e9 < extra < 11.7e9


# -- layouts --------------------------------------------------------------------------------------------------------------


def test_expert_parallelism_of_one_changes_nothing():
    plain = make(1, **SMALL)
    spelled = make(1, **SMALL, expert_model_parallel_size=1, expert_tensor_parallel_size=1)
    a, b = last(plain), last(spelled)
    assert np.array_equal(a.num_bytes, b.num_bytes)
    assert a.peak() == b.peak()


@settings(max_examples=20)
@given(
    sharded=st.booleans(),
    dispatcher=st.sampled_from(["allgather", "alltoall"]),
    grouped=st.booleans(),
    tensor=st.sampled_from([1, 2]),
)
def test_more_expert_parallelism_never_raises_weights(sharded, dispatcher, grouped, tensor):
    def held(expert: int) -> int:
        job = make(
            8, **{**SMALL, "num_experts": 8, "transformer_impl": "transformer_engine"},
            use_distributed_optimizer=sharded, moe_token_dispatcher_type=dispatcher, moe_grouped_gemm=grouped,
            tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, expert_model_parallel_size=expert,
            expert_tensor_parallel_size=1,
        )  # fmt: skip
        return weights(last(job))

    sizes = [held(expert) for expert in (1, 2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)


def test_expert_states_are_sharded_over_the_expert_data_parallel_group():
    """8 ranks: with 8-fold expert parallelism nobody shares the experts' states, and dense ones are cut in 8."""
    flags = {**SMALL, "num_experts": 8, "use_distributed_optimizer": True, "global_batch_size": 16}
    job = make(8, **flags, expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    (parameters,) = owned_parameters(rank_share(job, None, 0))
    experts = sum(p.numel for p in parameters if p.expert)
    assert experts == 2 * H * FFN
    dense = sum(p.numel for p in parameters if not p.expert)
    timeline = last(job)
    states = int(timeline.num_bytes[timeline.categories == int(Category.OPTIMIZER_STATES)].sum())
    assert states == pytest.approx(8 * experts + 8 * dense / 8, rel=0.02)


def test_leading_layers_may_be_dense():
    job = make(1, **{**SMALL, "num_layers": 3, "moe_layer_freq": "([0]*1+[1]*2)"})
    (parameters,) = owned_parameters(rank_share(job, None, 0))
    routers = {p.module for p in parameters if "router" in p.name}
    assert routers == {"layers.1", "layers.2"}


def test_scope_of_mixtures():
    assert out_of_scope(small()) == ""
    engine = {**SMALL, "transformer_impl": "transformer_engine"}
    overlapped = make(1, **{**engine, "overlap_moe_expert_parallel_comm": True})
    assert "without expert parallelism" in out_of_scope(overlapped)
    assert "transformer-impl=local" in out_of_scope(make(1, **SMALL, multi_latent_attention=True))
    full = make(1, **engine, mtp_num_layers=1, recompute_granularity="full", recompute_method="uniform",
                recompute_num_layers=1)  # fmt: skip
    assert "Full recomputation" in out_of_scope(full)


@pytest.mark.parametrize(("version", "said"), [("0.15.3", True), ("0.16.0", False), ("0.18.0", False)])
def test_overlapped_layers_of_old_releases_keep_more_than_is_counted(version: str, said: bool):
    """Pull request 2236 of Megatron-LM, between 0.15 and 0.16, lets go of what a layer's parts hand to each other."""
    engine = {**SMALL, "transformer_impl": "transformer_engine", "overlap_moe_expert_parallel_comm": True}
    job = make(8, **{**engine, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1})
    found = scope_findings(job.replace(versions=FrozenMapping({"megatron_core": version})))
    overlap = [f for f in found if f.parameter == "framework_options.overlap_moe_expert_parallel_comm"]
    assert [(f.code, f.direction) for f in overlap] == [("nearly_modelled", "more")] * said


def test_overlapped_micro_batches_keep_what_a_layers_parts_hand_to_each_other():
    """`TransformerLayerNode.detach`: the shared expert's output is a leaf of the layer's last part, so every layer between
    its forward and its backward has one; else the sum with the experts' output frees it."""
    engine = {**SMALL, "num_layers": 3, "transformer_impl": "transformer_engine"}
    engine["moe_shared_expert_intermediate_size"] = FFN
    layout = {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "global_batch_size": 32}
    for overlaps, kept in ((True, 3), (False, 0)):
        timeline = megatron_ledger(make(8, **engine, **layout, overlap_moe_expert_parallel_comm=overlaps))
        at = int(np.flatnonzero(timeline.phases == Phase.LOSS)[0])
        lives = zip(timeline.names, timeline.born, timeline.dies, strict=True)
        assert sum(name == "shared_experts.linear_fc2" and born < at < dies for name, born, dies in lives) == kept


@pytest.mark.parametrize(("version", "blocks"), [("0.16.1", 2), ("0.18.0", 1)])
def test_logits_predicted_ahead_end_with_the_function_that_has_their_loss(version: str, blocks: int):
    """Narrow logits while the last loss is computed: the last token's own, and until megatron-core 0.17 those ahead too."""
    job = make(1, **SMALL, mtp_num_layers=1, cross_entropy_loss_fusion=True)
    timeline = megatron_ledger(job.replace(versions=FrozenMapping({"megatron_core": version})))
    at = int(np.flatnonzero(timeline.phases == Phase.LOSS)[0])
    assert timeline.labels[at] == "vocab_parallel_cross_entropy"
    lives = zip(timeline.names, timeline.born, timeline.dies, strict=True)
    assert sum(name == "output_layer" and born <= at < dies for name, born, dies in lives) == blocks
