"""`python -P -m peakcast.collectors.tracing JOB [RANK [GPU]]`: trace a job file and print the peaks. `-` reads a job as
JSON from standard input and prints both timelines as one line of JSON. With a GPU type, memory that its kernels allocate is
included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from peakcast.core.errors import PeakcastError


def main(arguments: list[str]) -> int:
    """Returns exit code 0, or 2 with one sentence on standard error."""
    from peakcast.collectors.machine.packages import import_for_good
    from peakcast.collectors.measure.worker import LIBRARIES
    from peakcast.collectors.tracing.trace import timeline_to_mapping, trace_here
    from peakcast.core.units import format_gib
    from peakcast.dialects.common.job_file import job_from_mapping, load_job

    if len(arguments) not in (1, 2, 3) or not all(argument.isdecimal() for argument in arguments[1:2]):
        print("usage: python -P -m peakcast.collectors.tracing JOB.yaml [RANK [GPU]]", file=sys.stderr)
        return 2
    import_for_good(LIBRARIES)
    rank, gpu = int(arguments[1]) if arguments[1:] else 0, arguments[2] if arguments[2:] else None
    try:
        if arguments[0] == "-":
            timelines = trace_here(job_from_mapping(json.load(sys.stdin)), rank, gpu)
            columns = {step: timeline_to_mapping(timeline) for step, timeline in timelines.items()}
            from peakcast.collectors.tracing.kernel_packages import replaced  # needs torch, which a trace asks for first

            print(json.dumps({**columns, "replaced": replaced}))
            return 0
        timelines = trace_here(load_job(Path(arguments[0])), rank, gpu)
    except PeakcastError as error:
        print(f"peakcast: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"peakcast: a trace needs {error.name}; install it with: pip install 'peakcast[collect]'", file=sys.stderr)
        return 2
    for step, timeline in timelines.items():
        peaks = ", ".join(f"{phase.name.lower()} {format_gib(size)}" for phase, size in timeline.phase_peaks().items())
        peak = timeline.peak()
        print(f"{step} step: {peaks}; the peak is at {timeline.labels[peak.instant]}")
        for name, category, size, number in timeline.largest_at(peak.instant, 8):
            print(f"  {format_gib(size):>12}  {name} ({category.name.lower()}, {number} tensors)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
