"""Programs that fine-tune networks of images: their batches are images, and nothing is said of tokens."""

from __future__ import annotations

from peakcast.api import read
from peakcast.jobs.images import sees_only_images

SCRIPT = """
python run_image_classification.py --dataset_name beans --output_dir beans --remove_unused_columns False \\
    --label_column_name labels --do_train --model_name_or_path google/vit-base-patch16-224-in21k --learning_rate 2e-5 \\
    --num_train_epochs 5 --per_device_train_batch_size 64 --fp16
"""
PROGRAM = """
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments
model = AutoModelForImageClassification.from_pretrained("microsoft/swin-tiny-patch4-window7-224", num_labels=101)
args = TrainingArguments("out", per_device_train_batch_size=16, gradient_accumulation_steps=4, bf16=True)
Trainer(model=model, args=args, train_dataset=food).train()
"""
CAPTIONS = """
python run_clip.py --model_name_or_path openai/clip-vit-base-patch32 --output_dir out --do_train \\
    --per_device_train_batch_size 64 --image_column image_path --caption_column caption
"""
LENGTHS = ("max_length", "sequence length", "tokens a sequence", "longest sample")


def test_a_script_that_classifies_images_asks_for_no_length() -> None:
    found = read(SCRIPT)
    assert found.job.architecture.name == "vit-base-patch16-224-in21k"
    assert (found.job.micro_batch_size, found.job.precision.parameters) == (64, "float32")
    assert not [one for one in (*found.assumptions, *found.warnings) if any(word in one for word in LENGTHS)]


def test_a_program_that_classifies_images_asks_for_no_length() -> None:
    found = read(PROGRAM)
    assert found.job.architecture.model_type == "swin"
    assert found.job.gradient_accumulation_steps == 4
    assert not [one for one in (*found.assumptions, *found.warnings) if any(word in one for word in LENGTHS)]


def test_captions_are_as_long_as_the_network_has_positions() -> None:
    assert read(CAPTIONS).job.sequence_length == 77


def test_a_network_that_compares_is_trained_to_classify_without_its_part_for_captions() -> None:
    found = read(PROGRAM.replace("microsoft/swin-tiny-patch4-window7-224", "google/siglip2-base-patch16-224"))
    assert sees_only_images(found.job.architecture)
    assert not sees_only_images(read(CAPTIONS).job.architecture)
