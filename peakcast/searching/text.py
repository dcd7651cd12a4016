"""A search's answer as text: a line per plan, at most 110 columns."""

from __future__ import annotations

import textwrap

from peakcast.labels import SHORT_VERDICTS, VERDICTS
from peakcast.remarks import warnings_shown
from peakcast.searching.found import Found, Largest, Plan
from peakcast.spec import TrainingJob
from peakcast.units import GIB

WIDTH = 110
SHORT = (
    ("tensor_parallel_size", "tp"),
    ("pipeline_parallel_size", "pp"),
    ("virtual_pipeline_stages", "vp"),
    ("context_parallel_size", "cp"),
    ("expert_parallel_size", "ep"),
    ("data_parallel_size", "dp"),
)
NAMES = {
    "micro_batch_size": "micro_batch_size",
    "sequence_length": "sequence_length",
    "num_gpus": "number of GPUs",
    "model": "architecture",
}


def search_text(found: Found | Largest) -> str:
    """The answer, and a line for each warning."""
    answer = found_text(found) if isinstance(found, Found) else largest_text(found)
    warnings = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in warnings_shown(found.findings)]
    return "\n".join([answer, *([""] if warnings else []), *warnings])


def found_text(found: Found) -> str:
    """The counts, then the plans in their order."""
    sure = sum(plan.fits == "yes" for plan in found.plans)
    head = (
        f"{found.num_gpus} × {found.gpu}, {found.global_batch_size} sequences per step: {found.num_candidates:,} "
        f"candidates, {found.num_ruled_out:,} of them with weights and states beyond the GPU."
    )
    if found.left_out:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in found.left_out.items())
        left = f"{sum(found.left_out.values()):,} more are left out ({reasons})."
        head = f"{head}\n{textwrap.fill(left, WIDTH, subsequent_indent='  ')}"
    if not found.plans:
        return f"{head}\nNothing fits: more GPUs, a shorter sequence, adapters or a smaller model would be needed."
    order = "least recomputation, least offloaded, least sent"
    lines = [head, f"The {len(found.plans)} best, {sure} of which surely fit; {order}:", "", HEAD]
    return "\n".join([*lines, *(plan_line(number, plan) for number, plan in enumerate(found.plans, 1))])


HEAD = (
    f"{'':>3} {'layout':<30} {'micro':>5} {'accum':>5} {'checkpointing':<13} {'verdict':<8} {'device GiB':>10}"
    f" {'95 % below':>10} {'again':>6} {'sent GiB':>8}"
)


def plan_line(number: int, plan: Plan) -> str:
    """One plan."""
    job, bar = plan.job, plan.peak_device_bytes
    again = f"{plan.recompute * 100:.0f} %"
    return (
        f"{number:>3} {plan_words(job):<30} {job.micro_batch_size:>5} {job.gradient_accumulation_steps:>5} "
        f"{job.activation_checkpointing.mode:<13} {SHORT_VERDICTS[plan.fits]:<8} {bar.point / GIB:>10.2f}"
        f" {bar.upper_95 / GIB:>10.2f} {again:>6} {plan.sent_bytes / GIB:>8.1f}"
    )


def plan_words(job: TrainingJob) -> str:
    """`tp4 sp pp2 dp8 zero1 offload`: what differs from one rank, and what is offloaded."""
    layout, offload = job.parallelism, job.offload
    words = [f"{short}{getattr(layout, name)}" for name, short in SHORT if getattr(layout, name) > 1]
    words += ["sp"] if layout.sequence_parallel else []
    words += [f"zero{layout.zero_stage}"] if layout.zero_stage else []
    words += [layout.sharding] if layout.sharding != "none" else []
    words += ["one GPU"] if not words else []
    kinds = [name[:5] for name in ("optimizer", "parameters", "activations") if getattr(offload, name)]
    return " ".join([*words, *(["offload " + "+".join(kinds)] if kinds else [])])


def largest_text(found: Largest) -> str:
    """The answer to an inverse question, in one or two sentences."""
    name = NAMES[found.asked]
    if found.value is None or found.plan is None:
        return f"No {name} surely fits: not even {found.beyond}."
    fewest = found.asked == "num_gpus"
    bar = found.plan.peak_device_bytes
    text = (
        f"{'Fewest' if fewest else 'Largest'} {name} that surely fits: {_number(found.value)} "
        f"({bar.point / GIB:.2f} GiB, below {bar.upper_95 / GIB:.2f} with 95 % confidence)."
    )
    if found.beyond is not None:
        text += f" With {_number(found.beyond)} it {VERDICTS[found.beyond_fits or 'no']}."
    if found.limit is not None:
        text += f" The recipe holds up to {found.limit:,}: more is not asked."
    if fewest:
        text += "\n\n" + HEAD + "\n" + plan_line(1, found.plan)
    return text


def _number(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
