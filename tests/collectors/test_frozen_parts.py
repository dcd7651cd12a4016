"""Which weights `finetuning.frozen` names, in a vision-language model small enough to count."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import CollectorError

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from peakcast.collectors.stacks.frozen import freeze, frozen_modules, frozen_weights
from peakcast.collectors.stacks.huggingface_model import model_of, with_adapters
from tests.collectors.test_images_traced import job


def asked(*frozen: str, **more: Any) -> Any:
    return job(finetuning={"frozen": list(frozen), **more}, precision={"parameters": "float32"})


def test_the_three_parts_of_llava_are_all_of_it() -> None:
    """Each weight belongs to one: the projector's two layers have a weight and a bias each."""
    parts = {}
    for part in ("vision", "projector", "language"):
        model = model_of(asked(part))
        parts[part] = frozen_weights(model, asked(part))
    names = [name for name, _ in model.named_parameters()]
    assert sorted(set().union(*parts.values())) == sorted(names)
    assert sum(map(len, parts.values())) == len(names)
    assert len(parts["projector"]) == 4
    assert all("vision_tower" in name for name in parts["vision"])
    assert "lm_head.weight" in parts["language"]


def test_what_is_frozen_has_no_gradient_and_the_rest_has() -> None:
    model = model_of(asked("vision", "q_proj"))
    freeze(model, asked("vision", "q_proj"))
    still = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    assert still == frozen_weights(model, asked("vision", "q_proj"))
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in still
    assert "model.language_model.layers.0.self_attn.k_proj.weight" not in still


def test_adapters_stay_out_of_frozen_parts() -> None:
    """CLIP's and Llama's projections bear the same names; only Llama's two layers get adapters."""
    pytest.importorskip("peft")
    tuned = asked("vision", "projector", method="lora", rank=4, targets=["q_proj"])
    model = with_adapters(model_of(tuned), tuned)
    adapted = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert len(adapted) == 2 * 2
    assert all("language_model" in name for name in adapted)


def test_a_name_of_no_module_is_refused_with_what_was_meant() -> None:
    model = model_of(asked())
    assert frozen_modules(model, asked()) == []
    with pytest.raises(CollectorError, match=r"finetuning.frozen='q_prj' is no part of Llava.*did you mean 'q_proj'"):
        frozen_weights(model, asked("q_prj"))
