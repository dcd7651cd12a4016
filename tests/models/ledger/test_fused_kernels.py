"""Kernels that stacks put in the place of transformers' own code, counted by hand from their sources."""

from dataclasses import replace

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import check_framework_options, conventions
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, Loss, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts import adapters_are_whole
from peakcast.models.ledger.scope.assumptions import assumption_on_liger_kernels
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

TOKENS, H, K, F, V, A, RANK = 1024, 512, 256, 1536, 8192, 8, 16
GROUPED = Architecture(
    name="grouped",
    model_type="mistral",
    hidden_size=H,
    num_hidden_layers=3,
    num_attention_heads=A,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=F,
    vocab_size=V,
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
LORA = Finetuning(method="lora", rank=RANK, targets=LINEARS)
UNSLOTH = FrozenMapping({"unsloth": "2025.11.4"})
NARROW = Precision(gradients="float32", optimizer_states="float32")


def job(**changes):
    """Adapters trained with checkpoints of no layer, so that what a layer keeps is there when the lm_head begins."""
    given = {"architecture": GROUPED, "sequence_length": TOKENS, "attention": "flash_attention_2", **changes}
    return TrainingJob(framework="huggingface", **given)


def kept_by_a_layer(**changes):
    """Bytes that a third layer leaves behind for its backward, less its weights, adapters and their two states."""
    totals = []
    for layers in (2, 3):
        one = job(architecture=replace(GROUPED, num_hidden_layers=layers), precision=NARROW, **changes)
        timeline = ledger(one)
        instant = next(i for i, label in enumerate(timeline.labels) if label.startswith("lm_head"))
        stored = stored_parameters(one)
        weights = sum(t.numel * (t.element_bytes + 8 * t.trains) for t in stored)
        totals.append(int(timeline.totals[instant]) - weights)
    return totals[1] - totals[0]


def test_unsloths_layer_keeps_inputs_gate_and_up():
    """Both norms' input and output, q, k, v and attention's result, gate and up, in half precision; a number a row of each
    norm, attention's statistics, its random state in two blocks of 512 bytes."""
    kept = kept_by_a_layer(finetuning=LORA, versions=UNSLOTH)
    assert kept == TOKENS * (12 * H + 4 * K + 4 * F + 4 * A + 8) + 1024


def test_dropout_keeps_a_copy_of_its_input_for_each_adapter_and_no_mask():
    fused = FrozenMapping({"lora_kernel": "fused", "norm_kernel": "fused", "rotary_kernel": "fused"})
    plain = kept_by_a_layer(finetuning=LORA, framework_options=fused)
    dropped = kept_by_a_layer(finetuning=replace(LORA, dropout=0.1), framework_options=fused)
    # q, k, v, o, gate and up drop inputs of the hidden size; down drops the product, kept for nothing else
    assert dropped - plain == TOKENS * 2 * (6 * H + F)


def test_unsloth_leaves_adapters_with_dropout_to_peft():
    with_dropout = replace(LORA, dropout=0.1)
    unsloths = kept_by_a_layer(finetuning=with_dropout, versions=UNSLOTH)
    pefts = kept_by_a_layer(
        finetuning=with_dropout, framework_options=FrozenMapping({"norm_kernel": "fused", "rotary_kernel": "fused"})
    )
    assert unsloths == pefts


def test_a_loss_in_place_spares_the_log_softmax_and_its_gradient_the_logits():
    """transformers 4.48: logits, their fp32 copy and the shifted copy of that; log-softmax is as large as the last."""
    versions = FrozenMapping({"transformers": "4.48.1"})

    def most(phase, **options):
        return ledger(job(versions=versions, framework_options=FrozenMapping(options))).peak(phase).num_bytes

    shifted = 4 * V * (TOKENS - 1)
    a_row = 4 * TOKENS
    assert most(Phase.LOSS) - most(Phase.LOSS, loss_kernel="in_place") == pytest.approx(shifted, abs=3 * a_row)


def test_unsloths_loss_has_the_logits_of_a_chunk_once():
    """The logits of one chunk in half precision, and the chunk's gradient of the hidden states beside the whole one."""

    def most(chunks):
        options = FrozenMapping({"loss_chunks": chunks})
        one = job(finetuning=LORA, versions=UNSLOTH, framework_options=options, precision=NARROW)
        return ledger(one).peak(Phase.LOSS).num_bytes

    assert most(1) - most(4) == TOKENS * 3 // 4 * 2 * (V + H)


def test_fms_acceleration_fuses_adapters_of_quantised_weights_only():
    options = FrozenMapping({"fused_kernels": True})
    plain, quantised = (
        conventions(job(finetuning=tuning, framework_options=options))
        for tuning in (LORA, Finetuning(method="qlora", rank=RANK, quantization="nf4"))
    )
    assert (plain["norm_kernel"], plain["rotary_kernel"], plain["loss_kernel"]) == ("fused", "fused", "in_place")
    assert (plain["lora_kernel"], quantised["lora_kernel"]) == ("eager", "fused")
    assert plain["gated_activation_kernel"] == "eager"


def test_a_stack_s_kernel_can_be_set_by_itself():
    options = FrozenMapping({"fused_kernels": True, "norm_kernel": "eager"})
    chosen = conventions(job(framework_options=options))
    assert (chosen["norm_kernel"], chosen["rotary_kernel"]) == ("eager", "fused")
    with pytest.raises(SpecError, match=r"norm_kernel='fusd' must be one of 'eager', 'fused'"):
        check_framework_options(job(framework_options=FrozenMapping({"norm_kernel": "fusd"})))


def test_fused_adapters_are_whole_on_every_rank_of_fsdp1():
    """Their gradients and states too; the frozen weights are shared as ever."""
    sharded = Parallelism(data_parallel_size=2, sharding="fsdp1")
    tuning = Finetuning(method="qlora", rank=RANK, quantization="nf4", targets=ATTENTION)

    def standing(**options):
        one = job(
            finetuning=tuning, parallelism=sharded, precision=NARROW, framework_options=FrozenMapping(options)
        )
        timeline = ledger(one)
        return adapters_are_whole(one), int(timeline.totals[0])

    whole, parts = standing(lora_kernel="fused"), standing()
    adapters = 3 * RANK * ((H + H) + 2 * (H + K) + (H + H))
    assert (whole[0], parts[0]) == (True, False)
    # half of an adapter's weight and of its two states, in fp32; a rank's parts are rounded, as are whole adapters
    assert whole[1] - parts[1] == pytest.approx(adapters * 12 // 2, rel=0.02)


def test_a_fused_loss_with_ligers_version_has_its_layer_kernels_too():
    fused = Loss(fused_linear_cross_entropy=True)
    with_version = job(loss=fused, versions=FrozenMapping({"liger_kernel": "0.8.5"}))
    assert conventions(with_version)["gated_activation_kernel"] == "fused"
    assert assumption_on_liger_kernels(with_version) == ""
    assert "fused loss is assumed alone" in assumption_on_liger_kernels(job(loss=fused))
    layers = FrozenMapping({"liger_kernels": True})
    assert "kernels inside layers are assumed alone" in assumption_on_liger_kernels(job(framework_options=layers))
    assert assumption_on_liger_kernels(job()) == ""
    tiles = FrozenMapping({"liger_kernels": True, "loss_kernel": "tiles"})  # of TRL's own head, which makes no whole logits
    assert assumption_on_liger_kernels(job(framework_options=tiles)) == ""


def test_where_fused_kernels_are_not_counted():
    unknown = replace(GROUPED, model_type="olmo2")
    for named, sentence in (
        ({"versions": UNSLOTH}, "Unsloth compiles"),
        ({"framework_options": FrozenMapping({"fused_kernels": True})}, "fms-acceleration has no kernels"),
    ):
        assert sentence in out_of_scope(job(architecture=unknown, **named))
    several = job(finetuning=LORA, versions=UNSLOTH, parallelism=Parallelism(data_parallel_size=2, zero_stage=2))
    assert "one GPU and with FSDP1" in out_of_scope(several)
    assert out_of_scope(job(finetuning=LORA, versions=UNSLOTH)) == ""


def test_old_flash_attention_gets_a_copy_of_keys_and_values_for_every_query_head():
    """transformers 4.47.1 MistralFlashAttention2 keeps k and v as wide as q, Llama's as they are."""

    def layer(version, model_type):
        network = replace(GROUPED, model_type=model_type)
        two, three = (
            ledger(
                job(
                    architecture=replace(network, num_hidden_layers=layers),
                    versions=FrozenMapping({"transformers": version}),
                    framework_options=FrozenMapping({"outputs_have_cache": False}),
                    activation_checkpointing=ActivationCheckpointing(),
                )
            )
            for layers in (2, 3)
        )
        found = []
        for timeline in (two, three):
            instant = next(i for i, label in enumerate(timeline.labels) if label.startswith("lm_head"))
            found.append(int(timeline.totals[instant]))
        return found[1] - found[0]

    assert layer("4.47.1", "mistral") - layer("4.48.1", "mistral") == TOKENS * 4 * (H - K)
    assert layer("4.47.1", "llama") == layer("4.48.1", "llama")


def test_old_rotary_embeddings_are_tables_of_every_layer():
    network = replace(GROUPED, max_position_embeddings=4096)

    def standing(version):
        return int(ledger(job(architecture=network, versions=FrozenMapping({"transformers": version}))).totals[0])

    assert standing("4.41.2") - standing("4.42.4") == 3 * 2 * 4096 * 64 * 2
