"""Unsloth's own arguments, as its notebooks give them to `FastLanguageModel`, translated into TrainingArguments.

Source: unsloth 2025.11.4 `models/llama.py` from_pretrained and get_peft_model; unsloth_zoo 2025.11.5
`gradient_checkpointing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.units import MIB
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.allocator_settings import Allocator

NEWEST_UNSLOTH = "2025.11.4"
"""The release whose conventions are used if none is named."""
CHECKPOINTING = ("gradient_checkpointing", "use_gradient_checkpointing")
LEAST_OFFLOADED_BYTES = 2 * MIB
"""Hidden states larger than this are offloaded (MINIMUM_SIZE): at width 4096 and 16 bits, from 257 tokens on."""
HALF = 2
ALLOCATOR = Allocator(expandable_segments=True, roundup_power2_divisions="[32:256,64:128,256:64,>:32]")
"""PYTORCH_CUDA_ALLOC_CONF as importing Unsloth sets it (unsloth 2025.7 and unsloth_zoo 2025.11 `__init__.py`)."""


TABLES = ("embed_tokens", "lm_head")
"""What `target_modules` may name, and Unsloth trains whole: `get_peft_model` moves both to `modules_to_save`."""


def is_unsloths(versions: Mapping[str, str] | None, *arguments: Mapping[str, Any] | None) -> bool:
    """Whether the run uses Unsloth: its version is named, or one of its own values is given."""
    given = [mapping.get(key) for mapping in arguments if isinstance(mapping, Mapping) for key in CHECKPOINTING]
    return "unsloth" in (versions or {}) or "unsloth" in given


def in_words_of_the_trainer(
    training: Mapping[str, Any] | None, peft: Mapping[str, Any] | None, notes: Notes
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """`training_arguments` and `peft` with Unsloth's checkpointing expressed in the Trainer's arguments: reentrant and, for
    the value "unsloth", offloaded (`activation_offloading`). "unsloth" is the default of `get_peft_model`."""
    arguments, adapter = dict(training or {}), None if peft is None else _with_whole_tables(peft, notes)
    given = [(mapping or {}).pop(key, None) for mapping in (adapter, arguments) for key in CHECKPOINTING[::-1]]
    chosen = next((value for value in given if value is not None), "unsloth" if adapter is not None else False)
    arguments["gradient_checkpointing"] = True if chosen == "unsloth" else chosen
    if chosen == "unsloth":
        arguments["activation_offloading"] = True
    arguments.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": True})
    return arguments, adapter


def _with_whole_tables(peft: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """`peft` with the embedding and the head among the modules that are trained whole, if they are among the targets."""
    adapter, targets = dict(peft), peft.get("target_modules")
    tables = [name for name in TABLES if isinstance(targets, (list, tuple)) and name in targets]
    if not tables or not isinstance(targets, (list, tuple)):
        return adapter
    adapter["target_modules"] = [name for name in targets if name not in tables]
    adapter["modules_to_save"] = [*(adapter.get("modules_to_save") or ()), *tables]
    notes.unsupported.append(
        f"Unsloth trains {' and '.join(tables)} whole and moves the frozen ones to the host; these are counted on the GPU.",
        "target_modules",
        "less",
    )
    return adapter


def offloads(training: Settings, num_tokens: int, hidden_size: int) -> bool:
    """Whether Unsloth's checkpoints of `num_tokens` tokens are offloaded. Raises: SpecError."""
    return training.switch("activation_offloading") and num_tokens * hidden_size * HALF > LEAST_OFFLOADED_BYTES
