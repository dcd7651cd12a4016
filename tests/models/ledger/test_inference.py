"""Generation: weights, caches and logits counted by hand; properties; and that every door answers."""

from dataclasses import replace

import pytest

import peakcast
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture, MultiLatentAttention
from peakcast.jobs.spec import Finetuning, Inference, Precision, TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.blocks.kv_cache import CacheTurn, cache_turn
from peakcast.models.ledger.huggingface.inference import MAX_DECODE_FORWARDS, _decoded
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category

H, F, V, LAYERS, HEADS, KV_HEADS, DIM = 256, 512, 1024, 2, 4, 2, 64
TINY = Architecture(
    name="tiny",
    model_type="llama",
    hidden_size=H,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    intermediate_size=F,
    vocab_size=V,
)
PER_LAYER = 2 * H * HEADS * DIM + 2 * H * KV_HEADS * DIM + 3 * H * F + 2 * H
PARAMETERS = 2 * V * H + LAYERS * PER_LAYER + H


def job(batch=2, prompt=128, new=17, cache="dynamic", **changes):
    inference = Inference(prompt_length=prompt, new_tokens=new, cache=cache)
    return TrainingJob(architecture=TINY, task="inference", micro_batch_size=batch, inference=inference, **changes)


def cached(timeline, instant=-1):
    """Bytes of keys and values alive at `instant`."""
    alive = timeline.alive_at(instant % len(timeline.phases))
    return sum(
        int(size)
        for name, size, lives in zip(timeline.names, timeline.num_bytes, alive, strict=True)
        if lives and name in ("key_cache", "value_cache")
    )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_holds_keys_and_values_of_all_tokens_but_the_last(cache):
    timeline = ledger(job(cache=cache))
    assert cached(timeline) == 2 * LAYERS * 2 * (128 + 17 - 1) * KV_HEADS * DIM * 2
    assert timeline.composition(len(timeline.phases) - 1)[Category.PARAMETERS] == 2 * PARAMETERS


def test_a_dynamic_cache_grows_and_its_old_and_new_keys_meet():
    timeline = ledger(job())
    start = timeline.labels.index("decode embed_tokens")
    token = 2 * LAYERS * 2 * KV_HEADS * DIM * 2
    assert cached(timeline, start) == 128 * token
    meeting = next(t for t in range(start, len(timeline.labels)) if timeline.labels[t] == "decode key_cache")
    assert cached(timeline, meeting) == 128 * token + 129 * token // (2 * LAYERS)


def test_before_transformers_4_42_the_last_forward_s_cache_stays_until_the_next_forward():
    token = 2 * LAYERS * 2 * KV_HEADS * DIM * 2
    for release, held in {"4.41.2": 143 + 144, "4.42.0": 144}.items():
        timeline = ledger(job(versions=FrozenMapping({"transformers": release})))
        last = max(t for t, label in enumerate(timeline.labels) if label == "decode lm_head")
        assert cached(timeline, last) == held * token


def test_logits_of_all_positions_wait_for_the_next_forward_s():
    """Before transformers 4.45 `next_token_logits` is a view of all of them."""
    timeline = ledger(job(batch=2, versions=FrozenMapping({"transformers": "4.41.2"})))
    decoding = timeline.labels.index("decode embed_tokens")
    alive = timeline.alive_at(decoding)
    held = {name: int(n) for name, n, lives in zip(timeline.names, timeline.num_bytes, alive, strict=True) if lives}
    assert held["next_token_logits"] == 2 * 128 * V * 4


@pytest.mark.parametrize(
    ("family", "last_with", "first_without"), [("llama", "4.40.2", "4.41.0"), ("mistral", "4.41.2", "4.42.0")]
)
def test_rotary_tables_of_every_layer(family, last_with, first_without):
    network = replace(TINY, model_type=family, max_position_embeddings=4096)
    tables = {}
    for release in (last_with, first_without):
        timeline = ledger(job(versions=FrozenMapping({"transformers": release})).replace(architecture=network))
        held = zip(timeline.names, timeline.num_bytes, strict=True)
        tables[release] = sum(int(size) for name, size in held if name.startswith("rotary_emb."))
    assert tables == {last_with: LAYERS * 2 * 4096 * DIM * 2, first_without: 0}


def test_a_static_cache_has_its_full_size_from_the_first_forward_on():
    timeline = ledger(job(cache="static"))
    start = timeline.labels.index("decode embed_tokens")
    assert cached(timeline, start) == cached(timeline)


def test_prefill_makes_logits_of_the_last_position_only():
    timeline = ledger(job(new=1))
    sizes = {name: int(size) for name, size in zip(timeline.names, timeline.num_bytes, strict=True)}
    assert (sizes["lm_head"], sizes["next_token_logits"]) == (2 * V * 2, 2 * V * 4)
    old = ledger(job(new=1, versions=FrozenMapping({"transformers": "4.44.2"})))
    everywhere = {name: int(size) for name, size in zip(old.names, old.num_bytes, strict=True)}
    assert everywhere["logits.to_float32"] == 2 * 128 * V * 4


def test_nothing_of_training_is_there():
    for step in ("first", "steady"):
        timeline = ledger(job(), step=step)
        alive = {Category(c) for c, b, d in zip(timeline.categories, timeline.born, timeline.dies, strict=True) if d > b}
        assert not alive & {Category.GRADIENTS, Category.OPTIMIZER_STATES, Category.OPTIMIZER_TEMPORARIES}


def test_the_peak_grows_with_the_batch_the_prompt_and_the_new_tokens():
    peak = ledger(job()).peak().num_bytes
    assert peak < ledger(job(batch=3)).peak().num_bytes
    assert peak < ledger(job(prompt=160)).peak().num_bytes
    long = job(batch=8, prompt=8, new=200)
    assert ledger(long).peak().num_bytes < ledger(job(batch=8, prompt=8, new=400)).peak().num_bytes


def test_decoding_forwards_are_all_shown_or_spread_with_the_last_one():
    assert _decoded(10, 10) == []
    assert _decoded(10, 13) == [10, 11, 12]
    many = _decoded(100, 5000)
    assert len(many) == len(set(many)) == MAX_DECODE_FORWARDS
    assert (many[0], many[-2:]) == (100, [4998, 4999])
    assert many == sorted(many)


def test_adapters_and_quantised_bases_generate_too():
    lora = ledger(job(finetuning=Finetuning(method="lora", rank=8))).peak().num_bytes
    plain = ledger(job()).peak().num_bytes
    assert plain < lora
    qlora = job(finetuning=Finetuning(method="qlora", rank=8, quantization="nf4"))
    assert ledger(qlora).peak().num_bytes < lora


def test_a_quantised_network_generates_without_adapters():
    """GPTQ of 4 bits by optimum: codes, scales and zeros of groups of 128, an index and a bias; exllama's buffer of the
    largest matrix, in which every use unpacks its own."""
    quantised = Finetuning(quantization="gptq")
    shapes = [(HEADS * DIM, H), (KV_HEADS * DIM, H), (KV_HEADS * DIM, H), (H, HEADS * DIM), (F, H), (F, H), (H, F)]
    packed = sum(out * inner // 2 + out * inner // 128 * 5 // 2 + inner * 4 + out * 2 for out, inner in shapes)
    whole = 2 * V * H * 2 + LAYERS * 2 * H * 2 + H * 2
    exllama = ledger(job(finetuning=quantised, framework_options=FrozenMapping({"gptq_kernel": "exllama"})))
    parameters = exllama.composition(0)[Category.PARAMETERS]
    assert parameters == pytest.approx(whole + LAYERS * packed, abs=512 * LAYERS * 5 * len(shapes))
    sizes = dict(zip(exllama.names, exllama.num_bytes, strict=True))
    assert sizes["exllama.scratch"] == F * H * 2
    with_room = ledger(job(finetuning=quantised, framework_options=FrozenMapping({"gptq_kernel": "exllamav2"})))
    assert dict(zip(with_room.names, with_room.num_bytes, strict=True))["exllama.scratch"] == F * H * 2 + F * 2048 * 8 * 4
    orders = [size for name, size in zip(with_room.names, with_room.num_bytes, strict=True) if name.endswith("perm")]
    assert sum(orders) == LAYERS * sum(2 * 2 * inner for _, inner in shapes)  # int16, there and back
    assert out_of_scope(job(finetuning=quantised)) == ""


@pytest.mark.parametrize(
    ("network", "batch", "attention", "allocated", "reserved"),
    [
        ("llama-2-7b", 4, "sdpa", 16_774, 24_983),  # OB-046
        ("llama-2-7b", 8, "eager", 19_997, 63_503),  # OB-078
        ("llama-2-13b", 1, "flash_attention_2", 27_506, 27_936),  # OB-014
    ],
)
def test_published_generations_on_an_a100(network, batch, attention, allocated, reserved):
    """huggingface/optimum-benchmark: transformers 4.35.2, 256 tokens and 512 more, in whole MB rounded down."""
    found = baseline(
        TrainingJob(
            architecture=peakcast.catalog.architecture(network),
            task="inference",
            micro_batch_size=batch,
            attention=attention,
            precision=Precision(parameters="float16", compute="float16"),
            versions=FrozenMapping({"torch": "2.1.1", "transformers": "4.35.2"}),
            inference=Inference(prompt_length=256, new_tokens=512),
        ),
        peakcast.catalog.gpu("A100-80GB"),
    )
    assert found.replayed_allocated_bytes == pytest.approx(allocated * 10**6, rel=1e-4)
    assert found.peak_reserved_bytes == pytest.approx(reserved * 10**6, rel=0.005)


def windowed(window, **changes):
    return job(**changes).replace(architecture=replace(TINY, model_type="mistral", sliding_window=window))


def test_a_window_cuts_a_dynamic_cache_when_it_next_grows():
    timeline = ledger(windowed(64))
    token = 2 * LAYERS * 2 * KV_HEADS * DIM * 2
    start = timeline.labels.index("decode embed_tokens")
    assert cached(timeline, start) == 128 * token  # cut as a view
    assert cached(timeline) == 64 * token


def test_a_window_bounds_a_static_cache_from_the_start():
    timeline = ledger(windowed(64, cache="static"))
    token = 2 * LAYERS * 2 * KV_HEADS * DIM * 2
    assert cached(timeline) == cached(timeline, timeline.labels.index("decode embed_tokens")) == 64 * token
    assert "decode key_cache.rolled" in timeline.labels
    assert "prefill key_cache.rolled" not in timeline.labels


@pytest.mark.parametrize(
    ("turn", "does"),
    [
        ((None, 0, 128, 144, False), CacheTurn("grows", 128, 128)),
        ((64, 0, 128, 144, False), CacheTurn("slides", 128, 128)),
        ((64, 128, 1, 144, False), CacheTurn("slides", 64, 64)),
        ((64, 63, 1, 144, False), CacheTurn("slides", 64, 64)),
        ((None, 128, 1, 144, True), CacheTurn("stores", 144, 144)),
        ((200, 128, 1, 144, True), CacheTurn("stores", 144, 144)),
        ((64, 0, 128, 144, True), CacheTurn("passes", 128, 64)),
        ((64, 0, 64, 144, True), CacheTurn("stores", 64, 64)),
        ((64, 64, 1, 144, True), CacheTurn("rolls", 64, 64)),
    ],
)
def test_what_a_cache_does_in_one_forward(turn, does):
    *lengths, static = turn
    assert cache_turn(*lengths, static=static) == does


def test_a_latent_cache_is_compressed_and_expanded_whole():
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    timeline = ledger(
        job().replace(architecture=replace(TINY, model_type="deepseek_v3", mla=MultiLatentAttention(**latent)))
    )
    assert cached(timeline) == 2 * LAYERS * 144 * (512 + 64) * 2
    sizes = zip(timeline.names, timeline.num_bytes, strict=True)
    assert max(size for name, size in sizes if name == "self_attn.kv_b_proj") == 2 * 144 * HEADS * (128 + 128) * 2


def test_earlier_versions_cache_what_latent_attention_has_expanded():
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    deepseek = replace(TINY, model_type="deepseek_v3", mla=MultiLatentAttention(**latent))
    old = job(versions=FrozenMapping({"transformers": "4.57.1"})).replace(architecture=deepseek)
    assert cached(ledger(old)) == 2 * LAYERS * 144 * HEADS * (128 + 64 + 128) * 2
    assert "before transformers 5.17" in out_of_scope(old)


def test_layers_that_attend_to_everything_keep_all_keys():
    qwen = replace(TINY, model_type="qwen2", sliding_window=64)
    some = replace(qwen, full_attention_layers=(0,))
    none, half = (cached(ledger(job().replace(architecture=a))) for a in (qwen, some))
    assert none < half < cached(ledger(job()))
    assert out_of_scope(job().replace(architecture=some)) == ""


def test_predict_answers_with_wide_bars_and_says_why():
    answer = peakcast.predict(
        {
            "architecture": "llama-3.1-8b",
            "task": "inference",
            "micro_batch_size": 4,
            "inference": {"prompt_length": 4096, "new_tokens": 512},
        },
        "H100-80GB",
    )
    weights, cache = 2 * 8_030_261_248, 2 * 32 * 4 * (4096 + 511) * 1024 * 2
    assert weights + cache < answer.peak_allocated_bytes.point < 1.15 * (weights + cache)
    assert answer.peak_phase == "forward"
    assert not answer.inside_calibrated_domain
    assert any("inference" in sentence for sentence in answer.warnings)
