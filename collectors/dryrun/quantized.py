"""Networks that scripts load with `quantization_config`: the layers are the library's own, and the weights have their
packed shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.stacks.parts import quantized_fakes

BITSANDBYTES = "bitsandbytes"


def quantizer_of(name: str, config: Any, keywords: dict[str, Any]) -> Any:
    """The quantizer of transformers for the network called `name`, from the keywords of `from_pretrained` and, if the
    checkpoint is quantised, from `config`; None if weights are not quantised, or are dequantised on loading.

    Raises: NotImplementedError for methods whose layers fake tensors cannot run.
    """
    asked: Any = keywords.get("quantization_config")
    checkpoint = getattr(config, "quantization_config", None)
    if asked is None and checkpoint is None and not any(keywords.get(key) for key in ("load_in_4bit", "load_in_8bit")):
        return None
    from transformers import BitsAndBytesConfig
    from transformers.quantizers.auto import AutoHfQuantizer

    if asked is None and checkpoint is None:  # the keywords of older releases
        asked = BitsAndBytesConfig(**{key: True for key in ("load_in_4bit", "load_in_8bit") if keywords.get(key)})
    if checkpoint is not None:
        del config.quantization_config
        asked = AutoHfQuantizer.merge_quantization_configs(checkpoint, asked)
    if getattr(asked, "dequantize", False):
        return None
    method = str(getattr(asked.quant_method, "value", asked.quant_method))
    if method != BITSANDBYTES:
        raise NotImplementedError(
            f"quantization_config of {name!r} cannot be followed on fake tensors: of weights that are quantised by their "
            f"values only those of bitsandbytes (4 and 8 bits) can, not those of {method}. Load it without, or ask "
            "`peakcast predict --method qlora` instead."
        )
    quantizer = AutoHfQuantizer.from_config(asked, pre_quantized=checkpoint is not None)
    quantizer.validate_environment(device_map={"": torch.cuda.current_device()}, weights_only=True)
    return quantizer


def quantize(network: Any, quantizer: Any, notes: RunFindings) -> None:
    """Move `network` from the CPU to the GPU. The layers that `quantizer` chooses become as they are after loading: each
    one is moved and then packed on the GPU, one after the other."""
    from transformers.pytorch_utils import Conv1D

    before = dict(network.named_modules())
    # transformers 4 makes the layers on the CPU, where their weights would be fake already (integrations/bitsandbytes.py)
    with unset_fake_temporarily(), torch.device("meta"):
        quantizer.preprocess_model(model=network, device_map={"": torch.cuda.current_device()}, keep_in_fp32_modules=[])
    for name, made in network.named_modules():
        layer = before.get(name)
        if layer is made or layer is None:
            continue
        weight = layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
        if quantizer.quantization_config.load_in_8bit:
            made.weight = quantized_fakes.packed_int8(weight, "cuda")
        else:
            options = {key: getattr(made.weight, key) for key in ("compress_statistics", "quant_type", "quant_storage")}
            made.weight = quantized_fakes.packed(weight, "cuda", made, **options)
        if layer.bias is not None:
            made.bias = torch.nn.Parameter(layer.bias.data.to("cuda"), requires_grad=False)
    if quantizer.quantization_config.load_in_8bit and quantizer.quantization_config.llm_int8_threshold:
        notes.add(
            "value_assumed",
            "quantization_config",
            "how many columns of the activations are too large for 8 bits, which bitsandbytes multiplies apart, only a run "
            "knows; none were taken to be.",
            "more",
        )
    torch.nn.Module.to(network, "cuda")
    network.hf_quantizer = quantizer
    quantizer.postprocess_model(network)
