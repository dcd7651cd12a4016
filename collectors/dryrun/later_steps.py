"""Follows some of a script's last steps too, after its first ones, where its loop can be led there (`counters.py`)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peakcast.collectors.dryrun.counters import Counters, Lead
from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.core.units import format_gib

if TYPE_CHECKING:
    from peakcast.collectors.dryrun.steps import ScriptSteps

MORE = 0.001
"""Later steps count if their peak is higher by this share."""
WHOLE_STEPS = 2
"""Steps to follow after the one in which the loop is led on. The second begins with what the first has left."""
SHARE, LEAST_SECONDS = 1.0, 20.0
"""They may take this share of the time that the script has taken so far, and at least so many seconds."""
CODE = "script_part_skipped"
OF_STEPS = (
    "spans", "batches", "networks", "optimizers", "micro_batches", "tokens", "inputs", "autocast", "checkpointing",
    "output_bytes", "cache_bytes", "gradient_bytes",
)  # fmt: skip
"""What is known of a script's steps."""


class LaterSteps:
    """Leads a script on when its first steps have been seen. If the later ones need no more, everything is as if they had
    not been followed."""

    def __init__(self, steps: ScriptSteps, notes: RunFindings, finish: Callable[[], None], seconds: float) -> None:
        self._steps, self._notes, self._finish = steps, notes, finish
        self._began, self._until = time.monotonic(), time.monotonic() + seconds / 2
        self._counters = Counters()
        self._lead: Lead | None = None
        self._before: dict[str, Any] = {}
        self._lists: list[tuple[list[Any], list[Any]]] = []
        """Other lists of what was seen, each with what it held before."""
        self._peak_bytes = 0
        self.counts = False
        """Whether later steps are among those that count."""

    @property
    def began(self) -> bool:
        """Whether the loop has been led on."""
        return self._lead is not None

    def end_step(self) -> None:
        """Note that a step of the script has ended."""
        if not self.began:
            self._counters.end_step()

    def goes_on(self) -> bool:
        """Whether to go on now that the first steps have been seen, with later ones."""
        if self._lead is None:
            return self._begin()
        steps = self._steps
        return len(steps.spans) < len(self._before["spans"]) + 1 + WHOLE_STEPS

    def said(self, error: str = "") -> tuple[str, ...]:
        """Sentences about the later steps, which count from now on or not at all. `error`: why they were not followed."""
        lead, steps = self._lead, self._steps
        if lead is None:
            return ()
        signal.setitimer(signal.ITIMER_REAL, 0)
        what = f"{lead.place} uses {lead.name}, which grows from step to step"
        if len(steps.spans) < len(self._before["spans"]) + 1 + WHOLE_STEPS:
            self._forget()
            asked = f"{lead.name} = {lead.number:,}{f' ({error})' if error else ''}"
            sentence = (
                f"{what}: only the first {len(steps.spans)} steps were followed, since the loop could not be led on to "
                f"{asked}; where steps there need more, that is not counted."
            )
            self._notes.add(CODE, "command", sentence, "more")
            return ()
        peak = self._peak()
        if peak <= (1 + MORE) * self._peak_bytes:
            self._forget()
            return (f"{what}; steps from {lead.name} = {lead.number:,} on, to which the loop was led, need no more.",)
        self.counts = True
        sentence = (
            f"{what}: later steps need more than the first ones ({format_gib(peak)} allocated and "
            f"{format_gib(self._peak_bytes)}). Those from {lead.name} = {lead.number:,} on count; "
            f"{lead.skipped:,} steps before them were left out."
        )
        self._notes.add(CODE, "command", sentence)
        return ()

    def _begin(self) -> bool:
        steps = self._steps
        if time.monotonic() > self._until or signal.getsignal(signal.SIGALRM) != signal.SIG_DFL:
            return False
        lead = self._counters.lead()
        for name, place in self._counters.unmoved():
            sentence = (
                f"{place} asks for {name}, and only the first steps were followed: what changes with it later is not "
                "counted."
            )
            self._notes.add(CODE, "command", sentence, "more")
        if lead is None:
            return False
        self._lead, self._peak_bytes = lead, self._peak()
        self._before = {name: _copied(getattr(steps, name)) for name in OF_STEPS}
        self._lists = [(one, [*one]) for one in (steps.lengths.of_steps, self._notes.findings, steps.evaluations.seen)]
        signal.signal(signal.SIGALRM, lambda *_: self._finish())
        taken = time.monotonic() - self._began
        signal.setitimer(signal.ITIMER_REAL, max(LEAST_SECONDS, SHARE * taken))
        return True

    def _peak(self) -> int:
        """The most bytes that any step has allocated."""
        steps = self._steps
        return int(steps.tracer.timeline(0, steps.spans[-1][1], steps.evaluations.fullest()).peak().num_bytes)

    def _forget(self) -> None:
        """Let everything be as before the later steps."""
        for name, value in self._before.items():
            setattr(self._steps, name, value)
        for now, before in self._lists:
            now[:] = before


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value
