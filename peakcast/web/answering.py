"""Turns a question of the page into its panels, within limits of time and memory. A worker process of the server runs this,
without Gradio."""

from __future__ import annotations

from functools import cache

import peakcast.explaining.picture  # loaded before the first question
import peakcast.models.prediction.predict  # noqa: F401
from peakcast.core.units import GIB
from peakcast.core.workers import QuestionLimits, Workers
from peakcast.printing.answers import job_text
from peakcast.web import panels
from peakcast.web.asking import PageState, Searched, answered, searched
from peakcast.web.links import to_query

AT_ONCE = 2
"""Questions answered at the same time, so that a slow one does not block another."""
LIMITS = QuestionLimits(
    seconds=30.0,
    memory_bytes=2 * GIB,
    way_out="ask again if the machine is busy, or on the command line (`peakcast predict`), which waits longer",
)
"""Limits of one question. One of a real project takes a second and 0.2 GiB, including its pictures."""


def panels_of(asked: PageState) -> tuple[str, ...]:
    """The panels of one question: answer, timeline, layers, communication, notes, job file, link. Raises: SpecError or
    CatalogError."""
    found = answered(asked)
    return (
        panels.answer_html(found),
        panels.timeline_html(found),
        panels.layers_html(found),
        panels.communication_html(found),
        panels.notes_html(found),
        job_text(found.job, as_json=False),
        panels.link_html(to_query(asked)),
    )


def replied(question: PageState | Searched) -> tuple[str, ...]:
    """The panels of a question, or the one panel of a search. Raises: SpecError or CatalogError."""
    return (panels.plans_html(searched(question)),) if isinstance(question, Searched) else panels_of(question)


@cache
def workers() -> Workers:
    """The processes that answer this server's questions; they start with the first question."""
    return Workers(replied, AT_ONCE, LIMITS, method="forkserver")
