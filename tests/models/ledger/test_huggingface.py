"""The Hugging Face ledger: hand-counted bytes, properties, and published runs replayed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, Offload, Optimizer, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.timelines.timeline import Category, Phase
from tests.models.ledger.conftest import TINY

PARAMETERS = 2 * 1024 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256) + 256
FULL = ActivationCheckpointing(mode="full")


def job(**changes):
    return TrainingJob(**{"architecture": TINY, "sequence_length": 128, **changes})


def test_states_of_adamw_are_two_copies_and_the_foreach_step_makes_a_third():
    timeline = ledger(job(optimizer=Optimizer(implementation="foreach"), framework="torch"))
    inside = timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)
    assert inside[Category.PARAMETERS] == 2 * PARAMETERS
    assert inside[Category.GRADIENTS] == 2 * PARAMETERS
    assert inside[Category.OPTIMIZER_STATES] == 4 * PARAMETERS
    assert inside[Category.OPTIMIZER_TEMPORARIES] == 2 * PARAMETERS


def test_fused_adamw_has_no_temporaries():
    timeline = ledger(job(optimizer=Optimizer(implementation="fused")))
    assert Category.OPTIMIZER_TEMPORARIES not in timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)


def test_saved_activations_of_a_llama_layer_are_those_of_the_table():
    """where-memory-goes F1: 20h + 4k + 8f + 4a + 8 bytes per token and layer (two 512-byte random states on top)."""
    two, three = (ledger(job(architecture=replace(TINY, num_hidden_layers=n))) for n in (2, 3))

    def at_end_of_forward(timeline):
        instant = int((timeline.phases == Phase.FORWARD).nonzero()[0][-1])
        return timeline.composition(instant)[Category.ACTIVATIONS]

    tokens, h, k, f, a = 128, 256, 256, 512, 4
    per_layer = at_end_of_forward(three) - at_end_of_forward(two)
    # the residual stream itself is not kept: RMSNorm keeps its fp32 copy
    assert per_layer == tokens * (20 * h + 4 * k + 8 * f + 4 * a + 8) + 1024


def test_the_first_step_has_no_states_before_its_optimizer_step():
    first, steady = (ledger(job(), step=step) for step in ("first", "steady"))
    assert steady.peak(Phase.FORWARD).num_bytes - first.peak(Phase.FORWARD).num_bytes == 4 * PARAMETERS
    norms = 5 * 256  # the second group's states are made only when its turn comes
    in_step = [timeline.peak(Phase.OPTIMIZER_STEP).num_bytes for timeline in (steady, first)]
    assert in_step[0] - in_step[1] == 4 * norms


def test_gradient_accumulation_adds_the_gradients_to_the_forward():
    one, two = (ledger(job(gradient_accumulation_steps=n)) for n in (1, 2))
    assert two.peak(Phase.FORWARD).num_bytes - one.peak(Phase.FORWARD).num_bytes == 2 * PARAMETERS


def test_full_checkpointing_keeps_only_the_inputs_of_the_layers():
    big = job(micro_batch_size=8, sequence_length=1024)
    plain, checkpointed = ledger(big), ledger(replace(big, activation_checkpointing=FULL))
    instant = int((checkpointed.phases == Phase.FORWARD).nonzero()[0][-1])
    alive = checkpointed.alive_at(instant)
    kept = [
        int(n) for n, x, a in zip(checkpointed.num_bytes, checkpointed.names, alive, strict=True) if a and x == "checkpoint"
    ]
    assert kept == [2 * 8 * 1024 * 256] * TINY.num_hidden_layers
    assert checkpointed.peak(Phase.FORWARD).num_bytes < plain.peak(Phase.FORWARD).num_bytes


def test_what_a_reentrant_checkpoint_hands_to_a_layer_stays_beside_the_sum_with_it():
    """CheckpointFunction.backward names its arguments: one hidden state more where the layer's attention runs backward."""

    def hidden_states(reentrant):
        full = ActivationCheckpointing(mode="full", use_reentrant=reentrant)
        steady = ledger(job(activation_checkpointing=full))
        instant = max(i for i, label in enumerate(steady.labels) if label == "self_attn.o_proj")
        named = [name in ("gradient", "recomputed_output") for name in steady.names]
        return int(steady.num_bytes[steady.alive_at(instant) & named].sum()) // (2 * 128 * 256)

    assert hidden_states(True) == hidden_states(False) + 2


def test_lora_trains_only_its_adapters():
    tuning = Finetuning(method="lora", rank=8, targets=("q_proj", "v_proj"))
    timeline = ledger(job(finetuning=tuning))
    adapters = 2 * 2 * (8 * 256 + 256 * 8)  # layers × targets × (A + B)
    inside = timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)
    assert inside[Category.OPTIMIZER_STATES] == 2 * 4 * adapters  # fp32 adapters are peft's default


@settings(max_examples=25)
@given(
    batch=st.integers(1, 6),
    sequence=st.sampled_from([64, 128, 200, 512]),
    mode=st.sampled_from(["none", "full"]),
    implementation=st.sampled_from(["foreach", "fused", "loop"]),
    attention=st.sampled_from(["eager", "sdpa"]),
)
def test_peak_is_monotone_in_batch_and_sequence_and_adds_up(batch, sequence, mode, implementation, attention):
    base = job(
        micro_batch_size=batch,
        sequence_length=sequence,
        activation_checkpointing=ActivationCheckpointing(mode=mode),
        optimizer=Optimizer(implementation=implementation),
        attention=attention,
    )
    timeline = ledger(base)
    peak = timeline.peak()
    assert (timeline.num_bytes > 0).all()
    assert (timeline.dies > timeline.born).any()
    assert sum(timeline.composition(peak.instant).values()) == peak.num_bytes
    assert ledger(replace(base, micro_batch_size=batch + 1)).peak().num_bytes >= peak.num_bytes
    assert ledger(replace(base, sequence_length=sequence + 64)).peak().num_bytes >= peak.num_bytes


# -- published runs (fms-acceleration, A100-80GB, torch 2.4.1, transformers 4.48.1; datasets/published) -------------------

VERSIONS = FrozenMapping({"torch": "2.4.1", "transformers": "4.48.1", "peft": "0.13.2"})
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = Finetuning(method="lora", rank=16, dropout=0.1, targets=PROJECTIONS)
NF4 = replace(LORA, method="qlora", quantization="nf4", double_quantization=True)
GPTQ = replace(LORA, method="qlora", quantization="gptq")


@pytest.mark.parametrize(
    ("model", "finetuning", "options", "micro_batch_size", "peak_bytes", "steady_bytes"),
    [
        ("mistral-7b-v0.1", Finetuning(), {}, 4, 72434837504, 43467876352),
        ("mistral-7b-v0.1", Finetuning(), {}, 8, 72435230720, 43468269568),
        ("mistral-7b-v0.1", LORA, {}, 4, 26704571904, 14664493056),
        ("mistral-7b-v0.1", LORA, {}, 8, 38742912512, 14664886272),
        ("mistral-7b-v0.1", NF4, {"autocast": True}, 8, 28412178944, 4306889728),
        ("mistral-7b-v0.1", NF4, {"autocast": True, "norms_in_float32": True}, 4, 20669338112, 4307028992),
        ("mistral-7b-v0.1", GPTQ, {"autocast": True}, 8, 28442489344, 4337200128),
        ("llama-2-70b", GPTQ, {"autocast": True, "gptq_group_size": -1}, 4, 67069711872, 36122332160),
        ("llama-2-70b", NF4, {"autocast": True}, 4, 68126381056, 37179001856),
    ],
)
def test_published_runs_are_repeated_to_two_in_ten_thousand(
    model, finetuning, options, micro_batch_size, peak_bytes, steady_bytes
):
    timeline = ledger(
        TrainingJob(
            architecture=catalog.architecture(model),
            versions=VERSIONS,
            micro_batch_size=micro_batch_size,
            sequence_length=4096,
            finetuning=finetuning,
            precision=Precision(),
            attention="flash_attention_2",
            activation_checkpointing=ActivationCheckpointing(mode="full", use_reentrant=True),
            framework_options=FrozenMapping(options),
        ),
        device=catalog.gpu("A100-80GB"),
    )
    assert timeline.peak().num_bytes == pytest.approx(peak_bytes, rel=2e-4)
    assert int(timeline.totals[-1]) == pytest.approx(steady_bytes, rel=4e-4)


def test_neftune_adds_noise_that_dies_with_the_addition():
    quiet, noisy = (ledger(job(framework_options=FrozenMapping(o))) for o in ({}, {"neftune": True}))
    index = list(noisy.names).index("neftune.noise")
    assert int(noisy.num_bytes[index]) == 128 * 256 * 2
    assert noisy.dies[index] - noisy.born[index] == 2
    assert quiet.peak(Phase.BACKWARD).num_bytes == noisy.peak(Phase.BACKWARD).num_bytes


def test_float8_keeps_what_bf16_keeps_and_converts_on_the_way():
    """torchao's Float8Linear saves its wide input; nine bytes per element of the largest weight pass by."""
    wide, narrow = (ledger(job(precision=Precision(compute=compute))) for compute in ("bfloat16", "float8"))

    def saved(timeline):
        return timeline.composition(int((timeline.phases == Phase.LOSS).nonzero()[0][0]))[Category.ACTIVATIONS]

    assert saved(wide) == saved(narrow)
    conversions = [
        int(size)
        for name, size in zip(narrow.names, narrow.num_bytes, strict=True)
        if name == "mlp.down_proj.temporary"
    ]
    assert max(conversions) >= 9 * 256 * 512
    assert not any(name.startswith("lm_head.temporary") for name in narrow.names)


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({}, True),
        ({"precision": Precision(compute="float8")}, False),  # the first projection of all stays wide
        ({"finetuning": Finetuning(method="lora", rank=8)}, False),  # no gradient enters the first layer
        ({"finetuning": Finetuning(method="lora", rank=8), "activation_checkpointing": FULL}, True),
    ],
)
def test_layers_that_differ_in_nothing_are_made_once(changes, alike):
    asked = job(**changes)
    first, second = Blocks(asked, block_context(asked, None)).contexts
    assert (first == second) is alike


def autocast_copies(architecture, **changes):
    timeline = ledger(
        job(
            architecture=architecture,
            precision=Precision(parameters="float32", gradients="float32", optimizer_states="float32"),
            framework_options=FrozenMapping({"autocast": True}),
            **changes,
        )
    )
    named = zip(timeline.names, timeline.modules, timeline.num_bytes, strict=True)
    return {module: int(size) for name, module, size in named if name == "autocast_cache"}


def test_autocast_caches_copies_of_matrices_and_of_no_experts():
    experts = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
    routed = replace(TINY, model_type="qwen3_moe", moe=experts)
    attention, router = 4 * 256 * 256, 8 * 256
    of_layer = 2 * (attention + router)
    assert autocast_copies(routed, activation_checkpointing=FULL) == {"layers.0": of_layer, "layers.1": of_layer}


def test_autocast_keeps_its_copies_also_where_what_autograd_keeps_goes_to_the_host():
    of_layer = 2 * (4 * 256 * 256 + 3 * 256 * 512)
    offloaded = autocast_copies(TINY, offload=Offload(activations=True))
    assert offloaded == {"layers.0": of_layer, "layers.1": of_layer}  # with the head the forward ends
    assert autocast_copies(TINY) == {}  # the graph owns them
