"""Networks of 2 to 9 billion weights, trained with and without Liger's kernels under FSDP1 by the example of its own
repository, as `Measurement` rows.

Source: `liger_examples.jsonl`; the facts about it are in `datasets/README.md`. The logs print the peak of every step but
the first. A step's batch is as long as its longest sample, at most 512 tokens, and no log says how long: a row is in scope
where its peak is the same for every length, or is that of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.collectors.published.configured_rows import configured_reading
from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows
from peakcast.core.fields import FrozenMapping
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "Batches are padded to their longest sample, so that attention is given a mask.",
    "transformers is what the example's requirements name; other releases are those of September 2024.",
)
LONGEST = "The longest sample is assumed to have the 512 tokens at which texts are cut."
OWN_CODE = (
    "Phi-3.5's code comes with its weights (trust_remote_code), and runs sdpa, which transformers 4.44 has not for it."
)
LENGTHS_UNKNOWN = "The peak depends on how long the longest batch was, which the log does not say."
PATCHED_LATE = "The kernels were put into a network that was already built, and the log does not say which of them ran."
WHICH_CODE = (
    "The log does not say which code ran: that which comes with the weights, or transformers' with Liger's kernels."
)
REACH_THE_CUT = ("gemma2", "phi3")
"""Families whose longest batch of the run reached the cut: their largest peaks are equal, or 16 tokens apart up to it."""
IN_THE_OPTIMIZER = ("llama", "mistral", "gemma", "qwen2")
"""Families whose peak with Liger's kernels is in the optimizer's step; Mistral's also without."""


def read_liger_examples(path: Path) -> list[Measurement]:
    """Every row of `liger_examples.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    read = configured_reading(record, ASSUMPTIONS, _out_of_scope(record))
    job = read.job.replace(batch=replace(read.job.batch, form="masked"))
    assumptions = read.assumptions
    if _family(record) in REACH_THE_CUT:
        assumptions += (LONGEST,)
    if _family(record) == "phi3":
        job = job.replace(framework_options=FrozenMapping({**job.framework_options, "sdpa": "sdpa"}))
        assumptions += (OWN_CODE,)
    return replace(read, job=job, assumptions=assumptions, unread=("peak_reserved_bytes",))


def _family(record: Mapping[str, Any]) -> str:
    """As the names of the logs have it."""
    return str(Path(record["path"]).name.split("_use_liger")[0])


def _out_of_scope(record: Mapping[str, Any]) -> tuple[str, ...]:
    family, patching = _family(record), record["patching"]
    if family in REACH_THE_CUT:
        if patching == "None":
            return ()
        if family == "phi3":
            return (WHICH_CODE,)
        return () if patching == "pre_init" else (PATCHED_LATE,)
    known = family == "mistral" or (patching != "None" and family in IN_THE_OPTIMIZER)
    return () if known else (LENGTHS_UNKNOWN,)
