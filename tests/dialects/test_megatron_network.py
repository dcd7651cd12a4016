"""Megatron-LM flags that describe the network: its vocabulary, its layers, its experts, hybrids of mixers."""

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.megatron.job import from_megatron
from tests.dialects.test_megatron import GPT


def job(**arguments):
    return from_megatron({**GPT, **arguments}, 8).job


@pytest.mark.parametrize(
    ("arguments", "vocabulary"),
    [
        ({"tensor-model-parallel-size": 2}, 50432),
        ({"tensor-model-parallel-size": 4}, 50688),
        ({"vocab-size": 151936}, 151936),
        ({"vocab-size": 8193, "tokenizer-type": "NullTokenizer"}, 8320),
        ({"tokenizer-type": "Llama2Tokenizer"}, 32000),
        ({"tokenizer-type": "BertWordPieceCase", "vocab-extra-ids": 100}, 29184),
        ({"vocab-size": 129280, "make-vocab-size-divisible-by": 3232, "tensor-model-parallel-size": 2}, 129280),
    ],
)
def test_the_vocabulary_is_padded_over_the_tensor_parallel_ranks(arguments, vocabulary):
    assert job(**arguments).architecture.vocab_size == vocabulary


def test_a_tokenizer_that_settles_nothing_is_a_warning():
    translation = from_megatron({**GPT, "tokenizer-type": "HuggingFaceTokenizer"}, 8)
    assert any("does not settle the vocabulary; give vocab-size" in sentence for sentence in translation.warnings)


def test_a_modern_network():
    network = job(
        **{"swiglu": True, "disable-bias-linear": True, "normalization": "RMSNorm", "position-embedding-type": "rope",
           "group-query-attention": True, "num-query-groups": 2, "qk-layernorm": True, "kv-channels": 128,
           "untie-embeddings-and-output-weights": True, "hidden-dropout": 0.0}
    ).architecture  # fmt: skip
    assert network.intermediate_size == int(4 * 512 * 2 / 3 / 64) * 64 == 1344
    assert (network.hidden_act, network.gated_mlp, network.normalization) == ("silu", True, "rmsnorm")
    assert (network.num_key_value_heads, network.head_dim, network.qk_norm) == (2, 128, "head")
    assert not network.mlp_bias
    assert not network.attention_bias
    assert not network.tie_word_embeddings
    assert job(**{"squared-relu": True}).architecture.hidden_act == "relu2"
    assert job(**{"num-query-groups": 2}).architecture.num_key_value_heads == 8  # without group-query-attention: no effect


def test_experts_and_latent_attention():
    network = job(
        **{"num-experts": 8, "moe-router-topk": 2, "moe-ffn-hidden-size": 256, "moe-shared-expert-intermediate-size": 64,
           "moe-layer-freq": "([0]*3+[1]*9)", "moe-router-enable-expert-bias": True, "disable-bias-linear": True,
           "expert-model-parallel-size": 4, "multi-latent-attention": True, "kv-lora-rank": 64, "q-lora-rank": 192,
           "qk-head-dim": 16, "qk-pos-emb-head-dim": 8, "v-head-dim": 16, "moe-grouped-gemm": True}
    ).architecture  # fmt: skip
    assert network.model_type == "megatron_moe"
    assert (network.moe.num_experts, network.moe.num_experts_per_tok, network.moe.moe_intermediate_size) == (8, 2, 256)
    assert [network.is_moe_layer(layer) for layer in range(12)] == [False] * 3 + [True] * 9
    assert network.moe.router_correction_bias
    assert (network.mla.q_lora_rank, network.mla.kv_lora_rank, network.mla.qk_rope_head_dim) == (192, 64, 8)


@pytest.mark.parametrize(
    ("frequency", "routed"),
    [
        (3, [0, 3, 6, 9]),
        ("4", [0, 4, 8]),
        ("([1]*1+[0]*1)*6", [0, 2, 4, 6, 8, 10]),
        ('\\"([0]*2+[1]*1)*4\\"', [2, 5, 8, 11]),
        ([0] * 11 + [1], [11]),
    ],
)
def test_layers_with_experts_come_in_any_order(frequency, routed):
    """Of N every N-th, beginning with the first (megatron-core 0.16.1 `gpt_layer_specs.py`); of a pattern its ones."""
    network = job(**{"num-experts": 8, "moe-layer-freq": frequency}).architecture
    assert [layer for layer in range(12) if network.is_moe_layer(layer)] == routed


@pytest.mark.parametrize("frequency", ["[0]*3+[1]*8", "every second", 0])
def test_an_order_that_is_not_one_of_all_layers_is_refused(frequency):
    with pytest.raises(SpecError, match="moe-layer-freq"):
        job(**{"num-experts": 8, "moe-layer-freq": frequency})


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"padded-vocab-size": 64000, "tokenizer-type": "GPT2BPETokenizer"}, 64000),
        ({"tokenizer-type": "TikTokenizer"}, 131072),
        ({"tokenizer-type": "TikTokenizer", "vocab-size": 200000}, 200064),
        ({"tokenizer-type": "NullMultimodalTokenizer", "vocab-size": 8192}, 8320),
    ],
)
def test_vocabularies_of_tokenizers(arguments, rows):
    assert job(**arguments).architecture.vocab_size == rows


def test_a_router_may_have_several_losses():
    """Each with a coefficient; one of 0 is none (`router.py` get_aux_loss_coeff)."""
    both = {"num-experts": 8, "moe-router-load-balancing-type": "[aux_loss seq_aux_loss]"}
    options = job(**both, **{"moe-aux-loss-coeff": "[0.01 0]"}).framework_options
    assert options["moe_aux_loss_coeff"] == 0.01
    assert "moe_router_load_balancing_type" not in options, "aux_loss alone is the default"
    options = job(**both, **{"moe-aux-loss-coeff": [0.01, 0.02]}).framework_options
    assert options["moe_router_load_balancing_type"] == "aux_loss seq_aux_loss"
    with pytest.raises(SpecError, match="moe-aux-loss-coeff"):
        job(**both, **{"moe-aux-loss-coeff": "[1 2 3]"})


def test_a_sliding_window_changes_no_tensor_of_transformer_engine():
    assert not from_megatron({**GPT, "window-size": "(128,0)", "window-attn-skip-freq": 2}, 8).findings
    local = from_megatron({**GPT, "window-size": "(128,0)", "transformer-impl": "local"}, 8)
    assert [found.direction for found in local.findings] == ["more"]


def test_a_hybrids_layers_and_its_mixer():
    """Inner width 2 x hidden-size, heads of 64, eight groups of a state of 128 each; stages end at the bars."""
    translation = from_megatron(
        {**GPT, "num-layers": None, "hybrid-layer-pattern": "M-M*|M-ME", "num-experts": 4,
         "pipeline-model-parallel-size": 2},
        8,
    )
    network = translation.job.architecture
    assert not translation.unsupported
    assert network.layer_types == ("mamba", "mlp", "mamba", "attention", "mamba", "mlp", "mamba", "moe")
    assert translation.job.parallelism.pipeline_layers == (4, 4)
    ssm, hidden = network.ssm, network.hidden_size
    assert (ssm.inner_size, ssm.num_heads, ssm.num_groups, ssm.state_size) == (2 * hidden, 2 * hidden // 64, 8, 128)
    assert ssm.input_size == 2 * (2 * hidden) + 2 * 8 * 128 + 2 * hidden // 64


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ({"hybrid-attention-ratio": 0.25, "num-layers": 8}, "MM*MM*MM"),
        ({"hybrid-attention-ratio": 0.25, "hybrid-mlp-ratio": 0.5, "num-layers": 8}, "M-*-M*--"),
        ({"hybrid-mlp-ratio": 0.5, "num-layers": 4}, "M-M-"),
        ({"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"], "num-layers": 3}, "MMM"),
    ],
)
def test_a_hybrid_without_a_pattern_spreads_its_layers_as_megatron_core_does(flags, pattern):
    """The patterns are those of megatron-core 0.12 `_allocate_auto`."""
    network = from_megatron({**GPT, **flags}, 8).job.architecture
    kinds = {"M": "mamba", "*": "attention", "-": "mlp"}
    assert network.kind == "hybrid"
    assert network.layer_types == tuple(kinds[symbol] for symbol in pattern)
    with pytest.raises(SpecError, match="must be shares of at most 1 together"):
        from_megatron({**GPT, "hybrid-attention-ratio": 0.75, "hybrid-mlp-ratio": 0.5}, 8)


def test_names_of_megatron_deepspeed_and_pai_megatron_patch_are_read():
    """Grouped-query attention by --num-key-value-heads; the tokenizer's vocabulary plus --extra-vocab-size."""
    own = {"normalization": "rmsnorm", "num-key-value-heads": 2, "deepspeed": True, "vocab-size": 32000}
    network = from_megatron({**GPT, **own}, 8)
    assert (network.job.architecture.normalization, network.job.architecture.num_key_value_heads) == ("rmsnorm", 2)
    assert any("DeepSpeed's engine" in sentence for sentence in network.unsupported)
    patched = {**GPT, "vocab-size": None, "patch-tokenizer-type": "Qwen2Tokenizer", "extra-vocab-size": 421}
    assert from_megatron(patched, 8).job.architecture.vocab_size == 151643 + 421
