"""What follows from a family's traits and a network's shape together: masks, windows, rotation, heads of the kernel."""

from __future__ import annotations

from peakcast.jobs.architecture import Architecture
from peakcast.networks.families import family_of
from peakcast.networks.windows import attends_to_everything


def multiplies_itself(architecture: Architecture) -> bool:
    """Whether the matrices of its layers do not use `F.linear`: Conv1D, FalconLinear."""
    family = family_of(architecture)
    return family.linear.conv1d or family.linear.transposes_weight


def attention_key_heads(architecture: Architecture) -> int:
    """Number of key heads that the attention kernel gets."""
    heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    expands = family_of(architecture).attention.expands_key_value and key_heads > 1
    return heads if architecture.mla or expands else key_heads


def joins_heads(architecture: Architecture) -> bool:
    """Whether queries and keys are laid out head by head, because each is concatenated from a rotated and another part."""
    family = family_of(architecture)
    return architecture.mla is not None or architecture.rotary_in_parts or family.rotary.in_halves


def attention_output_dropout(architecture: Architecture) -> float:
    """The probability with which elements of attention's output are dropped before it is added."""
    drops = family_of(architecture).layer.drops
    if drops == "both":
        return architecture.hidden_dropout
    return architecture.attention_dropout if drops == "sum" and not architecture.parallel_block else 0.0


def drops_sum(architecture: Architecture) -> bool:
    """Whether a parallel block drops elements of the sum of its two outputs, and not of each."""
    return family_of(architecture).layer.drops == "sum" and architecture.parallel_block


def has_mask_of_heads(architecture: Architecture) -> bool:
    """Whether the mask has numbers for every head, those of ALiBi."""
    return family_of(architecture).masks.joins_alibi and architecture.position_embedding == "alibi"


def kinds_of_layers(architecture: Architecture) -> int:
    """2 if there are layers with and without a sliding window, else 1."""
    return len(set(attends_to_everything(architecture)))


def kinds_of_masks(architecture: Architecture) -> int:
    """How many masks the model builds if it builds any: one for each kind of layer that its code knows."""
    family = family_of(architecture)
    alternates = architecture.sliding_window is not None and family.windows.layers != "alike"
    return 1 + (alternates or family.masks.for_both_kinds)


def window_of(architecture: Architecture, layer: int) -> int | None:
    """The sliding window of layer `layer` (from 0); None if it attends to everything."""
    return None if attends_to_everything(architecture)[layer] else architecture.sliding_window


def rotates(architecture: Architecture, layer: int) -> bool:
    """Whether layer `layer` (from 0) rotates its queries and keys, if the architecture has rotary positions."""
    family = family_of(architecture)
    if family.rotary.in_windows_only:
        return architecture.sliding_window is None or not attends_to_everything(architecture)[layer]
    return not family.rotary.skipped_every or (layer + 1) % family.rotary.skipped_every != 0


def slides(architecture: Architecture, layer: int, sequence: int) -> bool:
    """Whether layer `layer` (from 0) has a sliding window that `sequence` fills; it then gets an explicit mask.

    Source: transformers 5.17 `masking_utils.py` `_ignore_causal_mask_sdpa`: a window of exactly the sequence's length
    counts too.
    """
    window = window_of(architecture, layer)
    return window is not None and sequence >= window


def slides_anywhere(architecture: Architecture, sequence: int) -> bool:
    """Whether any layer has a sliding window that `sequence` fills."""
    window = architecture.sliding_window
    return window is not None and sequence >= window and not all(attends_to_everything(architecture))
