"""The words that all commands and pages use for verdicts, quantities, phases and kinds of tensors."""

from __future__ import annotations

from collections.abc import Mapping

from peakcast.answers.prediction import Fits, RestsOn
from peakcast.timelines.timeline import Category, Phase

VERDICTS: dict[Fits, str] = {"yes": "fits", "no": "does not fit", "uncertain": "may or may not fit"}
"""`Prediction.fits` -> words about a job."""
SHORT_VERDICTS: dict[Fits, str] = {"yes": "fits", "no": "too big", "uncertain": "may fit"}
"""`Prediction.fits` -> words short enough for a table."""
WOULD_FAIL = "would fail"
"""Verdict about a job that a library refuses to run, however much memory there is."""
RESTS_ON: dict[RestsOn, str] = {"measurements": "runs like it", "relatives": "related runs", "judgement": "judgement"}
"""`Interval.rests_on` -> what a bar rests on."""
OF_LIMIT = {
    "peak_device_bytes": "",
    "peak_reserved_bytes": " for PyTorch's allocator",
    "peak_host_bytes": " of host memory",
}
"""Quantity -> words after the size of its limit that say what the limit applies to."""
METHOD_LABELS = {"full": "full training", "lora": "LoRA", "qlora": "QLoRA"}
"""`finetuning.method` -> what is trained; other methods of peft go by peft's name."""
PHASE_NAMES = {
    Phase.INIT: "set-up",
    Phase.FORWARD: "the forward pass",
    Phase.LOSS: "the loss",
    Phase.BACKWARD: "the backward pass",
    Phase.GRADIENT_CLIPPING: "gradient clipping",
    Phase.OPTIMIZER_STEP: "the optimizer step",
}
GENERATION = {"prefill": "prefill", "decode": "decoding"}
"""Parts of a generation: the prompt in one forward, then one forward per token."""
CATEGORY_NAMES = {
    Category.PARAMETERS: "weights",
    Category.MAIN_PARAMETERS: "main weights",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATES: "optimizer states",
    Category.ACTIVATIONS: "activations",
    Category.LOGITS: "logits",
    Category.TEMPORARIES: "temporaries",
    Category.OPTIMIZER_TEMPORARIES: "optimizer temporaries",
    Category.COMMUNICATION_BUFFERS: "communication buffers",
    Category.WORKSPACES: "library workspaces",
    Category.INPUTS: "inputs",
    Category.OTHER: "other",
    Category.REFERENCE_PARAMETERS: "reference weights",
    Category.KV_CACHE: "key-value cache",
}


def quantity_name(quantity: str) -> str:
    """`peak_device_bytes` -> "device"."""
    return quantity.removeprefix("peak_").removesuffix("_bytes")


def phase_name(phase: str) -> str:
    """The phase called `phase` in the JSON, or the part of generation, for a sentence."""
    return GENERATION[phase] if phase in GENERATION else PHASE_NAMES[Phase[phase.upper()]]


def phase_title(phase: str) -> str:
    """The phase called `phase` in the JSON, for a table or a list."""
    return phase_name(phase).removeprefix("the ")


def peak_part(peak_phase: str, phase_peaks_bytes: Mapping[str, int]) -> str:
    """The phase in which the peak is, by its name in the JSON; of a generation, whose phases are all forward, the part."""
    parts = {name: size for name, size in phase_peaks_bytes.items() if name in GENERATION}
    return max(parts, key=lambda name: parts[name], default=peak_phase)


def category_name(category: str) -> str:
    """The category called `category` in the JSON, for people."""
    return CATEGORY_NAMES[Category[category.upper()]]


def sentence_start(words: str) -> str:
    """`words` with a capital first letter."""
    return words[:1].upper() + words[1:]
