"""Encoder-decoders: parameters counted, lengths of their own, and what is not modelled named."""

import pytest

from peakcast.core.errors import SpecError
from peakcast.jobs.spec import ActivationCheckpointing, Parallelism, Precision, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.parameters.inventory import layer_parameters, num_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.networks.config import architecture_from_hf_config
from peakcast.timelines.timeline import Category, Phase

CONFIG = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
TINY = architecture_from_hf_config(CONFIG)


def job(**changes):
    return TrainingJob(architecture=TINY, **{"micro_batch_size": 2, "sequence_length": 64, **changes})


def test_parameters_are_those_counted_by_hand():
    attention, feed_forward = 4 * 32 * 32 + 32, 2 * 32 * 64 + 32  # each with its norm
    encoder, decoder = attention + feed_forward, 2 * attention + feed_forward
    tables = 2 * 32 * 4  # of relative positions, in the first layer of each stack
    assert num_parameters(TINY) == 100 * 32 + 2 * encoder + 2 * decoder + tables + 2 * 32


def test_only_the_first_layer_of_a_stack_has_a_table_of_positions():
    names = [[tensor.name for tensor in layer_parameters(TINY, layer)] for layer in range(TINY.num_layers)]
    assert ["self_attn.relative_attention_bias.weight" in each for each in names] == [True, False, True, False]
    assert ["cross_attn.q.weight" in each for each in names] == [False, False, True, True]


def test_a_gate_is_a_third_matrix():
    gated = architecture_from_hf_config({**CONFIG, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})
    assert num_parameters(gated) - num_parameters(TINY) == 4 * 32 * 64
    assert (gated.hidden_act, gated.scale_decoder_outputs, TINY.scale_decoder_outputs) == ("gelu_new", False, True)


def test_another_pattern_of_the_feed_forward_is_refused_by_name():
    with pytest.raises(SpecError, match="feed_forward_proj='gelu-gated' must be"):
        architecture_from_hf_config({**CONFIG, "feed_forward_proj": "gelu-gated"})


def test_without_a_length_of_its_own_the_decoder_reads_as_much_as_the_encoder():
    said, unsaid = (ledger(job(decoder_sequence_length=length)).peak().num_bytes for length in (64, None))
    assert said == unsaid


def test_the_logits_are_of_the_targets_alone():
    short, long = (ledger(job(sequence_length=length, decoder_sequence_length=64)) for length in (64, 128))
    logits = [
        sum(size for name, _, size, _ in t.largest_at(t.peak(Phase.LOSS).instant, 99) if name == "lm_head")
        for t in (short, long)
    ]
    assert logits[0] == logits[1] > 0


@pytest.mark.parametrize("checkpointing", [ActivationCheckpointing(), ActivationCheckpointing(mode="full")])
def test_more_targets_never_need_less(checkpointing):
    peaks = [
        ledger(job(decoder_sequence_length=length, activation_checkpointing=checkpointing)).peak().num_bytes
        for length in (16, 64, 256)
    ]
    assert peaks == sorted(peaks)


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_sdpa_computes_self_attention_in_steps_as_the_bias_has_no_contiguous_rows(layer):
    """Saved: q, k and v in fp32, softmax, dropout's mask and what is left. Of cross-attention there are no scores."""
    timeline = ledger(job())
    scores, query = 2 * 4 * 64 * 64, 2 * 64 * 32
    backward = list(timeline.phases).index(Phase.BACKWARD)
    saved = timeline.alive_at(backward) & (timeline.born > 0)
    named = zip(timeline.names, timeline.modules, strict=True)
    own = [module == f"layers.{layer}" and ".math." in name for name, module in named]
    assert timeline.num_bytes[saved & own].sum() == scores * (4 + 1 + 4) + 3 * 4 * query
    assert not any(name.startswith("cross_attn.math") for name in timeline.names)


def test_the_decoders_cache_stays_beside_its_copies_until_the_loss_has_been_computed():
    timeline = ledger(job())
    backward = list(timeline.phases).index(Phase.BACKWARD)
    cached = [name == "past_key_values" for name in timeline.names]
    assert timeline.num_bytes[timeline.alive_at(backward - 1) & cached].tolist() == [2 * 2 * 64 * 32 * 2] * 2


def test_a_single_token_leaves_the_rows_contiguous():
    timeline = ledger(job(decoder_sequence_length=1))
    taken = {module for name, module in zip(timeline.names, timeline.modules, strict=True) if ".math." in name}
    assert taken == {"layers.0", "layers.1"}


def test_gradients_of_the_position_bias_are_summed_over_sequences_after_the_kernel_has_made_them():
    """Each sequence's gradient [4 heads, 64, 64] in bfloat16 stands beside the sum only while that is made."""
    timeline, one = ledger(job(activation_checkpointing=ActivationCheckpointing(mode="full"))), 4 * 64 * 64 * 2
    operations = list(zip(timeline.labels, timeline.labels[1:], strict=False))  # recomputing, it comes before the kernel
    summed = operations.index(("cross_attn.efficient_attention", "cross_attn.expand")) + 1

    def gradients(instant):
        alive = (timeline.born <= instant) & (instant < timeline.dies)
        named = [name.startswith("cross_attn.") and name.endswith(".gradient") for name in timeline.names]
        return timeline.num_bytes[alive & named].tolist()

    assert 2 * one in gradients(summed - 1)
    assert one not in gradients(summed - 1)
    assert 2 * one in gradients(summed)
    assert 2 * one not in gradients(summed + 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention": "flash_attention_2"}, "flash_attention_2"),
        ({"precision": Precision(parameters="float16", compute="float16")}, "float16"),
        ({"parallelism": Parallelism(tensor_parallel_size=2)}, "DDP, FSDP and ZeRO only"),
        ({"parallelism": Parallelism(data_parallel_size=2, sharding="fsdp2")}, "use fsdp1"),
        ({"activation_checkpointing": ActivationCheckpointing(mode="full", use_reentrant=True)}, "reentrant"),
        ({"task": "inference"}, "generation"),
    ],
)
def test_what_is_not_modelled_says_so(changes, reason):
    assert reason in out_of_scope(job(**changes))
    assert not out_of_scope(job())


@pytest.mark.parametrize(
    ("framework", "sharding"), [("huggingface", "none"), ("huggingface", "fsdp1"), ("torch", "fsdp2"), ("torch", "hsdp")]
)
def test_over_several_ranks_nothing_that_was_gathered_or_reduced_outlives_the_step(framework, sharding):
    """Both ends of the network are one unit, whose backward comes twice: it must fetch the last layer once."""
    sharded = job(framework=framework, parallelism=Parallelism(data_parallel_size=16, sharding=sharding))
    assert not out_of_scope(sharded)
    steady = ledger(sharded)
    left = (steady.dies >= len(steady.phases)) & (steady.born < len(steady.phases))
    buckets = sharding == "none"  # DDP's stand from its first step on
    assert (Category.COMMUNICATION_BUFFERS in steady.categories[left]) == buckets


def test_a_job_without_targets_is_written_as_ever():
    """The fields of few jobs are left out at their defaults, so that stored hashes stand."""
    from peakcast.jobs.spec import job_to_mapping

    assert "decoder_sequence_length" not in job_to_mapping(job())
    assert job_to_mapping(job(decoder_sequence_length=8))["decoder_sequence_length"] == 8
