"""A question of the page made into its panels, within a time and a memory of its own: what a worker process of the server
runs, without Gradio."""

from __future__ import annotations

from functools import cache

import peakcast.explaining.picture  # what answering needs is loaded before the first question
import peakcast.models.predict  # noqa: F401
from peakcast.render import job_text
from peakcast.units import GIB
from peakcast.web import panels
from peakcast.web.asking import Asked, answered
from peakcast.web.links import to_query
from peakcast.workers import Limits, Workers

AT_ONCE = 2
"""Questions answered at a time; one that takes long leaves room for another."""
LIMITS = Limits(seconds=30.0, memory_bytes=2 * GIB)
"""Of one question. One of a real project takes a second and 0.2 GiB, drawn pictures included."""


def panels_of(asked: Asked) -> tuple[str, ...]:
    """The panels of one question: answer, timeline, layers, notes, job file, link. Raises: SpecError or CatalogError."""
    found = answered(asked)
    return (
        panels.answer_html(found),
        panels.timeline_html(found),
        panels.layers_html(found),
        panels.notes_html(found),
        job_text(found.job, as_json=False),
        panels.link_html(to_query(asked)),
    )


@cache
def workers() -> Workers:
    """The processes that answer this server's questions, started when the first is asked."""
    return Workers(panels_of, AT_ONCE, LIMITS, method="forkserver")
