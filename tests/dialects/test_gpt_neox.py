"""GPT-NeoX's networks: what its keys say about the layers."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.translate import translated
from peakcast.jobs.architecture import Architecture

LLAMA_7B = {
    "pipe-parallel-size": 1, "model-parallel-size": 1, "num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32,
    "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary", "rotary-pct": 1, "no-weight-tying": True,
    "gpt-j-residual": False, "norm": "rmsnorm", "mlp_type": "llama", "activation": "silu",
    "train_micro_batch_size_per_gpu": 1, "precision": "fp16",
}  # fmt: skip
"""As in configs/llama/7B.yml of GPT-NeoX."""


def network(**changes: Any) -> Architecture:
    return translated(Pasted(values={**LLAMA_7B, **changes}, num_gpus=1)).job.architecture


def test_llamas_mlp_has_a_gate_and_a_width_in_steps_of_256():
    """megatron/model/transformer.py LLaMAParallelMLP: 8/3 of the hidden size, 10,922, up to 11,008 = 43 × 256."""
    assert (network().model_type, network().intermediate_size) == ("llama", 11008)
    assert network(intermediate_size=14336).intermediate_size == 14336
    assert network(mlp_type="regular", activation="gelu").model_type == "gpt_neox"
    with pytest.raises(SpecError, match="mlp_type='other' must be one of regular, llama"):
        network(mlp_type="other")
