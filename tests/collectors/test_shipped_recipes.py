"""Recipes that come with peakcast against traces of the library that is installed: networks of other widths and depths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peakcast.api import predict, read
from peakcast.collectors.measure.grid import expand
from peakcast.dialects.huggingface import trl_loss
from peakcast.doors import shipping
from peakcast.models.recipes import shelf, shipped

transformers = pytest.importorskip("transformers")

PUBLISHED: dict[str, dict[str, Any]] = {
    "distilbert-base-uncased": {
        "model_type": "distilbert",
        "activation": "gelu",
        "dim": 768,
        "hidden_dim": 3072,
        "n_heads": 12,
    }
    | {
        "n_layers": 6,
        "max_position_embeddings": 512,
        "sinusoidal_pos_embds": False,
        "tie_weights_": True,
        "vocab_size": 30522,
    },
    "Apertus-8B": {"model_type": "apertus", "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096}
    | {"intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False, "num_attention_heads": 32}
    | {"num_hidden_layers": 32, "num_key_value_heads": 8, "post_norm": False, "qk_norm": True, "vocab_size": 131072},
}
"""What the configurations on the hub say, with the keys that no code reads any more."""
AGAIN = "persimmon"
CHECKPOINTED = {"activation_checkpointing.mode": "full", "framework": "huggingface"}
SMALL = {"hidden_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 12, "vocab_size": 50257}
CELLS: dict[str, dict[str, Any]] = {
    "grouped heads": {
        "architecture": {"model_type": "apertus", **SMALL, "num_key_value_heads": 4, "intermediate_size": 4096},
        "micro_batch_size": 3,
        "sequence_length": 777,
    },
    "grouped heads on eight ranks": {
        "architecture": {"model_type": "apertus", **SMALL, "num_key_value_heads": 4, "intermediate_size": 4096},
        "micro_batch_size": 2,
        "sequence_length": 300,
        "parallelism.data_parallel_size": 8,
        "parallelism.sharding": "fsdp2",
    },
    "experts": {
        "architecture": {"model_type": "ernie4_5_moe", **SMALL, "num_key_value_heads": 2, "intermediate_size": 4096}
        | {"moe_num_experts": 48, "moe_intermediate_size": 640, "moe_k": 4},
        "micro_batch_size": 1,
        "sequence_length": 1000,
    },
    "flash-attention": {
        "architecture": {"model_type": "apertus", **SMALL, "num_key_value_heads": 4, "intermediate_size": 4096},
        "attention": "flash_attention_2",
        "micro_batch_size": 3,
        "sequence_length": 777,
    },
    "an encoder, of masked words, with Llama's keys": {
        "architecture": {"model_type": "eurobert", "hidden_size": 672, "num_hidden_layers": 5, "num_attention_heads": 12}
        | {"head_dim": 56, "intermediate_size": 2688, "vocab_size": 112224},
        "micro_batch_size": 3,
        "sequence_length": 601,
    },
}
AUTOCAST = {"precision.parameters": "float32", "framework_options": {"autocast": True}}
WINDOWED = {"model_type": "cwm", "hidden_size": 1536, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 64}
WINDOWED |= {"num_hidden_layers": 16, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 4}
WINDOWED |= {"intermediate_size": 5632, "sliding_window": 8192, "vocab_size": 32064}
for batch, length in ((3, 2500), (2, 8192), (3, 9000)):  # from 8,192 on each sequence has a mask of its own
    CELLS[f"{batch} x {length:,} beside a window"] = {
        "architecture": WINDOWED,
        "micro_batch_size": batch,
        "sequence_length": length,
    } | AUTOCAST
CELLS["images of a hundred and one classes"] = {
    "architecture": {"model_type": "vit", "hidden_size": 512, "num_hidden_layers": 5, "num_attention_heads": 8}
    | {"intermediate_size": 2048, "image_size": 224, "patch_size": 32, "num_labels": 101},
    "micro_batch_size": 5,
} | AUTOCAST
WHISPER = {"model_type": "whisper", "d_model": 512, "vocab_size": 51865, "num_mel_bins": 80, "max_target_positions": 448}
WHISPER |= {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 6), ("ffn_dim", 2048))}
WHISPER |= {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
CELLS["sound and the words in it"] = {"architecture": WHISPER, "micro_batch_size": 3, "sequence_length": 225} | AUTOCAST
FEW = ("grouped heads", "grouped heads on eight ranks", "experts", "images of a hundred and one classes")
"""Cells of every test run; the others run with -m whole."""


@pytest.fixture(autouse=True)
def nothing_recorded_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEAKCAST_RECIPES", str(tmp_path))
    monkeypatch.setattr(shelf, "_found", {})


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=[pytest.mark.whole] * (cell not in FEW)) for cell in CELLS])
def test_a_shipped_recipe_equals_the_trace_of_a_network_that_was_never_recorded(cell, ledger_equals_trace):
    if not shelf.installed_libraries()["transformers"].startswith("5.17."):
        pytest.skip("recipes of 5.17 are compared with 5.17")
    (job,) = expand({"include": [CELLS[cell] | CHECKPOINTED]})
    assert shelf.recipe_of(job) is not None
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_recipe_covers_a_published_configuration(name: str) -> None:
    (job,) = expand(
        {"include": [{"architecture": PUBLISHED[name], "micro_batch_size": 2, "sequence_length": 512} | CHECKPOINTED]}
    )
    assert shelf.recipe_of(job) is not None


def test_a_trainers_bf16_is_answered_without_recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As its arguments are read: float32 weights under autocast, no checkpoints, short sequences and many of them. They may
    also be TRL's, of which whole logits are counted where TRL is not installed to record its head."""
    monkeypatch.setenv("PEAKCAST_RECORD", "never")
    monkeypatch.setattr(trl_loss, "find_spec", lambda name: None)
    xlm_roberta = {"model_type": "xlm-roberta", "hidden_size": 768, "intermediate_size": 3072, "vocab_size": 250002}
    xlm_roberta |= {
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(xlm_roberta))
    for batch, length in ((1, 17), (64, 128), (16, 512)):
        shape = {"per_device_train_batch_size": batch, "max_seq_length": length}
        asked = {"model_name_or_path": str(tmp_path), "bf16": True, "output_dir": "out", **shape}
        assert shelf.recipe_of(read(asked).job) is not None
    found = predict(asked, "A100-80GB")
    assert found.assumptions
    assert any("TRL's trainers" in one.sentence and "GiB would be allocated and not" in one.sentence for one in found.found)


@pytest.mark.parametrize(
    "path",
    [path for folder in shipped._stacks("transformers") for path in sorted(folder.iterdir())],
    ids=lambda path: path.name,
)
def test_every_shipped_file_is_read(path: Path) -> None:
    kinds = shipped.all_of(path)
    assert kinds
    for kind, recipe in kinds:
        assert shipped.stack_name("transformers", str(recipe.versions["transformers"])) == path.parent.name
        assert len(kind.confirmed) > 1
        assert "hidden_size" in kind.read


@pytest.mark.whole
def test_recording_a_family_again_gives_what_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To the byte, in the releases that the shipped recipes name."""
    (folder,) = (folder for folder in shipped._stacks("transformers") if folder.name == "transformers-5.17.0")
    before = shipped.all_of(folder / shipped.file_name(AGAIN))
    if any(shelf.installed_libraries().get(name) != release for name, release in before[0][1].versions.items()):
        pytest.skip(f"{AGAIN} was recorded with other releases than are installed")
    monkeypatch.delenv("PEAKCAST_RECORD")
    monkeypatch.setattr(shipping, "REGIMES", shipping.REGIMES[:1])
    monkeypatch.setattr(shipping, "BATCHES", (1,))
    assert shipping.record_all(tmp_path, [AGAIN]).refused == {}
    ((kind, recipe),) = shipped.all_of(tmp_path / folder.name / shipped.file_name(AGAIN))
    assert shipped.written([(kind, recipe)]) in [shipped.written([one]) for one in before]
