"""The layout of the answer of `predict`, `dryrun` and `megatron`: a first screen, and details behind a flag."""

from __future__ import annotations

from collections.abc import Iterable

from peakcast.answers.labels import (
    METHOD_LABELS,
    RESTS_ON,
    category_name,
    peak_part,
    phase_name,
    phase_title,
    quantity_name,
    sentence_start,
)
from peakcast.answers.prediction import QUANTITIES, SEEN_BY, Answer, Interval, Prediction
from peakcast.answers.remarks import assumptions_shown, notable, preventing, verdict_reason, verdict_words, warnings_shown
from peakcast.core.findings import Finding
from peakcast.core.units import GIB, format_gib
from peakcast.jobs.audio import hears, sound_shape
from peakcast.jobs.images import pixels_of_image, reads_pixels, sees_only_images
from peakcast.jobs.spec import TrainingJob
from peakcast.printing.what_to_try import steps_text
from peakcast.printing.wrapping import wrapped

NUM_WARNINGS = 3
"""Warnings on the first screen."""
NUM_KINDS = 5
"""Kinds of tensors that the first screen names; the others share one line."""
LEAST, LEAST_IN_DETAILS = 0.01, 0.0005
"""Kinds of tensors below this fraction of the peak are not named, on the first screen and in the details."""
NUM_LARGEST = 5
NUM_GPUS = 3
"""GPU types that the first screen names."""
NOT_COVERED = "not known, since the ledger does not cover this job in full"
NOTHING = "nothing that peakcast can compute lowers this peak by itself"


def prediction_text(p: Answer, *, details: bool = False) -> str:
    """The first screen: does it fit, the peaks with their bars, what the peak is made of, what would help, and what may
    change the verdict. `details`: all of the answer instead."""
    parts = _details(p) if details else _first_screen(p)
    return "\n\n".join(part for part in parts if part)


def _first_screen(p: Answer) -> Iterable[str]:
    yield f"{_verdict(p)}\n{wrapped(asked(p.job))}"
    yield _quantities(p)
    yield _ranks(p)
    yield _peak(p, NUM_KINDS)
    yield _lines(p.remarks)
    yield _help(p) if p.fits != "yes" and not preventing(p) else ""
    yield _lines(warnings_shown(_warnings(p), most=NUM_WARNINGS))
    yield _more(p)


def _details(p: Answer) -> Iterable[str]:
    yield f"{_verdict(p)}\n{wrapped(asked(p.job))}"
    yield _quantities(p)
    yield _ranks(p)
    yield _peak(p)
    yield _lines(p.remarks)
    yield _phases(p)
    yield _largest(p)
    yield _steps(p)
    yield _gpus(p)
    yield _lines([*warnings_shown(p.findings, whole=True), *_domain(p), *assumptions_shown(p.assumptions, whole=True)])
    yield wrapped(f"Not modelled: {'; '.join(p.not_modelled)}.")


# -- parts of both ------------------------------------------------------------------------------------------------------


def _verdict(p: Prediction) -> str:
    failing = preventing(p)
    what = f": {failing.sentence}\n{sentence_start(verdict_reason(p))}." if failing else f": {verdict_reason(p)}."
    return _lines(f"{sentence_start(verdict_words(p))} on {p.gpu}{what}".split("\n"))


def asked(job: TrainingJob) -> str:
    """The job in one line, so that users see for what the answer holds and what was assumed."""
    method = job.finetuning.method
    what = "inference" if job.task == "inference" else METHOD_LABELS.get(method, f"adapters ({method})")
    if job.finetuning.frozen:
        what += f" ({', '.join(job.finetuning.frozen)} frozen)"
    ranks = job.parallelism.world_size
    gpus = f"{ranks:,} GPUs" if ranks > 1 else "1 GPU"
    batch = f"micro-batch {job.micro_batch_size:,} × {_sequence(job)}"
    if job.task == "inference":
        prompt, new = job.inference.prompt_length or job.sequence_length, job.inference.new_tokens or 1
        batch = f"batch {job.micro_batch_size:,} × {prompt:,} tokens of prompt and {new:,} new"
    return f"Asked: {job.architecture.name}, {what}, {batch}, {gpus}, {job.framework}."


def _sequence(job: TrainingJob) -> str:
    """What a micro-batch has so many of."""
    network, tokens = job.architecture, f"{job.sequence_length:,} tokens"
    if hears(network):
        return f"({tokens} and {sound_shape(network)[1]:,} frames of sound)"
    if not reads_pixels(network):
        return tokens
    _, height, width = pixels_of_image(job.images, network)
    image = f"an image of {height} x {width} pixels"
    return image if sees_only_images(network) else f"({tokens} and {image})"


def _quantities(p: Prediction) -> str:
    rows = [("peak", "GiB", "90 % bar", "bar rests on", "seen by")]
    for quantity in QUANTITIES:
        bar: Interval = getattr(p, quantity)
        if quantity != "peak_host_bytes" or bar.upper_95:
            point, ends = f"{bar.point / GIB:,.2f}", f"{bar.lower / GIB:,.2f} – {bar.upper / GIB:,.2f}"
            rows.append((quantity_name(quantity), point, ends, RESTS_ON[bar.rests_on], SEEN_BY[quantity]))
    size, span = (max(least, *(len(row[column]) + 2 for row in rows)) for column, least in ((1, 8), (2, 18)))
    return "\n".join(f"{row[0]:<11}{row[1]:>{size}}{row[2]:>{span}}   {row[3]:<14}{row[4]}" for row in rows)


def _peak(p: Prediction, most: int | None = None) -> str:
    """When the peak occurs and what it consists of: `most` kinds of tensors, and the rest as one."""
    total = max(sum(p.composition.values()), 1)
    least = LEAST if most is not None else LEAST_IN_DETAILS
    shown = [(category_name(name), size) for name, size in p.composition.items() if size / total >= least][:most]
    rest = total - sum(size for _, size in shown)
    shown += [("the rest", rest)] if rest / total >= least else []
    rank = f", on rank {p.rank}" if p.rank else ""
    lines = [f"The peak is in {phase_name(peak_part(p.peak_phase, p.phase_peaks_bytes))}{rank}:"]
    return "\n".join([*lines, *(f"  {name:<24}{size / GIB:>8.2f} GiB {size / total:>6.1%}" for name, size in shown)])


def _steps(p: Answer) -> str:
    """Changes that lower the peak, each on top of those before it."""
    if p.first_to_try:
        return steps_text(p.first_to_try)
    return f"First to try: {NOTHING if p.is_covered else NOT_COVERED}."


def _ranks(p: Answer) -> str:
    if not p.ranks:
        return ""
    numbers = f"{'allocated':>12}{'device':>9}{'at most':>12}"
    lines = [f"{'rank':<6}{'alike':>6}{'stage':>7}{'layers':>10}{numbers}   fits, peak in"]
    for item in p.ranks:
        layers = f"{item.layers[0]}–{item.layers[-1]}" if item.layers else "none"
        if len(item.layers) > 1 and item.layers[-1] - item.layers[0] >= len(item.layers):
            layers = f"{len(item.layers)}"
        lines.append(
            f"{item.rank:<6}{item.num_ranks:>6}{item.stage:>7}{layers:>10}{item.peak_allocated_bytes.point / GIB:>12.2f}"
            f"{item.peak_device_bytes.point / GIB:>9.2f}{item.peak_device_bytes.upper_95 / GIB:>12.2f}   "
            f"{item.fits}, {phase_title(item.peak_phase)}"
        )
    return "\n".join(lines)


# -- the first screen's own ---------------------------------------------------------------------------------------------


def _help(p: Answer) -> str:
    """What would make the job fit: changes, larger GPU types, more GPUs; or less in host memory, if that decides."""
    if p.limit.quantity == "peak_host_bytes":
        return _host_help(p.job)
    fitting = [gpu.gpu for gpu in p.gpus if gpu.fits == "yes"]
    named = ", ".join(fitting[:NUM_GPUS])
    further = f" and {len(fitting) - NUM_GPUS} more" if len(fitting) > NUM_GPUS else ""
    gpus = f"Fits as it is on {named}{further}" if fitting else "Surely fits as it is on none of the catalog's GPU types"
    search = "peakcast search --find num_gpus" if p.job.task == "inference" else "peakcast search"
    return f"{_steps(p)}\n{wrapped(f'{gpus}. More GPUs: `{search}`.')}"


def _host_help(job: TrainingJob) -> str:
    """What would make a job fit that needs too much host memory: changes that lower a GPU's peak would not."""
    offloaded = (name for name in ("parameters", "optimizer", "activations") if getattr(job.offload, name))
    flags = " or ".join(f"--set offload.{name}=false" for name in offloaded)
    less = f", or less that is kept there ({flags})" if flags else ""
    return wrapped(f"First to try: more host memory for each rank, by nodes of fewer GPUs (--gpus-per-node){less}.")


def _warnings(p: Prediction) -> list[Finding]:
    failing = preventing(p)
    return [finding for finding in notable(p.findings) if finding is not failing]


def _more(p: Answer) -> str:
    """What the details contain that the first screen does not."""
    left = len(p.findings) - min(len(_warnings(p)), NUM_WARNINGS) - bool(preventing(p))
    counts = [(left, "warning"), (len(p.assumptions), "assumption")]
    said = [f"{count} {noun}{'s' * (count > 1)}" for count, noun in counts if count > 0]
    further = ["tensors", "phases", "other GPUs", "what is not modelled"]
    return wrapped(f"More with --details: {', '.join([*said, *further])}.")


# -- the details' own ---------------------------------------------------------------------------------------------------


def _phases(p: Prediction) -> str:
    phases = ", ".join(f"{phase_title(name)} {size / GIB:,.2f}" for name, size in p.phase_peaks_bytes.items())
    first, between = format_gib(p.first_step_peak_bytes), format_gib(p.steady_state_bytes)
    return _lines([f"By phase in GiB: {phases}.", f"The first step's peak is {first}; between steps {between} remain."])


def _largest(p: Prediction) -> str:
    lines = ["Biggest tensors:"]
    for name, category, size, number in p.largest[:NUM_LARGEST]:
        shown = name if len(name) <= 44 else "…" + name[-43:]
        tensors = f"{number} tensors" if number > 1 else "1 tensor"
        lines.append(f"  {shown:<44} {size / GIB:>8.2f} GiB  {tensors}, {category_name(category)}")
    return "\n".join(lines)


def _gpus(p: Answer) -> str:
    if preventing(p):
        return ""
    lines = []
    for fits, words in (("yes", "It fits on"), ("uncertain", "It may or may not fit on")):
        names = [gpu.gpu for gpu in p.gpus if gpu.fits == fits]
        if names or fits == "yes":
            lines.append(f"{words}: {', '.join(names) or 'no GPU type of the catalog'}.")
    return _lines(lines)


def _domain(p: Prediction) -> list[str]:
    if p.calibration != p.gpu:
        return []
    inside = "like the runs measured there" if p.inside_calibrated_domain else "unlike the runs measured there"
    return [f"The bars come from the calibration of {p.calibration}; this job is {inside}."]


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(map(wrapped, lines))
