"""The dtypes in which the blocks of a network compute, and those of what they hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementBytes:
    """Bytes of one element of weights and results."""

    weight_bytes: int
    """Of the (unquantised) base weights."""
    compute_bytes: int
    """Inside matrix products. Only under autocast is it narrower than the weights or inputs."""
    end_weight_bytes: int
    """Of the token table and the lm_head, more than `weight_bytes` if a trainer casts them to fp32."""
    norm_weight_bytes: int
    """Of the norms' weights, more than `weight_bytes` if a trainer casts norms to fp32."""
    autocast: bool
    float16: bool = False
    """Whether matrix products are in float16; CUDA's softmax then widens its input itself (torch `native/SoftMax.cpp`
    half_to_float)."""
    narrows_final_norm: bool = False
    """Whether FSDP2 casts the last norm's output to the dtype in which it gathers, because the norm is in an FSDP2
    group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLinears:
    """The dtypes of products with quantised matrices."""

    narrow: str = "bfloat16"
    """Of other products."""
    weights: str = "bfloat16"
    """Of the weights that were quantised, to which bitsandbytes dequantises 4 bits before it casts them."""
    multiplies: str = "bfloat16"
    """Of both factors (`bnb_4bit_compute_dtype`)."""
    input_decides: bool = False
    """Whether 4-bit Linears take the dtype of their first input instead, if that is not float16 (before 0.47)."""
    casts_in_forward: bool = False
    """Whether forward, too, dequantises to the dtype of the weights first (before 0.50)."""
    elements_per_scale: int = 0
    """Elements of a matrix for each float32 that its scales, themselves quantised, become in forward and stay until the
    product is there; 0: none do."""


IN_BFLOAT16 = QuantizedLinears()
"""Everything is in bfloat16."""
