"""Images of vision-language models: tokens and pixels counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import CollectorError, SpecError
from peakcast.jobs.spec import Images

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")

from peakcast.collectors.stacks.batches import batch_of  # noqa: E402
from peakcast.collectors.stacks.huggingface_model import model_of  # noqa: E402
from peakcast.collectors.stacks.images import check_fit, image_processor_of, tokens_of_image, with_images  # noqa: E402
from peakcast.dialects.common.job_file import job_from_mapping  # noqa: E402

LLAVA = {
    "model_type": "llava",
    "vision_config": {
        "model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "projection_dim": 16,
    },
    "text_config": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 2, "vocab_size": 512,
    },
    "image_token_index": 500,
}  # fmt: skip


def job(**more: Any) -> Any:
    return job_from_mapping({"architecture": LLAVA, "sequence_length": 64, "micro_batch_size": 2, **more})


def test_an_image_of_llava_is_a_token_for_each_patch() -> None:
    asked = job(images={"per_sequence": 2, "height": 100, "width": 80}, precision={"parameters": "float32"})
    model = model_of(asked)
    batch = with_images(batch_of(asked), asked, model, "cpu")
    assert tokens_of_image(asked, batch, model.config) == (56 // 14) ** 2
    assert [int(one) for one in (batch["input_ids"] == 500).sum(1)] == [2 * 16, 2 * 16]
    assert batch["pixel_values"].shape == (4, 3, 56, 56)  # two images of each of two sequences
    assert batch["pixel_values"].numel() * batch["pixel_values"].element_size() == 4 * 3 * 56 * 56 * 4
    assert float(model(**batch).loss.detach()) > 0


def test_qwens_images_are_patches_in_one_row() -> None:
    import numpy as np

    config = transformers.AutoConfig.for_model("qwen2_5_vl")
    made = image_processor_of(config)(images=[np.zeros((224, 280, 3), dtype=np.uint8)], return_tensors="np")
    assert made["image_grid_thw"].tolist() == [[1, 224 // 14, 280 // 14]]
    assert made["pixel_values"].shape == (16 * 20, 3 * 2 * 14 * 14)  # of which four make a token: 80


def test_images_that_do_not_fit_are_refused() -> None:
    asked = job(images={"per_sequence": 4, "height": 56}, sequence_length=64)
    with pytest.raises(
        CollectorError, match=r"images.per_sequence=4 .* 16 tokens each.* need 68 of sequence_length=64"
    ):
        check_fit(asked, 16)


def test_images_need_a_network_that_sees_them_and_a_size() -> None:
    with pytest.raises(SpecError, match="reads text alone"):
        job_from_mapping({"architecture": "gpt2", "images": {"per_sequence": 1, "height": 56}})
    with pytest.raises(SpecError, match=r"images.height is missing"):
        Images(per_sequence=1)
    assert str(Images(per_sequence=2, height=448)) == "2 images of 448 x 448"


def test_a_known_mask_chooses_as_many_as_it_has() -> None:
    import torch

    from peakcast.collectors.tracing.known_values import KnownValuesMode

    with KnownValuesMode(allow_non_fake_inputs=True):
        ids = torch.tensor([[7, 1, 7], [2, 3, 7]])
        assert torch.empty(2, 3, 8)[ids == 7].shape == (3, 8)
        assert int((ids == 7).sum()) == 3


def test_a_tower_with_an_image_processor_of_its_own_is_given_its_images() -> None:
    """Pixtral is a tower of Llava's class, whose own processor would enlarge every image: 84 x 56 pixels in patches of 14
    are 6 x 4 tokens."""
    tower = {"model_type": "pixtral", "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
    tower |= {"num_attention_heads": 2, "head_dim": 16, "image_size": 112, "patch_size": 14}
    network = {**LLAVA, "vision_config": tower, "vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    asked = job(architecture=network, images={"per_sequence": 1, "height": 84, "width": 56})
    model = model_of(asked)
    assert type(image_processor_of(model.config)).__name__.startswith("PixtralImageProcessor")
    batch = with_images(batch_of(asked), asked, model, "cpu")
    assert tokens_of_image(asked, batch, model.config) == 24


@pytest.mark.parametrize(("family", "processor"), [("qwen3_vl_moe", "Qwen2VLImageProcessor"), ("glm4v_moe", "Glm4vImage")])
def test_a_mixture_sees_images_as_the_dense_network_of_its_family_does(family: str, processor: str) -> None:
    """It has no image processor of its own in transformers 5.17, and the same processor of text and images."""
    found = image_processor_of(transformers.CONFIG_MAPPING[family]())
    assert type(found).__name__.startswith(processor)
