"""Optimizers: states and temporaries counted by hand from the libraries' sources."""

from dataclasses import replace
from typing import get_args

import pytest

from peakcast import catalog
from peakcast.collectors.dryrun import older_torch
from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import IN_8_BITS, PAGED, Optimizer, OptimizerName, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.host import paged_state_bytes
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts.base import is_decayed
from peakcast.models.ledger.optimizers.choice import IN_PLACE_DENOMINATOR, RULES
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.ledger.tape.local_variables import Locals
from peakcast.timelines.timeline import Category, Phase

H, F, V, LAYERS = 256, 512, 1024, 2
TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=H,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=F,
    vocab_size=V,
)
EMBEDDING, NORMS = V * H, (2 * LAYERS + 1) * H
LINEARS = V * H + LAYERS * (4 * H * H + 3 * H * F)  # the head is a Linear too
PARAMETERS = EMBEDDING + LINEARS + NORMS
NUM_TENSORS = 2 + 9 * LAYERS + 1


def job(name, *, implementation="foreach", momentum=0.0, framework="huggingface", **changes):
    optimizer = Optimizer(name=name, implementation=implementation, momentum=momentum)
    return TrainingJob(architecture=TINY, sequence_length=64, optimizer=optimizer, framework=framework, **changes)


def states(job):
    timeline = ledger(job)
    return timeline.composition(len(timeline.phases) - 1).get(Category.OPTIMIZER_STATES, 0)


def temporaries(job, step="steady"):
    timeline = ledger(job, step=step)
    instant = timeline.peak(Phase.OPTIMIZER_STEP).instant
    return timeline.composition(instant).get(Category.OPTIMIZER_TEMPORARIES, 0)


def test_locals_make_the_new_before_they_let_go_of_the_old():
    run = Locals()
    run.let("a", 10)
    run.let("a", 20)
    run.free("a")
    run.let("b", 1)
    run.leave()
    assert sorted(run.lives) == [("a", 10, 0, 2), ("a", 20, 1, 2), ("b", 1, 2, 3)]


@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_sgd_keeps_nothing_without_momentum_and_one_copy_with(implementation):
    assert states(job("sgd", implementation=implementation)) == 0
    assert states(job("sgd", implementation=implementation, momentum=0.9)) == 2 * PARAMETERS
    assert temporaries(job("sgd", implementation=implementation, momentum=0.9)) == 0


def test_foreach_steps_make_copies_of_the_group():
    assert temporaries(job("rmsprop", framework="torch")) == 2 * PARAMETERS
    assert temporaries(job("adagrad", framework="torch")) == 4 * PARAMETERS


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_foreach_adam_of_torch_2_0_keeps_square_roots_and_denominators(name):
    """torch 2.0 optim/adam.py `_multi_tensor_adam`: denom = torch._foreach_add(exp_avg_sq_sqrt, eps); both are named."""
    old = job(name, framework="torch", versions=FrozenMapping({"torch": "2.0.1"}))
    new = old.replace(versions=FrozenMapping({"torch": "2.1"}))
    assert temporaries(new) == 2 * PARAMETERS
    assert temporaries(old) == temporaries(old, step="first") == 4 * PARAMETERS
    assert older_torch.IN_PLACE_DENOMINATOR == IN_PLACE_DENOMINATOR


def test_adagrad_makes_its_sums_with_the_optimizer():
    first = ledger(job("adagrad"), step="first")
    assert first.composition(0)[Category.OPTIMIZER_STATES] == 2 * PARAMETERS
    assert Category.OPTIMIZER_STATES not in ledger(job("rmsprop"), step="first").composition(0)


def test_adafactor_of_transformers_keeps_rows_and_columns_and_makes_four_fp32_copies():
    rows_and_columns = 2 * (V + H) + LAYERS * (4 * (H + H) + 3 * (H + F))
    assert states(job("adafactor")) == pytest.approx(4 * (rows_and_columns + NORMS), abs=512 * 2 * NUM_TENSORS)
    largest = V * H  # the embedding comes first: nothing of a turn before it; the head follows a matrix of H · F
    assert temporaries(job("adafactor")) == 16 * largest + 4 * H * F


def test_eight_bit_states_of_bitsandbytes_and_of_torchao():
    """bitsandbytes: one byte and 4/256 per element and state; embeddings (the Trainer) and small tensors in fp32."""
    quantized = LINEARS * 2 + LINEARS // 256 * 4 * 2
    assert states(job("adamw_8bit")) == pytest.approx(quantized + 8 * (EMBEDDING + NORMS) + 2048, abs=512 * 2 * NUM_TENSORS)
    torchao = FrozenMapping({"adamw_8bit_library": "torchao"})
    both = (EMBEDDING + LINEARS) * 2 + (EMBEDDING + LINEARS) // 256 * 8 + 2 * 1024 * 16 + 4 * NORMS
    assert states(job("adamw_8bit", framework_options=torchao)) == pytest.approx(both, abs=512 * 2 * NUM_TENSORS)


@pytest.mark.parametrize(
    ("name", "block", "between", "codes"),
    [("adamw_8bit", 256, 8, 1), ("adamw_4bit", 128, 24, 0.5), ("adamw_fp8", 256, 0, 1)],
)
def test_torchaos_compiled_update_keeps_normalized_states_between_its_kernels(name, block, between, codes):
    """As Inductor lowers it for a GPU: of the largest tensor, both new states and scales. torch before 2.6 times a kernel's
    variants in the first step on copies of the parameter and both codes, over 256 MB that empty the cache."""
    options = FrozenMapping({"adamw_8bit_library": "torchao"}) if name == "adamw_8bit" else FrozenMapping()
    largest = V * H
    steady = largest * between + 2 * largest // block * 4
    assert temporaries(job(name, framework_options=options)) == steady
    old = job(name, framework_options=options, versions=FrozenMapping({"torch": "2.5.1"}))
    assert temporaries(old) == steady
    assert temporaries(old, step="first") == steady + largest * 2 + 2 * largest * codes + 256_000_000


def test_four_bit_codes_are_not_wide_in_the_update_of_torch_2_4():
    """torchao's table of it leaves at most 11.6 bytes per element."""
    largest = V * H
    old = job("adamw_4bit", versions=FrozenMapping({"torch": "2.4.1"}))
    assert temporaries(old) == largest * 8 + 2 * largest // 128 * 4


def test_eight_bit_states_of_embeddings_are_wide_with_the_trainer_alone():
    absmax = EMBEDDING // 256 * 4
    assert states(job("adamw_8bit")) - states(job("adamw_8bit", framework="torch")) == 2 * (EMBEDDING * 3 - absmax)


def test_eight_bit_states_of_a_divided_table_are_wide_if_fsdp1_leaves_it_the_tables_own():
    """transformers registers the nn.Embedding; under `use_orig_params` its weight is this rank's part, which of two ranks
    is the whole table where table, head and last norm are the root's flat parameter. A flat parameter is no table's."""
    layout = Parallelism(data_parallel_size=2, sharding="fsdp1")
    own, flat = (
        states(job("adamw_8bit", parallelism=layout, framework_options=FrozenMapping({"fsdp1_use_orig_params": one})))
        for one in (True, False)
    )
    assert own - flat == pytest.approx(2 * (EMBEDDING * 3 - EMBEDDING // 256 * 4), abs=NORMS * 8 + 512 * 4 * NUM_TENSORS)


def test_weights_of_stacked_experts_that_are_called_biases_do_not_decay():
    assert [is_decayed(name, (4, 8)) for name in ("mlp.experts.down_proj", "mlp.experts.down_proj_bias")] == [True, False]
    assert not is_decayed("input_layernorm.weight", (8,))
    gpt_oss = replace(catalog.architecture("gpt-oss-20b"), num_hidden_layers=1)
    stored = stored_parameters(job("adam").replace(architecture=gpt_oss))
    assert [one.name for one in stored if len(one.shape) > 1 and not one.decays] == [
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
    ]


def test_four_bit_states_take_half_a_byte_and_a_scale_per_128():
    elements = EMBEDDING + LINEARS
    expected = elements + elements // 128 * 8 + 2 * 512 * 16 + 4 * NORMS
    assert states(job("adamw_4bit")) == pytest.approx(expected, abs=512 * NUM_TENSORS)


def test_paged_states_are_in_host_memory_from_100_000_elements_on():
    large = EMBEDDING + V * H + LAYERS * 3 * H * F  # H · H = 65,536 stays on the device
    paged = job("paged_adamw_32bit")
    assert paged_state_bytes(paged) == 8 * large
    assert states(paged) == 8 * (PARAMETERS - large)
    assert baseline(paged, catalog.gpu("A100-80GB")).peak_host_bytes == 8 * large
    assert baseline(job("adamw_8bit"), catalog.gpu("A100-80GB")).peak_host_bytes == 0


def test_ademamix_keeps_two_averages_of_gradients_in_one_state_and_one_of_squares():
    assert states(job("ademamix")) == 12 * PARAMETERS
    assert states(job("ademamix_8bit")) * 2 == pytest.approx(3 * states(job("adamw_8bit")), abs=512 * 4 * NUM_TENSORS)
    large = EMBEDDING + V * H + LAYERS * 3 * H * F
    assert paged_state_bytes(job("paged_ademamix_32bit")) == 12 * large


def test_muon_updates_matrices_and_adamw_the_rest():
    assert states(job("muon")) == 2 * (EMBEDDING + LINEARS) + 4 * NORMS
    # the update, the matrix before and after a round, two Gram matrices of the shorter side
    assert temporaries(job("muon")) == 3 * 2 * V * H + 2 * 2 * H * H


def test_adam_mini_keeps_one_second_moment_for_a_head_or_a_row():
    ends, wide, rest = 2 * 2 * V, LAYERS * 2 * 2 * F, LAYERS * 7 + 1  # the rest: blocks of 512 bytes
    assert states(job("adam_mini")) == 2 * PARAMETERS + ends + wide + 512 * rest
    # of the head, the last matrix: its update and the negative of that, and its step size, h and mean square
    assert temporaries(job("adam_mini")) == 2 * 2 * V * H + 3 * 2 * V


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finetuning": {"method": "lora", "rank": 8}}, "cannot divide adapters"),
        ({"architecture": "gemma-2-2b"}, "into a whole number of heads"),
        ({"architecture": "opt-125m"}, "called final_layer_norm"),
        ({"architecture": "qwen3-30b-a3b"}, "fails with experts"),
        ({"parallelism": {"data_parallel_size": 2, "sharding": "fsdp2"}}, "on one GPU and under DDP only"),
        ({"parallelism": {"data_parallel_size": 2}}, ""),
    ],
)
def test_where_adam_mini_is_not_modelled(changes, said):
    found = out_of_scope(job_from_mapping({"architecture": "llama-3.2-1b", "optimizer": {"name": "adam_mini"}, **changes}))
    assert said in found
    assert bool(found) == bool(said)


def test_galore_keeps_a_projector_and_projected_moments():
    rank = 32
    galore = job("galore", framework_options=FrozenMapping({"galore_rank": rank}))
    head = rank * H + 2 * rank * V
    attention, mlp = 3 * rank * H, rank * H + 2 * rank * F
    projected = head + LAYERS * (4 * attention + 3 * mlp)
    assert states(galore) == 2 * projected + 4 * (EMBEDDING + NORMS)
    # the decomposition of the head's gradient: fp32 copy, U, s, Vh, the discarded product, then the narrow factor
    svd = 4 * (V * H + V * H + H + H * H + V * rank) + 2 * rank * H
    turn_before = 2 * (H * F + rank * F)  # of the matrix before: its update and denominator
    assert temporaries(galore, "first") == svd + turn_before
    assert temporaries(galore, "first") > temporaries(galore)


def test_lomo_has_one_gradient_at_a_time_and_no_states():
    """The largest gradient in bf16, beside fp32 copies of a gradient and its parameter: never the whole set."""
    lomo, adamw = ledger(job("lomo")), ledger(job("adamw"))
    assert states(job("lomo")) == 0

    def most(timeline, category):
        return max(timeline.composition(t).get(category, 0) for t in range(len(timeline.phases)))

    assert most(adamw, Category.GRADIENTS) == 2 * PARAMETERS
    assert most(lomo, Category.GRADIENTS) < 2 * PARAMETERS / 3
    assert most(lomo, Category.OPTIMIZER_TEMPORARIES) == 8 * V * H
    assert most(ledger(job("adalomo")), Category.OPTIMIZER_TEMPORARIES) == 12 * V * H


def test_master_weights_are_a_copy_and_widen_the_states():
    precision = Precision(main_parameters="float32", optimizer_states="float32")
    timeline = ledger(job("adamw", implementation="fused", precision=precision))
    inside = timeline.composition(timeline.peak(Phase.OPTIMIZER_STEP).instant)
    assert inside[Category.MAIN_PARAMETERS] == 4 * PARAMETERS
    assert inside[Category.OPTIMIZER_STATES] == 8 * PARAMETERS + 512 * NUM_TENSORS
    assert inside[Category.PARAMETERS] == inside[Category.GRADIENTS] == 2 * PARAMETERS


def test_falcon_7b_in_fp16_jumps_from_53_to_66_gb_in_the_optimizer_step():
    """where-memory-goes D, feasibility 2: 52,809 MiB after backward, 66,011 MiB in the foreach step; fused has no jump."""
    half = Precision(parameters="float16", compute="float16", gradients="float16", optimizer_states="float16")
    falcon = catalog.architecture("falcon-7b")
    job = TrainingJob(architecture=falcon, precision=half, sequence_length=512)
    peaks = ledger(job).phase_peaks()
    assert peaks[Phase.GRADIENT_CLIPPING] / 2**20 == pytest.approx(52_809, rel=0.01)
    assert peaks[Phase.OPTIMIZER_STEP] / 2**20 == pytest.approx(66_011, rel=0.01)
    fused = ledger(job.replace(optimizer=Optimizer(implementation="fused"))).phase_peaks()
    assert fused[Phase.OPTIMIZER_STEP] == pytest.approx(fused[Phase.GRADIENT_CLIPPING], rel=1e-3)


def test_fp16_under_autocast_has_a_scaler_and_pure_fp16_has_none():
    """Gradients in fp16 cannot be unscaled, so there is a scaler only over fp32 weights; its scalars are all it costs."""
    scaled = job(
        "adamw",
        precision=Precision(parameters="float32", compute="float16"),
        framework_options=FrozenMapping({"autocast": True}),
    )
    names = ledger(scaled).names
    assert sum(name.startswith("grad_scaler.") for name in names) == 4
    assert not any(name.startswith("grad_scaler.") for name in ledger(job("adamw")).names)


def test_every_rule_names_its_source():
    assert all(rule.source for rule in RULES.values())


def test_an_implementation_that_does_not_exist_is_refused_with_what_does():
    with pytest.raises(SpecError, match=r"rmsprop.*fused.*did you mean"):
        ledger(job("rmsprop", implementation="fused"))


def test_paged_optimizers_and_those_of_8_bits_are_the_ones_that_are_named_so() -> None:
    names = get_args(OptimizerName)
    assert set(PAGED) == {name for name in names if name.startswith("paged_")}
    assert set(IN_8_BITS) == {name for name in names if name.endswith("_8bit")}
