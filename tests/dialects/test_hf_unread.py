"""Keys of a config.json that nobody reads: listed, and for unknown families in the way of an answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peakcast import api, catalog
from peakcast.core.errors import SpecError
from peakcast.networks.config import architecture_from_hf_config, left_out_of

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
         "intermediate_size": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}  # fmt: skip
OTHER = {**LLAMA, "model_type": "my_own"}
DBRX = {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000}, "max_seq_len": 32768, "vocab_size": 100352,
        "ffn_config": {"ffn_hidden_size": 10752, "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05, "moe_num_experts": 16,
                       "moe_top_k": 4}, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("name", catalog.architecture_names())
def test_nothing_of_the_catalogs_configurations_is_left_out(name: str) -> None:
    left = left_out_of(catalog._file(name)["config"])
    assert left.keys == ()


def test_an_unread_key_of_a_known_family_is_listed() -> None:
    read = api.read({"architecture": {**LLAMA, "depth_scale_width": 3}})
    assert "keys of the network's configuration that are not read: depth_scale_width." in read.assumptions
    assert api.read({"architecture": LLAMA}).assumptions == ()


def test_an_unknown_family_without_a_recipe_is_counted_as_a_llama_and_the_answer_says_so() -> None:
    plain, odd = (api.predict({"architecture": one}, "H100-80GB") for one in (OTHER, {**OTHER, "value_residual_dim": 3}))
    guessed = "model_type='my_own' is no family of the ledger, and no recipe of it has been recorded; by its keys it is"
    assert any(warning.startswith(guessed) for warning in plain.warnings)
    assert any("are not read: value_residual_dim" in warning for warning in odd.warnings)
    assert not any("are not read" in warning for warning in plain.warnings)


def test_a_family_that_recipes_come_with_is_no_misspelt_one() -> None:
    def warned(family: str) -> str:
        network = {**OTHER, "model_type": family, "hidden_act": "never heard of"}
        return " ".join(api.predict({"architecture": network}, "H100-80GB").warnings)

    assert "did you mean 'bert'?" in warned("apertu")
    known = warned("apertus")
    assert "the nearest that comes with peakcast is" in known
    assert "did you mean" not in known


@pytest.mark.parametrize(
    "more",
    [
        {"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 128}},
        {"attn_config": {"kv_n_heads": 2}},
        {"moe_num_experts": 16},
        {"num_experts": 8},
        {"n_experts": 8},
        {"kv_lora_rank": 512},
        {"ssm_cfg": {"layer": "Mamba2"}},
    ],
)
def test_a_stranger_with_experts_or_other_attention_is_not_taken_for_llama(more: dict[str, object]) -> None:
    assert architecture_from_hf_config({**OTHER, **more}).kind == "undescribed"
    with pytest.raises(SpecError, match=r"model_type='my_own' .* is no family of the ledger, and no recipe"):
        api.predict({"architecture": {**OTHER, **more}}, "H100-80GB")


def test_a_setting_that_changes_what_a_layer_computes_is_said() -> None:
    said = api.read({"architecture": {**LLAMA, "add_cross_attention": True}}).unsupported
    assert said == ("add_cross_attention=True of the network's configuration is not modelled.",)
    assert api.read({"architecture": {**LLAMA, "add_cross_attention": False}}).unsupported == ()


def test_inner_mappings_are_looked_into() -> None:
    assert left_out_of(DBRX).keys == ()
    changed = {**DBRX, "ffn_config": {**DBRX["ffn_config"], "moe_shared_width": 512}}  # type: ignore[dict-item]
    assert left_out_of(changed).keys == ("ffn_config.moe_shared_width",)


def test_the_hugging_face_form_and_a_file_say_it_too(tmp_path: Path) -> None:
    config = {**LLAMA, "depth_scale_width": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for form in ({"huggingface": {"config": config}}, {"architecture": str(tmp_path)}):
        read = api.read(form)
        assert any("depth_scale_width" in sentence for sentence in read.assumptions)
