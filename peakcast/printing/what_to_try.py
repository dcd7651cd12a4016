"""What to try first, as text: each change with its command-line flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peakcast.answers.advised import Advice
from peakcast.core.units import GIB
from peakcast.doors.job_flags import FLAGS
from peakcast.printing.wrapping import LINE_WIDTH


def steps_text(steps: Sequence[Advice]) -> str:
    """What to try first: a line for each change; each is applied on top of those before it."""
    lines = ["First to try, each on top of those before it; allocated peak:"]
    for item in steps:
        other = "" if item.same_training else " (changes results)"
        what = f"{lowered(item)}: {item.sentence}{other}"
        flags = flags_text(item.changes)
        lines += [f"  {what}; {flags}"] if len(what) + len(flags) < LINE_WIDTH - 4 else [f"  {what}", f"      {flags}"]
    return "\n".join(lines)


def lowered(item: Advice) -> str:
    """The peak after a change, and what it saves."""
    reserved = " reserved" if item.quantity == "peak_reserved_bytes" else ""
    return f"{item.peak_bytes / GIB:,.2f} GiB{reserved} (−{item.saved_bytes / GIB:,.2f})"


def flags_text(changes: Mapping[str, Any]) -> str:
    """The command-line flags that make `changes`."""
    names = {flag.fields[0]: flag.name for flag in FLAGS if len(flag.fields) == 1}
    words = []
    for field, value in changes.items():
        if field in names and not isinstance(value, bool):
            words.append(f"--{names[field].replace('_', '-')} {value_text(value)}")
        elif field in names:
            words.append(f"--{'' if value else 'no-'}{names[field].replace('_', '-')}")
        else:
            words.append(f"--set {field}={value_text(value)}")
    return " ".join(words)


def value_text(value: Any) -> str:
    """`value` as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
