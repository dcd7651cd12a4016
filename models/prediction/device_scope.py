"""What a job needs that the GPU type's chip cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peakcast.core.findings import FAILS, Finding, found
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

if TYPE_CHECKING:
    from peakcast.catalog import Device

FLASH_ATTENTION_2 = (8, 0)
"""Least compute capability. flash-attn 2.8 README: Ampere, Ada or Hopper GPUs."""
FLOAT8 = {"mxfp8": (10, 0), "blockwise": (9, 0)}
"""Least compute capability by recipe. Transformer Engine 2.8 pytorch/fp8.py: check_mxfp8_support,
check_fp8_block_scaling_support."""
ANY_FLOAT8 = (8, 9)
"""Least compute capability for other float8: check_fp8_support there; torch 2.13 aten/src/ATen/native/cuda/Blas.cpp
_scaled_mm_allowed_device."""


def device_findings(job: TrainingJob, device: Device) -> tuple[Finding, ...]:
    """Why `job` would fail on `device`, as findings."""
    has = ".".join(map(str, device.compute_capability))
    recipe = conventions(job).get("fp8_recipe", "") if job.framework == "megatron" else ""
    needs = FLOAT8.get(recipe, ANY_FLOAT8)
    flash = job.attention == "flash_attention_2" or conventions(job).get("attention_backend") == "flash"
    findings = []
    if job.precision.compute == "float8" and device.compute_capability < needs:
        sentence = (
            f"precision.compute='float8'{f' (fp8_recipe={recipe})' if recipe else ''} needs compute capability "
            f"{needs[0]}.{needs[1]}, and {device.name} has {has}: the run would fail; compute in bfloat16."
        )
        findings.append(found(sentence, "precision.compute", effect=FAILS))
    if flash and device.compute_capability < FLASH_ATTENTION_2:
        sentence = (
            f"FlashAttention 2 needs compute capability 8.0, and {device.name} has {has}: the run would fail; use "
            "attention: sdpa."
        )
        findings.append(found(sentence, "attention", effect=FAILS))
    return tuple(findings)
