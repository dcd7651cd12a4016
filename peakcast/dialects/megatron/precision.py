"""The `Precision` of a Megatron-LM command line, and its use of Transformer Engine's FP8."""

from __future__ import annotations

from typing import Literal

from peakcast.dialects.common.translation import FALSE, Settings, note_unsupported
from peakcast.dialects.megatron import flags as flags
from peakcast.jobs.spec import Precision


def megatron_precision(settings: Settings) -> Precision:
    """The dtypes of parameters, products, gradients and states. Raises: SpecError naming the flag."""
    bf16, fp16, fp8 = settings.switch("bf16"), settings.switch("fp16"), _fp8(settings)
    if bf16 and fp16:
        raise settings.refuse("fp16", "cannot be given together with bf16; keep one")
    in_fp32, in_bf16 = settings.switch("accumulate_allreduce_grads_in_fp32"), settings.switch("grad_reduce_in_bf16")
    if not bf16 and not fp16:
        if fp8:
            settings.notes.unsupported.append(
                "FP8 over fp32 parameters (fp8-format without bf16) is not modelled.", "fp8-format"
            )
        return Precision(parameters="float32", compute="float32", gradients="float32", optimizer_states="float32")
    dtype: Literal["bfloat16", "float16"] = "bfloat16" if bf16 else "float16"
    # gradients are 16-bit with fp16 unless the flag asks for fp32, and with bf16 if main_grads_dtype says so
    # (megatron/training/arguments.py)
    narrow = not in_fp32 and (fp16 or settings.text("main_grads_dtype", "fp32") != "fp32")
    return Precision(
        parameters=dtype,
        compute="float8" if fp8 else dtype,
        gradients=dtype if in_bf16 or narrow else "float32",
        optimizer_states="float32",
        main_parameters="float32",
    )


def _fp8(settings: Settings) -> bool:
    """Whether Transformer Engine's projections multiply in FP8; a flag that is false or null in the YAML does not count."""
    text = settings.text("fp8_format").lower()
    if text in FALSE or text == "none":
        for key in flags.FP8_UNSUPPORTED:
            settings.given(key)
        return False
    note_unsupported(settings, flags.FP8_UNSUPPORTED)
    settings.one_of("fp8_format", "hybrid", flags.FP8_FORMATS)
    if settings.text("fp8_recipe", flags.FP8_RECIPES[0]) not in flags.FP8_RECIPES:
        settings.notes.unsupported.append(
            f"The FP8 recipe {settings.text('fp8_recipe')} ({settings.spell('fp8_recipe')}) is not modelled; "
            f"{flags.FP8_RECIPES[0]} is assumed. Known: {', '.join(flags.FP8_RECIPES)}.",
            settings.spell("fp8_recipe"),
        )
    if settings.switch("fp8_param_gather"):
        recipe = settings.text("fp8_recipe", flags.FP8_RECIPES[0])
        known = recipe in flags.FP8_GATHERED_RECIPES or (
            recipe == "mxfp8"  # of Megatron-FSDP the table of scope tells
            and (settings.switch("reuse_grad_buf_for_mxfp8_param_ag") or settings.switch("use_megatron_fsdp"))
        )
        if not known or not settings.switch("use_distributed_optimizer"):
            settings.notes.unsupported.append(
                f"FP8 parameters (fp8-param-gather) with fp8-recipe={recipe} are not modelled; with "
                f"use-distributed-optimizer and {', '.join(flags.FP8_GATHERED_RECIPES)}, or mxfp8 with "
                "reuse-grad-buf-for-mxfp8-param-ag, they are."
            )
    return True
