"""Networks with quantised base weights, as `from_pretrained(quantization_config=BitsAndBytesConfig(...))` loads them.

Source: transformers 5.17 `integrations/bitsandbytes.py` (replace_with_bnb_linear, Bnb4bitQuantize, Bnb8bitQuantize),
`quantizers/base.py` (get_keys_to_not_convert). There is no checkpoint to load: the weights are random, made on the CPU and
moved to the GPU one matrix at a time, as loading does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from transformers.pytorch_utils import Conv1D

from peakcast.collectors.machine.packages import imported
from peakcast.collectors.stacks.parts import quantized_fakes
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Finetuning, TrainingJob

try:
    from transformers.quantizers.base import get_keys_to_not_convert
except ImportError:  # transformers 4 has it in integrations/bitsandbytes.py
    from transformers.integrations.bitsandbytes import get_keys_to_not_convert

INT8_THRESHOLD = 6.0
"""BitsAndBytesConfig.llm_int8_threshold's default."""


def quantize(model: Any, job: TrainingJob, device: str) -> Any:
    """Move `model` from the CPU to `device` and quantise its linear layers, except the head. Returns it. Raises:
    CollectorError without the package."""
    asked = job.finetuning.quantization
    layers = imported("bitsandbytes", "bitsandbytes", parameter="finetuning.quantization", value=asked).nn
    kept = set(get_keys_to_not_convert(model))
    compute = getattr(torch, str(conventions(job).get("quantized_compute_dtype") or job.precision.compute))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, (torch.nn.Linear, Conv1D)) and name not in kept:
            model.set_submodule(name, _quantized(layer, layers, job.finetuning, compute, device, storage_of(job)))
    model.is_loaded_in_4bit = job.finetuning.quantization == "nf4"
    model.is_loaded_in_8bit = job.finetuning.quantization == "int8"
    model.requires_grad_(False)
    model = model.to(device)
    model.tie_weights()  # moving fake tensors unties them
    return model


def storage_of(job: TrainingJob) -> torch.dtype:
    """The dtype as which packed weights are stored (`bnb_4bit_quant_storage`). FSDP shards floating numbers of one dtype,
    and its mixed precision would cast those of another."""
    shards = job.parallelism.sharding != "none" and job.parallelism.num_replicas > 1
    asked = conventions(job).get("quantized_storage")
    found: torch.dtype = getattr(torch, job.precision.wide_compute) if shards and asked != "uint8" else torch.uint8
    return found


def _quantized(
    layer: Any, layers: Any, tuning: Finetuning, compute: torch.dtype, device: str, storage: torch.dtype
) -> Any:
    weight = layer.weight.data.T.contiguous() if isinstance(layer, Conv1D) else layer.weight.data
    out_features, in_features = weight.shape
    common = {"bias": layer.bias is not None, "device": "meta"}
    if tuning.quantization == "int8":
        made = layers.Linear8bitLt(in_features, out_features, has_fp16_weights=False, threshold=INT8_THRESHOLD, **common)
        made.weight = layers.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
    else:
        with unset_fake_temporarily():
            kept = {"compute_dtype": compute, "quant_type": "nf4", "quant_storage": storage}
            made = layers.Linear4bit(in_features, out_features, **kept, **common)
        options = {"compress_statistics": tuning.double_quantization, "quant_type": "nf4", "quant_storage": storage}
        if isinstance(weight, FakeTensor):
            made.weight = quantized_fakes.packed(weight, device, made, **options)
        else:
            made.weight = layers.Params4bit(weight, requires_grad=False, module=made, **options).to(device)
    if layer.bias is not None:
        made.bias = torch.nn.Parameter(layer.bias.data.to(device), requires_grad=False)
    return made
