"""What all pictures share: colours, matplotlib's settings, and how they are put into an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import Any

INK, MUTED = "#1f2933", "#8a94a0"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "peakcast",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Arguments of `matplotlib.rc_context`, with which the same picture always has the same bytes."""


def inline_svg(draw: Callable[[], Any], style: Mapping[Any, Any] = STYLE) -> str:
    """The figure that `draw` gives as an `<svg>` element to put into a page, which decides its size."""
    import matplotlib

    with matplotlib.rc_context(dict(style)):
        buffer = io.StringIO()
        draw().savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for attribute in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {attribute}="[^"]*"', r"\1", text, count=1)
    return text
