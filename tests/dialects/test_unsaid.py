"""Keys with weight that dialects know and a job cannot say: none is passed over in silence."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

AXOLOTL = {"base_model": "gpt2", "micro_batch_size": 1, "sequence_len": 64, "bf16": True}
FACTORY = {"model_name_or_path": "gpt2", "stage": "sft", "cutoff_len": 64, "finetuning_type": "lora", "lora_rank": 8}
TRAINER = {"model_name_or_path": "gpt2", "output_dir": "o", "per_device_train_batch_size": 1, "block_size": 64}
ACCELERATE = {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16"}


@pytest.mark.parametrize(
    ("values", "more"),
    [
        (AXOLOTL, {"device_map": "auto"}),
        (AXOLOTL, {"s2_attention": True}),
        (AXOLOTL, {"flash_optimum": True}),
        (AXOLOTL, {"torch_compile": True, "torch_compile_mode": "max-autotune"}),
        (FACTORY, {"use_dft_loss": True}),
        (FACTORY, {"quantization_bit": 8, "quantization_method": "hqq"}),
        (TRAINER, {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}),
    ],
)
def test_it_is_said(values: dict[str, Any], more: dict[str, Any]) -> None:
    plain, found = translation_of(values), translation_of({**values, **more})
    key = list(more)[-1]
    new = set(found.unsupported) - set(plain.unsupported)
    assert any(key in sentence for sentence in new), (new, found.ignored)
    assert found.unknown == plain.unknown


def test_what_accelerate_compiles_is_said() -> None:
    beside = "".join(f"{key}: {value}\n" for key, value in ACCELERATE.items())
    text = "".join(f"{key}: {value}\n" for key, value in TRAINER.items())
    compiled = "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
    plain, found = (translation_of(f"{text}--- accelerate.yaml\n{beside}{more}") for more in ("", compiled))
    assert any("dynamo_backend=INDUCTOR" in sentence for sentence in found.unsupported)
    assert plain.unsupported == ()


def test_the_buckets_of_ddp_are_read_from_axolotl_too() -> None:
    job = translation_of({**AXOLOTL, "ddp_bucket_cap_mb": 50}, ReadOptions(num_gpus=2)).job
    assert job.framework_options["ddp_bucket_cap_mib"] == 50


@pytest.mark.parametrize("more", [{"torch_compile_mode": "default"}, {"torch_compile_backend": "inductor"}])
def test_a_mode_or_a_backend_of_compilation_switches_it_on(more: dict[str, Any]) -> None:
    """transformers 5 training_args.py `__post_init__`; axolotl's core/builders/base.py passes both with torch_compile."""
    assert not translation_of(TRAINER).job.compile
    assert all(translation_of({**values, **more}).job.compile for values in (TRAINER, FACTORY))
    assert not translation_of({**AXOLOTL, **more}).job.compile
    assert translation_of({**AXOLOTL, **more, "torch_compile": True}).job.compile


def test_a_checkpoint_that_axolotl_widens_is_what_is_counted() -> None:
    kept = {"model_quantization_config": "Mxfp4Config"}
    widened = {**kept, "model_quantization_config_kwargs": {"dequantize": True}}
    found = [translation_of({**AXOLOTL, **more}).findings for more in (kept, widened)]
    said = [[each.direction for each in some if each.parameter in widened] for some in found]
    assert said == [["less"], []]
