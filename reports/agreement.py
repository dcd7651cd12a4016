"""The comparison of ledger and trace as text: counts of cells that agree and differ, and every cell in a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.jobs.spec import job_in_words
from peakcast.models.baseline.agreement import Agreement
from peakcast.reports.tables import markdown_table

PLACES = {
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "gradient_clipping": "clipping",
    "optimizer_step": "optimizer",
    "first step": "first step",
    "between steps": "between steps",
}
"""Where ledger and trace are compared -> column of the table."""


def agreement_text(cells: Sequence[Agreement]) -> str:
    """The counts, and a line for every cell that differs."""
    missed = sorted((cell for cell in cells if not cell.holds and not cell.reason), key=lambda cell: -abs(cell.worst))
    apart = [cell for cell in cells if cell.reason]
    lines = [summary(cells)]
    if missed:
        lines += ["", "Further off:"]
        for cell in missed:
            where = max(cell.errors, key=lambda place: abs(cell.errors[place]))
            lines.append(f"  {_percent(cell.worst):>9}  {PLACES.get(where, where):13}  {job_in_words(cell.job)}")
    if apart:
        lines += ["", "Not compared:"]
        lines += [f"  {job_in_words(cell.job)}: {cell.reason}" for cell in apart]
    return "\n".join(lines)


def summary(cells: Sequence[Agreement]) -> str:
    """How many cells agree, in two sentences."""
    compared = [cell for cell in cells if not cell.reason]
    parts = []
    for name, group in (
        ("on one GPU", [cell for cell in compared if cell.job.parallelism.world_size == 1]),
        ("in parallel layouts", [cell for cell in compared if cell.job.parallelism.world_size > 1]),
    ):
        if group:
            holds = sum(cell.holds for cell in group)
            parts.append(f"{holds} of {len(group)} cells {name} within {group[0].tolerance:.1%} in every phase")
    return "; ".join(parts or ["nothing to compare"]) + f"; {len(cells) - len(compared)} cells could not be compared."


def agreement_markdown(cells: Sequence[Agreement], grid: str) -> str:
    """The page of `grid`: what was compared, then every cell with its error in each phase."""
    lines = [
        [job_in_words(cell.job), *(_percent(cell.errors[p]) if p in cell.errors else "" for p in PLACES), _verdict(cell)]
        for cell in cells
    ]
    return (
        "# Ledger against trace\n\n"
        "Every cell is the ledger's peak of a phase over that of the traced step of the real library, minus one. The trace "
        "runs the step on fake tensors; neither has kernels' own workspaces. "
        f"Made by `peakcast verify {grid} --output FOLDER`.\n\n{summary(cells)}\n\n"
        + markdown_table(["cell", *PLACES.values(), "agrees"], lines)
    )


def _verdict(cell: Agreement) -> str:
    return cell.reason or ("yes" if cell.holds else "no")


def _percent(error: float) -> str:
    return f"{error * 100:+.3f} %"
