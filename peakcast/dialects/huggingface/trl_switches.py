"""Switches of training commands that are on by default, and how a command turns them off.

Source: transformers 5.17 hf_argparser.py `_parse_dataclass_field`: each has a flag of its name after `--no_`. Defaults:
training_args.py of transformers 5.17, trainer/*_config.py of trl 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.translation import words

ON = words("""
    average_tokens_across_devices dataloader_in_order dataloader_pin_memory disable_dropout ds3_gather_for_generation
    eval_do_concat_batches gradient_checkpointing log_on_each_node logging_nan_inf_filter remove_unused_columns
    shuffle_dataset skip_memory_metrics use_bias_correction_kl vllm_importance_sampling_correction
""")


def affirmed(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a command, in which `--no_gradient_checkpointing` is gradient_checkpointing: false."""
    off = {key: key.removeprefix("no_") for key in values if key.startswith("no_") and key.removeprefix("no_") in ON}
    return {**{key: value for key, value in values.items() if key not in off}, **dict.fromkeys(off.values(), False)}
