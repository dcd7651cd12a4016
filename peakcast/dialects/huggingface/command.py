"""Two things that a command line writes differently from a configuration file: switching off what is on by default, and
mappings.

Source: transformers 5.17 hf_argparser.py `_parse_dataclass_field`: such a switch has a flag of its name after `--no_`;
training_args.py `_VALID_DICT_FIELDS`: mappings are given as JSON. Defaults: training_args.py of transformers 5.17,
trainer/*_config.py of trl 1.16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from peakcast.core import bounded
from peakcast.dialects.common.translation import words

ON = words("""
    average_tokens_across_devices dataloader_in_order dataloader_pin_memory disable_dropout ds3_gather_for_generation
    eval_do_concat_batches gradient_checkpointing log_on_each_node logging_nan_inf_filter remove_unused_columns
    shuffle_dataset skip_memory_metrics use_bias_correction_kl vllm_importance_sampling_correction
""")


def as_in_a_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a command, in which `--no_gradient_checkpointing` is gradient_checkpointing: false, and
    `--gradient_checkpointing_kwargs '{"use_reentrant": false}'` is a mapping."""
    off = {key: key.removeprefix("no_") for key in values if key.startswith("no_") and key.removeprefix("no_") in ON}
    given = {key: _mapping(value) for key, value in values.items() if key not in off}
    return {**given, **dict.fromkeys(off.values(), False)}


def _mapping(value: Any) -> Any:
    """The mapping in `value`, if it is the text of one; else `value`."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        with contextlib.suppress(ValueError):
            return bounded.json_value(value)
    return value
