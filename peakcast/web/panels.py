"""What the page shows, as HTML: every text is escaped, every picture is inline."""

from __future__ import annotations

import re
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from peakcast.answers.explanation import LAYER_COLUMNS
from peakcast.answers.labels import (
    SHORT_VERDICTS,
    category_name,
    peak_part,
    phase_name,
    phase_title,
    quantity_name,
    sentence_start,
)
from peakcast.answers.prediction import QUANTITIES, SEEN_BY
from peakcast.answers.remarks import verdict_reason, verdict_words, warning_sentences
from peakcast.core.drawing import inline_svg
from peakcast.core.findings import ordered, sentences
from peakcast.core.units import GIB, MIB, format_gib
from peakcast.models.prediction.verdict import ranks_of_a_node
from peakcast.printing.plans import candidate_sentences, columns_of, nothing_fits, plan_words, recommended_sentences
from peakcast.printing.screen import asked
from peakcast.printing.what_to_try import flags_text
from peakcast.searching.found import Found
from peakcast.web.asking import Answered

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

STYLES = {"yes": "fits", "no": "not", "uncertain": "unsure"}
"""`Prediction.fits` -> class in the page's style sheet."""
ROOM = 1.05
"""Bars have this multiple of the length that they show, so that the GPU's capacity is visible."""
_CODE = re.compile(r"`([^`]+)`")
_FLAG = re.compile(r"--[a-z][a-z-]*")
TOP = 5
NUM_ADVICE = 6


def answer_html(found: Answered) -> str:
    """The verdict, the four quantities with their bars, what the peak is made of, what to try."""
    p, e = found.prediction, found.explanation
    scale = max(p.capacity_bytes, *(getattr(p, name).upper_95 for name in QUANTITIES)) * ROOM
    return _render(
        "answer.html.j2",
        style=STYLES[p.fits],
        words=sentence_start(verdict_words(p)) + ".",
        reason=sentence_start(verdict_reason(p)),
        architecture=found.job.architecture.name,
        asked=asked(found.job),
        part=phase_name(peak_part(p.peak_phase, p.phase_peaks_bytes)),
        prediction=p,
        capacity=100 * p.capacity_bytes / scale,
        quantities=[_quantity(p, name, scale) for name in QUANTITIES if getattr(p, name).upper_95],
        host=_host(found),
        largest=p.largest[:TOP],
        warnings=warning_sentences(p.findings),
        sentences=e.peak.sentences,
        advice=[(item, flags_text(item.changes)) for item in e.advice[:NUM_ADVICE]],
        fitting=[verdict.gpu for verdict in p.gpus or () if verdict.fits == "yes"],
    )


def _quantity(prediction: Any, name: str, scale: int) -> dict[str, Any]:
    bar = getattr(prediction, name)
    shares = {end: 100 * getattr(bar, end) / scale for end in ("point", "lower", "upper")}
    return {"name": quantity_name(name), "bar": bar, "shares": shares, "seen": SEEN_BY[name]}


def _host(found: Answered) -> str:
    """What the host memory of a rank means for its node: a sentence; "" if none is needed."""
    bar = found.prediction.peak_host_bytes
    if not bar.upper_95:
        return ""
    ranks = ranks_of_a_node(found.job, found.device)
    given = found.device.host_memory_bytes
    there = f" of {format_gib(given)}" if given is not None else ""
    return f"{format_gib(bar.point * ranks)}{there} for the {ranks} {'rank' if ranks == 1 else 'ranks'} of a node"


def timeline_html(found: Answered) -> str:
    """The stacked timeline as two inline pictures, of which the page shows the one that suits its width, and its peaks by
    phase as a table for people who cannot see it."""
    from peakcast.explaining.picture import TALL, WIDE, draw

    e, p = found.explanation, found.prediction
    what = "One steady step" if found.job.task == "train" else "The generation"
    title = f"{what}, on rank {e.rank}"
    wide, tall = (inline_svg(partial(draw, e.timeline, title, p.capacity_bytes, size)) for size in (WIDE, TALL))
    peak = peak_part(p.peak_phase, p.phase_peaks_bytes)
    return _render("timeline.html.j2", wide=wide, tall=tall, phases=p.phase_peaks_bytes, peak_phase=peak)


def layers_html(found: Answered) -> str:
    """The per-layer table."""
    rows = found.explanation.modules
    total = {name: sum(getattr(row, name) for row in rows) for name in ("num_parameters", *LAYER_COLUMNS, "at_peak")}
    return _render("layers.html.j2", rows=rows, columns=[*LAYER_COLUMNS, "at_peak"], total=total)


def communication_html(found: Answered) -> str:
    """What the rank sends in one step, and to how many ranks."""
    e = found.explanation
    return _render(
        "communication.html.j2",
        rank=e.rank,
        groups=e.groups,
        rows=e.communication,
        sent_bytes=sum(row.sent_per_iteration_bytes for row in e.communication),
        notes=e.communication_notes,
    )


def notes_html(found: Answered) -> str:
    """Assumptions, warnings, what no number includes, and the whole advice."""
    p, e = found.prediction, found.explanation
    return _render(
        "notes.html.j2",
        assumptions=dict.fromkeys((*p.assumptions, *e.assumptions)),
        warnings=sentences(ordered((*p.findings, *e.findings))),
        not_modelled=p.not_modelled or (),
        calibration=p.calibration,
        inside=p.inside_calibrated_domain,
    )


def plans_html(found: Found) -> str:
    """The layouts that fit, a row each, and the one to take."""
    rows = [(plan_words(plan.job), plan.job, SHORT_VERDICTS[plan.fits], plan) for plan in found.plans]
    said = candidate_sentences(found)
    more = recommended_sentences(found) if found.plans else [nothing_fits(found)]
    return _render("plans.html.j2", sentences=[*more[:1], *said], rows=rows, columns=columns_of(found.plans))


def link_html(query: str) -> str:
    """The link that asks the same question again."""
    return _render("link.html.j2", query=query)


def fault_html(message: str) -> str:
    """Why there is no answer, as the page shows it."""
    first = message.partition(" ")[0]
    return _render("fault.html.j2", message=message[:1].upper() + message[1:] if first.isalpha() else message)


def breakable(name: str) -> Markup:
    """`name`, escaped, which a browser may break after a dot or an underscore."""
    from markupsafe import Markup

    return Markup(re.sub(r"([._])(?=.)", r"\1<wbr>", str(sentence(name))))


def sentence(text: str) -> Markup:
    """`text`, escaped, with commands in backticks set as code, and flags of the command line that a browser does not break
    at their hyphens."""
    from markupsafe import Markup, escape

    coded = _CODE.sub(r"<code>\1</code>", str(escape(text)))
    return Markup(_FLAG.sub(r'<span class="flag">\g<0></span>', coded))


@cache
def _environment() -> Environment:
    from jinja2 import DictLoader, Environment, StrictUndefined

    folder = files("peakcast.web").joinpath("templates")
    texts = {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.name.endswith(".j2")}
    environment = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        gib=lambda value: format_gib(value),
        gib2=lambda value: f"{value / GIB:,.2f}",
        mib2=lambda value: f"{value / MIB:,.2f}",
        breakable=breakable,
        sentence=sentence,
        gib3=lambda value: f"{value / GIB:.3f}",
        phase=phase_title,
        category=category_name,
    )
    return environment


def _render(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(values)
