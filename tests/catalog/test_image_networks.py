"""Families whose batches are images: as transformers classes them, with the batches that they read."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import pytest

from peakcast import catalog
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.printing.screen import asked

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from peakcast.collectors.stacks.batches import batch_of  # noqa: E402
from peakcast.collectors.stacks.huggingface_model import model_of  # noqa: E402

TABLE = tomllib.loads(files("peakcast.catalog").joinpath("image_networks.toml").read_text(encoding="utf-8"))
VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
VIT |= {"image_size": 32, "patch_size": 16, "id2label": {"0": "cat", "1": "dog", "2": "neither"}}
PART = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CLIP = {
    "model_type": "clip",
    "projection_dim": 16,
    "text_config": {**PART, "model_type": "clip_text_model", "vocab_size": 128, "max_position_embeddings": 20},
    "vision_config": {**PART, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 16},
}


def job(network: object, **more: Any) -> Any:
    return job_from_mapping(
        {"architecture": network, "micro_batch_size": 3, "precision": {"parameters": "float32"}, **more}
    )


@pytest.mark.parametrize(
    ("what", "auto"),
    [("classify", "AutoModelForImageClassification"), ("compare", "AutoModelForZeroShotImageClassification")],
)
def test_transformers_classes_each_family_so(what: str, auto: str) -> None:
    mapping = getattr(transformers, auto)._model_mapping
    unknown = [name for name in TABLE[what] if transformers.CONFIG_MAPPING[name] not in mapping]
    assert unknown == []


def test_families_that_classify_read_pixels_first() -> None:
    mapping = transformers.AutoModelForImageClassification._model_mapping
    classes = [mapping[transformers.CONFIG_MAPPING[name]] for name in TABLE["classify"]]
    firsts = [one[0] if isinstance(one, tuple) else one for one in classes]
    assert {one.main_input_name for one in firsts} == {"pixel_values"}


def test_a_classifier_of_images_is_given_an_image_and_a_class_for_each_sequence() -> None:
    asked_for = job(VIT)
    batch = batch_of(asked_for)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"pixel_values": (3, 3, 32, 32), "labels": (3,)}
    model = model_of(asked_for)
    assert type(model).__name__ == "ViTForImageClassification"
    assert model(**batch).logits.shape == (3, 3)


def test_names_of_classes_count_by_their_number() -> None:
    assert job(VIT).architecture == job({**VIT, "id2label": {"0": "a", "1": "b", "2": "c"}}).architecture
    assert job(VIT).architecture != job({**VIT, "id2label": {"0": "a", "1": "b"}}).architecture


def test_a_network_that_compares_is_given_captions_and_images_and_asked_for_a_loss() -> None:
    asked_for = job(CLIP)
    assert asked_for.sequence_length == 20  # the caption's table of positions ends there
    batch = batch_of(asked_for)
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    assert batch["input_ids"].shape == (3, 20)
    assert model_of(asked_for)(**batch).loss.dim() == 0


def test_a_network_that_compares_can_classify_without_its_part_for_captions() -> None:
    asked_for = job({**CLIP, "architectures": ["CLIPForImageClassification"], "num_labels": 3})
    assert set(batch_of(asked_for)) == {"pixel_values", "labels"}
    model = model_of(asked_for)
    assert type(model).__name__ == "CLIPForImageClassification"
    assert model(**batch_of(asked_for)).loss.dim() == 0


def test_images_have_the_size_of_the_configuration_of_the_image_processor_or_that_is_asked_for() -> None:
    """facebook/dinov2-base has image_size 518 in its config.json, and its image processor crops to 224."""
    assert batch_of(job("dinov2-base"))["pixel_values"].shape == (3, 3, 224, 224)
    larger = job("dinov2-base", images={"per_sequence": 1, "height": 518})
    assert batch_of(larger)["pixel_values"].shape == (3, 3, 518, 518)


def test_several_images_a_sequence_are_refused() -> None:
    with pytest.raises(SpecError, match=r"images.per_sequence=2 must be 1: .*micro_batch_size; raise that instead"):
        job(VIT, images={"per_sequence": 2, "height": 32})


def test_answers_say_what_a_micro_batch_has() -> None:
    assert "micro-batch 3 × an image of 32 x 32 pixels" in asked(job(VIT))
    assert "micro-batch 3 × (20 tokens and an image of 32 x 32 pixels)" in asked(job(CLIP))


def test_hub_ids_of_networks_of_images_are_found() -> None:
    assert catalog.architecture("google/vit-base-patch16-224-in21k").name == "vit-base-patch16-224-in21k"
    assert catalog.architecture("openai/clip-vit-large-patch14").name == "clip-vit-large-patch14"
