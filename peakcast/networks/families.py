"""The table of Hugging Face model families: for each `model_type`, the source of every field of `Architecture`.

The families are grouped by shape in `hf_dense`, `hf_classic`, `hf_experts`, `hf_encoders` and `hf_state_space`.
"""

from __future__ import annotations

from collections.abc import Mapping

from peakcast.networks.classic import CLASSIC
from peakcast.networks.dense import DENSE
from peakcast.networks.encoders import ENCODERS
from peakcast.networks.experts import EXPERTS
from peakcast.networks.rules import Family
from peakcast.networks.state_space import STATE_SPACE

FAMILIES: Mapping[str, Family] = {**DENSE, **CLASSIC, **EXPERTS, **ENCODERS, **STATE_SPACE}
"""`model_type` -> the family's rules."""

OTHER_KINDS: Mapping[str, str] = {
    "umt5": "an encoder-decoder",
    "bart": "an encoder-decoder",
    "mbart": "an encoder-decoder",
    "pegasus": "an encoder-decoder",
    "whisper": "an encoder-decoder",
    "marian": "an encoder-decoder",
    "rwkv": "a recurrent network",
    "recurrent_gemma": "a hybrid of recurrence and attention",
    "zamba2": "a hybrid of state space and attention",
    "qwen3_next": "a hybrid of linear and full attention",
    "lfm2": "a hybrid of convolution and attention",
    "vit": "a vision encoder",
    "clip": "a pair of encoders",
    "deberta-v2": "an encoder with relative attention",
}
"""Known families that no rules can describe -> what kind of network they are."""
