"""The answer of a search as text: a line per plan, at most 110 columns."""

from __future__ import annotations

import textwrap

from peakcast.answers.labels import SHORT_VERDICTS, VERDICTS
from peakcast.answers.remarks import SURE, warnings_shown
from peakcast.core.units import GIB
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.found import Found, Largest, Plan
from peakcast.searching.gpu_types import Offers

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


def search_text(found: Found | Largest | Offers, *, whole: bool = False) -> str:
    """The answer, and a line for each warning up to a limit; `whole`: for all warnings."""
    if isinstance(found, Offers):
        answer = offers_text(found)
    else:
        answer = found_text(found) if isinstance(found, Found) else largest_text(found)
    shown = warnings_shown(found.findings, whole=whole)
    warnings = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in shown]
    return "\n".join([answer, *([""] if warnings else []), *warnings])


def offers_text(found: Offers) -> str:
    """The comparison of GPU types: one line for each."""
    order = "the cheapest first" if found.has_prices else "the fewest GPUs first"
    head = f"GPU types on which the job surely fits, {order}; speed is estimated from data sheets:"
    columns = f"{'':>3} {'GPU type':<16} {'GPUs':>5} {'layout':<33} {'':<7} {'GiB':>6} {'at most':>7} {'tokens/s':>9}"
    prices = f" {'price/h':>9} {'/M tokens':>9}" if found.has_prices else ""
    lines = [head, "", columns + prices]
    for number, offer in enumerate(found.offers, 1):
        if offer.plan is None or offer.tokens_per_second is None:
            lines.append(f"{number:>3} {offer.gpu:<16} {'none':>5} no number of them surely holds it")
            continue
        bar, job = offer.plan.peak_device_bytes, offer.plan.job
        line = (
            f"{number:>3} {offer.gpu:<16} {offer.num_gpus:>5} {plan_words(job):<33} {SHORT_VERDICTS[offer.fits]:<7} "
            f"{bar.point / GIB:>6.2f} {bar.upper_95 / GIB:>7.2f} {offer.tokens_per_second:>9,.0f}"
        )
        each = offer.price_per_million_tokens
        priced = f" {offer.price_per_hour:>9.2f} {each:>9.3f}" if each is not None else f" {'no price':>9}"
        lines.append(line + (priced if found.has_prices else ""))
    return "\n".join(lines)


def found_text(found: Found) -> str:
    """The numbers of candidates, then the plans in order."""
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
    best = f"The {len(found.plans)} that take least extra time, {sure} of which surely fit (estimated from data sheets):"
    lines = [head, best, "", HEAD]
    return "\n".join([*lines, *(plan_line(number, plan) for number, plan in enumerate(found.plans, 1))])


HEAD = (
    f"{'':>3} {'layout':<33} {'micro':>5} {'accum':>5} {'recompute':<9} {'':<7} {'GiB':>6} {'at most':>7}"
    f" {'again':>6} {'bubble':>6} {'sending':>7} {'longer':>6}"
)


def plan_line(number: int, plan: Plan) -> str:
    """The line of one plan."""
    job, bar, cost = plan.job, plan.peak_device_bytes, plan.cost
    shares = (cost.recompute, cost.bubble, cost.sending, cost.total)
    again, idle, sending, longer = (f"{share * 100:.0f} %" for share in shares)
    return (
        f"{number:>3} {plan_words(job):<33} {job.micro_batch_size:>5} {job.gradient_accumulation_steps:>5} "
        f"{job.activation_checkpointing.mode:<9} {SHORT_VERDICTS[plan.fits]:<7} {bar.point / GIB:>6.2f}"
        f" {bar.upper_95 / GIB:>7.2f} {again:>6} {idle:>6} {sending:>7} {longer:>6}"
    )


def plan_words(job: TrainingJob) -> str:
    """`tp4 sp pp2 dp8 zero1 offload`: the differences from one rank, and what is offloaded."""
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
        f"(expect {bar.point / GIB:.2f} GiB, at most {bar.upper_95 / GIB:.2f}, {SURE})."
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
