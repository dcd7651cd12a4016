"""The answer of a search as text: a line per plan, about 110 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """The comparison of GPU types: the one to take, then one line for each."""
    order = "the cheapest first" if found.has_prices else "the fewest GPUs first"
    head = f"GPU types on which the job surely fits, {order}; speed is estimated from data sheets:"
    columns = f"{'':>3} {'GPU type':<16} {'GPUs':>5} {'layout':<33} {'':<7} {'GiB':>6} {'at most':>7} {'tokens/s':>9}"
    prices = f" {'price/h':>9} {'/M tokens':>9}" if found.has_prices else ""
    lines = [*_offer_recommended(found), head, "", columns + prices]
    for number, offer in enumerate(found.offers, 1):
        if offer.plan is None:
            lines.append(f"{number:>3} {offer.gpu:<16} {'none':>5} no number of them surely holds it")
            continue
        bar, speed = offer.plan.peak_device_bytes, offer.tokens_per_second
        line = (
            f"{number:>3} {offer.gpu:<16} {offer.num_gpus:>5} {plan_words(offer.plan.job):<33} "
            f"{SHORT_VERDICTS[offer.fits]:<7} {bar.point / GIB:>6.2f} {bar.upper_95 / GIB:>7.2f} "
            f"{'not known' if speed is None else f'{speed:,.0f}':>9}"
        )
        hour, each = (
            "no price" if price is None else f"{price:.{digits}f}"
            for price, digits in ((offer.price_per_hour, 2), (offer.price_per_million_tokens, 3))
        )
        lines.append(line + (f" {hour:>9} {each if speed is not None else '':>9}" if found.has_prices else ""))
    return "\n".join(lines)


def _offer_recommended(found: Offers) -> list[str]:
    """The line that names the GPU type to take; none if the job surely fits on no type."""
    offer = found.recommended
    if offer is None or offer.plan is None:
        return []
    price = offer.price_per_million_tokens
    cost = f", {price:.3f} for a million tokens" if price is not None else ""
    least = "cheapest" if price is not None else "fewest GPUs"
    taken = f"{offer.num_gpus} × {offer.gpu}, {plan_words(offer.plan.job)}{cost}"
    return [f"Recommended, the {least} with which it surely fits: {taken}.", ""]


def found_text(found: Found) -> str:
    """The numbers of candidates, the plan to take, then the plans in order."""
    head, *notes = candidate_sentences(found)
    head = "\n".join([head, *(textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in notes)])
    if not found.plans:
        return f"{head}\n{nothing_fits(found)}"
    return "\n".join([head, "", *recommended_sentences(found), "", *_table(found.plans)])


def candidate_sentences(found: Found) -> list[str]:
    """How many candidates there were, and how many were left out and why."""
    said = [
        f"{found.num_gpus} × {found.gpu}, {found.global_batch_size} sequences per step: {found.num_candidates:,} "
        f"candidates; weights and states alone exceed the GPU in {found.num_ruled_out:,}."
    ]
    if found.left_out:
        reasons = "; ".join(f"{count:,}: {reason}" for reason, count in found.left_out.items())
        said.append(f"{sum(found.left_out.values()):,} more are left out ({reasons}).")
    if found.num_beyond_host:
        said.append(f"{found.num_beyond_host:,} of them are left out: they need more host memory than the node has.")
    return said


def nothing_fits(found: Found) -> str:
    """The sentence about a search without plans."""
    host = " more host memory," if found.num_beyond_host else ""
    what = "Nothing that is covered fits" if found.left_out else "Nothing fits"
    return f"{what}: more GPUs,{host} a shorter sequence, adapters or a smaller model would be needed."


def recommended_sentences(found: Found) -> list[str]:
    """The plan to take, and how the plans are ordered."""
    sure = sum(plan.fits == "yes" for plan in found.plans)
    known = "estimated from data sheets" if found.estimates_time else f"as on an H100: no speed of {found.gpu} is known"
    shown = f"Plans by extra time ({known}); {sure} of {len(found.plans)} surely {'fits' if sure == 1 else 'fit'}:"
    plan = found.recommended
    if plan is None:
        unknown = any(not plan.limit.known for plan in found.plans)
        asked = " Give --host-memory-gib, the host memory of a node, to have it checked." if unknown else ""
        return [f"Recommended: none, as no plan surely fits.{asked}", shown]
    job = plan.job
    size = f"micro-batches of {job.micro_batch_size}, {RECOMPUTE[job.activation_checkpointing.mode]}"
    return [f"Recommended, the fastest that surely fits: {plan_words(job)}, {size}.", shown]


RECOMPUTE = {"none": "nothing recomputed", "full": "full recomputation", "selective": "selective recomputation"}


def _table(plans: Sequence[Plan]) -> list[str]:
    """The plans, a line each. Host memory has a column if some plan needs any; a wait for other pipeline stages, if some
    plan has stages, so that a line stays short."""
    shown = columns_of(plans)
    layouts = [plan_words(plan.job) for plan in plans]
    width = max(33 if len(shown) < len(COLUMNS) else 0, *map(len, layouts))
    titles = "".join(f" {column.title:>{column.width}}" for column in shown)
    head = f"{'':>3} {'layout':<{width}} {'micro':>5} {'accum':>5} {'recompute':<9} {'':<7} {'GiB':>6} {'at most':>7}"
    lines = [head + titles]
    for number, (layout, plan) in enumerate(zip(layouts, plans, strict=True), 1):
        job, bar = plan.job, plan.peak_device_bytes
        lines.append(
            f"{number:>3} {layout:<{width}} {job.micro_batch_size:>5} {job.gradient_accumulation_steps:>5} "
            f"{job.activation_checkpointing.mode:<9} {SHORT_VERDICTS[plan.fits]:<7} {bar.point / GIB:>6.2f}"
            f" {bar.upper_95 / GIB:>7.2f}" + "".join(f" {column.text(plan):>{column.width}}" for column in shown)
        )
    return lines


def columns_of(plans: Sequence[Plan]) -> list[_Column]:
    """The columns of a table of `plans`, apart from their layouts and bytes."""
    return [column for column in COLUMNS if column.always or any(column.value(plan) for plan in plans)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the table of plans that is a number of each plan: a share of a step's time, or GiB."""

    title: str
    width: int
    value: Callable[[Plan], float]
    always: bool = True
    is_share: bool = True

    def text(self, plan: Plan) -> str:
        """The number of one plan."""
        value = self.value(plan)
        return f"{value * 100:.0f} %" if self.is_share else f"{value / GIB:.1f}"


COLUMNS = (
    _Column(title="host/node", width=9, value=lambda plan: plan.node_host_bytes, always=False, is_share=False),
    _Column(title="rerun", width=6, value=lambda plan: plan.cost.recompute),
    _Column(title="bubble", width=6, value=lambda plan: plan.cost.bubble, always=False),
    _Column(title="comm.", width=7, value=lambda plan: plan.cost.sending),
    _Column(title="extra", width=6, value=lambda plan: plan.cost.total),
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
        f"(expect {bar.point / GIB:,.2f} GiB, at most {bar.upper_95 / GIB:,.2f}, {SURE})."
    )
    if found.beyond is not None:
        text += f" With {_number(found.beyond)} it {VERDICTS[found.beyond_fits or 'no']}."
    if found.limit is not None:
        text += f" The recipe holds up to {found.limit:,}: more is not asked."
    network = found.plan.job.architecture
    if found.asked == "sequence_length" and 0 < network.max_position_embeddings < int(found.value):
        text += f" {network.name} is made for {network.max_position_embeddings:,} positions (max_position_embeddings)."
    if fewest and found.plan.job.task == "inference":  # a plan's extra time is that of a training step
        text += f" They share each layer: --tensor-parallel-size {found.value}."
    elif fewest:
        text += "\n\n" + "\n".join(_table([found.plan]))
    return text


def _number(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
