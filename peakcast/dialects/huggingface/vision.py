"""Training scripts of vision-language projects, which take the Trainer's arguments and some of their own: which parts of
the network train, and the sizes of images."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peakcast.dialects.common.frozen_parts import with_frozen_parts
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.spec import TrainingJob

_OF_LLAVA = re.compile(r"mm_\w+|image_\w+|\w*mm_mlp_adapter|group_by_modality_length|version")
"""Keys of LLaVA's scripts beside `vision_tower`."""
_OF_IMAGES = re.compile(
    r"(image_|video_)?(min|max)_pixels|(image|video)_resized_(height|width)|video_\w+|base_interval|fps|nframes"
    r"|mm_projector_lr|vision_(tower_)?lr|merger_lr|projector_lr|force_image_size|down_sample_ratio|drop_path_rate"
    r"|dynamic_image_size|use_thumbnail|m(ax|in)_dynamic_patch|ps_version|conv_style|meta_path|vision_select_layer"
    r"|use_data_resampling|pad2square|min_num_frame|max_num_frame|normalize_type|loss_reduction\w*|max_packed_tokens|num_images_expected"
    r"|data_packing"
)
"""Keys of data, learning rates and image sizes in the scripts of `PROJECTS`."""
LIMITS = ("max_pixels", "image_max_pixels", "force_image_size")
"""Settings that limit the size of images; InternVL's is the side of a tile, of which an image has several."""


@dataclass(frozen=True, slots=True)
class _Project:
    name: str
    keys: Mapping[str, str]
    """Part of the network -> its key, false by default: the key freezes the part or trains it, as `freezes` says."""
    freezes: bool
    """Whether a key that is true freezes its part; otherwise it trains the part."""
    checkpoints: str = ""
    """The project's name for the key `gradient_checkpointing`."""
    adapters: tuple[str, ...] = ()
    """Keys that ask for adapters by their rank."""


PROJECTS = (
    # qwen-vl-finetune/qwenvl/train/argument.py ModelArguments
    _Project(
        "Qwen-VL's script", {"vision": "tune_mm_vision", "projector": "tune_mm_mlp", "language": "tune_mm_llm"}, False
    ),
    # internvl_chat/internvl/train/internvl_chat_finetune.py ModelArguments
    _Project(
        "InternVL's script",
        {"vision": "freeze_backbone", "projector": "freeze_mlp", "language": "freeze_llm"},
        True,
        "grad_checkpoint",
        ("use_backbone_lora", "use_llm_lora"),
    ),
    # Qwen2-VL-Finetune, src/params.py TrainingArguments
    _Project(
        "Qwen2-VL-Finetune",
        {"vision": "freeze_vision_tower", "projector": "freeze_merger", "language": "freeze_llm"},
        True,
        adapters=("vision_lora",),
    ),
)
"""Projects whose scripts freeze parts of a network that transformers builds. A script belongs to the project with most of
whose keys it is called."""


def take_images(training: dict[str, Any], notes: Notes) -> Callable[[TrainingJob], TrainingJob]:
    """Remove the settings of vision-language scripts from `training`. Returns what their frozen parts change in the job."""
    if training.pop("vision_tower", None):  # LLaVA's tower is no part of the language model's configuration
        notes.unsupported.append(
            "The vision tower (vision_tower), its projector and the tokens of images are not in the number.",
            "vision_tower",
            "more",
        )
        _drop(training, notes, _OF_LLAVA)
        return lambda job: job
    project = max(PROJECTS, key=lambda project: len(set(project.keys.values()) & set(training)))
    if not set(project.keys.values()) & set(training):
        return lambda job: job
    if project.checkpoints and project.checkpoints in training:
        training["gradient_checkpointing"] = training.pop(project.checkpoints)
    if "attn_implementation" not in training and not Settings(training, notes, "").switch("disable_flash_attn2"):
        training["attn_implementation"] = "flash_attention_2"  # which these scripts set themselves
    training.pop("disable_flash_attn2", None)
    own = Settings(dict(training), notes, project.name)
    if own.switch("data_flatten"):
        notes.assumptions.append("data_flatten puts a batch in one row without padding; as many full rows are counted.")
    frozen = tuple(part for part, key in project.keys.items() if own.switch(key) is project.freezes)
    for key in project.adapters:
        if own.integer(key):
            notes.unsupported.append(f"{key}: adapters of {project.name} are not read; say them with --method lora.", key)
    limits = {key: own.integer(key) if key != "force_image_size" else None for key in LIMITS if own.given(key)}
    for key in (*project.keys.values(), *project.adapters, "data_flatten"):
        training.pop(key, None)
    _drop(training, notes, _OF_IMAGES)
    return lambda job: with_frozen_parts(job, frozen, own, project.keys, limits)


def _drop(training: dict[str, Any], notes: Notes, names: re.Pattern[str]) -> None:
    for key in [key for key in training if names.fullmatch(key)]:
        notes.ignored.append(key)
        del training[key]
